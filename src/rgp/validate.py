"""Checks of single values that a user gave. Each error names the argument, its value and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import Any


def check_count(name: str, value: Any, *, least: int = 1) -> int:
    """An integer of at least `least`, numpy's included."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}; got {value!r}")
    return int(value)


def check_positive(name: str, value: Any) -> float:
    if not _is_number(value) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be positive and finite; got {value!r}")
    return value


def check_probability(name: str, value: Any) -> float:
    if not _is_number(value) or not 0 < value < 1:
        raise ValueError(f"{name} must be above 0 and below 1; got {value!r}")
    return value


def check_one_of(name: str, value: object, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}; got {value!r}")


def per_step(name: str, value: Any, steps: int, check: Callable[[Any], bool], allowed: str) -> tuple[Any, ...]:
    """A number, or a function of the step, as one value per step."""
    values = tuple(value(t) for t in range(steps)) if callable(value) else (value,) * steps
    for t, v in enumerate(values):
        if not _is_number(v) or not check(v):
            where = f"{name} at step {t}" if callable(value) else name
            raise ValueError(f"{where} must be {allowed}; got {v!r}")
    return tuple(v.item() if hasattr(v, "item") else v for v in values)  # numpy's numbers are not JSON


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
