"""Capture: sees every operation that touches a trained parameter, and sends it to its rule.

A TorchFunctionMode watches operations, not modules: the model is not wrapped, keyword calls and weights used through
F.linear are seen, in-place activations do not matter. The forward result is the plain one; the rule's backward computes
the gradient of the inputs as always and, in place of the weight's gradient, per-example gradients into the slot.

A trained parameter in an operation without a rule is an error. There is no silent path: parameters reach autograd only
through rules, and after each backward pass the engine checks that none of them received an ordinary gradient.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_leaves

from rgp.checks.means import MEANS, Output, is_uneven, outputs_of
from rgp.errors import UnsupportedError, WrongUseError
from rgp.rules import ANYTIME, RULES, TRANSPOSED
from rgp.rules.derived import derived
from rgp.slots import Slot

_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_GRAD = torch.Tensor.grad.__get__  # type: ignore[attr-defined]
_BATCH_NORMS = (F.batch_norm, torch.batch_norm)
DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout)
# operations with a dropout of their own: where its probability stands among the arguments
DROPOUT_AT = {F.scaled_dot_product_attention: 4, F.multi_head_attention_forward: 10}


class Capture(TorchFunctionMode):
    """Off when made; `begin(m)` turns it on for a micro-batch of m examples, `end()` off again.

    While it is on the stack it also refuses what would go around the engine: `loss.backward()` and gradient clipping.
    """

    def __init__(self, slots: Mapping[int, Slot], *, sharded: bool = False) -> None:
        super().__init__()
        self.sharded = sharded  # whether parameters are whole in the forward pass only
        self._slots = slots  # id of a parameter -> its slot
        self._derived: dict[int, tuple[Tensor, Slot, bool]] = {}  # what stands for parameters in this micro-batch
        self.examples: int | None = None
        self.in_backward = False
        self.recomputes = False  # whether the backward pass may run operations of the forward pass again
        self._forms: dict[Slot, Tensor | None] = {}  # as what a parameter was used: what was derived from it, or itself
        self.uneven: list[Node] = []  # means of this micro-batch with a divisor that is not the same for all examples
        self.rehearsing = False  # whether dropout is left out, and outputs are noted (checks/rehearsal.py)
        self.outputs: list[Output] = []  # of operations with trained parameters, while it is rehearsed

    def names(self) -> dict[int, str]:
        """Id of a trained parameter -> its name."""
        return {key: slot.entry.name for key, slot in self._slots.items()}

    def begin(self, examples: int) -> None:
        self.examples = examples
        self.recomputes = False
        self._forget()

    def end(self) -> None:
        self.examples = None
        self._forget()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Off for a while, in the middle of a micro-batch."""
        examples, self.examples = self.examples, None
        try:
            yield
        finally:
            self.examples = examples

    def _forget(self) -> None:
        self._derived.clear()
        self._forms.clear()
        self.uneven.clear()
        self.outputs.clear()

    def slot(self, tensor: Any) -> Slot | None:
        """The slot of a trained parameter, or of its transpose; None for anything else."""
        return self.find(tensor)[0]

    def find(self, tensor: Any) -> tuple[Slot | None, bool]:
        """(slot, whether the tensor is its parameter's transpose)."""
        if (slot := self._slots.get(id(tensor))) is not None:
            return slot, False
        _, stands_for, transposed = self._derived.get(id(tensor), (None, None, False))
        return stands_for, transposed

    def remember(self, tensor: Tensor, slot: Slot, transposed: bool) -> None:
        self._derived[id(tensor)] = (tensor, slot, transposed)

    def used_as(self, slot: Slot, form: Tensor | None) -> None:
        """Its parameter is used as it is (None), or as something that was derived from it: as one of them, not both."""
        before = self._forms.setdefault(slot, form)
        with torch._C.DisableTorchFunction():
            same = before is form or (before is not None and form is not None and torch.equal(before, form))
        if not same:
            raise UnsupportedError(
                f"parameter {slot.entry.name!r} is used in two forms, one of them made by derived(): the gradients of both are "
                "clipped as one, and could not be carried back through two functions. Use one form, or two parameters."
            )

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.backward or func is torch.autograd.backward:
            if not self.in_backward:
                raise WrongUseError("call run.step(loss) in place of loss.backward(): it runs the backward pass itself")
            if self.recomputes and func is torch.autograd.backward and kwargs.get("inputs") is None:
                # a mode steps aside for the call that it handles, but activation checkpoints recompute inside this one
                edges = [get_gradient_edge(t) if isinstance(t, Tensor) else t for t in args[0]]
                with self:
                    return func(edges, **kwargs)
        elif func == _GRAD:
            _refuse_gradient_clipping()
        if self.examples is None:
            return func(*args, **kwargs)
        if self.rehearsing and func in DROPOUTS:
            return args[0] if args else kwargs["input"]
        if self.rehearsing and func in DROPOUT_AT:
            args, kwargs = _without_dropout(DROPOUT_AT[func], args, kwargs)
        result = self._operate(func, args, kwargs)
        if (
            func in MEANS
            and result.requires_grad
            and result.dim() == 0
            and is_uneven(func, self.examples, args, kwargs)
        ):
            self.uneven += [edge.node for edge, _ in outputs_of(result)]
        return result

    def _operate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if (
            special := ANYTIME.get(func)
        ) is not None:  # also without grad: a reentrant checkpoint will run it again with
            self.recomputes = self.recomputes or not torch.is_grad_enabled() or _saved_tensors_hooks(False) is not None
            return special(self, func, args, kwargs)
        if func in _BATCH_NORMS:
            _refuse_batch_statistics(func, args, kwargs)
        if not torch.is_grad_enabled():
            if not self.recomputes:  # a reentrant checkpoint runs forward like this; or it is an evaluation
                self.recomputes = any(self.slot(operand) is not None for operand in _operands(args, kwargs))
            return func(*args, **kwargs)
        met = [slot for slot in map(self.slot, _operands(args, kwargs)) if slot is not None]
        if not met:
            return func(*args, **kwargs)
        if (rule := RULES.get(func)) is not None:
            again = _saved_tensors_hooks(False) is not None
            self.recomputes = self.recomputes or again
            if func is not derived:
                for slot in (slot for operand in _operands(args, kwargs) if (slot := self._slots.get(id(operand)))):
                    self.used_as(slot, None)
            if func not in TRANSPOSED and any(self.find(operand)[1] for operand in _operands(args, kwargs)):
                raise UnsupportedError(
                    f"parameter {met[0].entry.name!r} was used transposed in {resolve_name(func) or func}, which has a rule only "
                    "for parameters as they are. Freeze it, or keep it the other way round."
                )
            result = rule(self, func, args, kwargs)
            if self.rehearsing and not again:
                self.outputs += outputs_of(result)
            return result
        result = func(*args, **kwargs)
        # shapes, dtypes, detached copies and the like carry no gradient and need no rule
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(result)):
            raise UnsupportedError(
                f"parameter {met[0].entry.name!r} is trained but was used in {resolve_name(func) or func}, which has no rule "
                f"for per-example gradients. Freeze it (overrides={{{met[0].entry.name!r}: 'frozen'}} in the method), or "
                "register a rule: see docs/rules.md"
            )
        return result


def _operands(args: Iterable[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """Arguments, and the members of list arguments (torch.cat, the flat weights of an LSTM)."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value


def _without_dropout(at: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if len(args) > at:
        return (*args[:at], 0.0, *args[at + 1 :]), kwargs
    return args, {**kwargs, "dropout_p": 0.0}


def _refuse_gradient_clipping() -> None:
    frame: FrameType | None = sys._getframe(2)
    for _ in range(6):
        if frame is None:
            return
        if frame.f_code.co_name.startswith("clip_grad_"):
            raise WrongUseError(
                f"torch.nn.utils.{frame.f_code.co_name} has nothing to clip here: run.step clips each example's gradient "
                "(the clip argument of privatize). Remove the call."
            )
        frame = frame.f_back


def _refuse_batch_statistics(func, args, kwargs) -> None:
    training = kwargs.get("training", args[5] if len(args) > 5 else False)
    if training:
        raise UnsupportedError(
            "batch norm in training mode mixes the examples of a batch, so one example's gradient depends on the others and no "
            "clipping bounds it. Replace it: rgp.fix(model) puts GroupNorm in its place; or call .eval() on a frozen network "
            "or a teacher, whose statistics are to stay as they are."
        )
