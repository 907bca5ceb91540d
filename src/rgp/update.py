"""A release -> the optimizer: full-size gradients from the noisy sum, one optimizer step, scheduler, running mean.

All of it is post-processing: nothing private is read. The optimizer belongs to the run while it lives; a step that anyone
else takes with it is refused.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from rgp.checks.moved import Moves
from rgp.ema import WeightMean
from rgp.errors import WrongUseError
from rgp.optimizers import AdamCorrected
from rgp.powersgd import PowerIteration
from rgp.reconstruct import factors, noise_variance
from rgp.rules.derived import carry_back
from rgp.sharding import product, shard
from rgp.slots import CarriedSlot, Slot
from rgp.streams import Streams
from rgp.thin import ThinState
from rgp.torchstate import is_sharded
from rgp.trained import TrainedModel


class Update:
    """Owns the optimizer, the scheduler and what follows their steps."""

    def __init__(
        self,
        trained: TrainedModel,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        streams: Streams,
        *,
        ema: WeightMean | None,
        power: PowerIteration | None,
        thin: ThinState | None = None,
    ) -> None:
        for hook in optimizer._optimizer_step_pre_hooks.values():
            if isinstance(getattr(hook, "__self__", None), Update):
                raise WrongUseError("the optimizer belongs to another run that is not closed; call its close() first")
        self.trained, self.optimizer, self.scheduler = trained, optimizer, scheduler
        self.ema, self.power, self.thin = ema, power, thin
        self._streams = streams
        self._noise_std = 0.0  # of this step's gradient, in the coordinates that are released
        self._moves: Moves | None = None
        self._stepping = False
        self._guard = optimizer.register_step_pre_hook(self._refuse_foreign_step)
        if isinstance(optimizer, AdamCorrected):
            optimizer.noise = self._noise_of

    def apply(self, noisy: Tensor, where: dict[str, slice], *, step: int, divisor: int, noise_std: float) -> None:
        """Take optimizer step number `step` (0 is the first) with the noisy sum, divided by the expected batch size.

        where: each parameter's columns of the sum. noise_std: of every entry of the sum.
        """
        self._noise_std = noise_std / divisor
        self._set_gradients(noisy, where, step, divisor)
        if step == 0 and noise_std > 0:
            seen = {name: p for name, p in self.trained.trained.items() if not is_sharded(p)}
            self._moves = Moves(seen, self.optimizer, self.scheduler)
        if self._moves is not None:
            self._moves.before()
        self._stepping = True
        try:
            with nullcontext() if self.thin is None else self.thin.standing_in():
                self.optimizer.step()
        finally:
            self._stepping = False
            self.trained.drop_gradients()
        if self.thin is not None:
            self.thin.apply(step)
        if self._moves is not None:
            self._moves.after()
        if self.scheduler is not None:
            self.scheduler.step()
        if self.ema is not None:
            self.ema.update(step + 1)

    @torch.no_grad()
    def _set_gradients(self, noisy: Tensor, where: dict[str, slice], step: int, divisor: int) -> None:
        noisy /= divisor
        for name, slot in self.trained.slots.items():
            parameter, entry = self.trained.parameters[name], slot.entry
            part = noisy[where[name]]
            if isinstance(slot, CarriedSlot) and self.thin is not None:
                self.thin.set_gradient(name, part)
                continue
            if isinstance(slot, CarriedSlot):
                cut_at = entry.rank * entry.p if slot.needs_left else 0
                Lt, R = slot.Lt.to(part.dtype), slot.R.to(part.dtype)
                At = part[:cut_at].view(entry.rank, entry.p) if slot.needs_left else None
                dR = part[cut_at:].view(entry.rank, entry.d) if slot.needs_right else None
                part = product(*factors(Lt, R, At, dR), like=parameter)
            elif entry.scale != 1:
                part = part / entry.scale
            part = part.view(parameter.shape)
            if slot.derive is not None:
                part = carry_back(parameter, slot.derive, part)
            if self.power is not None and entry.kind not in ("head", "embedding", "token"):
                part = self.power.approximate(name, part, lambda: self._streams.generator("carriers", step))
            parameter.grad = shard(part.to(parameter.dtype), like=parameter)

    def check(self) -> None:
        """Refuse, before a release, an optimizer or model that could not use it as promised."""
        if self.thin is not None:
            self.thin.check()

    def _noise_of(self, parameter: Tensor) -> Tensor | float:
        """Variance of the noise in each entry of this step's gradient: what AdamCorrected asks for."""
        if self.thin is not None and self.thin.stands_in(parameter):
            return self._noise_std**2  # as released, it is the same everywhere
        return self._noise_variance(self.trained.slot_of[id(parameter)])

    def _noise_variance(self, slot: Slot) -> Tensor | float:
        if isinstance(slot, CarriedSlot):
            shape = noise_variance(slot.Lt, slot.R, left=slot.needs_left, right=slot.needs_right)
            return shape.reshape(slot.entry.shape) * self._noise_std**2
        return (self._noise_std / slot.entry.scale) ** 2

    def close(self, *, warn: bool) -> None:
        self._guard.remove()
        if self._moves is not None and warn:
            self._moves.warn()

    def _refuse_foreign_step(self, *_: object) -> None:
        if not self._stepping:
            raise WrongUseError(
                "run.step(loss) calls optimizer.step() itself, once per logical batch. Remove the call."
            )
