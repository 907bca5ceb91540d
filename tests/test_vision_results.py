"""The vision experiments: every planned run is a valid config, and what counts as a win."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from rgp.train import config, setup

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
sys.path.insert(0, str(EXPERIMENTS))
import vision  # noqa: E402


@pytest.mark.parametrize("what", ["tables", "tuning"])
def test_every_planned_run_has_valid_settings(what):
    jobs = vision.planned(what)
    assert len({job["name"] for job in jobs}) == len(jobs)
    for job in jobs:
        changes = [f"{key}={json.dumps(value)}" for key, value in job["set"].items()]
        settings = config.load(preset=job["preset"], changes=changes)
        assert setup.make_method(settings.method).name


def test_the_kept_results_are_planned_runs():
    planned = {job["name"]: job for what in ("tables", "tuning") for job in vision.planned(what)}
    rows = vision.read(vision.RESULTS)
    assert rows
    for row in rows:
        assert planned[row["name"]]["set"] == row["set"]
        assert 0 < row["accuracy"] < 1


def test_a_win_is_a_paired_difference_above_two_standard_errors():
    base = {0: 50.0, 1: 52.0, 2: 48.0}
    assert vision.verdict({s: v + 1 for s, v in base.items()}, base) == (1.0, 0.0, "win")
    assert vision.verdict(base, {s: v + 1 for s, v in base.items()})[2] == "loss"
    difference, error, word = vision.verdict({0: 51.0, 1: 52.0, 2: 49.0}, base)
    assert (round(difference, 3), round(error, 3), word) == (0.667, 0.333, "level")
    assert vision.verdict({0: 51.0}, base)[2] == "one seed"
    assert vision.verdict({1: 60.0, 2: 1.0}, {0: 1.0, 1: 50.0})[0] == 10.0  # only the seed that both have


def test_a_computation_is_remembered_by_its_arguments():
    calls = []
    twice = vision._remembered(lambda x, *, y=0: calls.append(x) or x + y)
    assert [twice(1, y=2), twice(1, y=2), twice(2, y=2)] == [3, 3, 4]
    assert calls == [1, 2]
