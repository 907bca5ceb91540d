"""What the device decides: the form of attention, dropout and autocast, which meta tensors alone do not show."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rgp import in_place, turning
from rgp.rules import dropout, owners

DEVICES = ("gpu", "cpu")


def _functions_on(device: str) -> dict[str, Any]:
    """Attention and dropout as the device would run them: meta tensors alone would take the slowest form of both.

    Attention is fused (no T x T matrix is kept) on a GPU, and on a CPU without dropout. Dropout keeps a byte an entry on
    a GPU, a float on a CPU.
    """
    attend, drop = F.scaled_dot_product_attention, F.dropout
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **options):
        if dropout_p > 0 and device == "cpu":
            return attend(query, key, value, attn_mask, dropout_p, is_causal, **options)
        return fused(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=options.get("scale"))[0]

    def dropout_on_gpu(input, p=0.5, training=True, inplace=False):
        if not training or p == 0 or inplace:
            return drop(input, p, training, inplace)
        return torch.native_dropout(input, p, True)[0]

    return {"scaled_dot_product_attention": attention, "dropout": drop if device == "cpu" else dropout_on_gpu}


def _dropout_on(device: str) -> dict[str, Any]:
    """The engine's own dropout, which it has for CPUs only, for meta tensors; without drawing bits."""

    def fast(x: Tensor, p: float) -> bool:
        return device == "cpu" and dropout.SMALLEST <= p <= 1 - dropout.SMALLEST

    def mask(x: Tensor, threshold: int) -> Tensor:
        return torch.empty(x.shape, dtype=torch.int16, device=x.device) >= threshold

    return {"_fast": fast, "_mask": mask}


def _evenly_owned(self: owners.Owned, example: Tensor, m: int) -> None:
    """The owners of picked rows are unknown on meta tensors: assume as many for each example."""
    self.example, self.m, self.place = example, m, torch.empty_like(example)
    self.longest = -(-len(example) // m)


@contextmanager
def as_on(device: str) -> Iterator[None]:
    """Run what follows in the form that attention, dropout and autocast take on this device."""
    with (
        _replaced(F, **_functions_on(device)),
        _replaced(dropout, **_dropout_on(device)),
        _replaced(owners.Owned, __init__=_evenly_owned),
        _replaced(in_place, generator_on=lambda *_: None),
        _replaced(turning, _nearest_orthonormal=Tensor.double),
        _replaced(turning.Frame, same_as=lambda *_: False),  # there are no numbers to compare
        _replaced(torch, is_autocast_enabled=lambda *_: False),  # it does not know meta tensors
    ):
        yield


@contextmanager
def _replaced(module: Any, **attributes: Any) -> Iterator[None]:
    """Replace attributes of a module for a while, where the engine looks at devices or weights that a plan does not have."""
    before = {name: getattr(module, name) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)
