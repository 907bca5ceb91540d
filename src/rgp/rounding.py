"""How bounds on epsilon are shown: what was spent is rounded up, what an audit found is rounded down."""

from __future__ import annotations

import math


def round_up(epsilon: float, digits: int = 3) -> str:
    """Never shows less than was spent."""
    return f"{math.ceil(epsilon * 10**digits - 1e-9) / 10**digits:.{digits}f}"


def round_down(epsilon: float, digits: int = 3) -> str:
    """A lower bound, never shown above what it is."""
    return f"{math.floor(epsilon * 10**digits) / 10**digits:.{digits}f}"
