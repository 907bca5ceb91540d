"""Slots: where the per-example gradients of one trained parameter go during a backward pass.

Shapes: m examples, T positions (tokens, pixels), a weight's matrix (p, d), rank r. Example i's gradient of the weight is
G_i = sum_t left_it right_it^T with left (m, T, p) and right (m, T, d); it is formed only where that is the cheap way.

Carried   dL_i and dR_i, written straight into the run's (m, D) buffer
Dense     a small exact parameter's G_i, written into the same buffer
Deferred  a large exact parameter: what its operation needs is kept until all norms are known (norms.py), and the
          clipped sum is then one product, so G_i is not stored
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from rgp.grouping import UnitRows, UnitUse
from rgp.plan import Entry

LARGEST_DENSE = 1 << 14


class Use(Protocol):
    """One operation's contribution to a deferred parameter, kept until the clip factors are known."""

    def squared_norms(self) -> Tensor:
        """|G_i|^2 for every example, never below the truth beyond rounding of the sum itself (float64)."""

    def magnitude(self) -> tuple[Tensor, int]:
        """At least the sum of the norms of the terms whose sum is G_i, per example (float64), and how many they are."""

    def gradient(self, i: int) -> Tensor:
        """G_i of one example, in the parameter's shape."""

    def drop(self, bad: Tensor) -> None:
        """Forget the examples marked in `bad` (m,): they must contribute exactly zero, NaN or not."""

    def add_weighted_sum(self, factors: Tensor, total: Tensor) -> None:
        """total += sum_i factors_i G_i."""

    def unit_squared_norms(self, rows: UnitRows) -> Tensor:
        """|sum_i share_i G_i|^2 for every unit, where `i` runs over its rows; as `squared_norms` otherwise."""


class Slot:
    """What rules see of a trained parameter."""

    entry: Entry
    carried = False
    needs_left = needs_right = True  # whether dL_i, dR_i are wanted at this step

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.used = False  # in this forward and backward pass
        self.muted = False  # a backward pass of the loop's own is going on: nothing of it is kept
        self.filled = False  # holds something of this micro-batch: of this pass, or of an earlier view
        self.rows: UnitRows | None = None  # whose the rows of this pass are; None: every row is an example of its own
        self.derive: Callable[[Tensor], Tensor] | None = (
            None  # what made the weight out of the parameter (rules/derived.py)
        )

    @property
    def width(self) -> int:
        """Columns of the (m, D) buffer."""
        return self.entry.size

    def add_dense(self, gradients: Tensor) -> None:
        """Add per-example gradients (m, *shape), formed by a rule."""
        raise NotImplementedError

    def add_outer(self, left: Tensor, right: Tensor | None, *, thin_left=None, thin_right=None) -> None:
        """Add sum_t left_t right_t^T. A carried slot takes `thin_right` = right R^T or `thin_left` = left L if a rule
        has them already; `right` (or `left`) may then be None where that side alone is wanted."""
        raise NotImplementedError

    def begin_batch(self) -> None:
        """Start a logical batch."""

    def begin(self, buffer: Tensor) -> None:
        """Start a micro-batch: `buffer` (m, width) is this slot's part of the run's buffer, not zeroed."""
        self.used = self.filled = False
        self.rows = None

    def begin_pass(self, rows: UnitRows | None) -> None:
        """Start a pass over these rows: what it gives is added to what is there."""
        self.used, self.rows = False, rows

    def by_unit(self, gradients: Tensor) -> Tensor:
        """Gradients of rows -> gradients of examples: each unit's mean, where rows belong to units."""
        return gradients if self.rows is None else self.rows.mean(gradients)

    def end(self) -> None:
        """The micro-batch was clipped and summed: let go of the buffer."""


