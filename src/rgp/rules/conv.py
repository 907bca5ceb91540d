"""Convolutions in one, two and three dimensions, with any stride, padding, dilation and groups.

Shapes: x (m, c, *in), y (m, p, *out), kernel (p, c/groups, *k). As a matrix the kernel is W.flatten(1), d = c/groups * prod(k);
G_i = sum_t g_t patch_t^T over the output positions t. If an example has several rows, frames of a film, x is (m k, c, *in).

R x is a convolution with r outputs. For dR_i the thin side is unfolded: u = L^T g has r channels where x has c, and
sum_t u_t patch_t^T is a correlation, which may be read from x's side: spread u by the stride, pad it, and unfold it.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from rgp.grouping import UnitRows, UnitUse, formed_squared_norms
from rgp.norms import at_least_float32, outer_squared_norms, size, times, unit_outer_squared_norms, without
from rgp.rules import conv_native, rule
from rgp.rules.examples import by_example
from rgp.rules.norm import add_channels
from rgp.slots import DeferredSlot

_FORWARD = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_aten = torch.ops.aten
UNFOLDED = 1 << 20  # entries of an unfolded tensor that are worked on at once


class Geometry:
    """A convolution's constants, with what is computed from them."""

    def __init__(self, kernel: tuple[int, ...], stride, padding, dilation, groups: int) -> None:
        self.n = len(kernel) - 2
        self.k, self.groups = kernel[2:], groups
        self.stride, self.padding, self.dilation = (each(v, self.n) for v in (stride, padding, dilation))

        every = tuple(slice(None, None, s) for s in self.stride)
        self._strided = (Ellipsis, *every)  # every stride-th position

    def forward(self, x: Tensor, kernel: Tensor, bias: Tensor | None) -> Tensor:
        return _FORWARD[self.n](x, kernel, bias, self.stride, self.padding, self.dilation, self.groups)

    def input_gradient(self, g: Tensor, x: Tensor, kernel: Tensor) -> Tensor:
        # x gives its shape alone; an expanded scalar would do, but the CPU kernels make it contiguous first
        return self._backward(g, x, kernel, [True, False, False])[0]

    def kernel_gradient(self, g: Tensor, x: Tensor, kernel_shape) -> Tensor:
        like = g.new_empty(1).expand(kernel_shape)
        return self._backward(g, x, like, [False, True, False])[1]

    def _backward(self, g, x, kernel, mask):
        zeros = [0] * self.n
        return _aten.convolution_backward(
            g, x, kernel, [0], self.stride, self.padding, self.dilation, False, zeros, self.groups, mask
        )

    def patches(self, x: Tensor) -> Tensor:
        """(m, c prod(k), prod(out)): the inputs of every output position."""
        pads = [p for size in reversed(self.padding) for p in (size, size)]
        return unfold(F.pad(x, pads) if any(pads) else x, self.k, self.stride, self.dilation)

    def correlate(self, u: Tensor, x: Tensor) -> tuple[Tensor, bool]:
        """sum_t u_t patch_t(x)^T per example: u (m, r, *out), x (m, c, *in) -> (m, r, c prod(k)), False.

        Or (m, r, prod(k) c), True: with the kernel's positions before the channels and in reverse, as they are found where u
        is unfolded. To put m of them in order takes as long as half of the product.
        """
        (m, c), r, k = x.shape[:2], u.shape[1], prod(self.k)
        if k == 1 and not any(self.padding):
            return torch.bmm(u.flatten(2), x[self._strided].flatten(2).mT), False
        if r * prod(self.stride) > c:
            found = u.new_empty(m, r, c * k)
            for i in _pieces(m, c * k * prod(u.shape[2:]), x.device):
                torch.bmm(u[i].flatten(2), self.patches(x[i]).mT, out=found[i])
            return found, False
        found, spread, positions = u.new_empty(m, r * k, c), self._spread(u, x.shape[2:]), x.flatten(2).mT
        for i in _pieces(m, r * k * positions.shape[1], x.device):
            torch.bmm(unfold(spread[i], self.k, (1,) * self.n, self.dilation), positions[i], out=found[i])
        return found.view(m, r, k * c), True

    def _spread(self, u: Tensor, size) -> Tensor:
        """u with stride - 1 zeros between its positions, padded so that its windows lie over x's positions."""
        if any(s > 1 for s in self.stride):
            wide = u.new_zeros(*u.shape[:2], *((o - 1) * s + 1 for o, s in zip(u.shape[2:], self.stride, strict=True)))
            wide[self._strided] = u
            u = wide
        pads = []
        for i in reversed(range(self.n)):
            reach = self.dilation[i] * (self.k[i] - 1)
            rest = (size[i] + 2 * self.padding[i] - reach - 1) % self.stride[i]
            pads += [reach - self.padding[i], reach - self.padding[i] + rest]
        return F.pad(u, pads)


