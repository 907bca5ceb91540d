"""Rows -> units, as tensors: a unit's gradient is the mean of its rows', whichever way it is kept.

Shapes: m rows of a micro-batch, u units, n rows of the largest unit. Rows of a unit with n rows of T positions are one example
with n T positions, so norms of what is never formed (norms.py) work on them by padding with zeros to (u, n T, ...).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rgp.members import Group

if TYPE_CHECKING:
    from rgp.slots import Use


class UnitRows:
    """Whose the rows of a micro-batch are, on the device where they are needed."""

    def __init__(self, group: Group, *, dtype: torch.dtype, device: torch.device) -> None:
        self.m, self.units = len(group.owner), len(group.units)
        self.owner = torch.tensor(group.owner, device=device)
        self.share = torch.tensor(group.share, dtype=dtype, device=device)
        seen = [0] * self.units
        place = []
        for unit in group.owner:
            place.append(seen[unit])
            seen[unit] += 1
        self._place, self.most = torch.tensor(place, device=device), max(seen)

    def mean(self, x: Tensor) -> Tensor:
        """(m, ...) of rows -> (u, ...) of units; of a piece of a unit, its share of the mean."""
        x = x.to(torch.promote_types(x.dtype, self.share.dtype))
        weighted = x * self.share.to(x.dtype).view(-1, *[1] * (x.dim() - 1))
        return x.new_zeros(self.units, *x.shape[1:]).index_add_(0, self.owner, weighted)

    def weighted(self, x: Tensor) -> Tensor:
        """Every row of x times its share, in at least float32."""
        x = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        return x * self.share.to(x.dtype).view(-1, *[1] * (x.dim() - 1))

    def side_by_side(self, x: Tensor) -> Tensor:
        """(m, T, ...) -> (u, n T, ...): a unit's rows behind each other, filled up with zeros."""
        out = x.new_zeros(self.units, self.most, *x.shape[1:])
        out[self.owner, self._place] = x
        return out.flatten(1, 2)

    def to_rows(self, per_unit: Tensor) -> Tensor:
        return per_unit[self.owner]


class UnitUse:
    """What an operation left of a deferred parameter (slots.Use), row by row, as seen by units."""

    def __init__(self, use: Use, rows: UnitRows) -> None:
        self.use, self.rows = use, rows

    def squared_norms(self) -> Tensor:
        return self.use.unit_squared_norms(self.rows)

    def magnitude(self) -> tuple[Tensor, int]:
        magnitude, terms = self.use.magnitude()
        return self.rows.mean(magnitude), terms * self.rows.most

    def gradient(self, i: int) -> Tensor:
        mine = (self.rows.owner == i).nonzero().flatten().tolist()
        return torch.stack([self.use.gradient(j) * self.rows.share[j].to(self.rows.share.dtype) for j in mine]).sum(0)

    def drop(self, bad: Tensor) -> None:
        self.use.drop(self.rows.to_rows(bad))

    def add_weighted_sum(self, factors: Tensor, total: Tensor) -> None:
        self.use.add_weighted_sum(self.rows.to_rows(factors) * self.rows.share.to(factors.dtype), total)

    def unit_squared_norms(self, rows: UnitRows) -> Tensor:
        raise AssertionError("units of units")


def formed_squared_norms(use: UnitUse) -> Tensor:
    """By forming every unit's gradient, one at a time: for what has no cheaper way."""
    return torch.stack([use.gradient(i).double().square().sum() for i in range(use.rows.units)])
