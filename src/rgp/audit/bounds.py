"""Right guesses about canaries -> a lower bound on epsilon.

M canaries are each in the training data with probability 1/2, independently. After ONE run an auditor guesses about K of them,
"in" for the highest scores and "out" for the lowest, and abstains from the rest. Private training limits how many guesses
can be right, so many right ones refute a claim. Two limits, both of which hold for every score and need no independence:

guesses   Steinke, Nasr, Jagielski 2023 (arXiv 2305.08846): under (epsilon, delta), right guesses are dominated by
          Binomial(K, e^epsilon / (1 + e^epsilon)), up to a term in M delta.
f-dp      Mahloujifar, Melis, Chaudhuri 2024 (arXiv 2410.22235): uses the whole trade-off curve f and not one point of it.
          Let p_i be the probability of i right guesses. Flip one canary: a right guess becomes a wrong one, so for every
          set T of counts, by f-DP and Jensen's inequality,
              sum_{i in T} i p_i / M  <=  1 - f( sum_{i in T} (K - i + 1) p_{i-1} / M ).
          With T = {i, i+1, ...} and r_i, h_i = sum_{l >= i} (l, K - l) p_l / M this gives h_{i-1} >= (1 - f)^-1 (r_i). If
          even the smallest such sequence ends with r_0 + h_0 > K / M, that is with total probability above 1, then
          "as many right guesses as seen" has a probability below the level under f, and f is refuted.

The claim that is tested by f-dp is the ledger's, with every noise multiplier times s: the epsilon of the smallest s that
is refuted is the bound. Without sampling (q = 1) these are the Gaussian curves, in closed form.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rgp.accountants import PLD, composed_epsilon
from rgp.composition import Event, coarse_ledger, compose, fft_rounding, merge, read_epsilon

# shares of the canaries that are guessed about: the best of them counts, each at a quarter of the level
SHARES = (0.75, 0.5, 0.25, 0.1)
LARGEST_EPSILON = 100.0
LARGEST_SCALE = 4096.0
Inverse = Callable[[float], float]  # true-positive rate -> the least false-positive rate a mechanism allows with it


@dataclass(frozen=True, kw_only=True)
class Guessed:
    """What the auditor guessed: `correct` of `guesses` about `canaries` were right."""

    canaries: int
    guesses: int
    correct: int

    def __post_init__(self) -> None:
        if not 0 <= self.correct <= self.guesses <= self.canaries:
            raise ValueError(
                f"correct={self.correct}, guesses={self.guesses}, canaries={self.canaries}: each must be at most the next."
            )


@dataclass(frozen=True, kw_only=True)
class Lower:
    """A lower bound, and the guesses that gave it."""

    epsilon: float
    guessed: Guessed
    level: float  # error probability that this one bound was computed with; the family's is `1 - confidence`


def guess(scores: Sequence[float] | np.ndarray, included: Sequence[bool] | np.ndarray, guesses: int) -> Guessed:
    """Guess that the highest scores, half of `guesses`, were included and the lowest left out. Ties go by position.

    >>> guess([3.0, 0.1, 2.0, 0.2], [True, False, True, False], 4).correct
    4
    """
    score, truth = np.asarray(scores, np.float64), np.asarray(included, bool)
    if np.isnan(score).any():
        raise ValueError(
            f"{int(np.isnan(score).sum())} of {len(score)} canaries have the score NaN: the model diverged."
        )
    order = np.argsort(score, kind="stable")
    low, high = guesses // 2, guesses - guesses // 2
    correct = int((~truth[order[:low]]).sum() + truth[order[len(order) - high :]].sum())
    return Guessed(canaries=len(score), guesses=guesses, correct=correct)


def lower_bounds(
    scores: Sequence[float] | np.ndarray,
    included: Sequence[bool] | np.ndarray,
    events: Iterable[Event],
    *,
    delta: float,
    confidence: float = 0.95,
    guesses: int | None = None,
) -> dict[str, Lower]:
    """{"guesses": ..., "f-dp": ...}, each valid by itself with the stated confidence.

    guesses: how many canaries are guessed about, fixed before the scores are looked at. None tries the shares in SHARES,
        each at the level (1 - confidence) / len(SHARES), and takes the best: the union bound pays for the choice.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence={confidence} must lie between 0 and 1, such as 0.95.")
    claim, count = merge(events), len(np.asarray(scores))
    if guesses is not None and not 1 <= guesses <= count:
        raise ValueError(f"guesses={guesses} must be from 1 to {count}, the number of canaries.")
    numbers = [guesses] if guesses is not None else sorted({max(1, round(share * count)) for share in SHARES})
    level = (1 - confidence) / len(numbers)
    tried = [guess(scores, included, number) for number in numbers]
    by_count = max((guesses_epsilon(g, delta=delta, level=level), -i) for i, g in enumerate(tried))
    scale, best = refuted_scale(claim, tried, delta=delta, level=level)
    return {
        "guesses": Lower(epsilon=by_count[0], guessed=tried[-by_count[1]], level=level),
        "f-dp": Lower(epsilon=_epsilon(claim, scale, delta), guessed=best, level=level),
    }


# ---------------------------------------------------------------------- (epsilon, delta), Steinke et al.


def guesses_epsilon(guessed: Guessed, *, delta: float, level: float) -> float:
    """The largest epsilon that so many right guesses refute, or 0.

    >>> round(guesses_epsilon(Guessed(canaries=100, guesses=100, correct=100), delta=0, level=0.05), 4)
    3.4926
    """
    low, high = 0.0, LARGEST_EPSILON
    if guesses_probability(guessed, epsilon=0.0, delta=delta) > level:
        return 0.0
    while high - low > 1e-7:
        middle = (low + high) / 2
        if guesses_probability(guessed, epsilon=middle, delta=delta) <= level:
            low = middle
        else:
            high = middle
    return low


