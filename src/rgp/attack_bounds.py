"""Releases -> what they let an attacker do at most: recognition rates and mu, from the privacy profile of an accountant."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

from rgp.accountants import PLD, composed_epsilon, find_accountant
from rgp.composition import Event, merge
from rgp.validate import check_probability


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """What the releases let an attacker do who knows everything but whether one example was used.

    mu: every (epsilon, delta') guarantee of these releases with delta' >= `delta` also follows from mu-GDP
    tpr_at_0_1_percent: largest share of members recognised when 0.1% of non-members are taken for members
    tpr_at_1_percent: the same at 1%
    """

    delta: float
    mu: float
    tpr_at_0_1_percent: float
    tpr_at_1_percent: float


def meaning(events: Iterable[Event], *, delta: float, accountant: str = "pld") -> Meaning:
    """What the releases let an attacker do, from their privacy profile delta(epsilon), which the accountant must have.

    Each epsilon bounds the true-positive rate at a false-positive rate a by `delta(epsilon) + exp(epsilon) a`, and from
    the other corner by `1 - exp(-epsilon) (1 - delta(epsilon) - a)`. The best epsilon gives the trade-off curve, any
    other one a larger rate. (riskcal 1.5 reads the curve from the PLD's own arrays and cuts off negative rounding
    errors there: for sigma 1.5, q 0.04, 500 steps its rate is 0.2% too small at an interval of 1e-4, 20% at 1e-5.)

    Formal guarantees:
    - the rates are upper bounds for every attack, whatever it knows, in either direction (added or removed)
    - mu is not the mu that merely has the same epsilon at `delta`: it is at least that, and holds at every larger delta
      too. For `sampling_rate=1` it is sqrt(steps) / noise_multiplier
    """
    check_probability("delta", delta)
    merged = merge(events)
    if not merged:
        return Meaning(delta=delta, mu=0.0, tpr_at_0_1_percent=0.001, tpr_at_1_percent=0.01)
    if any(event.noise_multiplier == 0 for event in merged):
        return Meaning(delta=delta, mu=math.inf, tpr_at_0_1_percent=1.0, tpr_at_1_percent=1.0)
    make_profile = find_accountant(accountant).profile
    if make_profile is None:
        raise ValueError(f'accountant={accountant!r} has no privacy profile; use "{PLD.name}"')
    profile = cache(make_profile(merged, float(delta)))
    return Meaning(
        delta=delta,
        mu=_gaussian_mu(profile, composed_epsilon(merged, float(delta), accountant)),
        tpr_at_0_1_percent=_true_positive_rate(profile, 0.001),
        tpr_at_1_percent=_true_positive_rate(profile, 0.01),
    )


def _true_positive_rate(profile: Callable[[float], float], false_positive_rate: float) -> float:
    from scipy.optimize import minimize_scalar

    a = false_positive_rate

    def steep(eps: float) -> float:
        return profile(eps) + math.exp(eps) * a

    def flat(eps: float) -> float:
        return 1 - math.exp(-eps) * (1 - profile(eps) - a)

    best = 1.0
    for bound in (steep, flat):
        found = minimize_scalar(bound, bounds=(0.0, -math.log(a)), method="bounded", options={"xatol": 1e-3})
        best = min(best, float(found.fun), bound(0.0))
        if best < 1 - a:  # on this side of the diagonal only the steep lines touch the curve
            break
    return best


def _gaussian_mu(profile: Callable[[float], float], largest_epsilon: float) -> float:
    """The smallest mu whose Gaussian profile is above `profile` from 0 to `largest_epsilon`."""
    from scipy.optimize import brentq, minimize_scalar
    from scipy.special import log_ndtr, ndtr

    def needed(eps: float) -> float:
        delta = min(profile(eps), 1 - 1e-12)  # nearer to 1 there are no digits left to tell mu from

        def excess(mu: float) -> float:
            return float(ndtr(mu / 2 - eps / mu) - math.exp(eps + log_ndtr(-mu / 2 - eps / mu))) - delta

        high = 1.0
        while excess(high) < 0:
            high *= 2
        return float(brentq(excess, 1e-9, high, xtol=1e-9)) if excess(1e-9) < 0 else 1e-9

    grid = [largest_epsilon * i / 16 for i in range(17)]
    values = [needed(eps) for eps in grid]
    top = max(range(17), key=values.__getitem__)
    near = (grid[max(top - 1, 0)], grid[min(top + 1, 16)])
    if near[0] == near[1]:
        return values[top]
    peak = minimize_scalar(lambda eps: -needed(eps), bounds=near, method="bounded", options={"xatol": 1e-3 * near[1]})
    return max(values[top], float(-peak.fun))
