"""Searches that would cost more than they say: what `rgp.tune` pays for is what its trials release.

Each was silent when it was found. The rest of the folder: test_silent_ways.py.
"""

from __future__ import annotations

import pytest
import torch
from test_silent_ways import ROWS, data, loop, mean, net
from torch import nn

import rgp
from rgp.streams import Streams
from rgp.tuning import api
from rgp.tuning.law import Law
from rgp.tuning.space import combinations
from rgp.tuning.trials import Drawn

PLAN = {"dataset_size": ROWS, "batch_size": 12, "steps": 2, "epsilon": 6.0, "accountant": "rdp", "trials": 2}


def search(train, space=None, **changes):
    """A search with three trials."""
    law, space = Law.named("geometric", 2), space or {"lr": [0.1]}
    seed = next(s for s in range(99) if Drawn(Streams.from_seed(s), law, space).count == 3)
    return rgp.tune(train, space, **{**PLAN, **changes}, score="public", seed=seed)


def trained(run, model):
    for x, y in run:
        run.step(mean(model, x, y))
    return run, 1.0


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def promised(trial):
    return {"batch_size": 12, "steps": 2, "noise_multiplier": trial.noise_multiplier, "delta": trial.delta}


@pytest.mark.parametrize("shared", ["the model", "its first layer"])
@pytest.mark.parametrize("after", [{}, {"after": ()}], ids=["", "after nothing"])
def test_a_trial_that_trains_on_from_an_earlier_one(shared, after):
    rows, whole = data(), net()
    calls = []

    def train(trial):
        calls.append(trial)
        model = whole if shared == "the model" else nn.Sequential(whole[0], nn.ReLU(), nn.Linear(16, 2))
        return trained(trial.privatize(model, sgd(model), rows, **after), model)

    with pytest.raises(rgp.WrongUseError, match=r"trained by an earlier (trial|run)"):
        search(train)
    assert len(calls) == 2


def test_a_run_beside_the_one_that_is_paid_for():
    """`rgp.privatize` in place of `trial.privatize`, or besides it."""
    rows = data()

    def instead(trial, **changes):
        model = net()
        options = {**promised(trial), **changes}
        return trained(rgp.privatize(model, sgd(model), rows, **options), model)

    def besides(trial):
        model = net()
        instead(trial)
        return trained(trial.privatize(model, sgd(model), rows), model)

    for train in (lambda trial: instead(trial, noise_multiplier=0.3), lambda trial: instead(trial, steps=3), besides):
        with pytest.raises(rgp.WrongUseError, match="what the search pays for"):
            search(train)
    assert search(instead).epsilon <= 6  # that is what was planned, whoever asked for it


def test_a_trials_run_may_be_stopped_and_resumed(tmp_path):
    rows = data()

    def train(trial):
        model, folder = net(), tmp_path / str(trial.seed)
        run = trial.privatize(model, sgd(model), rows, folder=folder)
        for x, y in run:
            run.step(mean(model, x, y))
            if run.step_index == 1:
                run.stop()
        run.save(folder)
        run.close()
        model = net()
        return trained(rgp.resume(folder, model, sgd(model), rows), model)

    assert search(train).epsilon <= 6


def test_settings_that_are_equal_and_not_the_same():
    """1 == True: the first was taken for both, and paid for as if it were drawn half as often."""
    space = {"x": [True, 1, 1.0], "y": [0, False]}
    tried = combinations(space)
    drawn = Drawn(Streams.from_seed(0), Law(10), space)
    for found in (drawn.settings(i) for i in range(40)):
        assert all(value is found[key] for key, value in tried[api.place_of(found, tried)].items())


def test_a_new_head_on_what_an_earlier_run_trained():
    first, rows = net(), data()
    loop(first, mean, rows=rows)
    second = nn.Sequential(first[0], nn.ReLU(), nn.Linear(16, 2))
    with pytest.raises(rgp.WrongUseError, match="or a part of it, was trained by an earlier run"):
        loop(second, mean, rows=rows)
    first.load_state_dict({name: value.clone() for name, value in first.state_dict().items()}, assign=True)
    with pytest.raises(rgp.WrongUseError, match="was trained by an earlier run"):
        loop(first, mean, rows=rows)  # other parameters, with the same numbers in them
    untouched = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
    loop(untouched, mean, rows=rows, method=rgp.DPSGD(overrides={"0.*": "frozen"}))
    loop(nn.Sequential(untouched[0], nn.ReLU(), nn.Linear(16, 2)), mean, rows=rows)  # that run moved its head alone
