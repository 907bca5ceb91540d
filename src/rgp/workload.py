"""What an optimizer makes of the noise, how many past vectors may be kept, and when noise is correlated by default.

All of it is public. docs/correlated-noise.md has the reasons.
"""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

from rgp.accounting import Budget
from rgp.mechanism import Mechanism, Workload
from rgp.methods import Method
from rgp.plan import Plan

LEAST_MEMORY = 1 << 30  # bytes that past noise may take on any machine that trains
# their next rate is a function of the step and of the rate before
KNOWN_SCHEDULES = (
    lr_scheduler.LambdaLR,
    lr_scheduler.MultiplicativeLR,
    lr_scheduler.StepLR,
    lr_scheduler.MultiStepLR,
    lr_scheduler.ConstantLR,
    lr_scheduler.LinearLR,
    lr_scheduler.ExponentialLR,
    lr_scheduler.PolynomialLR,
    lr_scheduler.CosineAnnealingLR,
)


def bands_by_default(
    method: Method, optimizer: torch.optim.Optimizer, *, budget: Budget | None, batch_size: Any, max_batch: int | None
) -> int | str:
    """What bands=None means: "auto" where correlated noise can be used and nothing reads single releases, otherwise 1."""
    refused = budget is None or callable(batch_size) or max_batch is not None
    turning = method.carries and (getattr(method, "keep", 1) == 1 or getattr(method, "sides", None) == "alternate")
    # These look at one release, or at a few of the last, which are noisier; what is calmer is their sum. Adam divides by them: at
    # a rate that was found for independent noise a small BERT lost four points (docs/correlated-noise.md).
    reads_releases = (
        method.power_iteration() is not None
        or getattr(method, "source", None) == "momentum"
        or not isinstance(optimizer, torch.optim.SGD)
    )
    return 1 if refused or turning or reads_releases else "auto"


def default_note(mechanism: Mechanism) -> str:
    """What a run says where noise is correlated by default."""
    return f"{mechanism.noise_words()}. bands=1 makes it independent."


def rate_words(mechanism: Mechanism, optimizer: torch.optim.Optimizer) -> str:
    """By how much the learning rate may be raised, where that is so."""
    if mechanism.worth is None or mechanism.worth.of_a_step < 1.05 or isinstance(optimizer, torch.optim.SGD):
        return ""
    return (
        f"; {type(optimizer).__name__} divides by the latter, so that a little less is gained than these numbers say, which are "
        f"SGD's, and its learning rate may be up to {mechanism.worth.of_a_step:.1f} times as large as with independent noise"
    )


def workload_of(
    model: nn.Module,
    plan: Plan,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    steps: int | None,
) -> Workload:
    """For this run. steps: None if they are not known yet; the rate then counts as constant."""
    method = plan.method
    return Workload(
        momentum=momentum_of(optimizer),
        rates=None if steps is None else rates_of(optimizer, scheduler, steps),
        stay=method.keep if method.carries and hasattr(method, "keep") else None,
        most_bands=_bands_in_memory(model, plan),
    )


def momentum_of(optimizer: torch.optim.Optimizer) -> float:
    """SGD's momentum. 0 for Adam and all others.

    Coefficients made for Adam's beta_1 of 0.9 leave 5 to 17% less noise in the weights than those made for 0, with single
    steps that are 1.9 to 2.2 times noisier (60 to 10,000 steps); and Adam divides by single steps.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return 0.0
    largest = max(optimizer.param_groups, key=lambda group: sum(p.numel() for p in group["params"]))
    return float(largest["momentum"]) if 0 <= float(largest["momentum"]) < 1 else 0.0


def rates_of(optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[float] | None:
    """The learning rates of the coming steps, of the group with the most weights; None if they cannot be known beforehand.

    The schedule is tried out on an optimizer with nothing in it, from a copy of the scheduler.
    """
    if type(scheduler) not in KNOWN_SCHEDULES:
        return None
    weights = [sum(p.numel() for p in group["params"]) for group in optimizer.param_groups]
    groups = [
        {
            "params": [torch.zeros(1)],
            "lr": float(group["lr"]),
            "initial_lr": float(group.get("initial_lr", group["lr"])),
        }
        for group in optimizer.param_groups
    ]
    trial = copy.copy(scheduler)
    trial.optimizer = torch.optim.SGD(groups, lr=0.1)
    largest, found = weights.index(max(weights)), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no optimizer took a step
        for _ in range(steps):
            found.append(float(trial.optimizer.param_groups[largest]["lr"]))
            trial.step()
    return found if any(found) and all(map(math.isfinite, found)) else None


def released_numbers(plan: Plan) -> int:
    """How many numbers a step releases."""
    sides = {"both": (1, 1), "left": (1, 0), "right": (0, 1), "alternate": (1, 1)}[
        getattr(plan.method, "sides", "both")
    ]
    return sum(e.rank * (sides[0] * e.p + sides[1] * e.d) if e.treatment == "carried" else e.size for e in plan.trained)


def _bands_in_memory(model: nn.Module, plan: Plan) -> int:
    """Past noise may take as much memory as the model itself, and a gigabyte where that is more."""
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    width = max(p.element_size() for p in model.parameters())
    return 1 + int(max(whole, LEAST_MEMORY) // (released_numbers(plan) * width))


def check_carriers(method: Method, bands: int) -> None:
    """Refuse or warn where turning carriers leave little to take back."""
    if bands == 1 or not method.carries:
        return
    if getattr(method, "sides", None) == "alternate":
        raise ValueError(
            f"bands={bands} cannot be used with sides='alternate': what a left step released has little in common with a right "
            "step, and nothing could be taken back. Use sides='both'."
        )
    keep = getattr(method, "keep", 1)
    if keep == 1:
        warnings.warn(
            f"bands={bands} with carriers that turn at every step: hardly any noise can be taken back, and sampling in groups "
            "costs more noise. Let carriers stay: rgp.RGP(keep=K) with K of at least the number of bands."
        )
