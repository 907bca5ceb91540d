"""Labels as they are written -> classes 0, 1, ... The names of the classes count as public."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from rgp.data.spec import DataError, listing


def index_labels(
    parts: Sequence[Iterable[Any]], sources: Sequence[str], column: str, names: tuple[str, ...] = ()
) -> tuple[list[np.ndarray], tuple[str, ...]]:
    """One int64 array per part, and the names of the classes. `sources` say where each part is from.

    With `names` given, labels are these names or their numbers. Without, the classes are the labels found in all parts
    together, whole numbers in their order and words in the alphabet's.
    """
    texts = [[_text(value) for value in part] for part in parts]
    for rows, source in zip(texts, sources, strict=True):
        if not rows:
            raise DataError(f"{source} has no rows.")
        empty = sum(text == "" for text in rows)
        if empty:
            raise DataError(
                f"{source}: {empty} of {len(rows)} rows have no {column}, the first is row {rows.index('') + 1}."
            )
    found = set().union(*texts)
    source = " and ".join(dict.fromkeys(sources))
    index = {name: i for i, name in enumerate(names)} | {str(i): i for i in range(len(names))}
    if not names:
        names = tuple(sorted(found, key=int) if all(_whole(text) for text in found) else sorted(found))
        rows_in_all = sum(len(rows) for rows in texts)
        if len(names) < 2:
            raise DataError(f"{source}: {column} has one value only, {names[0]!r}; a classifier needs two or more.")
        if len(names) > 10 and len(names) > rows_in_all / 2:
            raise DataError(
                f"{source}: {column} has {len(names)} values in {rows_in_all} rows, such as {listing(names, 3)}: "
                "these are not classes. Is it the right column?"
            )
        index = {name: i for i, name in enumerate(names)}
    strange = sorted(found - index.keys())
    if strange:
        raise DataError(f"{source}: {column} holds {listing(strange, 5)}, which is none of {listing(index)}.")
    return [np.array([index[text] for text in rows], np.int64) for rows in texts], names


def _text(value: Any) -> str:
    if value is None or (isinstance(value, float) and value != value):
        return ""
    if isinstance(value, (bool, np.bool_)):
        return str(int(value))
    if isinstance(value, (float, np.floating)) and float(value).is_integer():
        return str(int(value))
    return str(value).strip()


def _whole(text: str) -> bool:
    return text.lstrip("-").isascii() and text.lstrip("-").isdigit()
