"""What is promised, as one frozen value: unit, sampling, clip, noise, number of steps, divisor, budget.

It is made once (`plan_mechanism`), written into ledger and checkpoint and shown on the card. Sampler, clipping, noise,
division, ledger and accountant ask it, and decide nothing themselves, so no two parts can disagree. Schedules are functions
of the step, evaluated when it is made.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from numbers import Integral
from typing import Any

from rgp import accounting
from rgp._version import __version__
from rgp.accounting import Budget, Event
from rgp.clips import Bound, ClipRule, as_rule, rule_from_json
from rgp.sampling import Poisson
from rgp.units import Rows, Unit, unit_from_json
from rgp.validate import check_count, per_step

FloatSchedule = float | Callable[[int], float]


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """One run's promise.

    unit: whose presence is hidden
    sampling: how units are drawn; it owns q and the divisor
    clip: how far one unit can move the sum
    sigmas: of each step, the noise's standard deviation over the sensitivity
    method: the name of what trains, for the ledger
    """

    unit: Unit
    sampling: Poisson
    clip: ClipRule
    sigmas: tuple[float, ...]
    steps: int
    delta: float
    budget: Budget | None
    accountant: str
    method: str

    @property
    def dataset_size(self) -> int:
        """N, the number of units; public."""
        return self.unit.size

    def batch_size(self, step: int) -> int:
        """The expected size of a logical batch, by which the noisy sum is divided."""
        return self.sampling.batch_size(step)

    def rate(self, step: int) -> float:
        return self.sampling.rate(step)

    def sigma(self, step: int) -> float:
        return self.sigmas[step]

    def bound(self, step: int, adapted: float | None = None) -> Bound:
        """How this step clips. `adapted`: the C that an adaptive rule has arrived at."""
        return self.clip.bound(step, sigma=self.sigma(step), batch_size=self.batch_size(step), adapted=adapted)

    def noise_std(self, step: int, sensitivity: float) -> float:
        """Of the noise on every entry of a clipped sum, which one unit can move by `sensitivity`."""
        sigma = self.sigma(step)
        return sigma * sensitivity if sigma > 0 else 0.0

    def event(self, step: int) -> Event:
        return self.sampling.event(self.rate(step), self.sigma(step))

    def events(self) -> list[Event]:
        """What the accountant is told of the whole run, as it is planned."""
        counts = Counter((self.rate(t), self.sigma(t)) for t in range(self.steps))
        return [self.sampling.event(rate, sigma, n) for (rate, sigma), n in counts.items()]

    def worst_event(self) -> Event:
        """What no step costs more than."""
        return self.sampling.event(self.sampling.largest_rate, min(self.sigmas))

    def charge(self, step: int, bound: Bound | None = None) -> dict[str, Any]:
        """This step's line in the ledger."""
        return {
            **self.sampling.charge(step),
            "sigma": self.sigma(step),
            "C": (bound or self.bound(step)).clip,
            "method": self.method,
            "version": __version__,
        }

    def header(self) -> dict[str, Any]:
        """The ledger's first line: what the run is, and the worst charge a lost line can stand for."""
        worst, event = min(range(self.steps), key=lambda t: self.sigmas[t] / self.rate(t)), self.worst_event()
        return {
            "dataset_size": self.dataset_size,
            **self._unit_json(),
            "steps": self.steps,
            "delta": self.delta,
            "accountant": self.accountant,
            "epsilon": None if self.budget is None else self.budget.epsilon,
            "method": self.method,
            "version": __version__,
            "worst": {**self.charge(worst), "q": event.sampling_rate, "sigma": event.noise_multiplier},
        }

    def to_json(self) -> dict[str, Any]:
        """For a checkpoint. Schedules are [value, how many steps] pairs."""
        planned = [self.clip.planned(t) for t in range(self.steps)]
        return {
            "dataset_size": self.dataset_size,
            **self._unit_json(),
            "steps": self.steps,
            "batch_sizes": _runs(self.sampling.batch_sizes),
            "max_batch": self.sampling.max_batch,
            "sigmas": _runs(self.sigmas),
            "clips": None if planned[0] is None else _runs(planned),
            "clip_rule": self.clip.to_json(),
            "delta": self.delta,
            "budget": self.budget and asdict(self.budget),
            "accountant": self.accountant,
            "method": self.method,
        }

    def _unit_json(self) -> dict[str, Any]:
        return (
            {} if isinstance(self.unit, Rows) else {"unit": self.unit.to_json()}
        )  # rows are what files mean without it

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Mechanism:
        size = saved["dataset_size"]
        clips = None if saved["clips"] is None else _values(saved["clips"])
        return cls(
            unit=unit_from_json(saved.get("unit"), size),
            sampling=Poisson(size=size, batch_sizes=_values(saved["batch_sizes"]), max_batch=saved["max_batch"]),
            clip=rule_from_json(saved["clip_rule"], clips),
            sigmas=_values(saved["sigmas"]),
            steps=saved["steps"],
            delta=saved["delta"],
            budget=saved["budget"] and Budget(**saved["budget"]),
            accountant=saved["accountant"],
            method=saved["method"],
        )


