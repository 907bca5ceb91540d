"""The settings that change the privacy guarantee, in one place: rates, noise, clip, divisor, number of steps.

All are fixed when the run is made; schedules are functions of the step, evaluated then. Whatever needs one of these
numbers (sampler, clipping, noise, division, ledger, accountant) asks here, so no two parts can disagree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rgp._version import __version__
from rgp.accounting import Budget, Event

FloatSchedule = float | Callable[[int], float]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One run's privacy-relevant numbers. Tuples have one value per step."""

    dataset_size: int  # N, public
    steps: int
    batch_sizes: tuple[int, ...]  # expected size of a logical batch: q = batch_size / N, and the divisor
    sigmas: tuple[float, ...]
    clips: tuple[float, ...] | None  # None: no clipping, allowed without noise only
    delta: float
    budget: Budget | None
    accountant: str
    microbatch_size: int
    loss_reduction: str
    max_batch: int | None
    method: str

    def batch_size(self, step: int) -> int:
        return self.batch_sizes[step]

    def rate(self, step: int) -> float:
        return self.batch_sizes[step] / self.dataset_size

    def sigma(self, step: int) -> float:
        return self.sigmas[step]

    def clip(self, step: int) -> float | None:
        return None if self.clips is None else self.clips[step]

    def sensitivity(self, step: int) -> float:
        """By how much one example can move the sum: C, or inf without clipping (never multiplied by noise then)."""
        return float("inf") if self.clips is None else self.clips[step]

    def charge(self, step: int) -> dict[str, Any]:
        """This step's line in the ledger."""
        return {
            "q": self.rate(step),
            "sigma": self.sigma(step),
            "C": self.clip(step),
            "batch_size": self.batch_size(step),
            "max_batch": self.max_batch,
            "method": self.method,
            "version": __version__,
        }

    def event(self, step: int) -> Event:
        size = None if self.max_batch is None else self.dataset_size
        return Event(self.rate(step), self.sigma(step), 1, max_batch=self.max_batch, dataset_size=size)

    def worst_event(self) -> Event:
        """What no step costs more than."""
        cap, size = self.max_batch, None if self.max_batch is None else self.dataset_size
        return Event(max(self.batch_sizes) / self.dataset_size, min(self.sigmas), 1, max_batch=cap, dataset_size=size)

    def header(self) -> dict[str, Any]:
        """The ledger's first line: what the run is, and the worst charge a lost line can stand for."""
        worst, event = min(range(self.steps), key=lambda t: self.sigmas[t] / self.rate(t)), self.worst_event()
        return {
            "dataset_size": self.dataset_size,
            "steps": self.steps,
            "delta": self.delta,
            "accountant": self.accountant,
            "epsilon": None if self.budget is None else self.budget.epsilon,
            "method": self.method,
            "version": __version__,
            "worst": {
                **self.charge(worst),
                "q": event.sampling_rate,
                "sigma": event.noise_multiplier,
            },
        }


def per_step(name: str, value: Any, steps: int, check: Callable[[Any], bool], allowed: str) -> tuple[Any, ...]:
    """A number, or a function of the step, as one value per step."""
    values = tuple(value(t) for t in range(steps)) if callable(value) else (value,) * steps
    for t, v in enumerate(values):
        if isinstance(v, bool) or not isinstance(v, (int, float)) or not check(v):
            where = f"{name} at step {t}" if callable(value) else name
            raise ValueError(f"{where} must be {allowed}; got {v!r}")
    return values
