"""A trained parameter that does not move is an error, unless there is a reason for it."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import rgp
from helpers import seeded

# ---------------------------------------------------------------------- a parameter that does not move


class Lazy(torch.optim.SGD):
    """Leaves the first parameter alone."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"][1:]:
            p.add_(p.grad, alpha=-0.1)


def small_run(optimizer, model, **options):
    data = [(torch.randn(6, generator=seeded(i)), i % 2) for i in range(20)]
    options = {"steps": 2, "after": (), **options}
    run = rgp.privatize(model, optimizer, data, noise_multiplier=1.0, batch_size=10, seed=0, **options)
    with run:
        for x, y in run:
            run.step(nn.functional.cross_entropy(model(x), y))


def test_a_trained_parameter_that_does_not_move_is_an_error():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))
    with pytest.raises(rgp.WrongUseError, match=r"'0.weight'.*did not move"):
        small_run(Lazy(model.parameters(), lr=0.1), model)
    groups = [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[1].parameters()}]
    with pytest.raises(rgp.WrongUseError, match="learning rate is 0"):
        small_run(torch.optim.SGD(groups, lr=0.1), model)


def test_a_warm_up_from_zero_and_updates_lost_in_rounding_are_no_error():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: min(1.0, t / 3))  # 0 in the first step
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        small_run(optimizer, model, scheduler=warm_up, steps=3)
    groups = [{"params": model[0].parameters(), "lr": 1e-12}, {"params": model[1].parameters()}]
    with pytest.warns(UserWarning, match="2 trained parameters did not move in the whole run"):
        small_run(torch.optim.SGD(groups, lr=0.1), model)
