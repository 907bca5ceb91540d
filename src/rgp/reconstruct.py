"""Noisy carrier gradients -> a full-size gradient (Corollary 1 of the paper). Post-processing: nothing private is read.

Shapes: Lt (r, p), R (r, d); A, the noisy left part, kept transposed as At (r, p); dR (r, d).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Factors(NamedTuple):
    """A matrix (p, d) as a product of thin ones, (p, k) and (k, d)."""

    left: Tensor
    right: Tensor


def factors(Lt: Tensor, R: Tensor, At: Tensor | None, dR: Tensor | None) -> tuple[Tensor, Tensor]:
    """Two factors, (p, k) and (k, d) with k = 2r or r, whose product is dL R + L dR - L L^T dL R, or with one side L dR or dL R.

    The left part is projected again, (I - L L^T) A: for the paper's norm that is the formula's last term, for the
    intrinsic norm it removes the noise that fell into the span of L, where dR already speaks.
    """
    if At is None:
        assert dR is not None
        return Lt.T, dR
    if dR is None:
        return At.T, R
    At = At - (At @ Lt.T) @ Lt
    return torch.cat([At, Lt]).T, torch.cat([R, dR])


def noise_variance(Lt: Tensor, R: Tensor, *, left: bool, right: bool) -> Tensor:
    """Variance of each entry (p, d) of the rebuilt gradient, where the entries of At and dR have variance 1.

    l_i + q_j - l_i q_j with l = diag(L L^T), q = diag(R^T R); with one side released, q_j or l_i.
    """
    l, q = Lt.square().sum(0)[:, None], R.square().sum(0)[None]
    if not right:
        return q.expand(len(l), -1)
    return l + q - l * q if left else l.expand(-1, q.shape[1])
