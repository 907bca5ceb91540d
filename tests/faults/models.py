"""Faults of models, optimizers and settings."""

from __future__ import annotations

import torch
from torch import nn

import rgp
from faults.small import (
    SIZE,
    STEPS,
    data,
    fault,
    small_model,
    start,
    train,
)
from rgp.ledger import Ledger

# ---------------------------------------------------------------------- models and optimizers


@fault
def batch_norm(_):
    start(model=nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)))


@fault
def own_statistics(_):
    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)
            self.register_buffer("mean", torch.zeros(3))

        def forward(self, x):
            self.mean.lerp_(x.mean(0), 0.1)
            return self.layer(x - self.mean)

    train(start(model=Centred(), probe=False))


@fault
def hidden_statistics(_):
    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)
            self.register_buffer("mean", torch.zeros(3))

        def forward(self, x):
            self.mean.data.lerp_(x.mean(0), 0.1)
            return self.layer(x - self.mean)

    train(start(model=Centred(), probe=False))


@fault
def changed_input(_):
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.layer = nn.RMSNorm(3), nn.Linear(3, 2)

        def forward(self, x):
            x = x.clone()
            x += self.norm(x)
            return self.layer(x)

    train(start(model=Residual()))


@fault
def complex_parameter(_):
    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.phase = nn.Linear(3, 2), nn.Parameter(torch.ones(3, dtype=torch.complex64))

        def forward(self, x):
            return self.layer((x * self.phase).real)

    train(start(model=Turned()))


@fault
def no_rule(_):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 2))

        def forward(self, x):
            return torch.cdist(x.unsqueeze(1), self.weight.T).squeeze(1)

    train(start(model=Odd(), method=rgp.DPSGD(fallback="error")))


@fault
def optimizer_lacks(_):
    model = small_model()
    rgp.privatize(model, torch.optim.SGD(model[0].parameters()), data(), batch_size=8, steps=2, noise_multiplier=1.0)


@fault
def lbfgs(_):
    start(optimizer=torch.optim.LBFGS)


# ---------------------------------------------------------------------- settings


@fault
def large_delta(_):
    start(delta=1 / SIZE)


@fault
def budget_and_noise(_):
    start(budget=rgp.Budget(8.0), noise_multiplier=1.0)


@fault
def no_clip(_):
    start(clip=None)


@fault
def no_noise(_):
    run = train(start(noise_multiplier=0.0))
    assert run.epsilon() == float("inf")


@fault
def reacting_schedule(_):
    levels = {"sigma": 2.0}
    run = start(noise_multiplier=lambda t: levels["sigma"])
    levels["sigma"] = 0.1
    train(run)
    assert {r["sigma"] for r in run.ledger.records} == {2.0} and run.noise_multiplier == 2.0


@fault
def plateau(_):
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    rgp.privatize(model, optimizer, data(), noise_multiplier=1.0, batch_size=8, steps=2, scheduler=scheduler)


@fault
def known_seed(tmp_path):
    start(tmp_path / "a", seed=3)
    start(tmp_path / "b", seed=None)
    assert Ledger.open(tmp_path / "a").header["seed_known"] and not Ledger.open(tmp_path / "b").header["seed_known"]


@fault
def past_budget(_):
    run = train(start(budget=rgp.Budget(3.0, 1e-5)))
    assert run.finished and run.step_index == STEPS and run.epsilon() <= 3.0
    iter(run)
