"""Transposed convolutions. y = conv_transpose(x, W) is the adjoint of z -> conv(z, W), so <g, y> = <conv(g, W), x>: the
kernel's gradient is that of an ordinary convolution of g whose result has the gradient x. All of conv.py serves.

Shapes: x (m, c, *in), y (m, p, *out), kernel (c, p/groups, *k).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from rgp.rules import rule
from rgp.rules.conv import Geometry, each, fill, fill_bias
from rgp.rules.examples import by_example
from rgp.rules.norm import add_channels

_FORWARD = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


class _ConvTranspose(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, kernel, bias, slot, bias_slot, geometry, output_padding, m):
        ctx.slot, ctx.bias_slot, ctx.geometry, ctx.m = slot, bias_slot, geometry, m
        ctx.save_for_backward(x, kernel)
        ctx.needs_x = x.requires_grad
        g = geometry
        return _FORWARD[g.n](x, kernel, bias, g.stride, g.padding, output_padding, g.groups, g.dilation)

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        x, kernel = ctx.saved_tensors
        dx = ctx.geometry.forward(g, kernel.to(g.dtype), None) if ctx.needs_x else None
        fill(ctx.slot, ctx.geometry, g, x.to(g.dtype), ctx.m)
        if ctx.bias_slot is not None:
            fill_bias(ctx.bias_slot, g, ctx.m)
        return dx, None, None, None, None, None, None, None


def _transposed(capture, n, input, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1):
    unbatched = input.dim() == n + 1
    x = input.unsqueeze(0) if unbatched else input
    slot, bias_slot = capture.slot(weight), capture.slot(bias)
    by_example(x, capture.examples, n + 1, slot or bias_slot)  # an error if its rows cannot be assigned to examples
    geometry = Geometry(tuple(weight.shape), stride, padding, dilation, groups)
    output_padding = each(output_padding, n)
    if slot is None:
        y = _FORWARD[n](x, weight, None, geometry.stride, geometry.padding, output_padding, groups, geometry.dilation)
        y = add_channels(capture, y, bias)
    else:
        computed = bias is not None and bias_slot is None and bias.requires_grad
        plain = None if bias is None or computed else bias.detach()
        y = _ConvTranspose.apply(x, weight, plain, slot, bias_slot, geometry, output_padding, capture.examples)
        y = y + bias.view(-1, *[1] * n) if computed else y
    return y.squeeze(0) if unbatched else y


@rule(F.conv_transpose1d)
def conv_transpose1d(capture, func, args, kwargs):
    return _transposed(capture, 1, *args, **kwargs)


@rule(F.conv_transpose2d)
def conv_transpose2d(capture, func, args, kwargs):
    return _transposed(capture, 2, *args, **kwargs)


@rule(F.conv_transpose3d)
def conv_transpose3d(capture, func, args, kwargs):
    return _transposed(capture, 3, *args, **kwargs)
