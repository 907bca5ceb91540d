"""Weights that are computed from a parameter, such as standardised kernels: y = conv(x, f(W)).

A model writes `derived(self.weight, f)` in place of `f(self.weight)`; without the engine that is all it means. Under it,
the per-example gradients are those of f(W), clipped and released as such; the noisy sum is then carried back through f,
which needs W alone and is post-processing. (The gradient of W itself would be a linear map of that of f(W), the same for
all examples; clipping before the map or after it are both private, and differ in which norm is bounded.)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

from rgp.errors import UnsupportedError
from rgp.rules import rule


def derived(weight: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
    """f(weight), which must have the weight's shape."""
    if torch._C._len_torch_function_stack() or torch.overrides.has_torch_function_unary(weight):
        return handle_torch_function(derived, (weight,), weight, f)
    return f(weight)


@rule(derived)
def _rule(capture, func, args, kwargs):
    weight, f = args
    slot = capture.slot(weight)
    if capture.sharded:
        raise UnsupportedError(
            f"parameter {slot.entry.name!r}: derived weights cannot be used with weights that fully_shard has sharded; let every "
            "rank hold the whole model, or use the weight as it is"
        )
    with torch.no_grad(), torch._C.DisableTorchFunction():
        value = f(weight.detach())
    if value.shape != weight.shape:
        raise UnsupportedError(
            f"parameter {slot.entry.name!r} has shape {tuple(weight.shape)}, and what is derived from it "
            f"{tuple(value.shape)}; they must be the same"
        )
    value.requires_grad_()  # so that the operation takes part in the backward pass, as with the parameter itself
    capture.used_as(slot, value)
    slot.derive = f
    capture.remember(value, slot, False)
    return value


def carry_back(weight: Tensor, f: Callable[[Tensor], Tensor], gradient: Tensor) -> Tensor:
    """The gradient of f(weight) -> that of the weight."""
    with torch.enable_grad():
        leaf = weight.detach().requires_grad_()
        (found,) = torch.autograd.grad(f(leaf), leaf, gradient)
    return found
