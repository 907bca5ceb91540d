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
from functools import lru_cache
from itertools import groupby
from numbers import Integral
from typing import Any

import numpy as np

from rgp import accounting, band_choice
from rgp._version import __version__
from rgp.accounting import Budget, Event
from rgp.bands import coefficients as best_coefficients
from rgp.bands import noise_of_steps
from rgp.clips import Bound, ClipRule, as_rule, rule_from_json
from rgp.sampling import Sampling, make_sampling
from rgp.units import Rows, Unit, unit_from_json
from rgp.validate import check_count, per_step

FloatSchedule = float | Callable[[int], float]


@dataclass(frozen=True, kw_only=True)
class Worth:
    """What correlated noise gains over independent noise of the same epsilon, or at least that much where carriers turn.

    in_weights, at_the_end: how many times smaller the noise in the weights is, over the run and after the last step
    of_a_step: how many times larger the noise of a single step is; an optimizer that divides by it, such as Adam, needs a
        learning rate that is larger by this factor
    """

    in_weights: float
    at_the_end: float
    of_a_step: float


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What becomes of the noise: the optimizer's momentum and rates, as far as they are known; public.

    stay: steps for which carriers stay; None if they never turn.
    most_bands: what memory allows "auto" to keep.
    """

    momentum: float = 0.0
    rates: Sequence[float] | None = None
    stay: int | None = None
    most_bands: int = 1 << 40


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """One run's promise.

    unit: whose presence is hidden
    sampling: how units are drawn; it owns q and the divisor
    clip: how far one unit can move the sum
    sigmas: the noise's standard deviation over the sensitivity, for each step
    method: its name, for the ledger
    coefficients: c_0 .. c_{b-1} of noise that takes back what earlier steps added (correlated.py); (1.0,) is independent noise
    worth: what that gains over independent noise; known where there is a budget
    """

    unit: Unit
    sampling: Sampling
    clip: ClipRule
    sigmas: tuple[float, ...]
    steps: int
    delta: float
    budget: Budget | None
    accountant: str
    method: str
    coefficients: tuple[float, ...] = (1.0,)
    worth: Worth | None = None

    @property
    def bands(self) -> int:
        """Over how many steps noise is correlated; 1 is independent noise."""
        return len(self.coefficients)

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
        """The standard deviation of the fresh noise on every entry of a clipped sum, which one unit can move by `sensitivity`."""
        sigma = self.sigma(step)
        return sigma * sensitivity if sigma > 0 else 0.0

    def noise_of_step(self, step: int, sensitivity: float) -> float:
        """The standard deviation of all the noise on every entry of a step, with what is taken back, while carriers stay."""
        std = self.noise_std(step, sensitivity)
        return std if self.bands == 1 else std * float(_factors(self.coefficients, self.steps)[step])

    def noise_words(self) -> str:
        """The kind of noise in words, and what it gains."""
        if self.bands == 1:
            return "independent noise"
        words = f"noise correlated over {self.bands} steps"
        if self.worth is None:
            return words
        return (
            f"{words}: noise in the weights {self.worth.in_weights:.1f} times smaller than with independent noise, in a single "
            f"step {self.worth.of_a_step:.1f} times larger"
        )

    def event(self, step: int) -> Event:
        return self.sampling.event(self.rate(step), self.sigma(step))

    def events(self) -> list[Event]:
        """The events of the whole run, as planned: what the accountant is given."""
        counts = Counter((self.rate(t), self.sigma(t)) for t in range(self.sampling.turns(self.steps)))
        return [self.sampling.event(rate, sigma, n) for (rate, sigma), n in counts.items()]

    def worst_event(self) -> Event:
        """An event that costs at least as much as any step."""
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
        correlated: dict[str, Any] = {"bands": self.bands, "coefficients": list(self.coefficients)}
        return {
            "dataset_size": self.dataset_size,
            **self.unit.to_json(),
            "steps": self.steps,
            "delta": self.delta,
            "accountant": self.accountant,
            "epsilon": None if self.budget is None else self.budget.epsilon,
            "method": self.method,
            "version": __version__,
            "worst": {
                **{
                    k: v for k, v in self.charge(worst).items() if k != "group"
                },  # the group of a lost line is unknown: all are charged
                "q": event.sampling_rate,
                "sigma": event.noise_multiplier,
            },
            **(correlated if self.bands > 1 else {}),
        }

    def to_json(self) -> dict[str, Any]:
        """For a checkpoint. Schedules are [value, how many steps] pairs."""
        planned = [self.clip.planned(t) for t in range(self.steps)]
        return {
            "dataset_size": self.dataset_size,
            **self.unit.to_json(),
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
            **({"coefficients": list(self.coefficients)} if self.bands > 1 else {}),
            **({"worth": asdict(self.worth)} if self.worth is not None else {}),
        }

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Mechanism:
        size = saved["dataset_size"]
        clips = None if saved["clips"] is None else _values(saved["clips"])
        coefficients = tuple(saved.get("coefficients", (1.0,)))
        worth = saved.get("worth")
        return cls(
            unit=unit_from_json(saved.get("unit"), size),
            sampling=make_sampling(
                size, _values(saved["batch_sizes"]), bands=len(coefficients), max_batch=saved["max_batch"]
            ),
            coefficients=coefficients,
            worth=worth and Worth(**worth),
            clip=rule_from_json(saved["clip_rule"], clips),
            sigmas=_values(saved["sigmas"]),
            steps=saved["steps"],
            delta=saved["delta"],
            budget=saved["budget"] and Budget(**saved["budget"]),
            accountant=saved["accountant"],
            method=saved["method"],
        )


@lru_cache(maxsize=8)
def _factors(coefficients: tuple[float, ...], steps: int) -> np.ndarray:
    return noise_of_steps(coefficients, steps)


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
    bands: int | str = 1,
    workload: Workload | None = None,
) -> Mechanism:
    """The promise that these arguments of `privatize` make, checked; calibrates the noise where a budget is given.

    size: the number of rows; or unit, if it is not a row.
    spent: releases of earlier runs, which the budget covers too.
    workload: what becomes of the noise, for the choice of bands and their coefficients.
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
    rule, workload = as_rule(clip, steps), workload or Workload()
    batch_sizes = _batch_sizes(batch_size, steps, unit)

    delta = budget.delta if budget is not None else delta
    delta = accounting.default_delta(size) if delta is None else delta
    accounting.check_delta(delta, size)
    b, worth = _bands(bands, workload, steps, size, batch_sizes, max_batch, noise_multiplier, budget, delta, spent)
    sampling = make_sampling(size, batch_sizes, bands=b, max_batch=max_batch)
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
        coefficients=_coefficients(b, steps, workload),
        worth=worth,
    )
    for step in range(steps) if rule.adapts else ():
        mechanism.bound(step)  # an adaptive rule's noise on the count must fit in every step
    return mechanism


