"""Clipping: one norm per example over everything trainable (or one per group); clip; sum. The sum knows its sensitivity.

Formal guarantees (tests/test_clipping.py):
- adding or removing one example changes the sum by at most `sensitivity` in L2 norm, up to rounding: the norm is taken
  of the very numbers that are summed, whatever the carriers are, and in float64
- an example with a NaN or Inf anywhere contributes exactly zero, and is counted
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rgp.checks.sketches import sketch
from rgp.clips import Bound, clip_factors
from rgp.grouping import UnitRows
from rgp.members import Group
from rgp.slots import CarriedSlot, DeferredSlot, Slot
from rgp.torchstate import in_full_precision

BLOCK = 256  # columns summed in the buffer's own precision; sums of blocks are float64
TINY = 1e-20  # squares of entries that matter for a smaller one may have been flushed to zero in float32
CANCELLING = 100  # terms of one example that exceed its clipped sum by this are summed separately


@dataclass(frozen=True)
class ClippedSum:
    """A sum of clipped per-example gradients in the released coordinates, and by how much one example can move it."""

    total: Tensor
    sensitivity: float
    examples: int
    bad_examples: int


class _Group:
    """Slots that share a clip norm, and their columns of the buffer (whole blocks)."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots = list(slots)
        self.columns = slice(0, 0)


