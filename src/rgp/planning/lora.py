"""A model with LoRA factors beside its matrices, for the plan of DP-LoRA: only the factors and the head are trained."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rgp.plan import Plan


class _Lora(nn.Module):
    """base(x) + (x A^T) B^T; for a convolution A keeps the kernel and B is a 1x1 one."""

    def __init__(self, base: nn.Module, rank: int) -> None:
        super().__init__()
        self.base = base
        weight: Tensor = base.weight  # type: ignore[assignment]
        like = {"dtype": weight.dtype, "device": weight.device}
        down: tuple[int, ...]
        up: tuple[int, ...]
        if isinstance(base, nn.Conv2d):
            down, up = (rank, weight.shape[1] * base.groups, *weight.shape[2:]), (weight.shape[0], rank, 1, 1)
        else:
            p, d = weight.shape if isinstance(base, nn.Linear) else weight.T.shape  # GPT-2's Conv1D is transposed
            down, up = (rank, d), (p, rank)
        self.A, self.B = nn.Parameter(torch.randn(down, **like)), nn.Parameter(torch.zeros(up, **like))

    def forward(self, x: Tensor) -> Tensor:
        base: Any = self.base
        if isinstance(base, nn.Conv2d):
            thin = F.conv2d(x, self.A, None, base.stride, base.padding, base.dilation)
            return base(x) + F.conv2d(thin, self.B)
        return base(x) + F.linear(F.linear(x, self.A), self.B)


def add_lora(model: nn.Module, plan: Plan) -> None:
    """LoRA factors of the plan's ranks for the layers that `plan` carries; all else frozen but an exact head."""
    carried = {entry.name: entry.rank for entry in plan if entry.treatment == "carried"}
    heads = {e.name for e in plan if e.kind in ("head", "head_bias") and e.treatment == "exact"}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in heads)
    for prefix, module in list(model.named_modules()):
        rank = carried.get(f"{prefix}.weight")
        if rank and (isinstance(module, (nn.Linear, nn.Conv2d)) or type(module).__name__ == "Conv1D"):
            parent, _, leaf = prefix.rpartition(".")
            setattr(model.get_submodule(parent), leaf, _Lora(module, rank))
