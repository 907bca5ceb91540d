"""What is protected: the unit whose presence the guarantee hides. All that stands here is public.

Neighbouring datasets differ by one unit, added or removed with all its rows. A card may say of a unit only what stands here;
which rows belong to which unit, and how many, is private and stays in members.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from rgp.validate import check_count

ROWS_PER_UNIT = 8


@dataclass(frozen=True)
class Rows:
    """Every row of the dataset is a unit of its own."""

    name: ClassVar[str] = "row"
    rows_per_unit: ClassVar[int] = 1
    noun: ClassVar[str] = "row"
    column: ClassVar[None] = None
    size: int  # number of units, public

    @property
    def rows(self) -> int:
        """The number of rows, which is public where each is a unit."""
        return self.size

    def describe(self, row: str = "") -> str:
        """In one line, for the card. row: what a row of this dataset is, if that is known."""
        return "one row of the dataset" + (f" ({row})" if row else "")

    def not_covered(self) -> list[str]:
        return [
            "several rows of one person: k rows are protected by no more than k times epsilon",
            "the number of training rows, and the names and number of classes, which count as public",
        ]

    def allowed_batch_sizes(self) -> str:
        return f"an integer from 1 to the dataset's size {self.size}"

    def to_json(self) -> dict[str, Any]:
        """Nothing: rows are what files mean that name no unit."""
        return {}


@dataclass(frozen=True, kw_only=True)
class Persons:
    """Units with several rows each: persons, documents, households.

    size: number of units U, public
    rows_per_unit: k, the most rows of a drawn unit that a step uses
    noun: what one unit is
    column: of the table, which says whose a row is; None if the ids were given in Python
    row: what one row is
    """

    name: ClassVar[str] = "person"
    size: int
    rows_per_unit: int = ROWS_PER_UNIT
    noun: str = "person"
    column: str | None = None
    row: str = "row"

    def __post_init__(self) -> None:
        check_count("rows_per_unit", self.rows_per_unit)

    @property
    def rows(self) -> None:
        """None: a further person brings all their rows, so the number of rows is not public."""

    def describe(self, row: str = "") -> str:
        """In one line, for the card.

        >>> Persons(size=100, rows_per_unit=8, column="user_id").describe()
        'one person (column user_id), at most 8 rows in a step'
        """
        where = "" if self.column is None else f" (column {self.column})"
        rows = f"{self.rows_per_unit} {self.row}{'' if self.rows_per_unit == 1 else 's'}"
        return f"one {self.noun}{where}, at most {rows} in a step"

    def not_covered(self) -> list[str]:
        """What one unit has many of is covered; who counts as one unit is not checked."""
        if self.noun == "person":
            shared = [
                "one person under several ids: ids are taken as they are, and each is protected on its own",
                "what persons have in common, such as a household: each is protected on its own",
            ]
        else:
            shared = [
                f"several {self.noun}s of one person, and what stands in several: each {self.noun} is protected on its own"
            ]
        return [
            *shared,
            f"the number of training {self.noun}s, and the names and number of classes, which count as public",
        ]

    def allowed_batch_sizes(self) -> str:
        return f"an integer from 1 to the number of units {self.size} (it counts each {self.noun} once)"

    def to_json(self) -> dict[str, Any]:
        return {"unit": {"name": self.name, **asdict(self)}}


Unit = Rows | Persons


def unit_from_json(saved: Mapping[str, Any] | None, size: int) -> Unit:
    """The inverse of `to_json`: `saved` is what files have under "unit", None if they have nothing."""
    if saved is None or saved["name"] == Rows.name:
        return Rows(size)
    return Persons(**{key: value for key, value in saved.items() if key != "name"})
