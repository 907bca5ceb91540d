"""Backward passes that the loop runs itself, besides run.step: for adversarial inputs, or for a generator.

They do not concern the run as long as nothing of them is kept: per-example gradients that rules compute on the way are
not kept, and what lands in the `.grad` of the model's parameters is dropped.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from rgp.checks.means import leaves_of
from rgp.errors import UnsupportedError, WrongUseError
from rgp.slots import Slot

BACKWARD = (torch.Tensor.backward, torch.autograd.backward)
GRAD = torch.autograd.grad


class OwnPasses:
    """Allows backward passes that end in something outside the model; refuses the rest."""

    def __init__(self, slots: Mapping[int, Slot], model: nn.Module | None) -> None:
        self._slots, self._model, self._warned = slots, model, False

    def check(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """What the pass ends in: "inputs", or parameters of "others".

        WrongUseError for `loss.backward()` as in plain training; UnsupportedError for second derivatives.
        """
        starts = args[0] if args else kwargs.get("tensors", kwargs.get("outputs"))
        leaves = [leaf for start in tree_leaves(starts) if isinstance(start, Tensor) for leaf in leaves_of(start)]
        if func in BACKWARD:
            asked = kwargs.get("inputs")
            foreign = [leaf for leaf in (leaves if asked is None else tree_leaves(asked)) if not self._is_ours(leaf)]
            if not foreign:
                raise WrongUseError("call run.step(loss) in place of loss.backward(): it runs the backward pass itself")
            if not any(isinstance(leaf, nn.Parameter) for leaf in foreign):
                return "inputs"
            self._warn()
            return "others"
        asked = args[1] if len(args) > 1 else kwargs.get("inputs")
        if any(map(self._is_ours, tree_leaves(asked))):
            raise WrongUseError(
                "torch.autograd.grad was asked for gradients of the model's parameters: run.step(loss) computes them, example by "
                "example. Call it in place of this."
            )
        if kwargs.get("create_graph", args[4] if len(args) > 4 else False) and any(map(self._is_ours, leaves)):
            raise UnsupportedError(
                "penalise a difference in place of the gradient: (model(x + h * v) - model(x)) / h, with a random direction v "
                "for each example. torch.autograd.grad(create_graph=True) through trained parameters, as in a gradient "
                "penalty, needs second derivatives, which have no per-example rules."
            )
        return "inputs"

    @contextmanager
    def nothing_stays(self) -> Iterator[None]:
        """Drop gradients of the model's parameters."""
        slots = set(self._slots.values())
        for slot in slots:
            slot.muted = True
        try:
            yield
        finally:
            for slot in slots:
                slot.muted = False
            for parameter in self._model.parameters() if self._model is not None else ():
                parameter.grad = None

    def _is_ours(self, leaf: Any) -> bool:
        return id(leaf) in self._slots or (isinstance(leaf, nn.Parameter) and id(leaf) in self._held())

    def _held(self) -> set[int]:
        return set() if self._model is None else {id(p) for p in self._model.parameters()}

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                "a backward pass that the loop runs itself gives gradients to parameters that the run does not train, such as a "
                "generator's. Epsilon covers them only if they learn from what the private model says, and never from private "
                "examples: feed them random numbers, and always equally many (the size of a drawn batch is private too)."
            )
