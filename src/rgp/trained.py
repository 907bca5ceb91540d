"""The model's parameters as a run sees them: which are trained, the slot of each, and how they are sharded."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from rgp.plan import Plan
from rgp.sharding import Sharding
from rgp.slots import CarriedSlot, Slot, make_slot


class TrainedModel:
    """A model under a plan. `take` sets what the plan says, `give_back` leaves the model as it was found."""

    def __init__(self, model: nn.Module, plan: Plan, *, views: int = 1, slot: Callable[..., Slot] = make_slot) -> None:
        named = dict(model.named_parameters())
        self.model, self.plan = model, plan
        self.parameters = {entry.name: named[entry.name] for entry in plan}
        self.sharding = Sharding(model, self.parameters)
        intrinsic = getattr(plan.method, "norm", "intrinsic") == "intrinsic"
        self.slots: dict[str, Slot] = {e.name: slot(e, intrinsic=intrinsic, views=views) for e in plan.trained}
        self.slot_of = {id(self.parameters[name]): slot for name, slot in self.slots.items()}
        self._required_grad: dict[str, bool] = {}

    @property
    def trained(self) -> dict[str, Tensor]:
        return {name: self.parameters[name] for name in self.slots}

    @property
    def names(self) -> set[str]:
        return set(self.slots)

    @property
    def carried(self) -> dict[str, CarriedSlot]:
        return {name: slot for name, slot in self.slots.items() if isinstance(slot, CarriedSlot)}

    @property
    def device(self) -> torch.device:
        return next(iter(self.trained.values())).device

    @property
    def dtype(self) -> torch.dtype:
        """The kind of number of per-example gradients and their sums."""
        double = any(p.dtype == torch.float64 for p in self.trained.values())
        return torch.float64 if double else torch.float32

    def take(self) -> None:
        """Require gradients of what is trained, and of nothing else."""
        self._required_grad = {name: p.requires_grad for name, p in self.parameters.items()}
        for name, parameter in self.parameters.items():
            parameter.grad = None
            parameter.requires_grad_(name in self.slots)
        for name, parameter in self.sharding.inside().items():  # the plain tensors of sharded ones in a forward pass
            parameter.requires_grad_(name in self.slots)
            if name in self.slots:
                self.slot_of[id(parameter)] = self.slots[name]

    def give_back(self) -> None:
        for name, parameter in self.parameters.items():
            parameter.requires_grad_(self._required_grad[name])
            parameter.grad = None

    def drop_gradients(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def gradients(self) -> dict[str, Tensor]:
        """Drop what plain training left in .grad."""
        return {name: g for name, p in self.trained.items() if (g := p.grad) is not None}
