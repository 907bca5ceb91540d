"""The script for owners of a GPU, on the CPU at toy size, so that it cannot rot."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_check.py"


def test_gpu_check_runs_on_cpu(tmp_path):
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--toy", "--out", str(tmp_path / "note.md")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    note = (tmp_path / "note.md").read_text()
    assert done.returncode == 0, note + done.stderr
    assert "FAILED" not in note
    for check in ("exactness", "noise", "bfloat16", "torch.compile", "benchmark"):
        assert f"- {check}" in note
