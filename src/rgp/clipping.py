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

BLOCK = 256  # columns summed in the buffer's own precision; sums of blocks are float64
CANCELLING = 100  # terms of one example that exceed its clipped sum by this are summed apart


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
        self._buffer = torch.empty(0, dtype=dtype, device=device)
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
        self._used_columns = start
        self._columns = -(-start // BLOCK) * BLOCK  # whole blocks; the columns past the slots stay zero
        start = self._columns
        for slot in self._slots:
            if isinstance(slot, DeferredSlot):
                self.where[slot.entry.name] = slice(start, start + slot.entry.size)
                start += slot.entry.size
        self._size = start
        self._total: Tensor | None = None
        self._examples = self._bad = 0

    def begin(self, m: int) -> None:
        """Start a micro-batch of m examples: hand every slot its columns."""
        if self._buffer.numel() < m * self._columns:
            self._buffer = torch.empty(m * self._columns, dtype=self._dtype, device=self._device)
        self._rows = self._buffer[: m * self._columns].view(m, self._columns)
        self._rows[:, self._used_columns :] = 0
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
        if self._total is None:
            self._total = torch.zeros(self._size, dtype=self._dtype, device=self._device)
        if deferred:
            squares = self._add_deferred(deferred, squares, clip)
        finite = squares.isfinite()
        factors = clip_factors(squares, clip, self._dtype)
        if not bool(finite.all()):
            rows[~finite] = 0
        self._total[: self._columns].addmv_(rows.T, factors)
        self._examples += len(rows)
        self._bad += int((~finite).sum())

    def _add_deferred(self, deferred: list[DeferredSlot], squares: Tensor, clip: float | None) -> Tensor:
        """Add the deferred slots' clipped sums, given the squared norms of the rest; returns those of everything."""
        assert self._total is not None
        rest, magnitude = squares, torch.zeros_like(squares)
        for slot in deferred:
            more, terms = slot.squared_norms()
            squares, magnitude = squares + more, magnitude + terms
        factors = clip_factors(squares, clip, self._dtype)
        left_out = ~squares.isfinite()
        if clip is not None:
            # terms far above C that cancel would, while they are summed, round away what other examples gave
            cancelling = ~left_out & (factors.double() * magnitude > CANCELLING * clip)
            for i in cancelling.nonzero().flatten().tolist():
                formed = [slot.gradient(i).to(self._dtype).flatten() * slot.entry.scale for slot in deferred]
                squares[i] = rest[i] + torch.stack([g.double().square().sum() for g in formed]).sum()
                factor = clip_factors(squares[i], clip, self._dtype)
                for slot, gradient in zip(deferred, formed, strict=True):
                    if factor > 0:
                        self._total[self.where[slot.entry.name]] += factor * gradient
            left_out |= cancelling
        for slot in deferred:
            if bool(left_out.any()):
                slot.drop(left_out)
            slot.add_weighted_sum(factors, self._total[self.where[slot.entry.name]])
        return squares

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
    """Squared norm of each row in float64. One float32 sum over a million squares would lose four digits, and overflow."""
    if rows.shape[1] % BLOCK:
        return rows.double().square().sum(1)
    squares = torch.linalg.vector_norm(rows.view(len(rows), -1, BLOCK), dim=2).double().square().sum(1)
    strange = ~squares.isfinite()
    if bool(strange.any()):  # NaN, Inf, or squares beyond float32
        squares[strange] = rows[strange].double().square().sum(1)
    return squares


def clip_factors(squares: Tensor, clip: float | None, dtype: torch.dtype = torch.float64) -> Tensor:
    """min(1, clip / norm), less what rounding can add; 0 where the norm is not finite or too large for a factor."""
    norms, info = squares.sqrt(), torch.finfo(dtype)
    factors = torch.ones_like(norms) if clip is None else (clip * (1 - 16 * info.eps) / norms).clamp_max(1.0)
    return torch.where(squares.isfinite() & (factors >= info.tiny), factors, torch.zeros_like(factors)).to(dtype)
