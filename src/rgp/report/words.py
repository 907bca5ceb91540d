"""Numbers as people read them. What bounds privacy is rounded up, never down."""

from __future__ import annotations

import math
from typing import Any

from rgp.rounding import percent_up, round_up


def epsilon_text(value: float | None) -> str:
    return "none" if value is None else round_up(value, 2)


def percent(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{100 * value:.{digits}f}%"


def ceiling(value: float) -> str:
    """A rate that is an upper bound: rounded up, 100% only if it is."""
    shown = percent_up(value, 1)
    return shown if shown != "100.0%" or value >= 1 else "99.9+%"


def odds(value: float) -> str:
    """A small probability as "1 in N", N rounded down to two digits."""
    count = 1 / value
    unit = 10 ** max(0, math.floor(math.log10(count)) - 1)
    return f"1 in {math.floor(count / unit + 1e-9) * unit:,}"


def small(value: float) -> str:
    """A small number as 10⁻⁵ or 7×10⁻⁵; two digits, rounded up."""
    exponent = math.floor(math.log10(value) + 1e-12)
    digits = math.ceil(value / 10**exponent * 10 - 1e-9) / 10
    if digits == 10:
        exponent, digits = exponent + 1, 1
    power = "10" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return power if digits == 1 else f"{digits:g}×{power}"


def factor(epsilon: float) -> str:
    """e^epsilon, rounded up."""
    value = math.exp(min(epsilon, 700))
    if value >= 1e6:
        return f"10^{math.ceil(math.log10(value))}"
    unit = 10 ** max(0, math.floor(math.log10(value)) - 1)
    return f"{math.ceil(value / unit) * unit:,}" if value >= 10 else f"{math.ceil(value * 10) / 10:.1f}"


def seconds(value: float | None) -> str:
    if value is None:
        return "–"
    if value < 60:
        return f"{value:.1f} s"
    if value < 3600:
        return f"{int(value // 60)} min {int(value % 60)} s"
    return f"{int(value // 3600)} h {int(value % 3600 // 60)} min"


def size(value: float | None) -> str:
    if value is None:
        return "–"
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= scale:
            return f"{value / scale:.{0 if value >= 100 * scale else 1}f} {unit}"
    return f"{value:.0f} B"


def whole(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def plain(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def coin(mu: float) -> float:
    """The best share of right guesses "used or not", each equally likely, under mu-GDP: Phi(mu / 2)."""
    return 0.5 * math.erfc(-min(mu, 80.0) / 2 / math.sqrt(2))


def strength(epsilon: float) -> str:
    """The tiers of "How to DP-fy ML" (Ponomareva et al., 2023)."""
    if epsilon <= 1:
        return "strong"
    return "moderate" if epsilon <= 10 else "weak"


def noun(run: Any) -> str:
    """What one unit is called: a row, a person, a document."""
    return run.text("unit_noun") or "row"


def units(run: Any) -> float | None:
    """How many units there were; public."""
    return run.number("training_units") or run.number("training_rows")
