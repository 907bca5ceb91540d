"""The list of faults, and a small run for them to happen to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import rgp
from rgp import checkpoint

TABLE = Path(__file__).parents[2] / "docs" / "faults.md"
FAULTS: dict[str, Callable[[Path], None]] = {}


def fault(function: Callable[[Path], None]) -> Callable[[Path], None]:
    FAULTS[function.__name__] = function
    return function


SIZE, STEPS = 40, 6


def data(size: int = SIZE, seed: int = 0) -> list:
    x = torch.randn(size, 3, generator=torch.Generator().manual_seed(seed))
    return [(x[i], i % 2) for i in range(size)]


def small_model(width: int = 5) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2))


def start(folder=None, *, model=None, dataset=None, optimizer=torch.optim.SGD, **options) -> rgp.Run:
    model = small_model() if model is None else model
    options = {"method": rgp.RGP(rank=2), "batch_size": 8, "steps": STEPS, "microbatch_size": 5, "seed": 0, **options}
    if "budget" not in options:
        options = {"noise_multiplier": 1.0, **options}
    dataset = data() if dataset is None else dataset
    return rgp.privatize(model, optimizer(model.parameters(), lr=0.1), dataset, folder=folder, **options)


def again(folder, *, model=None, dataset=None, optimizer=torch.optim.SGD, **options) -> rgp.Run:
    model = small_model() if model is None else model
    optim = optimizer(model.parameters(), lr=0.1)
    return checkpoint.resume(folder, model, optim, data() if dataset is None else dataset, **options)


def loss_of(run: rgp.Run, batch) -> torch.Tensor:
    return nn.functional.cross_entropy(run.model(batch[0]), batch[1])


def train(run: rgp.Run, until: int | None = None) -> rgp.Run:
    for batch in run:
        if run.step(loss_of(run, batch)) and run.step_index == until:
            break
    return run


def saved(folder: Path, **options) -> rgp.Run:
    """Saved at 2, with releases 2 and 3 on record after that."""
    run = train(start(folder, **options), 2)
    run.save(folder)
    return train(run, 4)


def weight(run: rgp.Run) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in run.model.parameters()])


def check_as_if_nothing_had_been(run: rgp.Run) -> None:
    assert torch.equal(weight(train(run)), weight(train(start())))
    assert run.ledger.count == STEPS


def check_charged_again(run: rgp.Run) -> None:
    train(run)
    assert run.step_index == STEPS and run.ledger.count == STEPS + 2
    for step in (2, 3):
        digests = {r["digest"] for r in run.ledger.of_step(step)}
        assert len(digests) == 2
