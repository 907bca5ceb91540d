"""Epsilon while a run trains."""

from __future__ import annotations

from typing import Any

from rgp import accounting
from rgp.run import Run


class EpsilonSoFar:
    """A cheap upper bound on what was spent, for every step."""

    def __init__(self, run: Run) -> None:
        mechanism = run.mechanism
        event: Any = mechanism.event(0) if len(mechanism.events()) == 1 else mechanism.event
        turns = mechanism.sampling.turns(mechanism.steps)
        curve = accounting.epsilon_curve(
            event, turns, delta=mechanism.delta, accountant=mechanism.accountant, points=20
        )
        self._curve = [(turn * mechanism.bands, epsilon) for turn, epsilon in curve]

    def after(self, run: Run) -> float:
        count = run.ledger.count  # more than the steps, if some were charged twice after a crash
        twice = count > run.step_index and run.mechanism.bands > 1  # in which group?
        anew = "deal" in (run.ledger.records or [{}])[-1]  # groups were dealt again: the curve knows one deal
        if twice or anew or run.ledger.header.get("after"):
            return run.epsilon()
        found = next((epsilon for step, epsilon in self._curve if step >= count), None)
        return run.epsilon() if found is None else found
