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
        self._curve = accounting.epsilon_curve(
            event, mechanism.steps, delta=mechanism.delta, accountant=mechanism.accountant, points=20
        )

    def after(self, run: Run) -> float:
        count = run.ledger.count  # more than the steps, if some were charged twice after a crash
        found = next((epsilon for step, epsilon in self._curve if step >= count), None)
        return run.epsilon() if found is None else found
