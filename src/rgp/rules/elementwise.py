"""A trained vector that scales or shifts activations: RMSNorm's weight * x, a bias added by hand, layer scale."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rgp.errors import UnsupportedError
from rgp.rules import rule
from rgp.slots import Slot


def per_example_sum(products: Tensor, m: int, shape: tuple[int, ...], slot: Slot) -> Tensor:
    """Sum (m, ...) down to (m, *shape), reversing the broadcast of a parameter of `shape`."""
    dims = products.dim() - len(shape)
    if products.shape[0] != m or dims < 1:
        raise UnsupportedError(
            f"parameter {slot.entry.name!r} of shape {tuple(shape)} met an activation of shape {tuple(products.shape)}, "
            f"whose first dimension is not the {m} examples of the micro-batch. Freeze it, or put the examples first."
        )
    dtype = torch.float32 if products.dtype in (torch.float16, torch.bfloat16) else products.dtype
    axes = [*range(1, dims), *(dims + i for i, size in enumerate(shape) if size == 1 and products.shape[dims + i] != 1)]
    summed = products.sum(axes, dtype=dtype) if axes else products.to(dtype)
    return summed.reshape(m, *shape)


class _Affine(torch.autograd.Function):
    """x * weight or x + weight."""

    @staticmethod
    def forward(ctx, x, weight, slot, m, scales):
        ctx.slot, ctx.m, ctx.scales = slot, m, scales
        ctx.save_for_backward(x if scales else None, weight)
        ctx.x_shape, ctx.x_dtype, ctx.needs_x = x.shape, x.dtype, x.requires_grad
        return x * weight if scales else x + weight

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        x, weight = ctx.saved_tensors
        grouped = g
        if g.shape[0] != ctx.m and ctx.m and g.shape[0] % ctx.m == 0 and g.dim() - weight.dim() == 1:
            grouped = g.reshape(ctx.m, -1, *g.shape[1:])  # flattened (m T, d)
        products = grouped * x.reshape(grouped.shape) if ctx.scales else grouped
        ctx.slot.add_dense(per_example_sum(products, ctx.m, tuple(weight.shape), ctx.slot))
        dx = None
        if ctx.needs_x:
            dx = (g * weight if ctx.scales else g).sum_to_size(ctx.x_shape).to(ctx.x_dtype)
        return dx, None, None, None, None


def _affine(capture, args, kwargs, scales: bool):
    a, b = args[0], args[1] if len(args) > 1 else kwargs["other"]
    slot_a, slot_b = capture.slot(a), capture.slot(b)
    x, weight, slot = (a, b, slot_b) if slot_a is None else (b, a, slot_a)
    usable = isinstance(x, Tensor) and (slot_a is None) != (slot_b is None) and kwargs.get("alpha", 1) == 1
    if not usable or torch.broadcast_shapes(x.shape, weight.shape) != x.shape:
        raise UnsupportedError(
            f"parameter {slot.entry.name!r} is trained but was combined with something that is not an activation of the "
            "batch (a number, another parameter, or a smaller tensor). Freeze it, or register a rule: see docs/rules.md"
        )
    return _Affine.apply(x, weight, slot, capture.examples, scales)


@rule(torch.mul, torch.Tensor.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__, torch.multiply, torch.Tensor.multiply)
def multiply(capture, func, args, kwargs):
    return _affine(capture, args, kwargs, scales=True)


@rule(torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__)
def add(capture, func, args, kwargs):
    return _affine(capture, args, kwargs, scales=False)
