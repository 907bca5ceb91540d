"""The short version of tests/torture/kill.py, which `make torture` runs with 50 kills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "torture" / "kill.py"


@pytest.mark.parametrize("bands", ["1", "3"])
def test_killed_training_loses_no_release_and_gives_the_same_weights(bands):
    command = [sys.executable, str(SCRIPT), "--kills", "5", "--longest", "0.4", "--seed", "1", "--bands", bands]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TORTURE_STEPS": "24"})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["kills"] == 5 and found["identical"] >= 1
