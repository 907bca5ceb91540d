"""A collate_fn or an augment that mixes examples is refused; others are left as they are, random ones too."""

from __future__ import annotations

import random
import threading
from collections import UserDict

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rgp
from helpers import seeded

EXAMPLES = 24


def examples() -> list[dict]:
    x = torch.randn(EXAMPLES, 5, generator=seeded(1))
    return [{"x": x[i, : 2 + i % 4].tolist(), "y": i % 3} for i in range(EXAMPLES)]


def padded(items: list[dict]) -> dict:
    """To the longest of the batch, with a label that is taken out of the items."""
    longest = max(len(item["x"]) for item in items)
    x = torch.tensor([item["x"] + [0.0] * (longest - len(item["x"])) for item in items])
    return {"x": F.pad(x, (0, 5 - longest)) if longest else x, "y": torch.tensor([item.pop("y") for item in items])}


def dynamic(items):
    batch = padded(items)
    return {**batch, "lengths": (batch["x"] != 0).sum(1)}


def mixed(batch, partner):
    y = F.one_hot(batch["y"], 3).float()
    return {"x": 0.7 * batch["x"] + 0.3 * batch["x"][partner], "y": 0.7 * y + 0.3 * y[partner]}


def mixup(batch):
    return mixed(batch, torch.randperm(len(batch["x"])))


def rolled(batch):
    return mixed(batch, torch.arange(len(batch["x"])).roll(1))


def standardised(batch):
    return {**batch, "x": batch["x"] - batch["x"].mean(0)}


def drawn_together(batch):
    return {**batch, "x": batch["x"] + np.random.randn()}


def flipped(batch):
    sign = torch.tensor([random.choice((-1.0, 1.0)) for _ in batch["x"]])
    return {**batch, "x": sign[:, None] * batch["x"] + torch.randn_like(batch["x"])}


def ordered(batch):
    order = batch["x"][:, 0].argsort()
    return {key: value[order] for key, value in batch.items()}


def not_a_dict(batch):
    return UserDict(batch)


MIXTURES = {f.__name__: f for f in (mixup, rolled, standardised)}
FINE = {f.__name__: f for f in (flipped, ordered, not_a_dict)}


def train(dataset=None, **options) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    options = {"noise_multiplier": 1.0, "batch_size": 12, "steps": 4, "microbatch_size": 6, "seed": 0, **options}
    options = {"collate_fn": padded, "method": rgp.DPSGD(), **options}
    dataset = Fresh(examples()) if dataset is None else dataset
    with rgp.privatize(model, torch.optim.SGD(model.parameters(), lr=0.1), dataset, **options) as run:
        try:
            for batch in run:
                run.step(F.cross_entropy(model(batch["x"]), batch["y"]))
        except rgp.UnsupportedError:
            assert run.epsilon() == 0
            raise
    return model


class Fresh(list):
    def __getitem__(self, i):
        return dict(super().__getitem__(i))


@pytest.mark.parametrize("mixture", MIXTURES.values(), ids=MIXTURES)
def test_mixtures_are_refused(mixture):
    with pytest.raises(rgp.UnsupportedError, match="collate_fn or augment mixes the examples"):
        train(collate_fn=lambda items: mixture(padded(items)))
    with pytest.raises(rgp.UnsupportedError, match="collate_fn or augment mixes the examples"):
        train(augment=mixture)


@pytest.mark.parametrize("function", FINE.values(), ids=FINE)
def test_the_watch_changes_nothing(function):
    """Neither what is made nor the random numbers that it is made with; and collate_fn may take its items apart."""
    for options in ({"collate_fn": lambda items: function(dynamic(items))}, {"augment": function}):
        assert torch.equal(train(**options).weight, train(**options, probe=False).weight)


def test_in_worker_processes():
    with pytest.raises(rgp.UnsupportedError, match="collate_fn or augment mixes the examples"):
        train(collate_fn=lambda items: rolled(padded(items)), workers=1)


@pytest.mark.parametrize("where", ["collate_fn", "augment"])
def test_random_numbers_that_a_batch_shares_are_refused(where):
    function = drawn_together if where == "augment" else lambda items: drawn_together(padded(items))
    with pytest.raises(rgp.UnsupportedError, match="share random numbers"):
        train(**{where: function})


def test_items_that_cannot_be_copied_are_said_to_be_unchecked():
    class Locked(Fresh):
        def __getitem__(self, i):
            return {**super().__getitem__(i), "lock": threading.Lock()}

    with pytest.warns(UserWarning, match="it was not checked that"):
        train(Locked(examples()), batch_size=EXAMPLES, steps=1)
