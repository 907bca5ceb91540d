"""Carriers: released state -> L with orthonormal columns, R with orthonormal rows (Algorithm 2 of the paper).

Shapes: W, delta (p, d); L (p, r), kept transposed and contiguous as Lt (r, p), because F.linear(g, Lt) is the fast form
of g L; R (r, d). n matrices of one shape are worked on together: (n, r, p), (n, r, d).

Why nothing private can reach this code: the only input is a `Released`, whose fields are the weights, their initial
copy, the optimizer's state and gradients of public data. It is made by the engine before a batch is drawn, when no
private tensor exists in the process's training state, and has no field that could carry one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rgp.sharding import thin_product

Pair = tuple[Tensor, Tensor]
TOLERANCE = 1e-13


@dataclass(frozen=True, kw_only=True)
class Released:
    """What one carried parameter's carriers may depend on; all of it was released before, or was never private."""

    weight: Tensor
    initial: Tensor | None = None
    momentum: Tensor | None = None
    public: Tensor | None = None

    def matrix(self, source: str, dtype: torch.dtype) -> Tensor:
        """The matrix (p, d) whose principal subspace is wanted; the weight's where a source has nothing yet."""
        if source == "history":
            assert self.initial is not None, "history needs the initial weights"
            return torch.sub(self.weight.detach(), self.initial).flatten(1).to(dtype)
        chosen = {"weight": self.weight, "momentum": self.momentum, "public": self.public}[source]
        return (self.weight if chosen is None else chosen).detach().flatten(1).to(dtype)


def find_carriers(
    released: Sequence[Released], *, source: str, rank: int, iterations: int, rng: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """Carriers of n parameters that share shape and rank: Lt (n, r, p) and R (n, r, d)."""
    weight = released[0].weight
    n, p, d = len(released), weight.shape[0], weight[0].numel()
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32

    def gaussian(width: int) -> Tensor:
        numbers = rng.standard_normal((n, rank, width), dtype=np.float64 if dtype == torch.float64 else np.float32)
        return torch.from_numpy(numbers).to(weight.device)

    if source == "random":
        Lt, R = orthonormal_rows(gaussian(p), gaussian), orthonormal_rows(gaussian(d), gaussian)
    else:
        Lt, R = _power_method(lambda i: released[i].matrix(source, dtype), gaussian(d), iterations, gaussian)
    return Lt.to(weight.dtype), R.to(weight.dtype)


def _power_method(
    delta: Callable[[int], Tensor], R: Tensor, iterations: int, gaussian: Callable[[int], Tensor]
) -> tuple[Tensor, Tensor]:
    """Algorithm 2 for n matrices: products one by one, so that no two differences exist at once, the rest together."""
    Lt = R
    for _ in range(iterations):
        products = [thin_product(r, delta(i), transposed=True) for i, r in enumerate(R)]
        Lt = orthonormal_rows(torch.stack(products), gaussian)
        R = torch.stack([thin_product(l, delta(i), transposed=False) for i, l in enumerate(Lt)])
    return Lt, orthonormal_rows(R, gaussian)


def orthonormal_rows(Y: Tensor, gaussian: Callable[[int], Tensor]) -> Tensor:
    """Orthonormal rows spanning those of each Y (n, r, d), also where Y is zero, rank-deficient, tiny or huge.

    Two Cholesky-QR passes in float64 serve well-conditioned inputs at the price of a few small products. What they leave
    worse than the tolerance is mixed with a little Gaussian noise, so that missing directions are random and not
    coordinate axes, and goes to Householder QR, which is orthonormal whatever it is given.
    """
    scale = Y.abs().amax((1, 2), keepdim=True)
    usable = (scale > 0) & scale.isfinite()
    Q = torch.where(usable, Y / torch.where(usable, scale, torch.ones_like(scale)), torch.zeros_like(Y)).double()
    Q = Q / Q.norm(dim=2, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    Z = Q
    for _ in range(2):
        factor, info = torch.linalg.cholesky_ex(Z @ Z.mT)
        Z = torch.linalg.solve_triangular(factor, Z, upper=False)
    gram = Z @ Z.mT - torch.eye(Z.shape[1], dtype=Z.dtype, device=Z.device)
    good = (info == 0) & (gram.abs().amax((1, 2)) < TOLERANCE)
    if not bool(good.all()):
        level = torch.finfo(Y.dtype).eps
        mixed = Q + level * gaussian(Y.shape[2]).double()
        Z = torch.where(good[:, None, None], Z, _householder(mixed))
    return Z.to(Y.dtype)


def _householder(Y: Tensor) -> Tensor:
    return torch.linalg.qr(Y.mT.contiguous()).Q.mT.contiguous()
