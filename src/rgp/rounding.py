"""How numbers are shown: what was spent is rounded up, what an audit found is rounded down, and infinity is not JSON."""

from __future__ import annotations

import math
from typing import Any


def round_up(value: float, digits: int = 3) -> str:
    """An upper bound, such as what was spent: never shown below what it is."""
    if not math.isfinite(value):
        return "infinite"
    return f"{math.ceil(value * 10**digits - 1e-9) / 10**digits:.{digits}f}"


def round_down(value: float, digits: int = 3) -> str:
    """A lower bound, such as an audit's: never shown above what it is."""
    return f"{math.floor(value * 10**digits) / 10**digits:.{digits}f}"


def percent_up(share: float, digits: int = 2) -> str:
    """An upper bound on a share, in percent.

    >>> percent_up(0.12341)
    '12.35%'
    """
    return f"{round_up(100 * share, digits)}%"


def finite(value: Any) -> float | None:
    """The value if it is a finite number, otherwise None: what JSON and a page can hold."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)
