"""A toy model, its examples and its losses, for tests of the loop."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rgp
from helpers import privatize, seeded

EXAMPLES = 12


def toy() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 3)).double()


def examples(count: int = EXAMPLES) -> list[tuple[Tensor, int]]:
    x = torch.randn(count, 8, generator=seeded(1), dtype=torch.float64)
    return [(x[i], i % 3) for i in range(count)]


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def losses_of(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def start(model: nn.Module | None = None, **options: Any) -> tuple[nn.Module, rgp.Run]:
    """A run with noise on a toy; 3 logical steps of about 6 examples in micro-batches of at most 4."""
    model = toy() if model is None else model
    options = {
        "batch_size": 6,
        "steps": 3,
        "noise_multiplier": 1.0,
        "microbatch_size": 4,
        "method": rgp.RGP(rank=2),
        **options,
    }
    return model, privatize(model, options.pop("data", None) or examples(), **options)


def captures() -> int:
    """Modes that watch operations; 0 outside of loops."""
    return torch._C._len_torch_function_stack()
