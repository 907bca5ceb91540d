"""The engine seen from outside: train with `rgp.privatize`, and compare with autograd one example at a time.

Nothing here uses the engine's own arithmetic. P(G) is formed with dense p x p and d x d projectors from the carriers
that `run.carriers` shows, norms are those of docs/method.md, "Which norm is clipped", and examples never share a forward pass.
"""

from __future__ import annotations

import copy
import fcntl
import json
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

import rgp

TOLERANCE = 1e-9
ERRORS: dict[str, float] = {}

Losses = Callable[[nn.Module, Any], Tensor]  # (model, batch) -> one loss per example


def record(family: str | None, error: float) -> None:
    if family is not None:
        ERRORS[family] = max(error, ERRORS.get(family, 0.0))


def write_errors() -> None:
    """Merge the worst error per family into the JSON file that the environment variable RGP_ERRORS names."""
    if not (path := os.environ.get("RGP_ERRORS")) or not ERRORS:
        return
    with open(path, "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        known = json.loads(file.read() or "{}")
        merged = {name: max(ERRORS.get(name, 0.0), known.get(name, 0.0)) for name in sorted({*ERRORS, *known})}
        Path(path).write_text(json.dumps(merged, indent=1) + "\n")


def privatize(model: nn.Module, data: Any, *, lr: float = 1.0, optimizer: Any = None, **options: Any) -> rgp.Run:
    """privatize without privacy and without its warning: every example in every batch, SGD with rate 1."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr) if optimizer is None else optimizer
    options = {"batch_size": len(data), "steps": 1, "noise_multiplier": 0.0, "seed": 0, **options}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="noise_multiplier is 0")
        return rgp.privatize(model, optimizer, data, **options)


def per_example_gradients(model: nn.Module, data: Sequence[Any], losses: Losses, collate=default_collate) -> list[dict]:
    """Each example's gradient of every parameter, by plain autograd, one example at a time."""
    parameters = dict(model.named_parameters())
    for parameter in parameters.values():
        parameter.requires_grad_(True)
    found = []
    for example in data:
        loss = losses(model, collate([example])).sum()
        grads = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        found.append(
            {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(parameters.items(), grads, strict=True)}
        )
    return found


def projection(G: Tensor, L: Tensor, R: Tensor, sides: str) -> Tensor:
    G = G.flatten(1)
    left, right = L @ L.T, R.T @ R
    if sides == "left":
        return G @ right
    if sides == "right":
        return left @ G
    return G - (torch.eye(len(left)).to(G) - left) @ G @ (torch.eye(len(right)).to(G) - right)


def squared_norm(G: Tensor, L: Tensor, R: Tensor, sides: str, norm: str) -> Tensor:
    """The squared norm of what is released for one carried parameter: docs/method.md, "Which norm is clipped"."""
    G = G.flatten(1)
    if sides == "left":
        return (G @ R.T).square().sum()
    if sides == "right":
        return (L.T @ G).square().sum()
    if norm == "paper":
        return (G @ R.T).square().sum() + (L.T @ G).square().sum()
    return projection(G, L, R, sides).square().sum()


class Expected:
    """What one logical step has to do to every parameter, given the carriers that it used."""

    def __init__(self, gradients, plan: rgp.Plan, carriers, step: int, clip: float | None, batch_size: int) -> None:
        method = plan.method
        sides = method.sides if isinstance(method, rgp.RGP) else "both"
        if sides == "alternate":
            sides = ("left", "right")[step % 2]
        norm = getattr(method, "norm", "")
        self.norms, self.factors = [], []
        self.update = {e.name: torch.zeros_like(gradients[0][e.name]) for e in plan}
        for G in gradients:
            squared = torch.zeros((), dtype=torch.float64)
            for e in plan.trained:
                if e.treatment == "carried":
                    squared += squared_norm(G[e.name], *carriers[e.name], sides, norm)
                else:
                    squared += (e.scale * G[e.name]).square().sum()
            self.norms.append(float(squared.sqrt()))
            self.factors.append(1.0 if clip is None or self.norms[-1] <= clip else clip / self.norms[-1])
            for e in plan.trained:
                P = projection(G[e.name], *carriers[e.name], sides) if e.treatment == "carried" else G[e.name]
                self.update[e.name] -= self.factors[-1] / batch_size * P.view_as(G[e.name])

    @property
    def clipped(self) -> int:
        return sum(f < 1 for f in self.factors)


def check_step(expected: Expected, before: dict[str, Tensor], after: dict[str, Tensor]) -> float:
    """The worst relative error over the parameters; what the plan freezes must not move at all."""
    whole = float(torch.stack([u.norm() for u in expected.update.values()]).norm())
    assert whole > 0, "a test that expects nothing tests nothing"
    worst = 0.0
    for name, update in expected.update.items():
        moved = after[name] - before[name]
        if not update.any():
            assert not moved.any(), name
            continue
        # a gradient that is zero by symmetry (the bias of attention's keys) is rounding on both sides
        scale = max(float(update.norm()), 1e-5 * whole)
        worst = max(worst, float((moved - update).norm()) / scale)
    return worst


def train(run: rgp.Run, model: nn.Module, losses: Losses) -> None:
    for batch in run:
        run.step(losses(model, batch).mean())


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def check_exact(
    model: nn.Module,
    data: Sequence[Any],
    losses: Losses,
    *,
    method: Any = None,
    clip: float | str | None = "median",
    reduction: str = "mean",
    steps: int = 1,
    family: str | None = None,
    collate: Any = default_collate,
    tolerance: float = TOLERANCE,
    **options: Any,
) -> rgp.Plan:
    """Train `steps` private steps without noise, and hold each against one-example-at-a-time autograd.

    clip "median" clips the examples whose norm at the first step is above the median, and no others.
    """
    method = rgp.RGP(rank=2) if method is None else method
    mixed = clip == "median"
    if mixed:
        twin = copy.deepcopy(model)
        truth = per_example_gradients(copy.deepcopy(model), data, losses, collate)
        with privatize(twin, data, method=method, clip=1.0, steps=steps, collate_fn=collate) as run:
            next(iter(run))  # the carriers of the first step
            norms = sorted(Expected(truth, run.plan, run.carriers, 0, None, 1).norms)
        clip = 0.99 * norms[len(norms) // 2]

    identity = {name: id(p) for name, p in model.named_parameters()}
    keys, kind = list(model.state_dict()), type(model)

    def check_untouched() -> None:
        assert type(model) is kind
        assert list(model.state_dict()) == keys
        assert {name: id(p) for name, p in model.named_parameters()} == identity

    initial = copy.deepcopy(model)
    states, carriers = [parameters_of(model)], []
    with privatize(
        model, data, method=method, clip=clip, steps=steps, loss_reduction=reduction, collate_fn=collate, **options
    ) as run:
        plan = run.plan
        for batch in run:
            check_untouched()
            loss = losses(model, batch)
            if run.step(loss if reduction == "none" else getattr(loss, reduction)()):
                carriers.append({n: (L.clone(), R.clone()) for n, (L, R) in run.carriers.items()})
                states.append(parameters_of(model))
        assert run.step_index == steps == len(carriers)
    check_untouched()

    worst = 0.0
    for step in range(steps):
        for name, parameter in initial.named_parameters():
            parameter.data.copy_(states[step][name])
        truth = per_example_gradients(initial, data, losses, collate)
        for L, R in carriers[step].values():
            assert (L.T @ L - torch.eye(L.shape[1])).abs().max() < 1e-12
            assert (R @ R.T - torch.eye(R.shape[0])).abs().max() < 1e-12
        expected = Expected(truth, plan, carriers[step], step, clip, len(data))
        if mixed and step == 0 and len(data) > 1:
            assert 0 < expected.clipped < len(data), f"clip {clip} clips {expected.clipped} of {expected.norms}"
        worst = max(worst, check_step(expected, states[step], states[step + 1]))
    record(family, worst)
    assert worst <= tolerance, f"worst relative error {worst:.2e}"
    return plan


def spread(count: int) -> Tensor:
    """Weights of the examples' losses: their gradient norms lie far apart, and a clip in the middle clips some."""
    return torch.logspace(-1.5, 1.5, count, dtype=torch.float64)[torch.randperm(count, generator=seeded(count))]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
