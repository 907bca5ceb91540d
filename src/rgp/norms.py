"""Norms and clipped sums of large exact parameters without storing per-example gradients.

Each use keeps the operands of its operation. |G_i|^2 comes either from Gram matrices (the "ghost" norm,
sum_ts (left_t . left_s)(right_t . right_s), T^2 (p + d) multiply-adds) or from forming G_i a few examples at a time
(T p d multiply-adds), whichever is fewer. The clipped sum is one product over all examples.

The Gram form cancels: rounding errors are relative to (sum_t |left_t||right_t|)^2, which may be far above |G_i|^2. That
much times the unit roundoff is added, so that a norm is never reported too small and the sensitivity never rests on luck.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

BLOCK_BYTES = 64 << 20  # per-example gradients formed at a time


def zero_unless(mask: Tensor, x: Tensor) -> Tensor:
    """x with the rows of examples outside the mask set to exactly zero."""
    return torch.where(mask.view(-1, *[1] * (x.dim() - 1)), x, torch.zeros((), dtype=x.dtype, device=x.device))


def outer_squared_norms(left: Tensor, right: Tensor) -> Tensor:
    """|sum_t left_t right_t^T|^2 per example, float64; left (m, T, p), right (m, T, d)."""
    m, T, p = left.shape
    d = right.shape[2]
    if T == 1:
        return left[:, 0].double().square().sum(1) * right[:, 0].double().square().sum(1)
    if T * (p + d) < p * d:
        gram_left, gram_right = torch.bmm(left, left.transpose(1, 2)), torch.bmm(right, right.transpose(1, 2))
        sizes = gram_left.diagonal(dim1=1, dim2=2).clamp_min(0).sqrt() * gram_right.diagonal(dim1=1, dim2=2).clamp_min(0).sqrt()
        squares = (gram_left * gram_right).sum((1, 2), dtype=torch.float64)
        slack = 4 * torch.finfo(left.dtype).eps * sizes.sum(1, dtype=torch.float64).square()
        return squares.clamp_min(0) + slack
    block = max(1, BLOCK_BYTES // (p * d * left.element_size()))
    return torch.cat(
        [
            torch.bmm(left[i : i + block].transpose(1, 2), right[i : i + block]).flatten(1).double().square().sum(1)
            for i in range(0, m, block)
        ]
    )


class OuterUse:
    """A matrix met as y = x W^T (left = grad of y, right = x) or y = x W (left = x, right = grad of y)."""

    def __init__(self, left: Tensor, right: Tensor, shape: tuple[int, ...]) -> None:
        self.left, self.right, self.shape = left, right, shape

    def squared_norms(self) -> Tensor:
        return outer_squared_norms(self.left, self.right)

    def gradient(self, i: int) -> Tensor:
        return (self.left[i].T @ self.right[i]).view(self.shape)

    def add_weighted_sum(self, factors: Tensor, total: Tensor) -> None:
        mask = factors != 0
        weighted = zero_unless(mask, self.left) * factors.to(self.left.dtype).view(-1, 1, 1)
        right = self.right if bool(mask.all()) else zero_unless(mask, self.right)
        product = (weighted.flatten(0, 1).T, right.flatten(0, 1))
        matrix = total.view(self.left.shape[2], self.right.shape[2])
        if matrix.dtype == weighted.dtype:
            matrix.addmm_(*product)
        else:
            matrix.add_(product[0] @ product[1])


class DenseUse:
    """Per-example gradients that a rule has formed already."""

    def __init__(self, gradients: Tensor) -> None:
        self.gradients = gradients

    def squared_norms(self) -> Tensor:
        return self.gradients.flatten(1).double().square().sum(1)

    def gradient(self, i: int) -> Tensor:
        return self.gradients[i]

    def add_weighted_sum(self, factors: Tensor, total: Tensor) -> None:
        kept = zero_unless(factors != 0, self.gradients).flatten(1)
        total.add_(factors.to(kept.dtype) @ kept)


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

    def gradient(self, i: int) -> Tensor:
        return self.g.new_zeros(self.shape).index_add_(0, self.ids[i], self.g[i])

    def add_weighted_sum(self, factors: Tensor, total: Tensor) -> None:
        weighted = zero_unless(factors != 0, self.g) * factors.to(self.g.dtype).view(-1, 1, 1)
        total.view(self.shape).index_add_(0, self.ids.flatten(), weighted.flatten(0, 1).to(total.dtype))
