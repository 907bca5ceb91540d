"""What the engine refuses in the middle of a run: an unsuitable loss, gradient, model or optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rgp.checks.means import leaves_of
from rgp.errors import WrongUseError
from rgp.slots import Slot
from rgp.trained import TrainedModel


def loss_weights(loss: Any, m: int, reduction: str, *, views: int) -> Tensor:
    """The tensor to backpropagate so that each of the m examples' own gradient arrives, whatever the reduction was."""
    if not isinstance(loss, Tensor):
        raise WrongUseError(f"run.step takes the loss as a tensor; got {type(loss).__name__}")
    if reduction == "none":
        if loss.shape != (m,):
            raise WrongUseError(
                f"loss_reduction='none' needs one loss per example, shape ({m},); got shape {tuple(loss.shape)}"
            )
    elif loss.numel() != 1:
        raise WrongUseError(
            f"run.step takes a scalar loss; got shape {tuple(loss.shape)}. Reduce it over the examples "
            "(loss_reduction='mean' or 'sum'), or pass loss_reduction='none' to privatize for one loss per example."
        )
    if not loss.requires_grad:
        raise WrongUseError(
            "the loss is not attached to the model: it was computed under no_grad, detached, or before this batch"
        )
    return torch.full_like(loss, (m if reduction == "mean" else 1) / views)


def check_leaves(loss: Tensor, trained: TrainedModel) -> None:
    """Refuse a loss in which a parameter takes part that the run does not train."""
    leaves, known = leaves_of(loss), trained.slot_of
    frozen = {id(p): name for name, p in trained.parameters.items() if name not in trained.slots}
    if name := next((frozen[id(leaf)] for leaf in leaves if id(leaf) in frozen), None):
        _refuse_unfrozen(name)
    foreign = [leaf for leaf in leaves if isinstance(leaf, nn.Parameter) and id(leaf) not in known]
    if foreign and any(id(leaf) in known for leaf in leaves):
        raise WrongUseError(
            f"a parameter of shape {tuple(foreign[0].shape)} that is not the model's takes part in the loss: it would get a "
            "gradient that is neither clipped nor noisy. Make it a part of the model (an attribute of the module) before "
            "privatize, or freeze it with requires_grad_(False). Nothing of this batch was released."
        )


def _refuse_unfrozen(name: str) -> None:
    raise WrongUseError(
        f"parameter {name!r} is frozen by the plan and received a gradient, which is neither clipped nor noisy: its "
        "requires_grad was changed in the loop. Set it before privatize, or use overrides."
    )


def check_no_backward_yet(slots: Mapping[str, Slot]) -> None:
    if any(slot.used for slot in slots.values()):
        raise WrongUseError(
            "a backward pass was run on this batch before run.step(loss), by torch.autograd.grad or "
            "torch.autograd.backward: it would count twice. Call run.step(loss) in place of it."
        )


def check_captured(parameters: Mapping[str, Tensor], slots: Mapping[str, Slot]) -> None:
    """No parameter may have received an ordinary gradient, and some must have received a captured one."""
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            if name not in slots:
                _refuse_unfrozen(name)
            raise WrongUseError(
                f"parameter {name!r} was used outside the capture of this batch (before the loop, in another thread, or "
                "in a cached tensor), so its gradient cannot be clipped per example. Compute the loss from the batch."
            )
    if not any(slot.used for slot in slots.values()):
        raise WrongUseError("the loss is not attached to the model: no trained parameter took part in computing it")


def check_unchanged(trained: TrainedModel, optimizer: torch.optim.Optimizer) -> None:
    """Refuse if the model, the plan and the optimizer no longer belong together."""
    current = dict(trained.model.named_parameters())
    for name, parameter in trained.parameters.items():
        now = current.pop(name, None)
        if now is not parameter:
            raise WrongUseError(f"parameter {name!r} was replaced or removed after privatize; make a new run")
        if now.requires_grad != (name in trained.slots):
            raise WrongUseError(
                f"requires_grad of parameter {name!r} was changed after privatize. Set it before, or use overrides."
            )
    if current:
        raise WrongUseError(f"parameter {next(iter(current))!r} was added after privatize; make a new run")
    check_optimizer(optimizer, trained.parameters, trained.names)


def check_optimizer(optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor], trained: set[str]) -> None:
    """Refuse an optimizer that lacks a parameter of the plan, or holds one that is not the model's."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = [name for name in parameters if name in trained and id(parameters[name]) not in held]
    if missing:
        raise ValueError(
            f"the optimizer lacks {len(missing)} parameters that the plan trains, {missing[0]!r} among them. Add them to the "
            "optimizer, or freeze them with the method's overrides."
        )
    known = {id(p) for p in parameters.values()}
    foreign = sum(id(p) not in known for group in optimizer.param_groups for p in group["params"])
    if foreign:
        raise ValueError(
            f"the optimizer holds {foreign} tensors that are not parameters of the model; leave them out, or make them a part"
        )
