"""Checks of single layers against autograd one example at a time, and the methods to check them with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import rgp
from helpers import (
    check_exact,
    seeded,
    spread,
)

EXAMPLES = 5
CARRIED = rgp.RGP(rank=2)
EXACT = rgp.DPSGD()


def examples(*shape: int, count: int = EXAMPLES) -> list[tuple[Tensor, Tensor]]:
    x = torch.randn(count, *shape, generator=seeded(1), dtype=torch.float64)
    return list(zip(x, spread(count), strict=True))


def squares(model: nn.Module, batch: Any) -> Tensor:
    """A loss per example that is not linear in the output, weighted."""
    x, weight = batch
    y = model(x)
    target = torch.linspace(-1, 1, y[0].numel(), dtype=y.dtype).view(y.shape[1:])
    return (y.tanh() - target).square().flatten(1).sum(1) * weight


def check(model: nn.Module, *shape: int, method: Any = CARRIED, family: str | None = None, **options: Any) -> rgp.Plan:
    torch.manual_seed(0)
    model = model.double()
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn(parameter.shape, dtype=torch.float64))
    options = {"microbatch_size": 3, "losses": squares, **options}
    losses = options.pop("losses")
    return check_exact(
        model, options.pop("data", None) or examples(*shape), losses, method=method, family=family, **options
    )


METHODS = {
    "carried": CARRIED,
    "left": rgp.RGP(rank=2, sides="left"),
    "right": rgp.RGP(rank=2, sides="right"),
    "paper": rgp.RGP(rank=2, norm="paper"),
    "exact": EXACT,
}


class Calls(nn.Module):
    """A model whose forward pass is given as a function of the model."""

    def __init__(self, forward: Any, **children: nn.Module | Tensor) -> None:
        super().__init__()
        self.call = forward
        for name, child in children.items():
            setattr(self, name, nn.Parameter(child) if isinstance(child, Tensor) else child)

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, x)


def matrix(*shape: int) -> Tensor:
    return 0.3 * torch.randn(shape, generator=seeded(2))


def mlp(*, inplace: bool = False) -> nn.Sequential:
    return nn.Sequential(nn.Linear(9, 16), nn.ReLU(inplace), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 3))
