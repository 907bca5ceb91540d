"""The settings of a search: keys with lists of values, of which a trial gets one combination, drawn at random."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

MOST = 1000  # combinations: each is checked before the first trial

Space = Mapping[str, Sequence[Any]]


def check_space(space: Any) -> dict[str, list[Any]]:
    """The space as plain lists; ValueError that names the key."""
    if not isinstance(space, Mapping) or not space:
        raise ValueError(
            f"space={space!r} must map keys to lists of values, such as {{'optimizer.lr': [0.1, 0.3, 1]}}."
        )
    for key, values in space.items():
        if not isinstance(values, (list, tuple)) or not values:
            raise ValueError(f"space: {key} = {values!r} must be a list with at least one value.")
        if any(a == b and type(a) is type(b) for i, a in enumerate(values) for b in values[:i]):
            raise ValueError(
                f"space: {key} = {list(values)!r} holds a value twice; all are drawn with the same probability."
            )
    if (count := math.prod(len(values) for values in space.values())) > MOST:
        raise ValueError(f"space: {count:,} combinations are more than {MOST:,}; take values or keys out.")
    return {str(key): list(values) for key, values in space.items()}


def combinations(space: Space) -> list[dict[str, Any]]:
    return [dict(zip(space, values, strict=True)) for values in product(*space.values())]


def draw(space: Space, rng: np.random.Generator) -> dict[str, Any]:
    """One combination, each as likely as any other and whatever the data are."""
    return {key: values[int(rng.integers(len(values)))] for key, values in space.items()}
