"""Lookups in a trained table, with the ids of each example; those with the same ids for all examples are forms.

Carried tables are refused: the paper freezes embeddings; exact ones work, tied ones too.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from rgp.errors import LayoutError, UnsupportedError
from rgp.rules import rule
from rgp.rules.forms import look_up


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, ids, padding_idx, slot, m):
        ctx.save_for_backward(ids)
        ctx.padding_idx, ctx.slot, ctx.m, ctx.shape = padding_idx, slot, m, tuple(weight.shape)
        return F.embedding(ids, weight, padding_idx)

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        (ids,) = ctx.saved_tensors
        ids, g = ids.reshape(ctx.m, -1), g.reshape(ctx.m, -1, g.shape[-1])
        if ctx.padding_idx is not None:
            g = g.masked_fill((ids == ctx.padding_idx).unsqueeze(-1), 0)
        look_up(ctx.slot, ids, g)
        return None, None, None, None, None


@rule(F.embedding)
def embedding(capture, func, args, kwargs):
    def call(input, weight, padding_idx=None, max_norm=None, norm_type=2.0, scale_grad_by_freq=False, sparse=False):
        slot, m = capture.slot(weight), capture.examples
        name = slot.entry.name
        if slot.carried:
            raise UnsupportedError(
                f"embedding {name!r} cannot be carried; make it 'exact' or 'frozen' in the method's overrides"
            )
        if max_norm is not None or scale_grad_by_freq:
            raise UnsupportedError(
                f"embedding {name!r} uses max_norm or scale_grad_by_freq, which depend on the whole batch"
            )
        ids = input
        if m > 1 and ids.shape[:1] == (1,):  # position ids, shared by all examples: give each example its own
            ids = ids.expand(m, *ids.shape[1:])
        if m > 1 and (ids.dim() == 0 or ids.shape[0] % m):
            raise LayoutError(
                f"embedding {name!r} was looked up with ids of shape {tuple(input.shape)}, which belong to no example of the "
                f"micro-batch of {m} (a relative position bias, for example). Freeze it: overrides={{{name!r}: 'frozen'}}."
            )
        if padding_idx is not None and padding_idx < 0:
            padding_idx += weight.shape[0]
        return _Lookup.apply(weight, ids, padding_idx, slot, m)

    return call(*args, **kwargs)


@rule(torch.Tensor.__getitem__)
def rows(capture, func, args, kwargs):
    """table[ids], with ids of the batch."""
    table, ids = args
    if not isinstance(ids, Tensor) or table.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
        return NotImplemented
    return embedding(capture, F.embedding, (ids % table.shape[0], table), {})