def _pieces(m: int, entries: int, device: torch.device) -> Iterator[slice]:
    """Cut m examples into equal pieces, on CPU so small that what is unfolded stays in the cache until it is multiplied."""
    if not isinstance(m, int):  # a symbol, while a graph is made (compiled/)
        return iter((slice(None),))
    few = m
    if device.type == "cpu":
        threads = torch.get_num_threads()  # each works on an example
        pieces = -(-m * entries // UNFOLDED)
        few = -(-m // (pieces * threads)) * threads if m else 1
    return (slice(i, i + few) for i in range(0, m, few))


def unfold(x: Tensor, kernel, stride, dilation) -> Tensor:
    """Windows of x (m, c, *in) as (m, c prod(kernel), prod(out)), kernel index inside the channel index."""
    # views and one copy: ten times faster than F.unfold on CPU, and any number of dimensions. Not as_strided, which a compiler
    # that lays tensors out in its own way gets wrong (inductor of torch 2.13)
    n, windows = len(kernel), x.contiguous()
    for axis, (k, s, d) in enumerate(zip(kernel, stride, dilation, strict=True), 2):
        windows = windows.unfold(axis, d * (k - 1) + 1, s)[..., ::d]
    out = windows.shape[2 : 2 + n]
    windows = windows.permute(0, 1, *range(2 + n, 2 + 2 * n), *range(2, 2 + n))
    return windows.reshape(x.shape[0], x.shape[1] * prod(kernel), prod(out))


def each(value, n: int) -> tuple[int, ...]:
    return (value,) * n if isinstance(value, int) else tuple(value) * (n if len(value) == 1 else 1)


class ConvUse:
    """A large exact kernel: what its norm and clipped sum need (see norms.py)."""

    def __init__(self, x: Tensor, g: Tensor, geometry: Geometry, shape: tuple[int, ...]) -> None:
        self.x, self.g, self.geometry, self.shape = x, g, geometry, shape

    def squared_norms(self) -> Tensor:
        if self.geometry.groups == 1:
            patches = self.geometry.patches(at_least_float32(self.x))
            left, right = self.g.flatten(2).transpose(1, 2), patches.transpose(1, 2)
            return outer_squared_norms(left, right)
        return torch.stack([self.gradient(i).double().square().sum() for i in range(len(self.x))])

    def magnitude(self) -> tuple[Tensor, int]:
        return size(self.g) * size(self.x) * prod(self.geometry.k) ** 0.5, prod(self.g.shape[2:])

    def gradient(self, i: int) -> Tensor:
        g, x = at_least_float32(self.g[i : i + 1]), at_least_float32(self.x[i : i + 1])
        return self.geometry.kernel_gradient(g, x, self.shape)

    def drop(self, bad: Tensor) -> None:
        self.x, self.g = without(bad, self.x), without(bad, self.g)

    def add_weighted_sum(self, factors: Tensor, total: Tensor) -> None:
        g = times(factors, self.g)
        total.add_(self.geometry.kernel_gradient(g, self.x.to(g.dtype), self.shape).flatten())

    def unit_squared_norms(self, rows: UnitRows) -> Tensor:
        if self.geometry.groups == 1:
            patches = self.geometry.patches(at_least_float32(self.x))
            return unit_outer_squared_norms(self.g.flatten(2).transpose(1, 2), patches.transpose(1, 2), rows)
        return formed_squared_norms(UnitUse(self, rows))


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, kernel, bias, slot, bias_slot, geometry, m):
        ctx.slot, ctx.bias_slot, ctx.geometry, ctx.m = slot, bias_slot, geometry, m
        y = geometry.forward(x, kernel, bias)
        # R x is computed in the backward pass: x is nearly always alive anyway (a ReLU keeps its result), R x would not be
        ctx.save_for_backward(x, kernel)
        ctx.needs_x = x.requires_grad
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        x, kernel = ctx.saved_tensors
        slot, geometry = ctx.slot, ctx.geometry
        x = x.to(g.dtype)
        dx = geometry.input_gradient(g, x, kernel.to(g.dtype)) if ctx.needs_x else None
        fill(slot, geometry, x, g, ctx.m)
        if ctx.bias_slot is not None:
            fill_bias(ctx.bias_slot, g, ctx.m)
        return dx, None, None, None, None, None, None


def fill(slot, geometry, x, g, m: int) -> None:
    """Give the slot of a kernel what a convolution of x, whose result has the gradient g, means for it."""
    if slot.carried:
        _carried(slot, geometry, x, g, m)
    elif x.shape[0] != m:
        pairs = zip(by_example(g, m, g.dim() - 1, slot), by_example(x, m, x.dim() - 1, slot), strict=True)
        slot.add_dense(torch.stack([geometry.kernel_gradient(gs, xs, slot.entry.shape) for gs, xs in pairs]))
    elif isinstance(slot, DeferredSlot):
        slot.add_use(ConvUse(x, g, geometry, slot.entry.shape))
    else:
        grouped = _grouped(geometry.patches(x), geometry.groups)
        slot.add_dense(torch.matmul(_grouped(g, geometry.groups), grouped.transpose(-1, -2)))


def fill_bias(slot, g, m: int) -> None:
    sums = g.flatten(2).sum(2, dtype=torch.promote_types(g.dtype, torch.float32))
    slot.add_dense(by_example(sums, m, 1, slot).sum(1))


def _grouped(x: Tensor, groups: int) -> Tensor:
    """(m, c, ...) -> (m, groups, c / groups, positions)."""
    x = x.flatten(2)
    return x.view(x.shape[0], groups, -1, x.shape[2])


def _carried(slot, geometry, x, g, examples: int) -> None:
    """dL_i transposed (m, r, p) and dR_i (m, r, d). Groups stand side by side in dL_i and add up in dR_i."""
    m, r, groups = g.shape[0], slot.entry.rank, geometry.groups
    if m == examples and conv_native.takes(slot, geometry, x, g):
        conv_native.fill(slot, geometry, x, g)
        return
    split = _grouped(g, groups)
    dLt = dR = None
    taps_first = False
    if slot.needs_left:
        R = slot.R.to(g.dtype).view(r, *slot.entry.shape[1:])
        thin = geometry.forward(x, R if groups == 1 else R.repeat(groups, *[1] * (R.dim() - 1)), None)
        dLt = torch.matmul(_grouped(thin, groups), split.transpose(-1, -2)).transpose(1, 2).reshape(m, r, -1)
    if slot.needs_right:
        Lt = slot.Lt.to(g.dtype).view(r, groups, -1).transpose(0, 1)
        u = torch.matmul(Lt, split).reshape(m * groups, r, *g.shape[2:])
        xs = x.reshape(m * groups, x.shape[1] // groups, *x.shape[2:])
        dR, taps_first = geometry.correlate(u, xs)
        dR = dR if groups == 1 else dR.view(m, groups, r, -1).sum(1)
    if m != examples:
        dLt, dR = (None if t is None else by_example(t, examples, 2, slot).sum(1) for t in (dLt, dR))
    slot.add_thin(dLt, dR, taps_first=taps_first)


def _convolution(capture, n: int, input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
    unbatched = input.dim() == n + 1
    x = input.unsqueeze(0) if unbatched else input
    if isinstance(padding, str):
        x, padding = _resolve(x, padding, weight.shape[2:], each(dilation, n))
    slot, bias_slot = capture.slot(weight), capture.slot(bias)
    by_example(x, capture.examples, n + 1, slot or bias_slot)  # an error if its rows cannot be assigned to examples
    geometry = Geometry(tuple(weight.shape), stride, padding, dilation, groups)
    if slot is None:
        y = geometry.forward(x, weight, None)
        y = add_channels(capture, y, bias)
    else:
        computed = bias is not None and bias_slot is None and bias.requires_grad  # it needs its own gradient
        plain = None if bias is None or computed else bias.detach()
        y = _Conv.apply(x, weight, plain, slot, bias_slot, geometry, capture.examples)
        y = y + bias.view(-1, *[1] * n) if computed else y
    return y.squeeze(0) if unbatched else y


def _resolve(x: Tensor, padding: str, kernel, dilation) -> tuple[Tensor, tuple[int, ...]]:
    """The numbers behind padding="valid" and "same"; an even kernel's lopsided padding goes onto x itself."""
    if padding == "valid":
        return x, (0,) * len(kernel)
    total = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    if all(t % 2 == 0 for t in total):
        return x, tuple(t // 2 for t in total)
    pads = [p for t in reversed(total) for p in (t // 2, t - t // 2)]
    return F.pad(x, pads), (0,) * len(kernel)


@rule(F.conv1d)
def conv1d(capture, func, args, kwargs):
    return _convolution(capture, 1, *args, **kwargs)


@rule(F.conv2d)
def conv2d(capture, func, args, kwargs):
    return _convolution(capture, 2, *args, **kwargs)


@rule(F.conv3d)
def conv3d(capture, func, args, kwargs):
    return _convolution(capture, 3, *args, **kwargs)
