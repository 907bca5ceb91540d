"""Cyclic Poisson sampling: the examples are dealt into b groups once, and step t draws from group t mod b alone.

So no example takes part twice in b consecutive steps, as correlated noise over b steps requires.

Formal guarantees (tests/test_groups.py):
- each example is in one group, uniform and independent of all others; it depends on the secret and the example's index
  alone, so that a row added at the end moves no other
- at step t each member of group t mod b is drawn independently with probability `rate`, and nobody else is
- with one group it is `rgp.sampling.draw`, number for number
"""

from __future__ import annotations

import numpy as np

from rgp.streams import Streams
from rgp.validate import check_count

DEALING = 1 << 62  # used as the step, and larger than any real one: dealing shares no random number with drawing


def deal(streams: Streams, size: int, bands: int) -> np.ndarray:
    """The group of each example, (size,), from 0 to bands - 1."""
    check_count("size", size, least=1)
    check_count("bands", bands, least=1)
    # One number per example, always: `integers` would reject some and shift those that follow.
    return (streams.generator("sampling", DEALING).random(size) * bands).astype(np.int64)


def draw_group(
    streams: Streams, step: int, groups: np.ndarray, bands: int, rate: float, *, attempt: int = 0
) -> np.ndarray:
    """The indices of one logical batch, ascending: members of group `step mod bands`, each with probability `rate`.

    `rate` is `rgp.bands.group_rate`, b times batch size over number of examples. May be empty; that is a step too.
    """
    if not 0 < rate <= 1:
        raise ValueError(f"rate={rate} must be above 0 and at most 1: it is bands times batch size over dataset size")
    drawn = streams.generator("sampling", step, attempt).random(len(groups)) < rate
    return np.flatnonzero(drawn & (groups == step % bands))
