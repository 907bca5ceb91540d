"""One gradient matrix G (p, d): its stable rank, its principal subspaces, and what is left of it after a projection.

Shapes: U, L (p, r) and V (d, r) with orthonormal columns. All in float64.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

RELATIVE_RANK = 1e-12  # squared singular values below this share of the largest are rounding, not directions


def stable_rank(G: Tensor) -> float | None:
    """|G|_F^2 / |G|_2^2: the rank, if singular values were all or nothing. None for a gradient of zero.

    >>> stable_rank(torch.eye(5))
    5.0
    """
    squares = _squares(G)[0]
    return (squares.sum() / squares[-1]).item() if squares[-1] > 0 else None


def principal(G: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The top singular spaces (U, V) of G; fewer than `rank` columns where G has fewer directions."""
    G = G.double()
    squares, vectors = _squares(G)
    kept = squares > RELATIVE_RANK * squares[-1]
    kept[: max(0, len(kept) - rank)] = False
    small = vectors[:, kept].flip(1)
    if small.shape[1] == 0:
        return G.new_zeros(G.shape[0], 0), G.new_zeros(G.shape[1], 0)
    if G.shape[0] <= G.shape[1]:
        return small, torch.linalg.qr(G.T @ small).Q
    return torch.linalg.qr(G @ small).Q, small


def residual(G: Tensor, U: Tensor | None, V: Tensor | None) -> float | None:
    """|(I - U U^T) G (I - V V^T)|_F / |G|_F, what RGP's projection misses; with one of them, a one-sided projection."""
    G = G.double()
    size, rest = torch.linalg.matrix_norm(G), G
    if U is not None:
        rest = rest - U @ (U.T @ rest)
    if V is not None:
        rest = rest - (rest @ V) @ V.T
    return (torch.linalg.matrix_norm(rest) / size).item() if size > 0 else None


def random_residual(p: int, d: int, rank: int) -> float:
    """The residual of two random subspaces (root of the mean of its square): a subspace must do better to be of use."""
    return math.sqrt((1 - min(rank, p) / p) * (1 - min(rank, d) / d))


def cosines(A: Tensor, B: Tensor) -> list[float]:
    """Cosines of the principal angles between two subspaces, largest first."""
    if not A.shape[1] or not B.shape[1]:
        return []
    return torch.linalg.svdvals(A.T.double() @ B.double()).clamp(0, 1).tolist()


def overlap(angles: list[float], columns: int) -> float | None:
    """How much of a subspace with so many columns another one contains, from 0 to 1: the mean of the squared cosines."""
    return sum(c * c for c in angles) / columns if columns else None


def _squares(G: Tensor) -> tuple[Tensor, Tensor]:
    """Squared singular values, ascending, and the singular vectors of the smaller side."""
    G = G.double()
    size = G.abs().max()
    G = G / size if size > 0 else G
    squares, vectors = torch.linalg.eigh(G @ G.T if G.shape[0] <= G.shape[1] else G.T @ G)
    return squares.clamp_min(0), vectors
