"""The privacy profile of a search from that of one trial: pure functions of numbers.

A profile is delta as a function of epsilon >= 0: the hockey-stick divergence of neighbouring data, the larger of both ways.

Theorem. A trial puts out (settings, model, score); the search puts out the best of K independent trials, K drawn from a law
with phi(z) = E[z^K] and weight W(u) = phi'(1 - u), or nothing if K = 0. Let delta(.) be the profile of one trial, and
T(u) = min over e >= 0 of min(1, exp(e) u + delta(e), 1 - exp(-e) (1 - delta(e) - u)). Then for every epsilon >= 0

    delta_search(epsilon) <= D_f,  f(r) = max over u in [0, 1] of (W(u) r - exp(epsilon) W(T(u)))_+

where D_f is the largest E_Q' f(Q / Q') of any two distributions with that profile.

Proof. Let Q and Q' be the laws of a trial on neighbouring data; equal scores are told apart by a uniform number that is drawn
with each trial, so that no two are equal. (Taking the first of equals instead gives the same law: the trials are exchangeable.)
Let u(y) be the probability under Q of a trial above y. The best is at most y with probability phi(1 - u(y)), so y is put out
with density Q(y) W(u(y)); on the other data with Q'(y) W(u'(y)). Being above y is an event, so u' <= exp(e) u + delta(e) for all
e, and 1 - u <= exp(e) (1 - u') + delta(e): u' <= T(u). W falls, so the difference of the densities is at most
W(u) Q(y) - exp(epsilon) W(T(u)) Q'(y) <= f(Q / Q') Q'(y). Sum over y. "Nothing" is as likely on both data sets. f is a maximum of
convex functions, so convex, and an f-divergence is at most that of any pair that dominates the profile.  QED

Poisson with T(u) <= exp(e) u + delta(e) and u <= 1 put in at once gives the bound for privacy profiles of Koskela et al. (ICML
2024): delta_search(epsilon) <= m delta(epsilon - m (exp(e) - 1) - m delta(e)). Keeping u inside the maximum is never worse, and
little is left to gain: for Gaussian trials there is an order of their outcomes for which the truth is 1 to 5% below (tests).

`search_delta` is an upper bound of D_f: u is cut into cells, in each of which W(u) is taken at the lower end and T at the upper
one; f is replaced by its chords between knots r_j, and above the last one by its steepest slope W(0). The chords are a sum of
w_j (r - r_j)_+ with w_j >= 0, whose divergences are the profile at log r_j; for r_j < 1 they are 1 - r_j + r_j delta(-log r_j).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rgp.tuning.law import Law

Profile = Callable[[float], float]

# Finer ones lower epsilon by less than 0.5% (tests/tuning/test_tuning_accounting.py).
KNOTS = np.unique(np.concatenate([np.linspace(0, 1, 51), np.linspace(1, 4, 76), np.linspace(4, 40, 181)]))
CELLS = np.concatenate([[0.0], np.logspace(-10, 0, 2001)])
LARGEST = 100.0  # epsilon
NOTHING = 1e-11  # a delta that is not worth another look


@dataclass(frozen=True)
class SearchProfile:
    """The profile of a search, from `deltas`, the trial's profile at `knots`, and its law."""

    law: Law
    knots: np.ndarray  # (k,) epsilons, rising from 0
    deltas: np.ndarray  # (k,)
    cells: np.ndarray  # (c,) edges, from 0 to 1

    @classmethod
    def of(cls, law: Law, profile: Profile, knots: np.ndarray = KNOTS, cells: np.ndarray = CELLS) -> SearchProfile:
        deltas = np.zeros(len(knots))
        for i, e in enumerate(knots):
            if i and deltas[i - 1] < NOTHING:  # a profile falls: the last value bounds all that follow
                deltas[i:] = deltas[i - 1]
                break
            deltas[i] = min(1.0, max(0.0, profile(float(e))))
        return cls(law, knots, deltas, cells)

    @cached_property
    def _weights(self) -> tuple[np.ndarray, np.ndarray]:
        """(W(u), W(T(u))) of every cell, on the pessimistic side: u at its lower end, T(u) at its upper one."""
        above = self.law.weight(self.cells[:-1])
        return above, self.law.weight(reach(self.cells[1:], self.knots, self.deltas))

    def delta(self, epsilon: float) -> float:
        """An upper bound of the search's delta at this epsilon."""
        above, below = self._weights
        r = np.exp(np.concatenate([-self.knots[:0:-1], self.knots]))
        f = np.maximum(0.0, above[:, None] * r - math.exp(epsilon) * below[:, None]).max(0)
        r, f = np.concatenate([[0.0], r]), np.concatenate([[0.0], f])
        slopes = np.concatenate([[0.0], np.diff(f) / np.diff(r), [self.law.mean]])
        turns = np.maximum(0.0, np.diff(slopes))
        small = np.exp(-self.knots[:0:-1])
        sticks = np.concatenate([[1.0], 1 - small + small * self.deltas[:0:-1], self.deltas])
        return min(1.0, float(turns @ sticks))

    def epsilon(self, delta: float) -> float:
        """The smallest epsilon with at most this delta, rounded up; infinity if there is none below 100."""
        if self.delta(LARGEST) > delta:
            return math.inf
        low, high = 0.0, LARGEST
        while high - low > 1e-6:
            middle = (low + high) / 2
            low, high = (low, middle) if self.delta(middle) <= delta else (middle, high)
        return high

    def true_positive_rate(self, false_positive_rate: float) -> float:
        """The largest share of members that any attack recognises when this share of the others is taken for members."""
        a, best = false_positive_rate, 1.0
        for epsilon in np.linspace(0, -math.log(a), 60):
            delta = self.delta(float(epsilon))
            best = min(best, delta + math.exp(epsilon) * a, 1 - math.exp(-epsilon) * (1 - delta - a))
        return best


def reach(u: np.ndarray, knots: np.ndarray, deltas: np.ndarray) -> np.ndarray:
    """T(u): what an event of probability u can have on neighbouring data, at most."""
    grow = np.exp(knots)[None, :]
    u, deltas = np.asarray(u, float)[:, None], deltas[None, :]
    both = np.minimum(grow * u + deltas, 1 - (1 - deltas - u) / grow)
    return np.minimum(1.0, both.min(1) * (1 + 1e-12))  # more than rounding takes away