class Gradients:
    """The per-example gradients of a micro-batch in one (m, D) buffer, and the clipped sum of the logical batch.

    Columns of the sum: those of the buffer, slot by slot and group by group, then the deferred slots, then the count of
    examples that were not clipped, where the bound wants one.
    """

    def __init__(self, groups: Sequence[Sequence[Slot]], *, dtype: torch.dtype, device: torch.device) -> None:
        self._groups = [_Group(slots) for slots in groups]
        self.slots = [slot for group in self._groups for slot in group.slots]
        self._dtype, self._device = dtype, device
        self._rows = torch.empty(0, 0, dtype=dtype, device=device)
        self.nbytes = 0  # of the largest buffer so far
        self.norms = torch.empty(0)  # of the last micro-batch, before clipping; private
        self.begin_batch(Bound(None))

    def begin_batch(self, bound: Bound) -> None:
        """Start a logical batch: lay out the columns anew (sides may have changed) and forget any partial sum."""
        self._bound = bound
        for slot in self.slots:
            slot.begin_batch()
        self.where: dict[str, slice] = {}
        self._padding: list[slice] = []  # columns that fill a group's last block; they stay zero
        start = 0
        for group in self._groups:
            first = start
            for slot in group.slots:
                self.where[slot.entry.name] = slice(start, start + slot.width)
                start += slot.width
            used, start = start, first + -(-(start - first) // BLOCK) * BLOCK
            group.columns = slice(first, start)
            self._padding.append(slice(used, start))
        self._columns = start
        for slot in self.slots:
            if isinstance(slot, DeferredSlot):
                self.where[slot.entry.name] = slice(start, start + slot.entry.size)
                start += slot.entry.size
        self._size = start + (1 if bound.count_weight else 0)
        self._total: Tensor | None = None
        self.examples = self._bad = 0

    @property
    def size(self) -> int:
        """Columns of the sum."""
        return self._size

    def begin(self, m: int, group: Group | None = None) -> None:
        """Start a micro-batch of m examples: hand every slot its columns. group: whose its rows are, if examples are units."""
        self._rows = torch.empty(m, self._columns, dtype=self._dtype, device=self._device)
        self.nbytes = max(self.nbytes, self._rows.nbytes)
        for columns in self._padding:
            self._rows[:, columns] = 0
        for slot in self.slots:
            columns = self.where[slot.entry.name] if not isinstance(slot, DeferredSlot) else slice(0, 0)
            slot.begin(self._rows[:, columns])
        self.begin_pass(group)

    def begin_pass(self, group: Group | None = None) -> None:
        """Start another pass over the same examples, of another view or other rows of theirs: its gradients are added."""
        rows = None
        if group is not None and len(group.owner) == len(group.units) and group.begins and group.ends:
            group = None  # one row each
        if group is not None:
            rows = UnitRows(group, dtype=self._dtype, device=self._device)
        for slot in self.slots:
            slot.begin_pass(rows)

    def end_passes(self) -> None:
        """All rows of these examples have been met: from now on slots hold examples."""
        for slot in self.slots:
            slot.rows = None

    @torch.no_grad()
    @in_full_precision
    def clip_and_add(self) -> None:
        """End a micro-batch: clip each example as the batch's bound says, and add it to the logical batch's sum."""
        rows, total, bound = self._rows, self.reserve(), self._bound
        for slot in self.slots:
            if not slot.filled and not isinstance(slot, DeferredSlot):
                rows[:, self.where[slot.entry.name]] = 0  # not used in this micro-batch: no gradient, not a stale one
        measured = [self._measure(group) for group in self._groups]
        finite = torch.stack([squares.isfinite() for squares, _, _ in measured]).all(0)
        bad = ~finite
        some_bad = bool(bad.any())
        if some_bad:
            rows[bad] = 0
        norms = bound.norms or (None,) * len(measured)
        for group, (squares, rest, magnitude), clip in zip(self._groups, measured, norms, strict=True):
            deferred = [slot for slot in group.slots if isinstance(slot, DeferredSlot) and slot.filled]
            if deferred:
                self._add_deferred(deferred, squares, rest, magnitude, clip, bad)
            factors = clip_factors(squares, clip, self._dtype, gamma=bound.gamma)
            factors = torch.where(bad, torch.zeros_like(factors), factors) if some_bad else factors
            total[group.columns].addmv_(rows[:, group.columns].T, factors)
        squares = torch.stack([squares for squares, _, _ in measured]).sum(0)
        self.norms = squares.sqrt()
        if bound.count_weight:
            assert bound.clip is not None
            halves = (self.norms[finite] <= bound.clip).double() - 0.5
            total[-1] += bound.count_weight * halves.sum()
        self.examples += len(rows)
        self._bad += int((~squares.isfinite()).sum())
        self._rows = rows[:0].clone()  # a new buffer fills up as the next backward pass frees activations: a lower peak
        for slot in self.slots:
            slot.end()

    def add_plain(self, gradients: Mapping[str, Tensor], m: int) -> None:
        """Without clipping: add gradients that are sums over the m examples of a micro-batch already."""
        assert self._bound.norms is None
        total = self.reserve()
        for slot in self.slots:
            if (gradient := gradients.get(slot.entry.name)) is not None:
                total[self.where[slot.entry.name]].add_(gradient.flatten(), alpha=slot.entry.scale)
                slot.used = slot.filled = True
        self.examples += m

    def reserve(self) -> Tensor:
        """The sum so far; zeros at the beginning of a logical batch."""
        if self._total is None:
            self._total = torch.zeros(self._size, dtype=self._dtype, device=self._device)
        return self._total

    def _measure(self, group: _Group) -> tuple[Tensor, Tensor, Tensor]:
        """Squared norms of a group, those of its columns in the buffer alone, and the magnitude of its deferred terms."""
        rest = squared_norms(self._rows[:, group.columns])
        squares, magnitude = rest.clone(), torch.zeros_like(rest)
        for slot in group.slots:
            if isinstance(slot, DeferredSlot) and slot.filled:
                more, terms = slot.squared_norms()
                squares, magnitude = squares + more, magnitude + terms
        return squares, rest, magnitude

    def _add_deferred(
        self,
        deferred: list[DeferredSlot],
        squares: Tensor,
        rest: Tensor,
        magnitude: Tensor,
        clip: float | None,
        bad: Tensor,
    ) -> None:
        """Add the clipped sums of a group's deferred slots. Corrects `squares` where terms cancel."""
        total, gamma = self.reserve(), self._bound.gamma
        factors = clip_factors(squares, clip, self._dtype, gamma=gamma)
        left_out = bad.clone()
        if clip is not None:
            # terms far above C that cancel would, while they are summed, round away what other examples gave
            cancelling = ~left_out & (factors.double() * magnitude > CANCELLING * clip)
            for i in cancelling.nonzero().flatten().tolist():
                formed = [slot.gradient(i).to(self._dtype).flatten() * slot.entry.scale for slot in deferred]
                squares[i] = rest[i] + torch.stack([g.double().square().sum() for g in formed]).sum()
                factor = clip_factors(squares[i], clip, self._dtype, gamma=gamma)
                for slot, gradient in zip(deferred, formed, strict=True):
                    if factor > 0:
                        total[self.where[slot.entry.name]] += factor * gradient
            left_out |= cancelling
        for slot in deferred:
            if bool(left_out.any()):
                slot.drop(left_out)
            slot.add_weighted_sum(factors, total[self.where[slot.entry.name]])

    def sketches(self) -> dict[str, Tensor]:
        """A few numbers of every example's gradient, by parameter (checks/rehearsal.py); ends the micro-batch. Private."""
        found = {}
        with torch.no_grad():
            self._put_in_order()
            for slot in self.slots:
                name = slot.entry.name
                if isinstance(slot, DeferredSlot):
                    rows = [sketch(slot.gradient(i).reshape(1, -1)) for i in range(slot.m)] if slot.filled else []
                    found[name] = torch.cat(rows) if rows else torch.zeros(slot.m, 3, dtype=torch.float64)
                    slot.uses = []
                else:
                    rows = self._rows[:, self.where[name]]
                    found[name] = sketch(rows if slot.filled else torch.zeros_like(rows[:, :1]))
                slot.end()
        self._rows = self._rows[:0].clone()
        return found

    def take(self) -> ClippedSum:
        """The logical batch's sum; zeros if it had no example."""
        total = self.reserve()
        self._put_in_order()
        self._total = None
        return ClippedSum(total, self._bound.sensitivity, self.examples, self._bad)

    def rows(self) -> Tensor:
        """The micro-batch's per-example gradients (m, D), before clipping; private."""
        self._put_in_order()
        return self._rows

    @torch.no_grad()
    def _put_in_order(self) -> None:
        """Columns as they are released, where a rule has filled them in another order (slots.py)."""
        for slot in self.slots:
            if isinstance(slot, CarriedSlot) and slot.taps_first:
                where = self.where[slot.entry.name]
                slot.put_in_order(self._rows[:, where])
                if self._total is not None:
                    slot.put_in_order(self._total[where].unsqueeze(0))
                slot.taps_first = False


def squared_norms(rows: Tensor) -> Tensor:
    """Squared norm of each row in float64. One float32 sum over a million squares would lose four digits, and overflow."""
    if rows.shape[1] % BLOCK:
        return rows.double().square().sum(1)
    squares = torch.linalg.vector_norm(rows.view(len(rows), -1, BLOCK), dim=2).double().square().sum(1)
    strange = ~squares.isfinite() | (squares < TINY)
    for i in strange.nonzero().flatten().tolist():  # NaN, Inf, or squares beyond float32: of confident examples, many
        blocks = torch.linalg.vector_norm(rows[i].view(-1, BLOCK), dim=1, dtype=torch.float64)
        squares[i] = blocks.square().sum()
    return squares
