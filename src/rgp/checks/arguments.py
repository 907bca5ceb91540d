"""What `privatize` and `resume` refuse before anything is made: arguments, models and plans that cannot be trained privately."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rgp.accounting import Budget
from rgp.agreement import refuse_wrappers
from rgp.checks.guards import check_optimizer
from rgp.errors import UnsupportedError
from rgp.methods import Method
from rgp.plan import Plan


def unwrapped(optimizer: Any) -> Any:
    """The optimizer inside the wrapper that accelerate's `prepare` returns."""
    inner = getattr(optimizer, "optimizer", None)
    return inner if type(optimizer).__name__ == "AcceleratedOptimizer" and inner is not None else optimizer


def check_arguments(
    model: Any, optimizer: Any, method: Any, scheduler: Any, budget: Any, public_loss: Callable[[], Tensor] | None
) -> None:
    """Refuse arguments of the wrong kind, and those that do not go together."""
    if not isinstance(method, Method):
        raise TypeError(f"method must be one of rgp's methods, such as rgp.RGP(rank=8); got {method!r}")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module; got {model!r}")
    if type(optimizer).__module__.partition(".")[0] == "opacus":
        raise TypeError(
            "give privatize the torch optimizer that this one was made from, optimizer.original_optimizer: it is Opacus's "
            f"{type(optimizer).__name__}, which clips and adds noise by itself."
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be an instance of a torch.optim class; got {optimizer!r}")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS calls the loss again by itself, which private training cannot allow; use another optimizer"
        )
    if scheduler is not None and not hasattr(scheduler, "step"):
        raise TypeError(f"scheduler must have a step() method; got {scheduler!r}")
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ValueError(
            "scheduler is a ReduceLROnPlateau: a rate that follows a metric. On private rows that uses them without "
            "noise. Take a schedule that is known beforehand; or, with a metric on public rows, call its step(metric) "
            "yourself and leave scheduler out."
        )
    if budget is not None and not isinstance(budget, Budget):
        raise TypeError(f"budget must be an rgp.Budget, such as rgp.Budget(epsilon=8.0, delta=1e-5); got {budget!r}")
    if (getattr(method, "source", None) == "public") != (public_loss is not None):
        raise ValueError("source='public' and public_loss= go together: give both, or neither")


def check_trainable(model: nn.Module, plan: Plan, optimizer: torch.optim.Optimizer) -> None:
    """Refuse a plan that cannot be carried out on this model with this optimizer."""
    check_plan(model, plan)
    check_optimizer(optimizer, dict(model.named_parameters()), {e.name for e in plan.trained})


def check_model(model: nn.Module, *, meta: bool = False) -> None:
    """Refuse models that mix the examples of a batch, or that are not ready. meta: weights need not be loaded."""
    refuse_wrappers(model)
    refuse_opacus(model)
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedError(
                "give privatize the module as it was before torch.jit: "
                f"{f'module {name!r}' if name else 'the model'} was scripted or traced, which hides its operations."
            )
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            raise UnsupportedError(
                "replace batch norm with rgp.fix(model), which puts GroupNorm in its place; or keep its statistics: .eval(). "
                f"Module {name!r} is {type(module).__name__} in training mode: it mixes the examples of a batch, so no "
                "clipping bounds one example's influence."
            )
        if isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.training and module.track_running_stats:
            raise UnsupportedError(
                f"module {name!r} is {type(module).__name__} with running statistics, which would be computed from "
                "private data without noise. Make it with track_running_stats=False, or call .eval() on it."
            )
    if not meta and any(p.is_meta for p in model.parameters()):
        raise ValueError("the model has parameters on the meta device; load its weights first")


def refuse_opacus(model: nn.Module) -> None:
    """Opacus's wrapper keeps per-example gradients of its own, and so do its hooks, which stay when it is taken off."""
    if type(model).__module__.partition(".")[0] == "opacus":
        raise TypeError(
            "call model.remove_hooks() and give privatize the module inside it, model._module: the model is Opacus's "
            f"{type(model).__name__}."
        )
    for name, module in model.named_modules():
        hooks = [*module._forward_hooks.values(), *module._backward_hooks.values()]
        if any((getattr(getattr(hook, "func", hook), "__module__", "") or "").startswith("opacus.") for hook in hooks):
            raise ValueError(
                "call remove_hooks() on the GradSampleModule that make_private returned, or make the model anew: module "
                f"{name or '(the model)'!r} still has hooks of Opacus, which go on storing per-example gradients."
            )


def check_plan(model: nn.Module, plan: Plan) -> None:
    if not plan.trained:
        raise ValueError("the plan trains nothing: every parameter is frozen (requires_grad is False, or overrides)")
    trained = {e.name for e in plan.trained}
    for name, parameter in model.named_parameters():
        if name in trained and parameter.is_complex():
            raise UnsupportedError(
                f"parameter {name!r} is complex, and its imaginary part would be lost. Freeze it (overrides={{{name!r}: "
                "'frozen'}), or keep the two parts in real parameters and combine them with torch.complex."
            )
    devices = {p.device for n, p in model.named_parameters() if n in trained}
    if len(devices) > 1:
        raise ValueError(
            f"trained parameters are on several devices ({', '.join(map(str, devices))}); move them to one"
        )
