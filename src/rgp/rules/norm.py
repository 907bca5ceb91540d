"""Normalisation with trained scale and shift: layer, group, RMS, instance norm, and batch norm in evaluation mode."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from rgp.errors import UnsupportedError
from rgp.rules import rule
from rgp.rules.examples import by_example, per_example_sum
from rgp.rules.generic import watched

_aten = torch.ops.aten


def _slots(capture, weight, bias):
    """Slots of scale and shift. One that is computed would need a gradient, which these rules do not give."""
    slots = capture.slot(weight), capture.slot(bias)
    for tensor, slot, other in ((weight, slots[0], slots[1]), (bias, slots[1], slots[0])):
        if slot is None and tensor is not None and tensor.requires_grad:
            raise UnsupportedError(
                f"parameter {other.entry.name!r} was used in a norm whose other operand is computed and not a parameter. "
                "Freeze it, or scale and shift after the norm, with * and +."
            )
    return slots


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shape, weight, bias, eps, slot_w, slot_b, m):
        y, mean, rstd = torch.native_layer_norm(x, shape, weight, bias, eps)
        ctx.save_for_backward(x, mean, rstd, weight, bias)
        ctx.shape, ctx.slots, ctx.m = shape, (slot_w, slot_b), m
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        x, mean, rstd, weight, bias = ctx.saved_tensors
        slot_w, slot_b = ctx.slots
        features = len(ctx.shape)
        if slot_w is not None:
            xhat = (x - mean).mul_(rstd)
            products = by_example(xhat.mul_(g), ctx.m, features, slot_w)
            slot_w.add_dense(per_example_sum(products, ctx.m, tuple(weight.shape), slot_w))
        if slot_b is not None:
            slot_b.add_dense(per_example_sum(by_example(g, ctx.m, features, slot_b), ctx.m, tuple(bias.shape), slot_b))
        dx = None
        if ctx.needs_input_grad[0]:
            wanted = [True, False, False]
            dx = _aten.native_layer_norm_backward(g.contiguous(), x, ctx.shape, mean, rstd, weight, bias, wanted)[0]
        return dx, None, None, None, None, None, None, None


@rule(F.layer_norm, torch.layer_norm)
def layer_norm(capture, func, args, kwargs):
    def call(input, normalized_shape, weight=None, bias=None, eps=1e-5, cudnn_enable=True):
        slots = _slots(capture, weight, bias)
        if torch.is_autocast_enabled(input.device.type):
            input = input.float()
        return _LayerNorm.apply(input, list(normalized_shape), weight, bias, eps, *slots, capture.examples)

    return call(*args, **kwargs)


def _by_channel(capture, normalize, x, weight, bias):
    """Scale and shift along dimension 1 of normalize(x)."""
    m = capture.examples
    slot_w, slot_b = _slots(capture, weight, bias)
    across = (1, -1, *[1] * (x.dim() - 2))

    def call(x):
        y = normalize(x)
        y = y if weight is None else y * weight.detach().view(across)
        return y if bias is None else y + bias.detach().view(across)

    def tell(g):
        dtype = torch.float32 if g.dtype in (torch.float16, torch.bfloat16) else g.dtype
        spatial = tuple(range(2, g.dim()))

        def summed(t, slot):
            rows = t.sum(spatial, dtype=dtype) if spatial else t.to(dtype)
            return by_example(rows, m, 1, slot).sum(1)

        if slot_w is not None:
            with torch.no_grad():
                slot_w.add_dense(summed(normalize(x.detach()) * g, slot_w))
        if slot_b is not None:
            slot_b.add_dense(summed(g, slot_b))

    return watched(call, tell, weight if slot_w is not None else bias, x)


def add_channels(capture, y, bias):
    """y + bias along dimension 1, where only the bias of a convolution is trained."""
    return _by_channel(capture, lambda x: x * 1, y, None, bias)


class _GroupNorm(torch.autograd.Function):
    """Examples are folded into channels for the backward kernel, whose sums over "the batch" are then per example."""

    @staticmethod
    def forward(ctx, x, groups, weight, bias, eps, slot_w, slot_b, m):
        N, C = x.shape[:2]
        x = x.contiguous()
        y, mean, rstd = torch.native_group_norm(x, weight, bias, N, C, x.shape[2:].numel(), groups, eps)
        ctx.save_for_backward(x, mean, rstd, weight)
        ctx.groups, ctx.slots, ctx.m = groups, (slot_w, slot_b), m
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        x, mean, rstd, weight = ctx.saved_tensors
        (N, C), positions = x.shape[:2], x.shape[2:].numel()
        slot_w, slot_b = ctx.slots
        wanted = [ctx.needs_input_grad[0], slot_w is not None, slot_b is not None]
        if not isinstance(N, int):
            return _group_norm_of_symbols(ctx, g, x, mean, rstd, weight), *[None] * 7
        dx, dw, db = _aten.native_group_norm_backward(
            g.contiguous().view(1, N * C, positions),
            x.view(1, N * C, positions),
            mean.view(1, -1),
            rstd.view(1, -1),
            None if weight is None else weight.to(x.dtype).repeat(N),
            1,
            N * C,
            positions,
            N * ctx.groups,
            wanted,
        )
        for slot, sums in ((slot_w, dw), (slot_b, db)):
            if slot is not None:
                slot.add_dense(by_example(sums.view(N, C), ctx.m, 1, slot).sum(1))
        return None if dx is None else dx.view(x.shape), None, None, None, None, None, None, None


def _group_norm_of_symbols(ctx, g, x, mean, rstd, weight):
    """The backward pass while a graph is made (compiled/): the number of groups must not depend on that of examples."""
    (N, C), positions = x.shape[:2], x.shape[2:].numel()
    slot_w, slot_b = ctx.slots
    if slot_w is not None:
        xhat = (x.reshape(N, ctx.groups, -1) - mean.view(N, -1, 1)) * rstd.view(N, -1, 1)
        slot_w.add_dense(by_example((g * xhat.view_as(g)).flatten(2).sum(2), ctx.m, 1, slot_w).sum(1))
    if slot_b is not None:
        slot_b.add_dense(by_example(g.flatten(2).sum(2), ctx.m, 1, slot_b).sum(1))
    if not ctx.needs_input_grad[0]:
        return None
    scale = None if weight is None else weight.to(x.dtype)
    wanted = [True, False, False]
    return _aten.native_group_norm_backward(g.contiguous(), x, mean, rstd, scale, N, C, positions, ctx.groups, wanted)[
        0
    ]


@rule(F.group_norm)
def group_norm(capture, func, args, kwargs):
    def call(input, num_groups, weight=None, bias=None, eps=1e-5):
        slots = _slots(capture, weight, bias)
        if torch.is_autocast_enabled(input.device.type):
            input = input.float()
        return _GroupNorm.apply(input, num_groups, weight, bias, eps, *slots, capture.examples)

    return call(*args, **kwargs)


@rule(F.instance_norm)
def instance_norm(capture, func, args, kwargs):
    def call(
        input, running_mean=None, running_var=None, weight=None, bias=None, use_input_stats=True, momentum=0.1, eps=1e-5
    ):
        # running statistics would be computed from private data: they are read, never updated
        def normalize(x):
            if use_input_stats:
                return F.instance_norm(x, None, None, None, None, True, momentum, eps)
            return F.instance_norm(x, running_mean, running_var, None, None, False, momentum, eps)

        return _by_channel(capture, normalize, input, weight, bias)

    return call(*args, **kwargs)


@rule(F.batch_norm)
def batch_norm(capture, func, args, kwargs):
    def call(input, running_mean, running_var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5):
        assert not training, "capture refuses batch statistics"
        return _by_channel(
            capture,
            lambda x: F.batch_norm(x, running_mean, running_var, None, None, False, momentum, eps),
            input,
            weight,
            bias,
        )

    return call(*args, **kwargs)


@rule(F.rms_norm, torch.rms_norm)
def rms_norm(capture, func, args, kwargs):
    def call(input, normalized_shape, weight=None, eps=None):
        slot, m = capture.slot(weight), capture.examples

        def tell(g):
            with torch.no_grad():
                products = by_example(
                    F.rms_norm(input.detach(), normalized_shape, None, eps) * g, m, len(normalized_shape), slot
                )
            slot.add_dense(per_example_sum(products, m, tuple(weight.shape), slot))

        return watched(lambda x: F.rms_norm(x, normalized_shape, weight.detach(), eps), tell, weight, input)

    return call(*args, **kwargs)
