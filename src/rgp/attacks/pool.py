"""Who is guessed about: the units of a run's training data, then those of its held-out data.

A unit is what the run promised to hide: a row, or a person with all their rows. What an attack knows of a person is the mean
over these rows: who was trained on has many that are a little too well known.

Shapes: n units with m rows in all; n = m where a unit is a row
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rgp.data import Data
from rgp.members import Members


@dataclass(frozen=True)
class Pool:
    """owner (m,): the number of each row's unit, units of the training data first; trained: how many these are."""

    data: Data
    owner: np.ndarray
    trained: int

    @classmethod
    def of(cls, data: Data) -> Pool:
        if data.members is None:
            return cls(data, np.arange(len(data.train) + len(data.test)), len(data.train))
        if data.test_members is None:
            unit = data.members.unit
            raise ValueError(
                f"the run protects {unit.describe()}, and nothing says whose the test rows are. An attack compares {unit.noun}s "
                "that were trained on with others: give the test split the same column, or bring one file, of which some are "
                "held out. `rgp audit` needs neither."
            )
        trained = data.members.unit.size
        return cls(data, np.concatenate([data.members.of_rows, trained + data.test_members.of_rows]), trained)

    @property
    def size(self) -> int:
        """n, the number of units."""
        return int(self.owner[-1]) + 1 if self.data.members is None else int(self.owner.max()) + 1

    @property
    def noun(self) -> str:
        return "row" if self.data.members is None else self.data.members.unit.noun

    def mean(self, values: np.ndarray) -> np.ndarray:
        """The mean of the rows' values (m,) over the rows of each unit: (n,)."""
        return np.bincount(self.owner, values) / np.bincount(self.owner)

    def rows(self, chosen: np.ndarray | None = None) -> PooledRows:
        """The rows of the chosen units (n,), or all."""
        inside = np.ones(len(self.owner), bool) if chosen is None else chosen[self.owner]
        return PooledRows(self.data.train, self.data.test, np.flatnonzero(inside).tolist())

    def divided(self, inside: np.ndarray) -> Data:
        """The same data, with the chosen units for training and the others held out."""
        train, test = self.rows(inside), self.rows(~inside)
        if self.data.members is None:
            return replace(self.data, train=train, test=test, more_tests={})
        unit = self.data.members.unit
        members, others = (
            Members(
                self.owner[side[self.owner]].tolist(),
                rows_per_unit=unit.rows_per_unit,
                noun=unit.noun,
                column=unit.column,
                row=unit.row,
            )
            for side in (inside, ~inside)
        )
        return replace(self.data, train=train, test=test, members=members, test_members=others, more_tests={})


def take(dataset: Any, indices: list[int]) -> list[Any]:
    """Many rows at once, where the data set has a faster way to get them."""
    many = getattr(dataset, "__getitems__", None)
    return many(indices) if callable(many) and indices else [dataset[i] for i in indices]


class PooledRows:
    """Some rows of two data sets, one after the other."""

    def __init__(self, train: Any, test: Any, indices: Sequence[int]) -> None:
        self._train, self._test, self._indices = train, test, indices
        if hasattr(train, "lengths") and hasattr(test, "lengths"):
            joined = [*train.lengths, *test.lengths]
            self.lengths = [joined[i] for i in indices]

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        at, size = [self._indices[i] for i in indices], len(self._train)
        trained = iter(take(self._train, [i for i in at if i < size]))
        tested = iter(take(self._test, [i - size for i in at if i >= size]))
        return [next(trained) if i < size else next(tested) for i in at]
