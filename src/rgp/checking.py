"""`check`: compare the engine with plain autograd, one example at a time, on the user's own model and loss."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from rgp import rules
from rgp.capture import Capture
from rgp.carriers import Released, find_carriers
from rgp.checks.arguments import check_model
from rgp.clipping import Gradients
from rgp.errors import LayoutError, UnsupportedError
from rgp.methods import RGP, Method
from rgp.plan import make_plan
from rgp.rules.forms import is_in_place
from rgp.slots import CarriedSlot, DeferredSlot, make_slot
from rgp.streams import Streams
from rgp.torchstate import as_tree, is_compiled, uncompiled


@dataclass(frozen=True)
class Check:
    """Worst relative error per trained parameter, over the examples; `print` shows it as a table."""

    errors: dict[str, float]
    tolerance: float
    alone: str = ""  # why each example had to go through the model alone, if it had to

    @property
    def ok(self) -> bool:
        return all(error <= self.tolerance for error in self.errors.values())

    @property
    def worst(self) -> float:
        return max(self.errors.values())

    def __str__(self) -> str:
        width = max(map(len, self.errors))
        lines = [
            f"{name.ljust(width)}  {error:.1e}{'' if error <= self.tolerance else '  WRONG'}"
            for name, error in sorted(self.errors.items(), key=lambda kv: -kv[1])
        ]
        verdict = "exact" if self.ok else "NOT exact: do not train this model privately before it is"
        if self.alone:
            lines.append(f"one example at a time, which is exact and slow: {self.alone}")
        return "\n".join([*lines, f"worst relative error {self.worst:.1e}: {verdict}"])


def check(
    model: nn.Module,
    batch: Any,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    *,
    method: Method | None = None,
    loss_reduction: str = "mean",
    double: bool = True,
    tolerance: float | None = None,
) -> Check:
    """Compare the engine's per-example gradients with autograd's on `batch`, one example at a time.

    batch: a micro-batch as the training loop would see it; tensors in it have the examples first.
    loss_fn: `loss_fn(model, batch)`, the loss as the training loop computes it.
    double: work on a float64 copy of the model, in evaluation mode so that dropout does not differ. Constants in float32, and
        casts to it, become float64 on the way.

    Finds wrong layouts, operations without exact rules, and losses that mix examples, such as a mean over all tokens.
    Where rows cannot be assigned to examples (positions first, say), it works with one example at a time, as a run does then.
    What the model draws from torch's generators for an example in the batch, it gets again when that example is alone.
    """
    method = RGP() if method is None else method
    model = _copied(uncompiled(model))
    check_model(model)
    if any(map(is_compiled, model.modules())):
        raise UnsupportedError(
            "parts of the model are compiled: give rgp.check the model as it was before torch.compile"
        )
    model = (model.double() if double else model).eval()
    batch = as_tree(batch)
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    if not tensors:
        raise ValueError("batch holds no tensor, so it cannot be cut into examples")
    m = len(tensors[0])
    if double:
        batch = tree_map(lambda t: t.double() if isinstance(t, Tensor) and t.is_floating_point() else t, batch)
        loss_fn = _in_float64(loss_fn)
    draws, alone = _Draws(m), ""
    try:
        with draws:
            layout = _captured(model, batch, loss_fn, method, m, loss_reduction)
    except LayoutError as refusal:
        if m == 1 or method.fallback != "loop":
            raise
        alone, refused = refusal.reason, refusal
    errors: dict[str, float] = {}
    total: dict[str, Tensor] = {}  # of the examples' gradients
    for i in range(m):
        one = tree_map(lambda t, i=i: t[i : i + 1] if isinstance(t, Tensor) and t.dim() and len(t) == m else t, batch)
        if alone:
            draws = _Draws(1)
            try:
                with draws:
                    layout = _captured(model, one, loss_fn, method, 1, loss_reduction)
            except (RuntimeError, IndexError) as failure:  # the model, or the loss, cannot do with one example
                raise refused from failure
        model.zero_grad(set_to_none=True)
        with draws.of_example(0 if alone else i):
            loss_fn(model, one).sum().backward()
        parameters = dict(model.named_parameters())
        whole = torch.stack([p.grad.norm() for p in parameters.values() if p.grad is not None]).norm()
        for name, (slot, found) in layout.items():
            truth = _released_form(slot, parameters[name].grad, parameters[name])
            # a gradient that is zero by symmetry (the bias of attention's keys) is rounding on both sides
            scale = max(float(truth.norm()), 1e-6 * float(whole)) or 1.0
            missed = truth if found is None else found[0 if alone else i].detach() - truth
            error = float(missed.norm()) / scale
            errors[name] = max(errors.get(name, 0.0), math.inf if math.isnan(error) else error)
            if alone and (gradient := parameters[name].grad) is not None:
                total[name] = total.get(name, torch.zeros_like(gradient)) + gradient
    if alone and not draws.drew:
        for name, error in _mixed(model, batch, loss_fn, total, m if loss_reduction == "mean" else 1).items():
            errors[name] = max(errors[name], error)
    floor = 1e-9 if double else 1e-3
    return Check(errors, floor if tolerance is None else tolerance, alone)


def _copied(model: nn.Module) -> nn.Module:
    """A deep copy, also where a module keeps what it computed from a parameter, as the old torch.nn.utils.weight_norm does."""
    kept = [value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor)]
    computed = {id(value): value.detach().clone() for value in kept if not value.is_leaf}
    return copy.deepcopy(model, computed)


def _mixed(model, batch, loss_fn, total: dict[str, Tensor], weight: int) -> dict[str, float]:
    """By how much a batch's gradient differs from the sum of what its examples give alone."""
    model.zero_grad(set_to_none=True)
    loss = loss_fn(model, batch)
    torch.autograd.backward(loss, torch.full_like(loss, weight))
    whole = torch.stack([gradient.norm() for gradient in total.values()]).norm()
    errors = {}
    for name, parameter in model.named_parameters():
        if name in total:
            found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            errors[name] = float((found - total[name]).norm() / (total[name].norm() + 1e-6 * whole + 1e-30))
    return errors


