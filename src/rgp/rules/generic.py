"""A rule from a function that gives per-example gradients; the operation itself stays a black box to autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten

from rgp.errors import UnsupportedError


def _version(x: Tensor) -> int:
    return -1 if x.is_inference() else x._version


class _Watched(torch.autograd.Function):
    """Runs `call` on detached inputs, remembers its inner graph, and tells `tell` the output's gradient."""

    @staticmethod
    def forward(ctx, call, tell, token, *inputs):
        ctx.inputs = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
        # its own hooks: an activation checkpoint around it must not drop and recompute what the inner graph saves
        with torch.enable_grad(), saved_tensors_hooks(lambda x: x, lambda x: x):
            ctx.output = call(*ctx.inputs)
        ctx.tell, ctx.versions = tell, [_version(x) for x in ctx.inputs]
        return ctx.output.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        if ctx.versions != [_version(x) for x in ctx.inputs]:
            raise UnsupportedError(
                "an input of an operation with trained parameters was changed in place before the backward pass, which needs "
                "it as it was: write x = x + y in place of x += y"
            )
        ctx.tell(grad)
        wanted = [x for x in ctx.inputs if x.requires_grad]
        found = iter(torch.autograd.grad(ctx.output, wanted, grad, allow_unused=True) if wanted else ())
        return (None, None, None, *(next(found) if x.requires_grad else None for x in ctx.inputs))


def watched(call: Callable[..., Tensor], tell: Callable[[Tensor], None], parameter: Tensor, *inputs: Tensor) -> Tensor:
    """call(*inputs), with `tell(grad of the result)` in the backward pass. `call` must use parameters detached."""
    return _Watched.apply(call, tell, parameter, *inputs)


class _Inside(torch.autograd.Function):
    """Like _Watched, for several results, and it tells `tell` the gradients of tensors inside `call`."""

    @staticmethod
    def forward(ctx, call, tell, token, *inputs):
        ctx.inputs = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
        with torch.enable_grad(), saved_tensors_hooks(lambda x: x, lambda x: x):
            ctx.outputs, ctx.inside = call(*ctx.inputs)
        ctx.tell, ctx.versions = tell, [_version(x) for x in ctx.inputs]
        ctx.set_materialize_grads(False)
        return tuple(y.detach() for y in ctx.outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        if ctx.versions != [_version(x) for x in ctx.inputs]:
            raise UnsupportedError(
                "an input of an operation with trained parameters was changed in place before the backward pass, which needs "
                "it as it was: write x = x + y in place of x += y"
            )
        given = [(y, g) for y, g in zip(ctx.outputs, grads, strict=True) if g is not None]
        wanted = [x for x in ctx.inputs if x.requires_grad]
        ys, gs = zip(*given, strict=True)
        with torch.enable_grad():
            found = torch.autograd.grad(ys, [*wanted, *ctx.inside], gs, allow_unused=True)
        inside = [
            torch.zeros_like(x) if g is None else g for x, g in zip(ctx.inside, found[len(wanted) :], strict=True)
        ]
        ctx.tell(inside)
        rest = iter(found)
        return (None, None, None, *(next(rest) if x.requires_grad else None for x in ctx.inputs))


def watched_inside(
    call: Callable[..., tuple[list[Tensor], list[Tensor]]],
    tell: Callable[[list[Tensor]], None],
    parameter: Tensor,
    *inputs: Tensor,
) -> tuple[Tensor, ...]:
    """The results of `call(*inputs) -> (results, tensors inside)`; `tell` gets the gradients of those inside."""
    return _Inside.apply(call, tell, parameter, *inputs)


def from_gradients(gradients: Callable[..., Any]) -> Callable[..., Any]:
    def apply(capture, func, args, kwargs):
        leaves, spec = tree_flatten((args, kwargs))
        slots = {i: capture.slot(leaf) for i, leaf in enumerate(leaves)}
        trained = [i for i, slot in slots.items() if slot is not None]
        data = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and slots[i] is None]
        m = capture.examples

        def arguments(inputs):
            filled = [leaf.detach() if i in trained else leaf for i, leaf in enumerate(leaves)]
            for i, value in zip(data, inputs, strict=True):
                filled[i] = value
            return tree_unflatten(filled, spec)

        def call(*inputs):
            inner_args, inner_kwargs = arguments(inputs)
            return func(*inner_args, **inner_kwargs)

        def tell(grad):
            inner_args, inner_kwargs = arguments([leaves[i].detach() for i in data])
            found = gradients(m, grad, *inner_args, **inner_kwargs)
            for where, value in found.items():
                parameter = args[where] if isinstance(where, int) else kwargs[where]
                slot = capture.slot(parameter)
                if slot is not None:
                    if tuple(value.shape) != (m, *parameter.shape):
                        raise ValueError(
                            f"the rule for {getattr(func, '__name__', func)} gave gradients of shape {tuple(value.shape)} for "
                            f"{slot.entry.name!r}; they must be {(m, *parameter.shape)}"
                        )
                    slot.add_dense(value)

        return watched(call, tell, leaves[trained[0]], *(leaves[i] for i in data))

    return apply
