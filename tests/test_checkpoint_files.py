"""Files of a checkpoint: the secret apart, atomic writes, no pickle, nested state."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import stat
import sys
import warnings
from collections import Counter

import pytest
import torch

import rgp
from resuming import (
    again,
    crashed,
    same,
    start,
    train,
    uninterrupted,
    weights,
)
from rgp import checkpoint
from rgp.checkpoint import resume
from rgp.encoding import decode, encode
from rgp.ledger import FILE, Ledger

# ---------------------------------------------------------------------- secrets


def test_the_secret_has_its_own_file_for_the_owner_alone(tmp_path):
    run = crashed(tmp_path)
    secret = run._streams.secret
    path = tmp_path / "secret.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert json.loads(path.read_text())["secret"] == secret.hex()
    keys = [key.tobytes() for key in run._streams._keys.values()]
    for file in (f for f in tmp_path.rglob("*") if f.is_file() and f != path):
        content = file.read_bytes()
        for piece in (secret, secret.hex().encode(), *keys, *(k.hex().encode() for k in keys)):
            assert piece not in content, file


def test_the_secret_goes_when_the_run_is_finished_and_closed(tmp_path):
    run = crashed(tmp_path)
    run.close()
    assert (tmp_path / "secret.json").exists()  # not finished: it can be resumed
    run = again(tmp_path)
    train(run)
    assert (tmp_path / "secret.json").exists()
    run.close()
    assert not (tmp_path / "secret.json").exists()


def test_the_secret_goes_when_a_finished_run_is_saved(tmp_path):
    run = crashed(tmp_path)
    train(run)
    run.save(tmp_path)
    assert not (tmp_path / "secret.json").exists()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed = again(tmp_path)  # to read from it; there is nothing to repeat
    assert resumed.finished and list(resumed) == [] and same(weights(resumed), weights(run))
    assert resumed.epsilon() == run.epsilon()


def test_a_secret_that_others_can_read_is_warned_of(tmp_path):
    crashed(tmp_path)
    (tmp_path / "secret.json").chmod(0o644)
    with pytest.warns(UserWarning, match="chmod 600"):
        again(tmp_path)


# ---------------------------------------------------------------------- files


def test_a_crash_at_any_moment_of_a_save_leaves_the_old_or_the_new_checkpoint(tmp_path, monkeypatch):
    """Every call that changes the disk fails in turn; after each, the run resumes and ends as if nothing had been."""
    truth = weights(uninterrupted(steps=3))

    class Killed(BaseException):
        pass

    outcomes = Counter()
    for victim in range(200):
        folder = tmp_path / str(victim)
        run = start(folder, steps=3)
        train(run, 1)
        run.save(folder)
        train(run, 2)
        calls = iter(range(10**6))

        def dying(function, victim=victim, calls=calls):
            def call(*args, **options):
                if next(calls) == victim:
                    raise Killed
                return function(*args, **options)

            return call

        with monkeypatch.context() as patch:
            for module, name in [
                *((os, n) for n in ("open", "fsync", "rename", "replace", "mkdir", "unlink")),
                (shutil, "rmtree"),
            ]:
                patch.setattr(module, name, dying(getattr(module, name)))
            try:
                run.save(folder)
            except Killed:
                survived = False
            else:
                survived = True
        resumed = again(folder)
        outcomes[resumed.step_index] += 1
        assert resumed.step_index in (1, 2) and not (survived and resumed.step_index == 1)
        resumed.save(folder)  # over whatever the crash left
        train(resumed)
        assert same(weights(resumed), truth) and resumed.ledger.count == 3
        if survived:
            break
    assert survived and outcomes[1] > 10 and outcomes[2] >= 2
    assert [p.name for p in folder.glob("checkpoint-*")] == ["checkpoint-2.1"]


def test_only_the_newest_checkpoint_is_kept_and_other_programs_files_are_left_alone(tmp_path):
    run = start(tmp_path)
    (tmp_path / "checkpoint-2").mkdir()  # a Hugging Face Trainer's, say
    (tmp_path / "checkpoint-2" / "trainer_state.json").write_text("{}")
    for stop in (1, 2, 4):
        train(run, stop)
        run.save(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "checkpoint-2",
        "checkpoint-4",
        "initial.safetensors",
        "latest",
        FILE,
        "secret.json",
    ]


def test_no_pickle(tmp_path, monkeypatch):
    def refuse(*_args, **_options):
        raise AssertionError("pickle was used")

    for module, name in [(torch, "save"), (torch, "load"), (pickle, "dumps"), (pickle, "loads"), (pickle, "Pickler")]:
        monkeypatch.setattr(module, name, refuse)
    run = start(tmp_path, scheduler="steps")
    train(run, 2)
    run.save(tmp_path)
    train(again(tmp_path, scheduler="steps"))
    kinds = {p.suffix for p in tmp_path.rglob("*") if p.is_file()}
    assert kinds == {".json", ".jsonl", ".safetensors", ""}


def test_safetensors_is_asked_for(tmp_path, monkeypatch):
    run = start(tmp_path)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match=r"rgp\[checkpoint\]"):
        run.save(tmp_path)


def test_weights_can_be_read_with_safetensors_alone(tmp_path):
    from safetensors.torch import load_file

    run = crashed(tmp_path)
    run.save(tmp_path)
    (path,) = tmp_path.glob("checkpoint-*/model.safetensors")
    assert same(load_file(path), weights(run))


# ---------------------------------------------------------------------- nested state


def test_nested_state_survives():
    state = {
        "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(3)}, 7: {}},
        "groups": [{"betas": (0.9, 0.99), "lr": 1e-3, "best": float("inf"), "name": "x", "on": True, "no": None}],
        "milestones": Counter({3: 1, 5: 2}),
        "empty": [],
    }
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(encode(state, tensors, "s"))
    found = decode(json.loads(text), tensors)
    assert torch.equal(found["state"][0].pop("exp_avg"), state["state"][0].pop("exp_avg"))
    assert torch.equal(found["state"][0].pop("step"), state["state"][0].pop("step"))
    assert found == state and type(found["milestones"]) is Counter and type(found["groups"][0]["betas"]) is tuple


@pytest.mark.parametrize("value", [object(), {1.5: 2}, {"a": [lambda: 0]}, torch.nn.Linear(1, 1), {"x": {1, 2}}])
def test_state_that_only_pickle_could_hold_is_refused_by_name(value):
    with pytest.raises(ValueError, match=r"thing.* cannot be saved.*no pickle"):
        encode({"a": value}, {}, "thing")


def test_a_scheduler_without_state_is_named(tmp_path):
    class Bare:
        def step(self):
            pass

    run = start(tmp_path)
    run._step.update.scheduler = Bare()
    with pytest.raises(ValueError, match="the scheduler, a Bare, has no state_dict"):
        run.save(tmp_path)


def test_the_functions_are_public():
    assert checkpoint.resume is resume and callable(rgp.Run.save)
    assert Ledger is checkpoint.Ledger
