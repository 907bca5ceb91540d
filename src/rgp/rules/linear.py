"""Matrix products with a trained matrix: y = x W^T + b, y = x W + b, and biases in them.

F.linear, matmul, @, mm, addmm (GPT-2's Conv1D), with the weight used as it is or transposed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from rgp.rules import rule
from rgp.rules.copies import stacked_product
from rgp.rules.examples import by_example


class _MatMul(torch.autograd.Function):
    """y = x M (+ b) where M is W^T (transposed=True, the nn.Linear case) or W."""

    @staticmethod
    def forward(ctx, x, weight, bias, slot, bias_slot, transposed, m):
        ctx.slot, ctx.bias_slot, ctx.transposed, ctx.m = slot, bias_slot, transposed, m
        y = F.linear(x, weight, bias) if transposed else F.linear(x, weight.t(), bias)
        if y._is_view():  # autograd forbids in-place activations on a view that a Function returns
            y = torch.ops.aten._unsafe_view(y, y.shape)
        # what x is to W's matrix: its right factor in y = x W^T, its left factor in y = x W
        keep_x, thin = True, None
        if slot.carried:
            wants_thin = slot.needs_left if transposed else slot.needs_right
            keep_x = slot.needs_right if transposed else slot.needs_left
            if wants_thin:
                thin = F.linear(x, (slot.R if transposed else slot.Lt).to(x.dtype))
        ctx.save_for_backward(x if keep_x else None, thin, weight)
        ctx.needs_x = x.requires_grad
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        x, thin, weight = ctx.saved_tensors
        dx = None
        if ctx.needs_x:
            w = weight.to(g.dtype)
            dx = torch.matmul(g, w) if ctx.transposed else F.linear(g, w)
        g3 = by_example(g, ctx.m, 1, ctx.slot)
        x3 = None if x is None else by_example(x, ctx.m, 1, ctx.slot).to(g3.dtype)
        thin3 = None if thin is None else by_example(thin, ctx.m, 1, ctx.slot).to(g3.dtype)
        if ctx.transposed:
            ctx.slot.add_outer(g3, x3, thin_right=thin3)
        else:
            ctx.slot.add_outer(x3, g3, thin_left=thin3)
        if ctx.bias_slot is not None:
            ctx.bias_slot.add_dense(g3.sum(1, dtype=_at_least_float32(g3)))
        return dx, None, None, None, None, None, None


def _at_least_float32(x: Tensor) -> torch.dtype:
    return torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype


def product(capture, x: Tensor, weight: Tensor, bias: Tensor | None, *, transposed: bool):
    """x W^T + b (transposed) or x W + b, whichever of W and b are trained."""
    slot, is_transpose = capture.find(weight)
    if slot is None:  # the weight is frozen: only the bias is trained
        y = F.linear(x, weight) if transposed else torch.matmul(x, weight)
        return y if bias is None else capture.run(torch.add, y, bias)
    bias_slot = None if bias is None else capture.slot(bias)
    if bias is not None and bias_slot is None and bias.requires_grad:  # a computed one, which needs its own gradient
        return product(capture, x, weight, None, transposed=transposed) + bias
    if is_transpose:
        weight, transposed = weight.t(), not transposed
    frozen_bias = bias if bias is None or bias_slot is None else bias.detach()
    return _MatMul.apply(x, weight, frozen_bias, slot, bias_slot, transposed, capture.rows(x))


@rule(F.linear, transposed=True, picked=True)
def linear(capture, func, args, kwargs):
    x, weight, bias = _bind(("input", "weight", "bias"), args, kwargs)
    return product(capture, x, weight, bias, transposed=True)


@rule(torch.addmm, torch.Tensor.addmm, transposed=True, picked=True)
def addmm(capture, func, args, kwargs):
    bias, x, weight = _bind(("input", "mat1", "mat2"), args, kwargs)
    if kwargs.get("beta", 1) != 1 or kwargs.get("alpha", 1) != 1 or capture.slot(x) is not None:
        return NotImplemented
    return product(capture, x, weight, bias, transposed=False)


@rule(
    torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.mm, torch.Tensor.mm, transposed=True, picked=True
)
def matmul(capture, func, args, kwargs):
    x, weight = _bind(("input", "mat2" if "mat2" in kwargs else "other"), args, kwargs)
    slot, _ = capture.find(weight)
    if slot is None or capture.slot(x) is not None or weight.dim() != 2:
        return stacked_product(capture, func, x, weight)
    return product(capture, x, weight, None, transposed=False)


def _bind(names, args, kwargs):
    bound = dict(zip(names, args, strict=False))
    bound.update({k: v for k, v in kwargs.items() if k in names})
    return [bound.get(name) for name in names]
