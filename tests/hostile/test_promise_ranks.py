"""Ranks draw indices together, so their rows must be the same: data of equal size that differ are refused."""

from __future__ import annotations

from typing import Any

import pytest
from test_silent_ways import data

from rgp.agreement import check_same, describe_dataset
from rgp.distributed import Ranks


class Second(Ranks):
    """The second of two ranks; what the first one has is known."""

    rank, size = 1, 2

    def __init__(self, theirs: dict[str, Any]) -> None:
        self.theirs = {name: repr(value) for name, value in theirs.items()}

    def from_first(self, make: Any) -> Any:
        return self.theirs

    def agree(self, problem: str | None) -> None:
        if problem is not None:
            raise ValueError(problem)


@pytest.mark.parametrize("row", [0, 12, 23])
def test_different_data_of_equal_size(row):
    mine, theirs = data(), data()
    check_same(Second(describe_dataset(Second({}), theirs)), describe_dataset(Second({}), mine))
    mine[row] = (mine[row][0] + 1, mine[row][1])
    with pytest.raises(ValueError, match=f"row {row} of the dataset is .* on rank 1"):
        check_same(Second(describe_dataset(Second({}), theirs)), describe_dataset(Second({}), mine))
