"""The script for owners of a GPU, on the CPU at toy size, so that it cannot rot."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_check.py"
QUICK = ("exactness", "noise", "bfloat16 autocast")
SLOW = ("torch.compile", "several devices", "benchmark")  # a compiler and other processes


@pytest.mark.parametrize("checks", [QUICK, pytest.param(SLOW, marks=pytest.mark.slow)], ids=["quick", "slow"])
def test_gpu_check_runs_on_cpu(checks, tmp_path):
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--toy", "--out", str(tmp_path / "note.md")]
    done = subprocess.run([*command, "--only", ",".join(checks)], capture_output=True, text=True, timeout=300)
    note = (tmp_path / "note.md").read_text()
    assert done.returncode == 0, note + done.stderr
    assert "FAILED" not in note and "not run" not in note
    for check in checks:
        assert f"- {check}: " in note
