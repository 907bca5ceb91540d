"""A small run to interrupt and resume."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import rgp
from rgp.checkpoint import resume

STEPS, SIZE = 8, 48


class Net(nn.Module):
    """Carried matrices, an exact head, dropout, a norm, a tied pair, a buffer."""

    def __init__(self, seed: int = 0, width: int = 12) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(6, width), nn.Linear(width, width)
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(0.3)
        self.head = nn.Linear(width, 3)
        self.register_buffer("shift", torch.randn(6))

    def forward(self, x):
        h = self.drop(torch.tanh(self.first(x + self.shift)))
        return self.head(self.norm(self.second(h)))


class Tied(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.into, self.out = nn.Linear(6, 3, bias=False), nn.Linear(6, 3, bias=False)
        self.out.weight = self.into.weight

    def forward(self, x):
        return self.into(x) + self.out(torch.tanh(x))


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.02),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.02, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.02),
    "groups": lambda p: torch.optim.Adam([{"params": [next(p)], "lr": 0.1}, {"params": list(p)}], lr=0.01),
}
SCHEDULERS = {
    None: lambda o: None,
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, STEPS),
    "steps": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 5]),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda t: 1 / (1 + t)),
    "onecycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=STEPS + 1),
}


def data(size: int = SIZE, seed: int = 1) -> list:
    x = torch.randn(size, 6, generator=torch.Generator().manual_seed(seed))
    return [(x[i], i % 3) for i in range(size)]


def parts(seed: int = 0, *, net=Net, optimizer: str = "adam", scheduler: str | None = None):
    model = net(seed)
    optim = OPTIMIZERS[optimizer](model.parameters())
    return model, optim, SCHEDULERS[scheduler](optim)


def start(folder=None, *, net=Net, optimizer="adam", scheduler=None, dataset=None, **options) -> rgp.Run:
    model, optim, plan = parts(net=net, optimizer=optimizer, scheduler=scheduler)
    options = {"method": rgp.RGP(rank=2, warmup_steps=2), "noise_multiplier": 1.0, "microbatch_size": 5, **options}
    options = {"batch_size": 12, "steps": STEPS, "seed": 0, **options}
    return rgp.privatize(model, optim, dataset or data(), scheduler=plan, folder=folder, **options)


def again(folder, *, net=Net, optimizer="adam", scheduler=None, dataset=None, **options) -> rgp.Run:
    """Resume with a model and an optimizer of other weights."""
    model, optim, plan = parts(99, net=net, optimizer=optimizer, scheduler=scheduler)
    return resume(folder, model, optim, dataset or data(), scheduler=plan, **options)


def train(run: rgp.Run, until: int | None = None, *, part: int | None = None) -> None:
    """Up to a step; with `part`, up to that micro-batch of it, and then the loop is left as a crash would leave it."""
    if run.step_index == until and part is None:
        return
    seen = 0
    for x, y in run:
        ended = run.step(nn.functional.cross_entropy(run.model(x), y))
        seen = 0 if ended else seen + 1
        if until is not None and run.step_index >= until and (ended if part is None else seen == part):
            return


def weights(run: rgp.Run) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in run.model.state_dict().items()}


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def uninterrupted(**options) -> rgp.Run:
    run = start(**options)
    train(run)
    return run


def crashed(folder: Path, **options) -> rgp.Run:
    """Saved at 3, with releases 3 and 4 on record after that."""
    run = start(folder, **options)
    train(run, 3)
    run.save(folder)
    train(run, 5)
    return run
