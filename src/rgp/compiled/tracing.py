"""How a graph is made: its parameters come through the sink, and its operations run under a capture without numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.autograd.function import once_differentiable

from rgp.capture import Capture
from rgp.checks.means import unevenness
from rgp.compiled.recorders import went_around
from rgp.errors import UnsupportedError
from rgp.rules.fallback import name_of
from rgp.rules.owners import Owners
from rgp.slots import Slot


class Sink(torch.autograd.Function):
    """The parameters, for the rules. In the backward pass, after all uses: what they gave, as gradients of the ports.

    One for all of them: every rule hands at least one of the parameters that it fills the slots of to autograd, not each.
    """

    @staticmethod
    def forward(ctx, recorders, take, count, *tensors):
        """tensors: `count` parameters, then the ports. take: from recorders to what the ports get."""
        ctx.recorders, ctx.take, ctx.count, ctx.ports = recorders, take, count, len(tensors) - count
        ctx.set_materialize_grads(False)
        return tuple(parameter.detach() for parameter in tensors[:count])

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        for recorder, g in zip(ctx.recorders, gradients, strict=True):
            if g is not None:
                raise went_around(recorder.entry.name)
        found = ctx.take(ctx.recorders)
        assert len(found) == ctx.ports, "the graph is the same each time that it is traced"
        return None, None, None, *[None] * ctx.count, *found


class Anchor(torch.autograd.Function):
    """What was computed from parameters alone, detached, as rules and forms want it; but the sinks of the parameters
    still wait for its uses."""

    @staticmethod
    def forward(ctx, form, name):
        ctx.name = name
        ctx.set_materialize_grads(False)
        return form.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        if g is not None:
            raise went_around(ctx.name)
        return None, None


class Tracing(Capture):
    """The capture of a graph that is being made: tensors have shapes, and no numbers that could be looked at."""

    tracing = True

    def __init__(self, m: int, parameters: dict[int, Slot], constants: Sequence[Tensor]) -> None:
        """parameters: id -> slot."""
        super().__init__(parameters)
        self.owners = Owners(self.assume)
        self.uneven_means: list[Tensor] = []
        self.broken: list[Tensor] = []  # assumptions that do not hold
        self.begin(m)
        for tensor in constants:
            self.constants.add(tensor)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if isinstance(func, HigherOrderOperator):
            raise UnsupportedError(
                f"the graph of a compiled module has {func.name()} in it (an activation checkpoint, control flow, an autograd "
                "Function), and the rules do not see what is inside. Leave that part uncompiled."
            )
        return super().__torch_function__(func, types, args, kwargs)

    def hand_on(self, result: Tensor, slot: Slot, transposed: bool) -> Tensor:
        value = Anchor.apply(result, slot.entry.name)
        self.remember(value, slot, transposed)
        return value

    def _note_mean(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> None:
        assert self.examples is not None
        with torch.no_grad():
            uneven = unevenness(func, self.examples, args, kwargs)
            if uneven is not False:
                self.uneven_means.append(torch.as_tensor(uneven))

    def assume(self, holds: Tensor) -> None:
        """The rules go on as if this were true, and it is looked at when the graph runs."""
        self.broken.append(~holds)

    def _without_rule(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], met: list[Slot]) -> Any:
        name = met[0].entry.name
        raise UnsupportedError(
            f"parameter {name!r} is trained but was used in {name_of(func)}, which has no rule for per-example gradients that "
            f"could be compiled. Leave the module that uses it uncompiled, or freeze it (overrides={{{name!r}: 'frozen'}})."
        )
