"""PowerSGD (Vogels et al. 2019): a released gradient -> its rank-r approximation. Post-processing: nothing private is read.

Q starts random and is kept from step to step, so that the power iteration continues through the run. Shapes: gradient (p, d),
Pt (r, p) with orthonormal rows, Q (r, d).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from rgp.carriers import orthonormal_rows


class PowerIteration:
    """The state of the approximations: Q per parameter, and with error feedback what was left out so far."""

    def __init__(self, rank: int, *, error_feedback: bool) -> None:
        self.rank, self.error_feedback = rank, error_feedback
        self.state: dict[str, Tensor] = {}

    def approximate(self, name: str, gradient: Tensor, rng: Callable[[], np.random.Generator]) -> Tensor:
        """The approximation of a parameter's gradient (any shape; as a matrix, flatten(1)). One-dimensional ones pass."""
        if gradient.dim() < 2:
            return gradient
        matrix = gradient.flatten(1)
        p, d = matrix.shape
        rank = min(self.rank, p, d)
        left_out = self.state.get(f"{name}.error")
        if left_out is not None:
            matrix = matrix + left_out

        def gaussian(width: int) -> Tensor:
            return torch.from_numpy(rng().standard_normal((1, rank, width))).to(matrix)

        Q = self.state.get(f"{name}.Q")
        Q = gaussian(d)[0] if Q is None else Q
        Pt = orthonormal_rows((Q @ matrix.T)[None], gaussian)[0]
        Q = Pt @ matrix
        found = Pt.T @ Q
        self.state[f"{name}.Q"] = Q
        if self.error_feedback:
            self.state[f"{name}.error"] = matrix - found
        return found.view_as(gradient)
