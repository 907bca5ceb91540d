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
from rgp.clips import AdaptiveClip, AutoClip, Bound, ClipRule, GroupClip, adaptive_bound

FloatSchedule = float | Callable[[int], float]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One run's privacy-relevant numbers. Tuples have one value per step."""

    dataset_size: int  # N, public
    steps: int
    batch_sizes: tuple[int, ...]  # expected size of a logical batch: q = batch_size / N, and the divisor
    sigmas: tuple[float, ...]
    clips: tuple[float, ...] | None  # C of each step, an adaptive rule's first; None: no clipping, without noise only
    delta: float
    budget: Budget | None
    accountant: str
    microbatch_size: int
    loss_reduction: str
    max_batch: int | None
    method: str
    clip_rule: ClipRule | None = None  # None: flat
    views: int = 1  # of each example, their gradients averaged before clipping

    def batch_size(self, step: int) -> int:
        return self.batch_sizes[step]

    def rate(self, step: int) -> float:
        return self.batch_sizes[step] / self.dataset_size

    def sigma(self, step: int) -> float:
        return self.sigmas[step]

    def clip(self, step: int) -> float | None:
        return None if self.clips is None else self.clips[step]

    @property
    def adapts(self) -> bool:
        """Whether C reacts to what was released; it may, because the noise is sigma C."""
        return isinstance(self.clip_rule, AdaptiveClip)

    def bound(self, step: int, adapted: float | None = None) -> Bound:
        """How this step clips. `adapted`: the C that an adaptive rule has arrived at."""
        rule = self.clip_rule
        if isinstance(rule, AdaptiveClip):
            norm = rule.initial if adapted is None else adapted
            return adaptive_bound(rule, norm, self.sigma(step), self.batch_size(step))
        if isinstance(rule, GroupClip):
            return Bound(tuple(rule.norms.values()))
        gamma = rule.gamma if isinstance(rule, AutoClip) else None
        return Bound(None if self.clips is None else (self.clips[step],), gamma=gamma)

    def charge(self, step: int, bound: Bound | None = None) -> dict[str, Any]:
        """This step's line in the ledger."""
        return {
            "q": self.rate(step),
            "sigma": self.sigma(step),
            "C": (bound or self.bound(step)).clip,
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