class CarriedSlot(Slot):
    carried = True

    def __init__(self, entry: Entry, *, intrinsic: bool) -> None:
        super().__init__(entry)
        self.intrinsic = intrinsic
        self.Lt = self.R = torch.empty(0)
        self.sides = "both"
        self.taps_first: bool | None = (
            None  # how dR_i of a kernel is stored in this logical batch; None: nothing is yet
        )

    @property
    def width(self) -> int:
        r, p, d = self.entry.rank, self.entry.p, self.entry.d
        return r * ((p if self.needs_left else 0) + (d if self.needs_right else 0))

    def set_carriers(self, Lt: Tensor, R: Tensor, sides: str) -> None:
        self.Lt, self.R, self.sides = Lt, R, sides
        self.needs_left, self.needs_right = sides != "right", sides != "left"

    def begin_batch(self) -> None:
        self.taps_first = None

    def put_in_order(self, columns: Tensor) -> None:
        """Bring columns (n, width) that were stored with taps first into the released order, in place."""
        dR = columns[:, -self.entry.rank * self.entry.d :]
        dR.copy_(self._reordered(dR, taps_first=False).flatten(1))

    def _reordered(self, dR: Tensor, *, taps_first: bool) -> Tensor:
        """dR_i (m, r d) of a kernel from one order into the other: (c, taps), or (taps in reverse, c)."""
        m, r, c = dR.shape[0], self.entry.rank, self.entry.shape[1]
        taps = self.entry.d // c
        if taps_first:
            return dR.reshape(m, r, c, taps).mT.flip(2).flatten(2)
        return dR.reshape(m, r, taps, c).flip(2).mT.flatten(2)

    def begin(self, buffer: Tensor) -> None:
        super().begin(buffer)
        m, r, p, d = len(buffer), self.entry.rank, self.entry.p, self.entry.d
        cut = r * p if self.needs_left else 0
        self.left = buffer[:, :cut].view(m, r, p) if self.needs_left else None  # dL_i transposed
        self.right = buffer[:, cut:].view(m, r, d) if self.needs_right else None

    def end(self) -> None:
        self.left = self.right = None

    def add_outer(self, left, right, *, thin_left=None, thin_right=None) -> None:
        u = z = dLt = dR = None
        if self.needs_right:
            u = F.linear(left, self.Lt.to(left.dtype)) if thin_left is None else thin_left
            dR = torch.bmm(u.transpose(1, 2), right)
        if self.needs_left:
            z = F.linear(right, self.R.to(right.dtype)) if thin_right is None else thin_right
            dLt = torch.bmm(z.transpose(1, 2), left)
        core = torch.bmm(z.transpose(1, 2), u) if self.projects and z is not None else None
        self.add_thin(dLt, dR, core)

    @property
    def projects(self) -> bool:
        """Whether A_i = (I - L L^T) dL_i is released in place of dL_i."""
        return self.intrinsic and self.needs_left and self.needs_right

    def add_thin(
        self, dLt: Tensor | None, dR: Tensor | None, core: Tensor | None = None, *, taps_first: bool = False
    ) -> None:
        """Add dL_i transposed (m, r, p) and dR_i (m, r, d), formed by a rule; None for a side not wanted.

        They are new tensors, copied into the buffer: products written straight into its strided rows take twice as long.
        `core` is dL_i^T L (m, r, r), if the rule has a cheaper way to it. taps_first: dR_i of a convolution's kernel has its
        positions in reverse before its channels; the sum over examples is put in order, and not every one of them.
        """
        if self.muted:
            return
        if dLt is not None and self.projects:
            Lt = self.Lt.to(dLt.dtype)
            core = torch.matmul(dLt, Lt.T) if core is None else core
            dLt = dLt.sub_(torch.matmul(core, Lt))
        self.keep_thin(dLt, dR, taps_first=taps_first)

    def keep_thin(self, dLt: Tensor | None, dR: Tensor | None, *, taps_first: bool = False) -> None:
        """Add them as they are to be released: projected already."""
        if self.muted:
            return
        if dLt is not None:
            self._store(self.left, dLt)
        if dR is not None:
            if self.taps_first is None:
                self.taps_first = taps_first
            same = taps_first == self.taps_first
            self._store(self.right, dR if same else self._reordered(dR, taps_first=self.taps_first))
        self.used = self.filled = True

    def room(self, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None] | None:
        """Where a rule may write dL_i transposed and dR_i by itself, as they are to be released; then it calls `wrote`.

        None where something is there already, or where more has to be done with them.
        """
        sides = [side for side in (self.left, self.right) if side is not None]
        if (
            self.filled
            or self.muted
            or self.taps_first
            or self.rows is not None
            or any(s.dtype != dtype for s in sides)
        ):
            return None
        return self.left, self.right

    def wrote(self) -> None:
        self.taps_first, self.used, self.filled = False, True, True

    def add_dense(self, gradients: Tensor) -> None:
        G = gradients.reshape(gradients.shape[0], self.entry.p, self.entry.d)
        dLt = torch.matmul(self.R.to(G.dtype), G.mT) if self.needs_left else None
        self.add_thin(dLt, torch.matmul(self.Lt.to(G.dtype), G) if self.needs_right else None)

    def _store(self, out: Tensor, value: Tensor) -> None:
        value = self.by_unit(value)
        if self.filled:
            out.add_(value)
        else:
            out.copy_(value)