def _coefficients(bands: int, steps: int, workload: Workload) -> tuple[float, ...]:
    if bands == 1:
        return (1.0,)
    return tuple(best_coefficients(bands, steps, momentum=workload.momentum, stay=workload.stay).tolist())


def _batch_sizes(batch_size: Any, steps: int, unit: Unit) -> tuple[int, ...]:
    def fits(value: Any) -> bool:
        return isinstance(value, Integral) and 0 < int(value) <= unit.size

    return per_step("batch_size", batch_size, steps, fits, unit.allowed_batch_sizes())


def _bands(
    bands: int | str,
    workload: Workload,
    steps: int,
    size: int,
    batch_sizes: tuple[int, ...],
    max_batch: int | None,
    noise_multiplier: Any,
    budget: Budget | None,
    delta: float,
    spent: Sequence[Event],
) -> tuple[int, Worth | None]:
    """The number of bands, checked or chosen, and what it is worth."""
    if bands == 1 and not isinstance(bands, bool):
        return 1, None
    if bands != "auto":
        if isinstance(bands, str):
            raise ValueError(f'bands={bands!r} must be a number of steps or "auto"')
        bands = check_count("bands", bands)
    why = None
    if len(set(batch_sizes)) > 1:
        why = "batch_size is a schedule, and groups are drawn at one rate"
    elif callable(noise_multiplier):
        why = "noise_multiplier is a schedule, and noise is taken back in units of one sigma"
    elif max_batch is not None:
        why = "the accounting of max_batch is not known for examples that are drawn in groups"
    elif bands == "auto" and budget is None:
        why = "there is no budget at which to compare: give budget= in place of noise_multiplier=, or a number of bands"
    elif isinstance(bands, int) and bands > steps:
        why = f"the run has {steps} steps, and noise cannot be taken back over more"
    if why is not None:
        raise ValueError(f"bands={bands!r} (correlated noise) cannot be used: {why}. Or leave bands out.")
    if budget is None:
        return check_count("bands", bands), None
    # Of what is left at least: the more there is, the more correlated noise is worth.
    left = budget.epsilon - accounting.epsilon(spent, delta=delta, accountant=budget.accountant)
    if left <= 0 or (bands == "auto" and 1 in (workload.most_bands, workload.stay)):
        return (1 if bands == "auto" else check_count("bands", bands)), None
    asked: dict[str, Any] = {
        "steps": steps,
        "epsilon": left,
        "delta": delta,
        "accountant": budget.accountant,
        "momentum": workload.momentum,
        "rates": workload.rates,
        "stay": workload.stay,
    }
    if bands == "auto":
        chosen = band_choice.choose(
            **asked,
            dataset_size=size,
            batch_size=batch_sizes[0],
            vector_bytes=1,
            most_bytes=workload.most_bands - 1,
        )
    else:
        chosen = band_choice.evaluate(check_count("bands", bands), sampling_rate=batch_sizes[0] / size, **asked)
    if chosen.bands == 1:
        return 1, None
    return chosen.bands, Worth(
        in_weights=chosen.factor_mean, at_the_end=chosen.factor_last, of_a_step=chosen.step_factor
    )


def _calibrated(budget: Budget, delta: float, sampling: Sampling, spent: Sequence[Event]) -> float:
    before = accounting.epsilon(spent, delta=delta, accountant=budget.accountant)
    if before >= budget.epsilon:
        raise ValueError(
            f"the earlier runs that `after` names have spent epsilon {before:.4g} at delta={delta:g}: nothing is left of the "
            f"budget of {budget.epsilon:g}, which covers them too"
        )
    counts = Counter(map(sampling.rate, range(sampling.turns(len(sampling.batch_sizes)))))

    def events(sigma: float) -> list[Event]:
        return [*spent, *(sampling.event(rate, sigma, n) for rate, n in counts.items())]

    return accounting.calibrate_scale(events, epsilon=budget.epsilon, delta=delta, accountant=budget.accountant)
