"""What does not come from the batch: parameters, buffers, positions made by torch.arange, and all that follows from them.

A trained layer may be applied to such a thing (a table of positions, a learned query). The result is the same for all
examples, its rows are no examples, and its gradient belongs to all of them: forms.py. So it must be known which tensors
are constants. What is not known to be one is taken for a part of the batch; a constant may be mistaken for that (a
tensor kept in a global variable), but a part of the batch is never mistaken for a constant.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

_FACTORIES = (
    "arange empty empty_like eye full full_like linspace logspace ones ones_like range tril_indices triu_indices zeros "
    "zeros_like new_empty new_full new_ones new_zeros hann_window"
)
_NAMES = frozenset(_FACTORIES.split())
_NUMBERS = (torch.tensor, torch.as_tensor, torch.scalar_tensor)  # constants if made of one number, data if of a list


class Constants:
    """Keeps track of the constants among the tensors of one micro-batch."""

    def __init__(self, model: nn.Module | None, is_trained: Callable[[Tensor], bool]) -> None:
        """is_trained: whether a tensor is a trained parameter, or was computed from such."""
        self._model, self._is_trained = model, is_trained
        self._known: dict[int, tuple[weakref.ref[Tensor], int]] = {}

    def begin(self) -> None:
        """Start a micro-batch: what the model holds now cannot come from it."""
        self._known.clear()
        if self._model is not None:
            for tensor in held_by(self._model):
                self.add(tensor)

    def forget(self) -> None:
        self._known.clear()

    def add(self, tensor: Tensor) -> None:
        if not tensor.is_inference():
            self._known[id(tensor)] = (weakref.ref(tensor), tensor._version)

    def __contains__(self, tensor: Tensor) -> bool:
        version = self._version_of(tensor)
        if version is not None:
            return version == tensor._version  # nothing else was written into it or into what it is a view of
        return isinstance(tensor, nn.Parameter) and not tensor.requires_grad

    def note(self, func: Any, args: Iterable[Any], kwargs: dict[str, Any], result: Any) -> None:
        """After an operation: whether its result is a constant."""
        if isinstance(result, Tensor):
            if result.requires_grad:
                return
        elif not isinstance(result, (tuple, list)):
            return
        if self._gives_constant(func, args, kwargs, result):
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor) and not leaf.requires_grad:
                    self.add(leaf)

    def _gives_constant(self, func: Any, args: Iterable[Any], kwargs: dict[str, Any], result: Any) -> bool:
        if getattr(func, "__name__", "") in _NAMES:
            return all(not isinstance(v, Tensor) or v in self for v in (kwargs.get("fill_value"), *list(args)[1:2]))
        operands = list(tensors_in((args, kwargs)))
        if func in _NUMBERS:
            return not operands and isinstance(next(iter(args), None), (bool, int, float))
        return bool(operands) and all(map(self._is_known, operands, repeat(result)))

    def _is_known(self, operand: Tensor, result: Any) -> bool:
        return operand in self or self._is_trained(operand) or self._was(operand, result)

    def _was(self, operand: Tensor, result: Any) -> bool:
        """Whether it was a constant before this operation changed it in place."""
        version = self._version_of(operand)
        return operand is result and version is not None and version + 1 == operand._version

    def _version_of(self, tensor: Tensor) -> int | None:
        """The version of the tensor when it was found to be a constant; None if it was not."""
        reference, version = self._known.get(id(tensor), (None, None))
        return version if reference is not None and reference() is tensor else None


def tensors_in(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def held_by(model: nn.Module) -> Iterator[Tensor]:
    """Buffers, and tensors that modules keep in plain attributes."""
    for module in model.modules():
        yield from (buffer for buffer in module._buffers.values() if buffer is not None)
        yield from (value for value in vars(module).values() if type(value) is Tensor)