def _runs(values: Any) -> list[list[Any]]:
    return [[value, len(list(same))] for value, same in groupby(values)]


def _values(runs: list[list[Any]]) -> tuple[Any, ...]:
    return tuple(value for value, count in runs for _ in range(count))


def plan_mechanism(
    *,
    size: int | None = None,
    unit: Unit | None = None,
    method: str,
    batch_size: Any,
    budget: Budget | None = None,
    noise_multiplier: Any = None,
    delta: float | None = None,
    epochs: float | None = None,
    steps: int | None = None,
    clip: Any = 1.0,
    max_batch: int | None = None,
    spent: Sequence[Event] = (),
) -> Mechanism:
    """The promise that these arguments of `privatize` make, checked; calibrates the noise where a budget is given.

    size: the number of rows; or unit, if it is not a row.
    spent: releases of earlier runs, which the budget covers too.
    """
    if unit is None:
        assert size is not None
        unit = Rows(size)
    size = unit.size
    if (epochs is None) == (steps is None):
        raise ValueError(f"give either epochs or steps; got epochs={epochs!r}, steps={steps!r}")
    if (budget is None) == (noise_multiplier is None):
        raise ValueError("give either budget=rgp.Budget(epsilon, delta) or noise_multiplier=, and not both")
    if budget is not None and delta is not None:
        raise ValueError("delta goes with noise_multiplier; with a budget it is part of it: rgp.Budget(epsilon, delta)")
    if steps is None:
        if callable(batch_size):
            raise ValueError("a batch_size schedule needs steps=, because epochs have no fixed length with it")
        assert epochs is not None
        steps = accounting.planned_steps(epochs, size, check_count("batch_size", batch_size))
    steps = check_count("steps", steps)
    if max_batch is not None:
        max_batch = check_count("max_batch", max_batch)
    sampling = Poisson(size=size, batch_sizes=_batch_sizes(batch_size, steps, unit), max_batch=max_batch)
    rule = as_rule(clip, steps)

    delta = budget.delta if budget is not None else delta
    delta = accounting.default_delta(size) if delta is None else delta
    accounting.check_delta(delta, size)
    if budget is not None:
        if rule.first is None:
            raise ValueError("clip=None bounds nothing, so no noise can protect anyone; give clip= a number")
        sigmas = (_calibrated(budget, delta, sampling, spent),) * steps
    else:
        finite = "at least 0 and finite"
        sigmas = per_step("noise_multiplier", noise_multiplier, steps, lambda s: 0 <= s < math.inf, finite)
        if rule.first is None and any(s > 0 for s in sigmas):
            raise ValueError("clip=None is allowed with noise_multiplier=0 only: noise is a multiple of the clip norm")
        if not all(s > 0 for s in sigmas):
            warnings.warn("noise_multiplier is 0: NOTHING IS PRIVATE in this run, and its epsilon is infinite.")
    mechanism = Mechanism(
        unit=unit,
        sampling=sampling,
        clip=rule,
        sigmas=sigmas,
        steps=steps,
        delta=delta,
        budget=budget,
        accountant="pld" if budget is None else budget.accountant,
        method=method,
    )
    for step in range(steps) if rule.adapts else ():
        mechanism.bound(step)  # an adaptive rule's noise on the count must fit in every step
    return mechanism


def _batch_sizes(batch_size: Any, steps: int, unit: Unit) -> tuple[int, ...]:
    size = unit.size
    allowed = f"an integer from 1 to the dataset's size {size}"
    if not isinstance(unit, Rows):
        allowed = f"an integer from 1 to the number of units {size} (it counts each {unit.short} once)"
    return per_step("batch_size", batch_size, steps, lambda b: isinstance(b, Integral) and 0 < int(b) <= size, allowed)


def _calibrated(budget: Budget, delta: float, sampling: Poisson, spent: Sequence[Event]) -> float:
    before = accounting.epsilon(spent, delta=delta, accountant=budget.accountant)
    if before >= budget.epsilon:
        raise ValueError(
            f"the earlier runs that `after` names have spent epsilon {before:.4g} at delta={delta:g}: nothing of the budget of "
            f"{budget.epsilon:g}, which covers them too, is left"
        )
    counts = Counter(map(sampling.rate, range(len(sampling.batch_sizes))))

    def events(sigma: float) -> list[Event]:
        return [*spent, *(sampling.event(rate, sigma, n) for rate, n in counts.items())]

    return accounting.calibrate_scale(events, epsilon=budget.epsilon, delta=delta, accountant=budget.accountant)
