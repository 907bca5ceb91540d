"""Which rows of an activation belong to which example. The one place where that is decided."""

from __future__ import annotations

import torch
from torch import Tensor

from rgp.errors import LayoutError
from rgp.rules.owners import Owned
from rgp.slots import Slot


def by_example(x: Tensor, m: int | Owned, features: int, slot: Slot) -> Tensor:
    """x as (m, T, *last `features` dimensions), examples first. m: their number, or the owners of rows that were picked.

    Dimension 0 is the examples, or a flattening with the examples outermost (GPT-2's (m T, d), multiple choice's
    (m c, T, d)). A layout with positions first, as in nn.Transformer without batch_first, is recognised where its
    sizes say so and refused where they leave a doubt.
    """
    lead = x.shape[: x.dim() - features]
    tail = x.shape[x.dim() - features :]
    if isinstance(m, Owned):
        return m.padded(x).reshape(m.m, -1, *tail)
    if m == 1:
        return x.reshape(1, -1, *tail)
    if lead and lead[0] == m:
        return x.reshape(m, -1, *tail)
    if len(lead) >= 2 and m in lead[1:]:
        raise LayoutError(
            f"parameter {slot.entry.name!r} met an input of shape {tuple(x.shape)}, but the micro-batch has {m} examples "
            "and they are not the first dimension. Put the examples first (batch_first=True in nn.Transformer, "
            "nn.MultiheadAttention, nn.LSTM), or freeze the parameter."
        )
    if lead and lead[0] % m == 0 and lead[0] > 0:
        return x.reshape(m, -1, *tail)
    raise LayoutError(
        f"parameter {slot.entry.name!r} met an input of shape {tuple(x.shape)}, whose rows cannot be assigned to the "
        f"{m} examples of the micro-batch. Put the examples first, or freeze the parameter; and let rows that are not the "
        "batch's, such as a generator's, through the model after run.step(loss)."
    )


def per_example_sum(products: Tensor, m: int, shape: tuple[int, ...], slot: Slot) -> Tensor:
    """Sum (m, ...) down to (m, *shape), reversing the broadcast of a parameter of `shape`."""
    dims = products.dim() - len(shape)
    if products.shape[0] != m or dims < 1:
        raise LayoutError(
            f"parameter {slot.entry.name!r} of shape {tuple(shape)} met an activation of shape {tuple(products.shape)}, "
            f"whose first dimension is not the {m} examples of the micro-batch. Freeze it, or put the examples first."
        )
    dtype = torch.float32 if products.dtype in (torch.float16, torch.bfloat16) else products.dtype
    axes = [*range(1, dims), *(dims + i for i, size in enumerate(shape) if size == 1 and products.shape[dims + i] != 1)]
    summed = products.sum(axes, dtype=dtype) if axes else products.to(dtype)
    return summed.reshape(m, *shape)