def _captured(model, batch, loss_fn, method, m, loss_reduction):
    """Per-example gradients in the released coordinates, by the engine's own stages."""
    rules.load()
    plan = make_plan(model, method)
    if not plan.trained:
        raise ValueError("the plan trains nothing: every parameter is frozen (requires_grad is False, or overrides)")
    parameters = dict(model.named_parameters())
    slots = {e.name: make_slot(e, intrinsic=False) for e in plan.trained}
    rng = Streams.from_system().generator("carriers", 0)
    for name, slot in slots.items():
        if isinstance(slot, CarriedSlot):
            released = [Released(weight=parameters[name])]
            Lt, R = find_carriers(released, source="random", rank=slot.entry.rank, iterations=1, rng=rng)
            slot.set_carriers(Lt[0], R[0], "both")
    for name, parameter in parameters.items():
        parameter.requires_grad_(name in slots)
    first = parameters[next(iter(slots))]
    gradients = Gradients([list(slots.values())], dtype=first.dtype, device=first.device)
    gradients.begin(m)
    capture = Capture({id(parameters[name]): slot for name, slot in slots.items()}, model=model)
    capture.begin(m)
    capture.in_backward = True
    with capture:
        loss = loss_fn(model, batch)
        torch.autograd.backward(loss, torch.full_like(loss, m if loss_reduction == "mean" else 1))
    layout = {}
    for name, slot in slots.items():
        if isinstance(slot, DeferredSlot):
            found = [slot.gradient(i).flatten() for i in range(m)] if slot.used else None
        else:
            columns = gradients.rows()[:, gradients.where[name]]
            found = list(columns / slot.entry.scale) if slot.used else None
        layout[name] = (slot, found)
    return layout


def _in_float64(loss_fn: Callable[[nn.Module, Any], Tensor]) -> Callable[[nn.Module, Any], Tensor]:
    def wide(model: nn.Module, batch: Any) -> Tensor:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            with _Wide():
                return loss_fn(model, batch)
        finally:
            torch.set_default_dtype(before)

    return wide


class _Wide(TorchFunctionMode):
    """Keeps a float64 model in float64 where it casts to float32 or meets a constant in float32."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is Tensor.float:
            func = Tensor.double
        with torch._C.DisableTorchFunction():
            dtypes = {leaf.dtype for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
            # what is changed in place has to stay what it is
            both = {torch.float32, torch.float64} <= dtypes and not is_in_place(func, args, kwargs)

        def widened(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return leaf.double() if both and leaf.dtype is torch.float32 else leaf
            return torch.float64 if leaf is torch.float32 else leaf

        args, kwargs = tree_map(widened, (args, kwargs))
        return func(*args, **kwargs)


class _Draws(TorchFunctionMode):
    """Keeps what a pass over m examples draws at random, and gives each example its own part of it when it is alone."""

    def __init__(self, m: int) -> None:
        super().__init__()
        self._m = m
        self._kept: list[Tensor] = []
        self._example: int | None = None
        self._next = 0

    @property
    def drew(self) -> bool:
        return bool(self._kept)

    def of_example(self, i: int) -> _Draws:
        self._example, self._next = i, 0
        return self

    def __torch_function__(self, func, types, args=(), kwargs=None):
        before = torch.default_generator.get_state()
        result = func(*args, **(kwargs or {}))
        drew = not torch.equal(before, torch.default_generator.get_state())
        if not drew or not isinstance(result, Tensor) or result.requires_grad:  # the last: computed, and not only drawn
            return result
        if self._example is None:
            self._kept.append(result.detach().clone())
            return result
        self._next += 1
        if self._next > len(self._kept):
            return result
        kept = self._kept[self._next - 1]
        if kept.shape != result.shape and kept.dim() and result.dim() and len(kept) == self._m * len(result):
            kept = kept[self._example * len(result) :][: len(result)]
        return result.copy_(kept) if kept.shape == result.shape else result


def _released_form(slot, gradient: Tensor | None, parameter: Tensor) -> Tensor:
    G = torch.zeros_like(parameter) if gradient is None else gradient
    if isinstance(slot, CarriedSlot):
        G = G.flatten(1)
        return torch.cat([(G @ slot.R.T).T.flatten(), (slot.Lt @ G).flatten()])
    return G.flatten()
