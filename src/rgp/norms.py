"""Norms and clipped sums of large exact parameters without storing per-example gradients.

Each use keeps the operands of its operation. |G_i|^2 comes either from Gram matrices (the "ghost" norm,
sum_ts (left_t . left_s)(right_t . right_s), T^2 (p + d) multiply-adds) or from forming G_i a few examples at a time
(T p d multiply-adds), whichever is fewer. The clipped sum is one product over all examples.

Terms may cancel: the rounding errors of |G_i| and of the released sum are relative to |left||right|, which may be far
above |G_i|. `widened` adds them to the norm: it is never reported too small, and the sensitivity never rests on luck.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from rgp.grouping import UnitRows

BLOCK_BYTES = 64 << 20  # per-example gradients formed at a time


def without(bad: Tensor, x: Tensor) -> Tensor:
    """A copy of x with the rows of bad examples zero: 0 times NaN would not be."""
    return x.masked_fill(bad.view(-1, *[1] * (x.dim() - 1)), 0)


def times(factors: Tensor, x: Tensor) -> Tensor:
    """Every example's rows times its factor, which must not be rounded to bfloat16: it may only get smaller."""
    return at_least_float32(x) * factors.view(-1, *[1] * (x.dim() - 1))


def at_least_float32(x: Tensor) -> Tensor:
    """Under autocast operands are bfloat16: norms, clip factors and sums of them are not."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def outer_squared_norms(left: Tensor, right: Tensor) -> Tensor:
    """|sum_t left_t right_t^T|^2 per example, float64; left (m, T, p), right (m, T, d)."""
    left, right = at_least_float32(left), at_least_float32(right)
    info = torch.finfo(left.dtype)
    m, T, p = left.shape
    d = right.shape[2]
    if T == 1:
        return left[:, 0].double().square().sum(1) * right[:, 0].double().square().sum(1)
    if T * (p + d) < p * d:
        gram_left, gram_right = torch.bmm(left, left.transpose(1, 2)), torch.bmm(right, right.transpose(1, 2))
        squares = (gram_left * gram_right).sum((1, 2), dtype=torch.float64)
        a, b = size(left).square(), size(right).square()
        rounded = 4 * (p + d) ** 0.5 * info.eps * a * b  # errors of the inner products, were they all to add up
        underflown = T * info.tiny * (p * b + d * a + T)
        return squares.clamp_min(0) + rounded + underflown
    block = max(1, BLOCK_BYTES // (p * d * left.element_size()))
    return torch.cat(
        [
            torch.bmm(left[i : i + block].transpose(1, 2), right[i : i + block]).flatten(1).double().square().sum(1)
            for i in range(0, m, block)
        ]
    )


def unit_outer_squared_norms(left: Tensor, right: Tensor, rows: UnitRows) -> Tensor:
    """The same for units of several rows: one unit with n rows of T positions is one example with n T of them."""
    return outer_squared_norms(rows.side_by_side(rows.weighted(left)), rows.side_by_side(right))


def size(x: Tensor) -> Tensor:
    """|x_i| of every example, float64, never 0; inf where a product with it could leave the range of normal numbers."""
    x = at_least_float32(x).flatten(1)
    info = torch.finfo(x.dtype)
    sizes = torch.linalg.vector_norm(x, dim=1).double() + (x.shape[1] * info.tiny) ** 0.5
    return sizes.masked_fill(sizes > 0.05 * info.max**0.5, float("inf"))


def widened(squares: Tensor, magnitude: Tensor, terms: int, dtype: torch.dtype) -> Tensor:
    """(|G_i| + rounding)^2, where G_i is a sum of terms whose norms sum to at most `magnitude`.

    The rounding is that of forming |G_i|, and of the released sum while it holds some of the terms: up to 512 terms of
    other examples are added meanwhile (the depth of a block in matrix products).
    """
    wide = torch.promote_types(dtype, torch.float32)
    steps = 4 if terms == 1 else terms + 512
    return (squares.sqrt() + steps * torch.finfo(wide).eps * magnitude).square()


class OuterUse:
    """A matrix met as y = x W^T (left = grad of y, right = x) or y = x W (left = x, right = grad of y)."""

    def __init__(self, left: Tensor, right: Tensor, shape: tuple[int, ...]) -> None:
        self.left, self.right, self.shape = left, right, shape

    def squared_norms(self) -> Tensor:
        return outer_squared_norms(self.left, self.right)

    def magnitude(self) -> tuple[Tensor, int]:
        return size(self.left) * size(self.right), self.left.shape[1]

    def gradient(self, i: int) -> Tensor:
        return (at_least_float32(self.left[i]).T @ at_least_float32(self.right[i])).view(self.shape)

    def drop(self, bad: Tensor) -> None:
        self.left, self.right = without(bad, self.left), without(bad, self.right)

    def add_weighted_sum(self, factors: Tensor, total: Tensor) -> None:
        left, right = self.left, self.right
        if left.shape[2] <= right.shape[2]:  # the thinner one is copied
            left, right = times(factors, left), at_least_float32(right)
        else:
            left, right = at_least_float32(left), times(factors, right)
        total.view(left.shape[2], right.shape[2]).addmm_(left.flatten(0, 1).T, right.flatten(0, 1))

    def unit_squared_norms(self, rows: UnitRows) -> Tensor:
        return unit_outer_squared_norms(self.left, self.right, rows)


class DenseUse:
    """Per-example gradients that a rule has formed already."""

    def __init__(self, gradients: Tensor) -> None:
        self.gradients = gradients

    def squared_norms(self) -> Tensor:
        return self.gradients.flatten(1).double().square().sum(1)

    def magnitude(self) -> tuple[Tensor, int]:
        return size(self.gradients), 1

    def gradient(self, i: int) -> Tensor:
        return self.gradients[i]

    def drop(self, bad: Tensor) -> None:
        self.gradients = without(bad, self.gradients)

    def add_weighted_sum(self, factors: Tensor, total: Tensor) -> None:
        total.addmv_(self.gradients.flatten(1).to(total.dtype).T, factors)

    def unit_squared_norms(self, rows: UnitRows) -> Tensor:
        return DenseUse(rows.mean(at_least_float32(self.gradients))).squared_norms()


class EmbeddingUse:
    """Rows `ids` (m, T) of a table, with the gradient `g` (m, T, d) of what was looked up."""

    def __init__(self, ids: Tensor, g: Tensor, shape: tuple[int, ...]) -> None:
        self.ids, self.g, self.shape = ids, g, shape

    def squared_norms(self) -> Tensor:
        def rows(i: int) -> Tensor:
            _, where = self.ids[i].unique(return_inverse=True)
            sums = torch.zeros(prod(where.shape), self.g.shape[2], dtype=torch.float64, device=self.g.device)
            return sums.index_add_(0, where, self.g[i].double())

        return torch.stack([rows(i).square().sum() for i in range(len(self.g))])

    def magnitude(self) -> tuple[Tensor, int]:
        T = self.g.shape[1]
        return T**0.5 * size(self.g), T

    def gradient(self, i: int) -> Tensor:
        g = at_least_float32(self.g[i])
        return g.new_zeros(self.shape).index_add_(0, self.ids[i], g)

    def gradients(self) -> Tensor:
        """G_i of all examples, for a table that is small."""
        m, (rows, d) = self.ids.shape[0], self.shape
        g = at_least_float32(self.g)
        first = torch.arange(m, device=g.device).unsqueeze(1) * rows
        return g.new_zeros(m * rows, d).index_add_(0, (self.ids + first).flatten(), g.flatten(0, 1)).view(m, rows, d)

    def drop(self, bad: Tensor) -> None:
        self.g = without(bad, self.g)

    def add_weighted_sum(self, factors: Tensor, total: Tensor) -> None:
        weighted = times(factors, self.g).flatten(0, 1).to(total.dtype)
        total.view(self.shape).index_add_(0, self.ids.flatten(), weighted)

    def unit_squared_norms(self, rows: UnitRows) -> Tensor:
        ids, g = rows.side_by_side(self.ids), rows.side_by_side(rows.weighted(self.g))
        return EmbeddingUse(ids, g, self.shape).squared_norms()
