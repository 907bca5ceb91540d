"""What one example is: the unit whose presence the guarantee hides.

Neighbouring datasets differ by one unit, added or removed. A card may say of a unit only what stands here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class Rows:
    """Every row of the dataset is a unit of its own."""

    name: ClassVar[str] = "row"
    size: int  # number of units, public

    def describe(self) -> str:
        return "one row of the dataset"

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "size": self.size}


Unit = Rows