class DenseSlot(Slot):
    def begin(self, buffer: Tensor) -> None:
        super().begin(buffer)
        self.out = buffer

    def end(self) -> None:
        self.out = torch.empty(0)

    def add_dense(self, gradients: Tensor) -> None:
        if self.muted:
            return
        gradients = gradients.reshape(len(self.out) if self.rows is None else self.rows.m, -1)
        gradients = self.by_unit(gradients)
        if self.entry.scale != 1:
            gradients = gradients * self.entry.scale
        if self.filled:
            self.out.add_(gradients)
        else:
            self.out.copy_(gradients)
        self.used = self.filled = True

    def add_outer(self, left, right, *, thin_left=None, thin_right=None) -> None:
        self.add_dense(torch.bmm(left.transpose(1, 2), right))


class DeferredSlot(Slot):
    width = 0  # nothing in the (m, D) buffer

    def begin(self, buffer: Tensor) -> None:
        super().begin(buffer)
        self.m, self.dtype = len(buffer), buffer.dtype
        self.uses: list[Use] = []

    def add_use(self, use: Use) -> None:
        if self.muted:
            return
        self.uses.append(use if self.rows is None else UnitUse(use, self.rows))
        self.used = self.filled = True

    def add_outer(self, left, right, *, thin_left=None, thin_right=None) -> None:
        from rgp.norms import OuterUse

        self.add_use(OuterUse(left, right, self.entry.shape))

    def add_dense(self, gradients: Tensor) -> None:
        from rgp.norms import DenseUse

        self.add_use(DenseUse(gradients))

    def squared_norms(self) -> tuple[Tensor, Tensor]:
        """|G_i|^2, and the magnitude of the terms that it is a sum of; both with the entry's scale.

        Several uses of one parameter have cross terms, so their gradient is formed one example at a time.
        """
        from rgp.norms import widened

        if len(self.uses) == 1:
            squares = self.uses[0].squared_norms()
        else:
            squares = torch.stack([self.gradient(i).double().square().sum() for i in range(self.m)])
        magnitudes, terms = zip(*(use.magnitude() for use in self.uses), strict=True)
        magnitude = torch.stack(magnitudes).sum(0)
        scale = self.entry.scale
        return widened(squares, magnitude, sum(terms), self.dtype) * scale**2, magnitude * scale

    def gradient(self, i: int) -> Tensor:
        """One example's gradient, over all uses; without the entry's scale."""
        return torch.stack([use.gradient(i) for use in self.uses]).sum(0)

    def drop(self, bad: Tensor) -> None:
        for use in self.uses:
            use.drop(bad)

    def add_weighted_sum(self, factors: Tensor, total: Tensor) -> None:
        for use in self.uses:
            use.add_weighted_sum(factors * self.entry.scale, total)
        self.uses = []


def make_slot(entry: Entry, *, intrinsic: bool, views: int = 1) -> Slot:
    if entry.treatment == "carried":
        return CarriedSlot(entry, intrinsic=intrinsic)
    # several views of an example add up in the buffer; what a deferred slot keeps would grow with their number
    dense = entry.size <= LARGEST_DENSE or len(entry.shape) < 2 or views > 1
    return DenseSlot(entry) if dense else DeferredSlot(entry)
