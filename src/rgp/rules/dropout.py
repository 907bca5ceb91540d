"""Dropout with masks that cost a sixth of torch's on CPU, and a quarter of their memory.

torch draws CPU masks number by number from one Mersenne twister and keeps them as floats: a tenth of a BERT step. Here a
seed is drawn from torch's generator, so that activation checkpointing and resuming see the same mask again, and the bits
come from SFC64, sixteen an entry; the mask is kept as bytes. The rate is p to within 1/65536, and the scale is that of
the rate. No trained parameter is involved; other devices and other forms of dropout keep torch's own.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from rgp.rules import anytime

LEVELS = 1 << 16
SMALLEST = 1e-3  # below this rate 16 bits are too coarse


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, p):
        threshold = round(p * LEVELS)
        ctx.scale = LEVELS / (LEVELS - threshold)
        mask = _mask(x, threshold)
        ctx.save_for_backward(mask)
        return torch.mul(x, mask).mul_(ctx.scale)

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        (mask,) = ctx.saved_tensors
        return torch.mul(g, mask).mul_(ctx.scale), None


class _DroppedProduct(torch.autograd.Function):
    """dropout(weights) @ value; what was dropped is computed again from mask and weights, which softmax keeps anyway."""

    @staticmethod
    def forward(ctx, weights, value, p):
        threshold = round(p * LEVELS)
        ctx.scale = LEVELS / (LEVELS - threshold)
        mask = _mask(weights, threshold)
        ctx.save_for_backward(weights, mask, value)
        return torch.mul(weights, mask).mul_(ctx.scale) @ value

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        weights, mask, value = ctx.saved_tensors
        dvalue = torch.mul(weights, mask).mul_(ctx.scale).to(g.dtype).mT @ g
        dweights = (g @ value.to(g.dtype).mT).mul_(mask).mul_(ctx.scale)
        return dweights.to(weights.dtype), dvalue.to(value.dtype), None


def _mask(x: Tensor, threshold: int) -> Tensor:
    bits = np.random.SFC64(int(torch.randint(2**63 - 1, ()))).random_raw(-(-x.numel() // 4)).view(np.int16)
    return torch.from_numpy(bits[: x.numel()]).view(x.shape) >= threshold - LEVELS // 2


def _fast(x: Tensor, p: float) -> bool:
    if type(x) is not Tensor:  # without numbers, while a graph is made: a compiler draws in its own way
        return False
    return x.device.type == "cpu" and x.is_floating_point() and SMALLEST <= p <= 1 - SMALLEST


@anytime(F.dropout)
def dropout(capture, func, args, kwargs):
    def call(input, p=0.5, training=True, inplace=False):
        if not training or inplace or not _fast(input, p):
            return func(*args, **kwargs)
        return _Dropout.apply(input, p)

    return call(*args, **kwargs)


@anytime(F.scaled_dot_product_attention)
def attention(capture, func, args, kwargs):
    """With dropout, torch's CPU attention is this very computation, with the slow mask inside."""

    def call(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        if not _fast(query, dropout_p) or (is_causal and attn_mask is not None):
            return func(*args, **kwargs)
        if enable_gqa:
            repeats = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
        scores = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.transpose(-2, -1)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if attn_mask is not None:
            scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
        # a row with no key to attend to gives zeros, as in torch, and not NaN
        weights = torch._safe_softmax(scores, -1)
        if weights.shape[:-2] != value.shape[:-2]:
            return _Dropout.apply(weights, dropout_p) @ value
        return _DroppedProduct.apply(weights, value, dropout_p)

    return call(*args, **kwargs)
