"""What the value of a setting may be: how to read it, and how to say it in an error message."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rgp.validate import check_count


@dataclass(frozen=True)
class Allowed:
    """What a key may hold: `read` turns what YAML gave into the value, or raises ValueError."""

    words: str
    read: Callable[[Any], Any]


def whole(low: int) -> Allowed:
    def read(value: Any) -> int:
        whole_number = isinstance(value, float) and value.is_integer()
        return check_count("", int(value) if whole_number else value, least=low)

    return Allowed(f"a whole number of at least {low}", read)


def number(low: float, *, above: bool = False, high: float = math.inf, below: bool = False) -> Allowed:
    def read(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise ValueError
        found = float(value)  # YAML takes 1e-5, without a point, for text
        if not (math.isfinite(found) and (found > low if above else found >= low)):
            raise ValueError
        if not (found < high if below else found <= high):
            raise ValueError
        return found

    words = f"a number {'above' if above else 'of at least'} {low:g}"
    return Allowed(words + (f" and {'below' if below else 'at most'} {high:g}" if high < math.inf else ""), read)


def choice(*names: str) -> Allowed:
    def read(value: Any) -> str:
        if value not in names:
            raise ValueError
        return value

    return Allowed(f"one of {', '.join(names)}", read)


def string() -> Allowed:
    def read(value: Any) -> str:
        if not isinstance(value, (str, int)) or isinstance(value, bool) or not str(value):
            raise ValueError
        return str(value)

    return Allowed("text", read)


def columns() -> Allowed:
    one = string()

    def read(value: Any) -> Any:
        return tuple(one.read(v) for v in value) if isinstance(value, list) and len(value) == 2 else one.read(value)

    return Allowed("a column's name, or a list of two", read)


def texts() -> Allowed:
    one = string()

    def read(value: Any) -> tuple[str, ...]:
        if not isinstance(value, (list, tuple)) or len(value) < 2:
            raise ValueError
        found = tuple(one.read(v) for v in value)
        if len(set(found)) < len(found):
            raise ValueError
        return found

    return Allowed("a list of texts, one for each class, no two the same", read)


def flag() -> Allowed:
    def read(value: Any) -> bool:
        if not isinstance(value, bool):
            raise ValueError
        return value

    return Allowed("true or false", read)


def ranks() -> Allowed:
    one = whole(1)

    def read(value: Any) -> Any:
        if isinstance(value, Mapping) and value:
            return {str(pattern): one.read(r) for pattern, r in value.items()}
        return value if value == "auto" else one.read(value)

    return Allowed("a whole number of at least 1, auto, or a mapping from parameter-name patterns to ranks", read)


def bands() -> Allowed:
    one = whole(1)

    def read(value: Any) -> Any:
        return value if value == "auto" else one.read(value)

    return Allowed("a whole number of at least 1, or auto", read)


def clips() -> Allowed:
    one = number(0, above=True)

    def read(value: Any) -> Any:
        if isinstance(value, Mapping) and value:
            return {str(pattern): one.read(norm) for pattern, norm in value.items()}
        return one.read(value)

    return Allowed("a number above 0, or a mapping from parameter-name patterns to such numbers", read)


def treatments() -> Allowed:
    one = whole(1)

    def read(value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise ValueError
        return {str(k): v if v in ("carried", "exact", "frozen") else one.read(v) for k, v in value.items()}

    return Allowed("a mapping from parameter-name patterns to carried, exact, frozen or a rank", read)
