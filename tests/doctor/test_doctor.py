"""`rgp doctor`: a sound installation passes, and one that is broken in a way that matters does not."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from rgp.doctor import facts, selftest

typer_testing = pytest.importorskip("typer.testing")


def test_a_sound_installation_passes_in_seconds(tmp_path):
    from rgp.cli import app

    said = typer_testing.CliRunner().invoke(app, ["doctor", "--json", "--folder", str(tmp_path)])
    assert said.exit_code == 0, said.output
    found = json.loads(said.stdout)
    assert found["ok"] and found["write"]["ok"] and found["packages"]["torch"]
    assert [test["name"] for test in found["self_test"]] == ["sampling", "noise", "exactness", "accounting", "ledger"]
    assert sum(test["seconds"] for test in found["self_test"]) < 20
    assert list(tmp_path.iterdir()) == []  # nothing is left behind


def test_a_failure_is_named_and_ends_with_code_1(tmp_path, monkeypatch):
    from rgp.cli import app

    broken = selftest.Finding("noise", False, "no noise at all", 0.0)
    monkeypatch.setattr(selftest, "self_test", lambda device: [broken])
    said = typer_testing.CliRunner().invoke(app, ["doctor", "--folder", str(tmp_path)])
    assert said.exit_code == 1
    assert "FAIL  noise" in said.output and "Do not train" in said.output


@pytest.mark.parametrize("factor", [2 / 3, 3 / 2])
def test_a_wrong_sampling_rate_is_noticed(factor, monkeypatch):
    right = selftest.sampling.draw
    monkeypatch.setattr(
        selftest.sampling, "draw", lambda streams, step, size, rate: right(streams, step, size, rate * factor)
    )
    assert not selftest.sampling_is_poisson()[0]


def test_batches_of_one_size_are_noticed(monkeypatch):
    monkeypatch.setattr(selftest.sampling, "draw", lambda streams, step, size, rate: np.arange(int(size * rate)))
    assert not selftest.sampling_is_poisson()[0]


@pytest.mark.parametrize("factor", [2 / 3, 3 / 2])
def test_a_wrong_noise_is_noticed(factor, monkeypatch):
    from rgp.noise import PhiloxNoise

    right = PhiloxNoise.add
    monkeypatch.setattr(
        PhiloxNoise, "add", lambda self, total, *, std, **where: right(self, total, std=std * factor, **where)
    )
    assert not selftest.noise_of_a_step()[0]


def test_wrong_gradients_are_noticed(monkeypatch):
    right = selftest._loss
    # a power of the mean loss couples the examples: their gradients are no longer their own
    monkeypatch.setattr(selftest, "_loss", lambda model, batch: right(model, batch) ** 2)
    assert not selftest._run("exactness", selftest.gradients_are_exact).ok


@pytest.mark.parametrize("factor", [2 / 3, 3 / 2])
def test_a_wrong_epsilon_is_noticed(factor, monkeypatch):
    right = selftest.accounting.epsilon
    monkeypatch.setattr(selftest.accounting, "epsilon", lambda events, *, delta: factor * right(events, delta=delta))
    assert not selftest.accounting_of_a_gaussian()[0]


def test_a_part_that_raises_has_failed():
    def part():
        raise RuntimeError("libraries do not fit")

    assert selftest._run("noise", part).seen == "RuntimeError: libraries do not fit"
    assert not selftest._run("noise", part).ok


def test_a_folder_that_does_not_exist_cannot_be_written(tmp_path):
    found = facts.writable(tmp_path / "nowhere")
    assert not found["ok"] and found["error"]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib is new in Python 3.11")
def test_extras_are_those_of_the_project():
    import tomllib

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]

    def names(extra):
        for needed in extras[extra]:
            name = re.match(r"[\w-]+", needed)[0]
            yield from names(re.search(r"\[(\w+)\]", needed)[1]) if name == "rgp" else [name]

    assert {extra: set(needed) for extra, needed in facts.EXTRAS.items()} == {e: set(names(e)) for e in facts.EXTRAS}
    together = {"bench", "demo", "dev", "docs"}  # made of the others, for developers and for the demo
    assert set(extras) - set(facts.EXTRAS) <= together
    assert {re.match(r"[\w-]+", needed)[0] for needed in project["dependencies"]} == set(facts.ALWAYS)


def test_the_device_is_the_one_that_training_takes():
    pytest.importorskip("yaml")
    from rgp.train.setup import pick_device

    assert torch.device(facts.machine()["device"]).type == pick_device("auto").type
