"""What says which trial is best.

public    measured on rows that nobody has to protect, as a published test split: free
private   the number of right answers on private rows, with Gaussian noise. One row more or less changes the number by at most 1
          (of a language model the row's share of right tokens is added, which is at most 1 too), so noise of standard deviation s
          is a release with sampling rate 1 and noise multiplier s. Every trial is charged for it, on top of its training: that
          holds for rows that were held out, for training rows, and for somebody who has a row in both. Where persons are
          protected, what is added up is each person's share of right answers, so that a person changes it by at most 1.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from rgp.accounting import Event

KINDS = ("public", "private")
ROWS = ("held-out", "training")
STEPS_OF_A_COUNT = (
    1024  # to which a noisy one is rounded: the last bits of a floating-point sum may tell what was added up
)


@dataclass(frozen=True, kw_only=True)
class Score:
    """How trials are scored.

    kind: public or private
    rows: how many rows, or persons, the score is measured on; the number counts as public
    where: which rows: held-out or training
    noise: standard deviation on the number of right answers; None for public rows
    unit: what adds at most 1 to the number: a row, or a person with all their rows
    """

    kind: str
    rows: int
    where: str = "held-out"
    noise: float | None = None
    unit: str = "row"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"score={self.kind!r} must be public or private.")
        if self.where not in ROWS:
            raise ValueError(f"score_rows={self.where!r} must be held-out or training.")
        if (self.kind == "private") != (self.noise is not None):
            raise ValueError(f"score_noise={self.noise}: a private score needs noise, and a public one has none.")
        if self.noise is not None and not 0 < self.noise < math.inf:
            raise ValueError(
                f"score_noise={self.noise:g} must be a number above 0: without noise the score would tell of private rows."
            )

    @property
    def events(self) -> tuple[Event, ...]:
        """What each trial's score costs."""
        return () if self.noise is None else (Event(1.0, self.noise),)

    @property
    def protects_held_out(self) -> bool:
        """Whether the promise covers the held-out rows, so that nothing exact may be said of them."""
        return self.kind == "private" and self.where == "held-out"

    @property
    def words(self) -> str:
        if self.noise is None:
            return f"right answers on {self.rows:,} public rows"
        noise = f"({self.where}), with noise of standard deviation {self.noise:g}"
        if self.unit == "row":
            return f"right answers on {self.rows:,} private rows {noise}"
        return f"right answers on private rows, as the mean of each of {self.rows:,} {self.unit}s {noise}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def default_noise(rows: int) -> float:
    """1% of the rows, at least 5: little against the noise of training, and little against what settings differ by."""
    return max(5.0, rows / 100)


def noisy_count(count: float, score: Score, rng: np.random.Generator) -> float:
    """The count as it may be used: exact on public rows, with its noise on private ones."""
    if not 0 <= count <= score.rows:
        raise ValueError(f"count={count} of right answers must lie between 0 and the number of rows, {score.rows}.")
    if score.noise is None:
        return float(count)
    noisy = float(count) + score.noise * float(rng.standard_normal())
    return round(noisy * STEPS_OF_A_COUNT) / STEPS_OF_A_COUNT


def share(noisy: float, score: Score) -> float:
    """The share of the rows, kept between 0 and 1 where noise has carried it out of them."""
    return min(1.0, max(0.0, noisy / score.rows))
