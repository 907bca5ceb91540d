"""Which rows belong to which unit: private, and in no file but a digest under the run's secret.

A unit is drawn by the sampler like any example. Of its rows at most k are used, drawn afresh each time, and its gradient is
the mean of theirs, clipped once. A unit with one row weighs as much as one with a hundred: both move the sum by up to C.

Formal guarantees (tests/test_units.py):
- of a drawn unit min(k, its rows) different rows are used, each with the same probability
- which ones depends on the secret, the step, the attempt and the unit, and not on who else was drawn
- a micro-batch holds whole units, or a piece of one unit that is larger than a micro-batch: its pieces add up before
  it is clipped
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from rgp.streams import Streams
from rgp.units import ROWS_PER_UNIT, Persons
from rgp.validate import check_count

ROWS = 1 << 32  # among the parts of the sampling stream: where those of the units begin
MOST = 0.5  # a unit with more than this share of the rows is worth a warning
UNKNOWN = (
    "-",
    "?",
    "n/a",
    "na",
    "nan",
    "none",
    "null",
    "unknown",
)  # what tables have where nobody knows whose a row is


@dataclass(frozen=True)
class Group:
    """Which units the rows of one micro-batch belong to.

    units: their numbers
    owner: for each row, the position of its unit in `units`
    share: for each row, its weight in its unit's mean
    begins, ends: False for a piece of a unit that is larger than a micro-batch, and not its first or last one
    """

    units: list[int]
    owner: list[int]
    share: list[float]
    begins: bool = True
    ends: bool = True


class UnitPart(list[int]):
    """The rows of one micro-batch, a unit's rows side by side."""

    group: Group


class Members:
    """The private mapping from units to rows.

    ids: one id per row, any hashable. Units are numbered in the order in which they appear.
    """

    def __init__(
        self,
        ids: Sequence[Hashable],
        *,
        rows_per_unit: int = ROWS_PER_UNIT,
        noun: str = "person",
        column: str | None = None,
        row: str = "row",
    ) -> None:
        numbers, self._unknown = _numbered(ids)
        size = int(numbers.max()) + 1 if len(numbers) else 0
        self._of_row = numbers
        self._order = np.argsort(numbers, kind="stable")
        self._starts = np.concatenate([[0], np.cumsum(np.bincount(numbers, minlength=size))])
        self.unit = Persons(
            size=size,
            rows_per_unit=check_count("rows_per_unit", rows_per_unit),
            noun=noun,
            column=column,
            row=row,
        )

    @property
    def rows(self) -> int:
        """The number of rows of the whole dataset; private, because a further unit brings all its rows."""
        return len(self._of_row)

    @property
    def of_rows(self) -> np.ndarray:
        """The number of each row's unit; private."""
        return self._of_row

    def of(self, unit: int) -> np.ndarray:
        """All rows of a unit."""
        return self._order[self._starts[unit] : self._starts[unit + 1]]

    def check(self, rows: int) -> None:
        """Refuse ids that do not match the dataset; warn about units that protect less, or cost more, than they seem to."""
        if self.rows != rows:
            raise ValueError(
                f"units has {self.rows} ids, and the dataset {rows} rows; give one id per row, in their order"
            )
        what = "units" if self.unit.column is None else f"column {self.unit.column!r}"
        if rows > 1 and self.unit.size == rows:
            warnings.warn(
                f"{what}: all ids are different, so a {self.unit.noun} is a {self.unit.row}. Is it the right column? Leave units "
                "out if rows are what you want to protect."
            )
        elif rows > 1 and np.diff(self._starts).max() > MOST * rows:
            warnings.warn(
                f"{what}: one {self.unit.noun} has most of the {self.unit.row}s. Is its id a placeholder for unknown ones? They "
                "count as one unit, and of all its rows a step uses few."
            )
        for name, unit in self._unknown.items():
            if len(self.of(unit)) > 1:
                warnings.warn(
                    f"{what}: several rows have the id {name!r}. If it stands for unknown {self.unit.noun}s, they count as one "
                    "unit, and none of them is protected: leave these rows out, or give each an id of its own if nobody has two."
                )

    def draw(self, streams: Streams, step: int, attempt: int, unit: int) -> np.ndarray:
        """The rows of a drawn unit that this step uses, ascending."""
        rows, most = self.of(unit), self.unit.rows_per_unit
        if len(rows) <= most:
            return rows
        return np.sort(streams.generator("sampling", step, attempt, part=ROWS + unit).choice(rows, most, replace=False))

    def digest(self, key: bytes) -> str:
        """Shows whether the mapping is the same after a resume, or on another rank. Without the key it reveals nothing."""
        return hashlib.blake2b(self._of_row.tobytes(), key=key, digest_size=16, person=b"units").hexdigest()


