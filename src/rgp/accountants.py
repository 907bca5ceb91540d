"""Accountants by name: all that the rest of the library knows about one is an `Accountant` in the table below.

`pld` (privacy loss distributions) is tight and the default; `rdp` (Rényi) is what the paper used, and is larger. A further
one is an entry here and nothing else: arguments, configs, help, cards, calibration and `rgp tune` look it up by name
(tests/test_accountants.py adds one). Whatever an accountant computes, it must be an upper bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rgp import composition
from rgp.composition import Event

Merged = tuple[Event, ...]  # as `composition.merge` returns them
Profile = Callable[[float], float]  # epsilon -> delta


@dataclass(frozen=True, kw_only=True)
class Accountant:
    """One way to add up privacy losses.

    label: its name on cards
    words: what it is good for, in a few words, for help texts
    epsilon: of merged events at delta; noise is above 0
    coarse_epsilon: an upper bound at a fraction of the work, for searches that `epsilon` finishes; None if that is fast itself
    start: a ledger of dp-accounting's for these events, which takes them piece by piece (`composition.compose`)
    rounding: by how much floating point may have lowered a delta of that ledger
    max_batch: whether it has a bound for draws that are cut down to a maximum
    profile: delta as a function of epsilon, most accurate near the given delta. Bounds on attacks and on searches for settings
        follow from it. None if it has no profile
    best_of: the epsilon of the best of a random number of equal runs; (merged, mean, shape, delta), as dp-accounting's
        repeat-and-select has them. Asked only where there is no profile
    """

    name: str
    label: str
    words: str
    epsilon: Callable[[Merged, float], float]
    coarse_epsilon: Callable[[Merged, float], float] | None = None
    start: Callable[[Merged, float], Any]
    rounding: Callable[[Iterable[Event]], float] = lambda events: 0.0
    max_batch: bool = False
    profile: Callable[[Merged, float], Profile] | None = None
    best_of: Callable[[Merged, float, float, float], float] | None = None

    def check(self, merged: Iterable[Event]) -> None:
        """Refuse what this accountant has no bound for."""
        for event in merged:
            if event.max_batch is not None and not self.max_batch:
                raise ValueError(
                    f"max_batch={event.max_batch}: {self.label} have no bound for batches cut to a maximum. "
                    f"Use accountant={with_max_batch()}, or no max_batch."
                )


def _pld_epsilon(merged: Merged, delta: float) -> float:
    return composition.read_epsilon(composition.composed_pld(merged, delta), delta, composition.fft_rounding(merged))


def _renyi_epsilon(merged: Merged, delta: float) -> float:
    return composition.read_epsilon(composition.compose(composition.renyi_ledger(), merged), delta)


PLD = Accountant(
    name="pld",
    label="privacy loss distributions (PLD)",
    words="tight",
    epsilon=_pld_epsilon,
    coarse_epsilon=composition.coarse_epsilon,
    start=composition.coarse_ledger,
    rounding=composition.fft_rounding,
    max_batch=True,
    profile=composition.pld_profile,
)
RDP = Accountant(
    name="rdp",
    label="Rényi divergences (RDP)",
    words="larger, as in the paper",
    epsilon=_renyi_epsilon,
    start=lambda merged, delta: composition.renyi_ledger(),
    best_of=composition.renyi_best_of,
)
ACCOUNTANTS = {accountant.name: accountant for accountant in (PLD, RDP)}


def find_accountant(name: str) -> Accountant:
    if name not in ACCOUNTANTS:
        known = " or ".join(
            f'"{a.name}" ({a.words}{", the default" if a is PLD else ""})' for a in ACCOUNTANTS.values()
        )
        raise ValueError(f"accountant={name!r} must be {known}.")
    return ACCOUNTANTS[name]


def accountant_help() -> str:
    """One line about all of them, for help texts."""
    return "; ".join(f"{a.name}: {a.words}" for a in ACCOUNTANTS.values())


def accountant_label(name: str | None) -> str:
    """A card's words. Cards of runs without noise have no accountant, and those of later versions may name an unknown one."""
    return "none" if name is None else ACCOUNTANTS[name].label if name in ACCOUNTANTS else name


def with_max_batch() -> str:
    """The names of those that have a bound for max_batch, for error messages."""
    return " or ".join(a.name for a in ACCOUNTANTS.values() if a.max_batch)


@lru_cache(maxsize=4096)
def composed_epsilon(merged: Merged, delta: float, accountant: str) -> float:
    if not merged:
        return 0.0
    if any(event.noise_multiplier == 0 for event in merged):
        return math.inf
    chosen = find_accountant(accountant)
    chosen.check(merged)
    try:
        return chosen.epsilon(merged, delta)
    except (OverflowError, ZeroDivisionError):  # noise of a thousandth of the clip norm, or less: nothing is protected
        return math.inf


def coarse_bound(merged: Merged, delta: float, accountant: str) -> float:
    """The accountant's coarse bound, or the real one where that is fast or trivial."""
    chosen = find_accountant(accountant)
    if chosen.coarse_epsilon is None or not merged or any(event.noise_multiplier == 0 for event in merged):
        return composed_epsilon(merged, delta, accountant)
    chosen.check(merged)
    return chosen.coarse_epsilon(merged, delta)
