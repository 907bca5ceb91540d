"""The short versions of tests/torture/kill.py and kill_tune.py, which `make torture` runs with many kills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "torture"
SCRIPT = FOLDER / "kill.py"


@pytest.mark.parametrize("bands", ["1", "3"])
def test_killed_training_loses_no_release_and_gives_the_same_weights(bands):
    command = [sys.executable, str(SCRIPT), "--kills", "5", "--longest", "0.4", "--seed", "1", "--bands", bands]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TORTURE_STEPS": "24"})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["kills"] == 5 and found["identical"] >= 1


def test_a_killed_search_stays_one_search():
    pytest.importorskip("typer")
    pytest.importorskip("sklearn")
    command = [sys.executable, str(FOLDER / "kill_tune.py"), "--kills", "2", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TORTURE_STEPS": "6"})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["kills"] == 2 and found["seeded, and identical"] >= 1
