"""Releases of one trial -> epsilon of the search, and back: the noise with which the whole search stays within a budget.

A trial is a tuple of `rgp.accounting.Event`s: its training steps and, if its score is private, the score's. Where settings
differ in batch size or length there are several kinds of trials, one for each setting, each drawn with the same probability.

An accountant with a privacy profile, such as pld, is asked for that of a trial (rgp.tuning.profiles); one without, such as rdp,
for the best of K runs by dp-accounting's repeat-and-select (Papernot and Steinke). Both are upper bounds, pld the smaller one:
ten trials of digits-rgp, geometric, cost epsilon 6.8 by pld and 9.0 by rdp where one costs 4.7.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from rgp.accountants import PLD, RDP, find_accountant
from rgp.accounting import RESOLUTION, Event
from rgp.composition import merge
from rgp.tuning.law import Law
from rgp.tuning.profiles import Profile, SearchProfile
from rgp.validate import check_positive, check_probability

Trial = Sequence[Event]
MOST_NOISE = 10**4


def epsilon(trials: Sequence[Trial], law: Law, *, delta: float, accountant: str = "pld") -> float:
    """The epsilon of the best of K trials, each of which has one of the kinds in `trials`.

    >>> training = Event(0.1, 2.0, 100)
    >>> round(epsilon([[training]], Law(10), delta=1e-5), 3) < round(epsilon([[training]], Law(20), delta=1e-5), 3)
    True

    Formal guarantees (tests/tuning/test_tuning_accounting.py):
    - an upper bound, for the best of K trials with all that the training and the score of each released
    - nothing is promised if anything else is known about the other trials, their number included
    - a trial without noise makes it infinite
    """
    check_probability("delta", delta)
    chosen = find_accountant(accountant)
    if any(event.noise_multiplier == 0 for trial in trials for event in trial):
        return math.inf
    profile = search_profile(trials, law, delta=delta, accountant=accountant)
    if profile is not None:
        return profile.epsilon(delta)
    if chosen.best_of is None:
        raise ValueError(f'accountant="{accountant}" has no bound for the best of several trials. Use "{PLD.name}".')
    kinds = {merge(trial) for trial in trials}
    if len(kinds) > 1:
        raise ValueError(
            f'accountant="{accountant}": the settings of the search differ in batch size, steps or bands, for which '
            f'dp-accounting has no event. Use accountant="{PLD.name}", or take these keys out of the space.'
        )
    (kind,) = kinds
    chosen.check(kind)
    return chosen.best_of(kind, law.mean, law.shape, delta)


def search_profile(trials: Sequence[Trial], law: Law, *, delta: float, accountant: str = "pld") -> SearchProfile | None:
    """The profile of the search, on a grid fine enough for `delta`; None if the accountant has no profiles."""
    profile = trial_profile(trials, delta=delta, accountant=accountant)
    return None if profile is None else SearchProfile.of(law, profile)


def trial_profile(trials: Sequence[Trial], *, delta: float, accountant: str = "pld") -> Profile | None:
    """The profile of a trial whose kind is drawn first and released with it: the mean of the kinds' profiles."""
    make_profile = find_accountant(accountant).profile
    if make_profile is None:
        return None
    counts = Counter(map(merge, trials))
    kinds = [(make_profile(merged, delta), n / counts.total()) for merged, n in counts.items()]
    return lambda eps: sum(share * profile(eps) for profile, share in kinds)


def calibrate(
    trials_at: Callable[[float], Iterable[Trial]], law: Law, *, epsilon: float, delta: float, accountant: str = "pld"
) -> float:
    """The smallest s, in steps of 0.0001, for which a search over `trials_at(s)` stays within epsilon.

    Formal guarantees, if every noise multiplier grows with s or stays:
    - the search's epsilon with the returned value is at most the epsilon asked for
    - with 0.0001 less it is above it
    """
    check_positive("epsilon", epsilon)

    def cost(k: int) -> float:
        return _cost(list(trials_at(k / RESOLUTION)), law, delta, accountant)

    def rough(k: int) -> float:
        """The cost of the costliest kind, in milliseconds of work."""
        kinds = {merge(trial) for trial in trials_at(k / RESOLUTION)}
        return max(_cost([kind], law, delta, RDP.name) for kind in kinds)

    guess = RESOLUTION
    slow = find_accountant(accountant).profile is not None
    if slow and not any(e.max_batch for trial in trials_at(1.0) for e in trial):
        guess = min(round(0.8 * _least(rough, epsilon, guess)), MOST_NOISE * RESOLUTION)
    least = _least(cost, epsilon, guess)
    if least > MOST_NOISE * RESOLUTION:
        raise ValueError(
            f"epsilon={epsilon:g} at delta={delta:g} is out of reach of a search: noise in the training steps does not bring it "
            "down to that. Ask for a larger epsilon, fewer trials, or more noise on the score."
        )
    return least / RESOLUTION


def _least(cost: Callable[[int], float], target: float, guess: int) -> int:
    """The smallest k with a cost of at most `target`, for a cost that falls; above the most noise if there is none."""
    costs: dict[int, float] = {}

    def fits(k: int) -> bool:
        costs[k] = cost(k)
        return costs[k] <= target

    low = high = guess
    if fits(guess):
        while low > 1 and fits(low := low * 9 // 10):
            high = low
    else:
        while high <= MOST_NOISE * RESOLUTION and not fits(high := high * 9 // 8 + 1):
            low, high = high, high * max(1, len(costs) // 8)  # in longer strides, if it is far away
        if high > MOST_NOISE * RESOLUTION:
            return high
    while high - low > 1:
        # A guess, then a look at its other side, near by: both ends close in.
        k = min(max(_between(low, high, costs[low], costs[high], target), low + 1), high - 1)
        near = max(1, (high - low) // 100)
        low, high = (low, k) if fits(k) else (k, high)
        if high - low > 1:
            k = max(low + 1, k - near) if high == k else min(high - 1, k + near)
            low, high = (low, k) if fits(k) else (k, high)
    return high


def _cost(trials: list[Trial], law: Law, delta: float, accountant: str) -> float:
    try:
        return epsilon(trials, law, delta=delta, accountant=accountant)
    except (OverflowError, ZeroDivisionError):  # almost no noise
        return math.inf


def _between(low: int, high: int, above: float, within: float, target: float) -> int:
    """Where a power law through both ends meets the target; the middle where there is none."""
    if low == 0 or not (math.isfinite(above) and 0 < within < above):
        return (low + high) // 2
    share = math.log(above / target) / math.log(above / within)
    return round(low * (high / low) ** share)
