"""A few numbers that tell gradients and outputs apart, without keeping them."""

from __future__ import annotations

import torch
from torch import Tensor


def sketch(rows: Tensor) -> Tensor:
    """(m, n) -> (m, 3), float64: the norm of each row and two projections of it."""
    rows = rows.double()
    at = torch.arange(rows.shape[1], dtype=torch.float64, device=rows.device)
    return torch.stack([rows.norm(dim=1), 2**0.5 * (rows @ at.cos()), 2**0.5 * (rows @ (at * 0.7 + 1).sin())], 1).cpu()
