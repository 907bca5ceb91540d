"""The law of the number of trials: fixed before anything is trained, because a number that anyone knows would leak.

    >>> law = Law.named("geometric", 10)
    >>> law.words
    'geometric with mean 10'

A fixed number of trials has no such guarantee: Papernot and Steinke (arXiv 2110.03620) show that its cost grows with the
number, where a random one costs little more than a single trial. `weight` is all that accounting needs of a law.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

LAWS = ("geometric", "logarithmic", "poisson")
MOST = 10_000  # trials, on average
LARGEST_SHAPE = 1e6  # beyond it the law is Poisson's, less precisely
PREFIX = "negative-binomial:"


@dataclass(frozen=True)
class Law:
    """How many trials there are: K.

    mean: E[K]
    shape: eta of the negative binomial that is truncated to K >= 1; 1 is geometric, 0 logarithmic. Infinity: Poisson, the
        only one with K = 0, where nothing is trained and nothing released
    """

    mean: float
    shape: float = 1.0

    def __post_init__(self) -> None:
        if not (isinstance(self.shape, (int, float)) and self.shape >= 0):
            raise ValueError(f"law: shape {self.shape} must be 0 or more, or infinity for Poisson.")
        if LARGEST_SHAPE < self.shape < math.inf:
            raise ValueError(
                f"law: shape {self.shape:g} must be at most {LARGEST_SHAPE:g}. So large a one is Poisson: law poisson."
            )
        least = "at least 1" if self.poisson else "above 1"
        if not 1 <= self.mean <= MOST or (self.mean == 1 and not self.poisson):
            raise ValueError(
                f"trials={self.mean:g} must be {least} and at most {MOST:,}: it is the mean of the number of trials. For one "
                "run with settings that are known, use rgp train."
            )

    @classmethod
    def named(cls, name: str, mean: float) -> Law:
        """geometric, logarithmic, poisson, or negative-binomial:SHAPE."""
        shapes = {"geometric": 1.0, "logarithmic": 0.0, "poisson": math.inf}
        if name in shapes:
            return cls(float(mean), shapes[name])
        try:
            shape = float(name.removeprefix(PREFIX)) if name.startswith(PREFIX) else math.nan
        except ValueError:
            shape = math.nan
        if not 0 <= shape < math.inf:
            raise ValueError(
                f"law={name!r} must be one of {', '.join(LAWS)}, or {PREFIX}SHAPE with a shape of 0 or more."
            )
        return cls(float(mean), shape)

    @property
    def poisson(self) -> bool:
        return self.shape == math.inf

    @property
    def name(self) -> str:
        return {1.0: "geometric", 0.0: "logarithmic", math.inf: "poisson"}.get(self.shape, f"{PREFIX}{self.shape:g}")

    @property
    def words(self) -> str:
        return f"{'Poisson' if self.poisson else self.name} with mean {self.mean:g}"

    @cached_property
    def gamma(self) -> float:
        """The parameter of the truncated negative binomial: the larger, the fewer trials."""
        if self.shape == 1:
            return 1 / self.mean
        from scipy.optimize import brentq

        return math.exp(brentq(lambda x: math.log(_mean(math.exp(x), self.shape) / self.mean), -40, -1e-12, xtol=1e-14))

    @property
    def chance_of_none(self) -> float:
        return math.exp(-self.mean) if self.poisson else 0.0

    def weight(self, above: Any) -> Any:
        """phi'(1 - u), with phi(z) = E[z^K]: E[K] at u = 0, falling in u.

        It is by how much a trial's outcome is more likely to be the best than to come out of one trial, if a trial comes
        out above it with probability u.
        """
        u = np.asarray(above, float)
        if self.poisson:
            return self.mean * np.exp(-self.mean * u)
        return self.mean * (self.gamma / (self.gamma + (1 - self.gamma) * u)) ** (self.shape + 1)

    def probability(self, count: int) -> float:
        """P(K = count)."""
        if self.poisson:
            return math.exp(count * math.log(self.mean) - self.mean - math.lgamma(count + 1)) if count >= 0 else 0.0
        if count < 1:
            return 0.0
        g, eta = self.gamma, self.shape
        if eta == 0:
            return math.exp(count * math.log1p(-g)) / (count * -math.log(g))
        ways = math.lgamma(count + eta) - math.lgamma(eta) - math.lgamma(count + 1)
        return math.exp(ways + count * math.log1p(-g)) / math.expm1(-eta * math.log(g))

    def draw(self, rng: np.random.Generator) -> int:
        """K itself: a secret."""
        if self.poisson:
            return int(rng.poisson(self.mean))
        if self.shape == 1:
            return int(rng.geometric(self.gamma))
        left, count = rng.random(), 1
        while (left := left - self.probability(count)) > 0 and count < 10**7:
            count += 1
        return count


def _mean(gamma: float, shape: float) -> float:
    """E[K] of the truncated negative binomial."""
    if shape == 0:
        return (1 / gamma - 1) / -math.log(gamma)
    return shape * (1 / gamma - 1) / -math.expm1(shape * math.log(gamma))
