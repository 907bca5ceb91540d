"""Every example runs as it stands, in a process of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
NEEDS = {
    "causal_lm": "transformers",
    "huggingface": "transformers",
    "trainer": "accelerate",
    "loop": "sklearn",
    "vision": "safetensors",
}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path, tmp_path):
    if path.stem in NEEDS:
        pytest.importorskip(NEEDS[path.stem])
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # the models are small, and other tests run beside
    command = [sys.executable, str(path)]
    done = subprocess.run(command, cwd=tmp_path, env=one_thread, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for accuracy in re.findall(r"held-out accuracy ([\d.]+)", done.stdout):
        assert float(accuracy) > 0.8, done.stdout  # it learns: the data are easy
    for after, before in re.findall(r"held-out perplexity ([\d.]+), ([\d.]+) before", done.stdout):
        assert float(after) < 3 < float(before), done.stdout  # the text itself has about 2
