"""Clipping: one norm per example over everything trainable; clip; sum. The sum knows its own sensitivity.

Formal guarantees (tests/test_clipping.py):
- adding or removing one example changes the sum by at most `sensitivity` in L2 norm, up to rounding: the norm is taken
  of the very numbers that are summed, whatever the carriers are, and in float64
- an example with a NaN or Inf anywhere contributes exactly zero, and is counted
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rgp.slots import DeferredSlot, Slot

BLOCK = 1 << 16  # columns whose squares are summed in float64 at a time, small enough to stay in cache


@dataclass(frozen=True)
class ClippedSum:
    """A sum of clipped per-example gradients in the released coordinates, and by how much one example can move it."""

    total: Tensor
    sensitivity: float
    examples: int
    bad_examples: int


class Gradients:
    """The per-example gradients of a micro-batch in one (m, D) buffer, and the clipped sum of the logical batch.

    Columns of the sum: those of the buffer, slot by slot, then the deferred slots.
    """

    def __init__(self, slots: list[Slot], *, dtype: torch.dtype, device: torch.device) -> None:
        self._slots = slots
        self._dtype, self._device = dtype, device
        self._buffer = torch.empty(0, 0, dtype=dtype, device=device)
        self.begin_batch()

    @property
    def nbytes(self) -> int:
        return self._buffer.numel() * self._buffer.element_size()

    def begin_batch(self) -> None:
        """Start a logical batch: lay out the columns anew (sides may have changed) and forget any partial sum."""
        self.where: dict[str, slice] = {}
        start = 0
        for slot in self._slots:
            self.where[slot.entry.name] = slice(start, start + slot.width)
            start += slot.width
        self._columns = start
        for slot in self._slots:
            if isinstance(slot, DeferredSlot):
                self.where[slot.entry.name] = slice(start, start + slot.entry.size)
                start += slot.entry.size
        self._size = start
        self._total: Tensor | None = None
        self._examples = self._bad = 0

    def begin(self, m: int) -> None:
        """Start a micro-batch of m examples: hand every slot its columns."""
        if self._buffer.shape[0] < m or self._buffer.shape[1] != self._columns:
            self._buffer = torch.empty(m, self._columns, dtype=self._dtype, device=self._device)
        self._rows = self._buffer[:m]
        for slot in self._slots:
            columns = self.where[slot.entry.name] if not isinstance(slot, DeferredSlot) else slice(0, 0)
            slot.begin(self._rows[:, columns])

    @torch.no_grad()
    def clip_and_add(self, clip: float | None) -> None:
        """End a micro-batch: min(1, clip / norm) times each example, added to the logical batch's sum."""
        rows = self._rows
        deferred = [slot for slot in self._slots if isinstance(slot, DeferredSlot) and slot.used]
        for slot in self._slots:
            if not slot.used and not isinstance(slot, DeferredSlot):
                rows[:, self.where[slot.entry.name]] = 0  # not used in this micro-batch: no gradient, not a stale one
        squares = squared_norms(rows)
        for slot in deferred:
            squares = squares + slot.squared_norms()
        finite = squares.isfinite()
        factors = clip_factors(squares, clip).to(self._dtype)
        if not bool(finite.all()):
            rows[~finite] = 0
        if self._total is None:
            self._total = torch.zeros(self._size, dtype=self._dtype, device=self._device)
        self._total[: self._columns].addmv_(rows.T, factors)
        for slot in deferred:
            slot.add_weighted_sum(factors, self._total[self.where[slot.entry.name]])
        self._examples += len(rows)
        self._bad += int((~finite).sum())

    def take(self, sensitivity: float) -> ClippedSum:
        """The logical batch's sum; zeros if it had no example."""
        total = self._total
        if total is None:
            total = torch.zeros(self._size, dtype=self._dtype, device=self._device)
        self._total = None
        return ClippedSum(total, sensitivity, self._examples, self._bad)

    def rows(self) -> Tensor:
        """The micro-batch's per-example gradients (m, D), before clipping; private."""
        return self._rows


def squared_norms(rows: Tensor) -> Tensor:
    """Squared norm of each row, summed in float64: float32 sums of a million squares lose four digits, and overflow."""
    squares = torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
    for start in range(0, rows.shape[1], BLOCK):
        squares += rows[:, start : start + BLOCK].double().square_().sum(1)
    return squares


def clip_factors(squares: Tensor, clip: float | None) -> Tensor:
    """min(1, clip / norm); 0 where the norm is not finite."""
    norms = squares.sqrt()
    factors = torch.ones_like(norms) if clip is None else (clip / norms).clamp_max(1.0)
    return torch.where(squares.isfinite(), factors, torch.zeros_like(factors))