def guesses_probability(guessed: Guessed, *, epsilon: float, delta: float) -> float:
    """At least the probability of so many right guesses under (epsilon, delta): Theorem 5.2 of Steinke et al."""
    from scipy.special import bdtrc

    right, most = guessed.correct, guessed.guesses
    q = 1 / (1 + math.exp(-epsilon))
    tail = float(bdtrc(right - 1, most, q))
    below = np.arange(1, right + 1)
    spread = bdtrc(right - below - 1, most, q) - tail  # probability of right - i up to right - 1
    worst = float(np.max(spread / below, initial=0.0))
    return min(1.0, tail + 2 * guessed.canaries * delta * worst)


# ---------------------------------------------------------------------- f-DP, Mahloujifar et al.


def refuted(inverse: Inverse, guessed: Guessed, *, level: float) -> bool:
    """Whether so many right guesses have a probability of at most `level` under the trade-off curve of `inverse`."""
    m, most, right = guessed.canaries, guessed.guesses, guessed.correct
    r, h = level * right / m, level * (most - right) / m
    for i in range(right, 0, -1):
        more = max(h, inverse(r))
        if more == h:
            break  # nothing will change from here on
        r, h = r + (i - 1) / (most - i + 1) * (more - h), more
        if r + h > most / m:
            return True
    return r + h > most / m


def refuted_scale(
    claim: tuple[Event, ...], tried: Sequence[Guessed], *, delta: float, level: float
) -> tuple[float, Guessed]:
    """The smallest s, to a thousandth, for which "every noise multiplier is s times the claim's" is refuted by one of
    `tried`, and which. inf if nothing is refuted, not even perfect privacy."""
    if not claim:
        raise ValueError("nothing was released: there is no claim to audit.")

    def refuting(inverse: Inverse) -> Guessed | None:
        return next((guessed for guessed in tried if refuted(inverse, guessed, level=level)), None)

    def at(scale: float) -> Guessed | None:
        return refuting(trade_off(claim, scale, delta))

    if (best := refuting(lambda rate: rate)) is None:
        return math.inf, tried[0]
    high = 1.0
    if at(1.0) is None:
        while high < LARGEST_SCALE and at(high) is None:
            high *= 2
        low = high / 2
    else:
        while high > 1 / LARGEST_SCALE and at(high / 2) is not None:
            high /= 2
        low = high / 2
    best = at(high) or best
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        if (found := at(middle)) is not None:
            best, high = found, middle
        else:
            low = middle
    return high, best


def trade_off(claim: tuple[Event, ...], scale: float, delta: float) -> Inverse:
    """The inverse of 1 - f for these releases with their noise times `scale`: never above the truth."""
    if all(event.sampling_rate == 1 and event.max_batch is None for event in claim):
        return gaussian(mu(claim) / scale)
    scaled = _scaled(claim, scale)
    # a coarse grid gives a curve that allows more, never less, and costs a tenth
    pld, slack = compose(coarse_ledger(scaled, float(delta)), scaled), fft_rounding(scaled)
    largest = read_epsilon(pld, min(float(delta), 1e-9), slack)
    epsilons = np.concatenate([[0.0], np.geomspace(max(largest, 1e-6) / 1e3, largest, 60)])
    deltas = np.clip([pld.get_delta(e) + slack for e in epsilons.tolist()], 0.0, 1.0)
    return by_profile(epsilons, deltas)


def mu(claim: Iterable[Event]) -> float:
    """mu of the one Gaussian mechanism that these releases, all without sampling, amount to."""
    return math.sqrt(sum(event.count / event.noise_multiplier**2 for event in claim))


def gaussian(mean: float) -> Inverse:
    from scipy.special import ndtr, ndtri

    return lambda rate: float(ndtr(ndtri(min(rate, 1.0)) - mean))


def by_profile(epsilons: np.ndarray, deltas: np.ndarray) -> Inverse:
    """From points of delta(epsilon), in both directions; fewer points allow an attacker more, so refute less."""
    shrink, grow = np.exp(-epsilons), np.exp(np.minimum(epsilons, 700))

    def inverse(rate: float) -> float:
        return float(max(0.0, np.max((rate - deltas) * shrink), np.max(1 - deltas - (1 - rate) * grow)))

    return inverse


def _scaled(claim: tuple[Event, ...], scale: float) -> tuple[Event, ...]:
    return merge(replace(event, noise_multiplier=event.noise_multiplier * scale) for event in claim)


def _epsilon(claim: tuple[Event, ...], scale: float, delta: float) -> float:
    if math.isinf(scale):
        return 0.0
    if all(event.sampling_rate == 1 and event.max_batch is None for event in claim):
        return gaussian_epsilon(mu(claim) / scale, delta)
    return composed_epsilon(_scaled(claim, scale), float(delta), PLD.name)


def gaussian_epsilon(mean: float, delta: float) -> float:
    """The epsilon of mu-GDP at delta (Balle and Wang 2018).

    >>> round(gaussian_epsilon(1.0, 1e-5), 3)
    4.377
    """
    from scipy.special import log_ndtr, ndtr

    def exceeds(epsilon: float) -> bool:
        kept = ndtr(mean / 2 - epsilon / mean)
        return bool(kept - math.exp(epsilon + log_ndtr(-mean / 2 - epsilon / mean)) > delta)

    low, high = 0.0, mean * mean / 2 + 10 * mean
    if not exceeds(0.0):
        return 0.0
    while high - low > 1e-9 * max(1.0, high):
        middle = (low + high) / 2
        low, high = (middle, high) if exceeds(middle) else (low, middle)
    return low