def as_members(units: Any, rows_per_unit: int | None) -> Members | None:
    """The `units` argument of `privatize`, as members: it may be ids, or members already."""
    if units is None:
        if rows_per_unit is not None:
            raise ValueError(
                f"rows_per_unit={rows_per_unit} needs units=: one id per row, which says which unit it belongs to"
            )
        return None
    if isinstance(units, Members):
        if rows_per_unit is not None and rows_per_unit != units.unit.rows_per_unit:
            raise ValueError(f"rows_per_unit={rows_per_unit}, and units was made for {units.unit.rows_per_unit}")
        return units
    if isinstance(units, (str, bytes, Mapping, Set)) or not hasattr(units, "__len__"):
        raise TypeError(f"units must be one id per row of the dataset, in their order, such as a list; got {units!r}")
    name = getattr(units, "name", None)  # of a pandas Series
    ids = units.tolist() if hasattr(units, "tolist") else list(units)
    column = name if isinstance(name, str) else None
    return Members(ids, rows_per_unit=ROWS_PER_UNIT if rows_per_unit is None else rows_per_unit, column=column)


def _numbered(ids: Sequence[Hashable]) -> tuple[np.ndarray, dict[str, int]]:
    """Each row's unit, by number; and the units whose id looks like a word for unknown ones."""
    known: dict[Hashable, int] = {}
    numbers: np.ndarray = np.empty(len(ids), np.int64)
    for row, given in enumerate(ids):
        # of equal tensors each would be somebody else
        name = given.item() if isinstance(given, Tensor) and given.numel() == 1 else given
        if _is_missing(name):
            raise ValueError(
                f"units: row {row} has no id ({name!r}). Rows of unknown persons cannot be protected as a person's: leave them "
                "out, or give each an id of its own if nobody has two of them."
            )
        try:
            if isinstance(name, Tensor):
                raise TypeError
            numbers[row] = known.setdefault(name, len(known))
        except TypeError as error:
            raise ValueError(f"units: the id of row {row} is a {type(name).__name__}, which is not hashable") from error
    unknown = {name: n for name, n in known.items() if isinstance(name, str) and name.strip().lower() in UNKNOWN}
    return numbers, unknown


def _is_missing(value: Any) -> bool:
    if value is None or (isinstance(value, str) and not value.strip()):
        return True
    if type(value).__name__ in ("NAType", "NaTType"):
        return True
    if isinstance(value, (np.datetime64, np.timedelta64)):
        return bool(np.isnat(value))
    return isinstance(value, (float, np.floating)) and math.isnan(value)


def cut_units(
    units: Sequence[int], rows: Sequence[np.ndarray], microbatch_size: int, lengths: np.ndarray | None = None
) -> list[UnitPart]:
    """Micro-batches of at most `microbatch_size` rows, out of whole units; a unit with more rows is cut into pieces.

    With `lengths`, units whose longest rows are of similar length share one, the longest first.
    """
    order = list(range(len(units)))
    if lengths is not None:
        order.sort(key=lambda i: -float(lengths[rows[i]].max()))
    parts: list[UnitPart] = []
    waiting: list[int] = []
    count = 0

    def close() -> None:
        nonlocal waiting, count
        if waiting:
            parts.append(_part([units[i] for i in waiting], [rows[i] for i in waiting]))
        waiting, count = [], 0

    for i in order:
        n = len(rows[i])
        if count + n > microbatch_size:
            close()
        if n > microbatch_size:
            parts += _pieces(units[i], rows[i], microbatch_size)
        else:
            waiting.append(i)
            count += n
    close()
    return parts


def _part(units: list[int], rows: list[np.ndarray]) -> UnitPart:
    part = UnitPart(np.concatenate(rows).tolist())
    owner = [place for place, own in enumerate(rows) for _ in own]
    part.group = Group(units, owner, [1 / len(own) for own in rows for _ in own])
    return part


def _pieces(unit: int, rows: np.ndarray, most: int) -> list[UnitPart]:
    cuts = np.array_split(rows, -(-len(rows) // most))
    parts = []
    for number, piece in enumerate(cuts):
        part = UnitPart(piece.tolist())
        share = [1 / len(rows)] * len(piece)
        part.group = Group([unit], [0] * len(piece), share, begins=number == 0, ends=number + 1 == len(cuts))
        parts.append(part)
    return parts
