"""Capture: sees every operation that touches a trained parameter, and sends it to its rule.

A TorchFunctionMode watches operations, not modules: the model is not wrapped, keyword calls and weights used through
F.linear are seen, in-place activations do not matter. The forward result is the plain one; the rule's backward computes
the gradient of the inputs as always and, in place of the weight's gradient, per-example gradients into the slot.

What is computed from parameters alone, before anything of the batch is met, is a form of them (rules/forms.py). A trained
parameter in an operation without a rule is looped over (rules/fallback.py) or an error. There is no silent path:
parameters reach autograd only through rules, and after each backward pass the engine checks that none of them received an
ordinary gradient.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from rgp.checks.means import MEANS, Output, is_uneven, outputs_of, reason_of
from rgp.checks.passes import BACKWARD, GRAD, OwnPasses
from rgp.errors import LayoutError, UnsupportedError, WrongUseError
from rgp.rules import ALIASES, ANYTIME, PICKED, RULES, TRANSPOSED
from rgp.rules.constants import Constants, tensors_in
from rgp.rules.derived import derived
from rgp.rules.fallback import loop, name_of, with_copies
from rgp.rules.forms import make_form
from rgp.rules.owners import Owned, Owners
from rgp.slots import Slot
from rgp.torchstate import HALF, autocast_devices, saved_tensors_hooks, without_autocast

_saved_tensors_hooks = saved_tensors_hooks()
_GRAD = torch.Tensor.grad.__get__  # type: ignore[attr-defined]
_BATCH_NORMS = (F.batch_norm, torch.batch_norm)
DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout)
# operations with dropout inside: the position of its probability among the arguments
DROPOUT_AT = {F.scaled_dot_product_attention: 4, F.multi_head_attention_forward: 10}


class Capture(TorchFunctionMode):
    """Off when made; `begin(m)` turns it on for a micro-batch of m examples, `end()` off again.

    While it is on the stack it also refuses what would go around the engine: `loss.backward()` and gradient clipping.
    """

    tracing = False  # whether a graph is being made, and tensors have no numbers to look at (compiled/)

    def __init__(self, slots: Mapping[int, Slot], *, sharded: bool = False, model: nn.Module | None = None) -> None:
        """model: whose buffers are known not to come from the batch."""
        super().__init__()
        self.sharded = sharded  # whether parameters are whole in the forward pass only
        self._slots = slots  # id of a parameter -> its slot
        self._derived: dict[
            int, tuple[Tensor, Slot, bool, int]
        ] = {}  # tensors that take the place of parameters in this micro-batch
        self.examples: int | None = None
        self.in_backward = False
        self.recomputes = False  # whether the backward pass may run operations of the forward pass again
        self._forms: dict[
            Slot, Tensor | None
        ] = {}  # the form in which each parameter was used: as it is, or derived from it
        self.own_passes = OwnPasses(slots, model)
        self.constants = Constants(model, lambda tensor: self.slot(tensor) is not None)
        self.owners = Owners()
        self.looped: set[tuple[str, tuple[str, ...]]] = set()  # operations and parameters the fallback was used for
        self.uneven: dict[Node, str] = {}  # means of this micro-batch in which examples count unequally, and why
        self.rehearsing = False  # whether dropout is left out, and outputs are noted (checks/rehearsal.py)
        # whether autocast is left out of a rehearsal too: its rounding would look like a small coupling
        self.rehearsing_precisely = False
        self.left_autocast_out = False  # whether there was any in this micro-batch
        self.rehearsing_compiled = False  # whether compiled modules run compiled in a rehearsal (compiled/)
        self.outputs: list[Output] = []  # outputs of operations with trained parameters, during a rehearsal
        self.plainly = False  # in a rehearsal: whether parameters reach autograd as without the capture
        self.unassigned: LayoutError | None = None  # in a rehearsal: why rows cannot be assigned to examples

    def names(self) -> dict[int, str]:
        """Id of a trained parameter -> its name."""
        return {key: slot.entry.name for key, slot in self._slots.items()}

    def begin(self, examples: int) -> None:
        self.examples = examples
        self.recomputes = self.left_autocast_out = self.plainly = False
        self.unassigned = None
        self._forget()
        self.constants.begin()

    def end(self) -> None:
        self.examples = None
        self._forget()

    @property
    def may_go_alone(self) -> bool:
        """Whether the run can go on with one example at a time if rows cannot be assigned to examples."""
        may_loop = all(slot.entry.fallback == "loop" for slot in self._slots.values())
        return self.rehearsing and self.examples != 1 and may_loop and not (self.tracing or self.sharded)

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
        self.constants.forget()
        self.owners.clear()
        self.uneven.clear()
        self.outputs.clear()

    def slot(self, tensor: Any) -> Slot | None:
        """The slot of a trained parameter, or of its transpose; None for anything else."""
        return self.find(tensor)[0]

    def find(self, tensor: Any) -> tuple[Slot | None, bool]:
        """(slot, whether the tensor is its parameter's transpose)."""
        if (slot := self._slots.get(id(tensor))) is not None:
            return slot, False
        known = self._derived.get(id(tensor))
        if known is None:
            return None, False
        _, stands_for, transposed, version = known
        if tensor._version != version:
            raise UnsupportedError(
                f"something computed from parameter {stands_for.entry.name!r} was changed in place, so that it is not what the "
                "rules take it for. Write it without the change: torch.where, torch.cat, y = x * mask."
            )
        return stands_for, transposed

    def remember(self, tensor: Tensor, slot: Slot, transposed: bool) -> None:
        """The tensor was computed from parameters alone, and the slot takes its per-example gradients."""
        self._derived[id(tensor)] = (tensor, slot, transposed, tensor._version)

    def forbid(self, tensor: Tensor) -> None:
        """From now on, using this form is an error: the model takes it for something that it is not."""
        self._derived[id(tensor)] = (*self._derived[id(tensor)][:3], -1)

    def hand_on(self, result: Tensor, slot: Slot, transposed: bool) -> Tensor:
        """Give the model what was computed from parameters as a leaf, whose gradients go to the slot alone."""
        value = result.detach().requires_grad_()
        self.guard(value, slot)
        self.remember(value, slot, transposed)
        return value

    def guard(self, leaf: Tensor, slot: Slot) -> None:
        """Refuse an ordinary gradient of a leaf whose gradients go to the slot."""
        name = slot.entry.name

        def refuse(leaf: Tensor) -> None:
            if leaf.grad is not None:  # rules pass none on
                raise WrongUseError(
                    f"something computed from parameter {name!r} alone reached the loss outside the capture of its batch (kept "
                    "from an earlier batch, used in another thread, or as the loss itself), so its gradient cannot be clipped "
                    "per example."
                )

        leaf.register_post_accumulate_grad_hook(refuse)

    def used_as(self, slot: Slot, form: Tensor | None) -> None:
        """Note that the slot's parameter is used as it is (None) or in a derived form; it must not be used as both."""
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
        if not self.in_backward and (func in BACKWARD or (func is GRAD and self.examples is not None)):
            if self.own_passes.check(func, args, kwargs) == "others" and self.rehearsing:
                return None  # a generator is not trained while the loop is rehearsed
            with self.own_passes.nothing_stays():
                return func(*args, **kwargs)
        if func in BACKWARD:
            if self.recomputes and func is torch.autograd.backward and kwargs.get("inputs") is None:
                # a mode steps aside for the call that it handles, but activation checkpoints recompute inside this one
                edges = [get_gradient_edge(t) if isinstance(t, Tensor) else t for t in args[0]]
                with self:
                    return func(edges, **kwargs)
        elif func == _GRAD:
            _refuse_grad_readers()
        if self.examples is None:
            return func(*args, **kwargs)
        if self.rehearsing and func in DROPOUTS and self._has_examples(dropped := args[0] if args else kwargs["input"]):
            return dropped
        if self.rehearsing and func in DROPOUT_AT:
            args, kwargs = _without_dropout(DROPOUT_AT[func], args, kwargs)
        if self.rehearsing_precisely and not any(tensor.dtype in HALF for tensor in tensors_in((args, kwargs))):
            self.left_autocast_out = self.left_autocast_out or bool(autocast_devices())
            with without_autocast():
                result = self._operate(func, args, kwargs)
        else:
            result = self._operate(func, args, kwargs)
        self._note(func, args, kwargs, result)
        if func in MEANS and result.requires_grad and result.dim() == 0:
            self._note_mean(func, args, kwargs, result)
        return result

    def _note_mean(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> None:
        assert self.examples is not None
        if is_uneven(func, self.examples, args, kwargs):
            reason = reason_of(func, args, kwargs)
            self.uneven.update((edge.node, reason) for edge, _ in outputs_of(result))

    def _operate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.plainly:
            return func(*args, **kwargs)
        try:
            return self._captured(func, args, kwargs)
        except LayoutError as error:
            if self.in_backward or not self.may_go_alone:
                raise
            self.unassigned, self.plainly = error, True
            return func(*args, **kwargs)

    def _captured(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        met = [slot for slot in map(self.slot, _operands(args, kwargs)) if slot is not None]
        special = None if self.tracing else ANYTIME.get(func)  # those draw numbers outside of torch
        # also without grad: a reentrant checkpoint will run it again with
        if special is not None and not (met and torch.is_grad_enabled()):
            self.recomputes = self.recomputes or not torch.is_grad_enabled() or _saved_tensors_hooks(False) is not None
            return special(self, func, args, kwargs)
        if func in _BATCH_NORMS and any(map(self._is_of_batch, tensors_in(args[:1] or kwargs.get("input")))):
            _refuse_batch_statistics(func, args, kwargs)
        if not torch.is_grad_enabled():
            if not self.recomputes:  # a reentrant checkpoint runs forward like this; or it is an evaluation
                self.recomputes = bool(met)
            return func(*args, **kwargs)
        if not met:
            return func(*args, **kwargs)
        if func is derived:
            return RULES[derived](self, func, args, kwargs)
        result = NotImplemented
        if func in ALIASES:
            result = ALIASES[func](self, func, args, kwargs)
        if result is NotImplemented and self._meets_no_batch(func, args, kwargs):
            result = make_form(self, func, args, kwargs)
        if result is not NotImplemented:
            if any(leaf.requires_grad for leaf in tensors_in(result)):
                self._used_as_they_are(args, kwargs)
            return result
        result = self._by_rule(func, args, kwargs)
        if result is not NotImplemented:
            return result
        result = func(*args, **kwargs)
        # shapes, dtypes, detached copies and the like carry no gradient and need no rule
        if not any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(result)):
            return result
        self._refuse_picked(func, args, kwargs)
        return self._without_rule(func, args, kwargs, met)

    def _without_rule(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], met: list[Slot]) -> Any:
        result = with_copies(self, func, args, kwargs)
        if result is not NotImplemented:
            self._note_output(result)
            return result
        if any(slot.entry.fallback == "error" for slot in met):
            raise UnsupportedError(
                f"parameter {met[0].entry.name!r} is trained but was used in {name_of(func)}, which has no rule "
                f"for per-example gradients. Freeze it (overrides={{{met[0].entry.name!r}: 'frozen'}} in the method), "
                "register a rule (see docs/rules.md), or let the method loop over the examples: fallback='loop'"
            )
        self._used_as_they_are(args, kwargs)
        looped = loop(self, func, args, kwargs)
        self._note_output(looped)
        return looped

    def _by_rule(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Apply the operation's rule; NotImplemented if it has none, or none for this way of calling it."""
        rule = RULES.get(func)
        if self.owners and func not in PICKED:
            self._refuse_picked(func, args, kwargs)
        turned = func not in TRANSPOSED and any(self.find(operand)[1] for operand in _operands(args, kwargs))
        if rule is None or turned:
            return NotImplemented
        self._used_as_they_are(args, kwargs)
        result = rule(self, func, args, kwargs)
        if result is not NotImplemented:
            self._note_output(result)
        return result

    def _refuse_picked(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for operand in tensors_in((args, kwargs)):
            if self.owners.of(operand) is not None:
                name = next(slot for t in _operands(args, kwargs) if (slot := self.slot(t)) is not None).entry.name
                raise LayoutError(
                    f"parameter {name!r} met rows that an index had picked out of the batch, in {name_of(func)}, whose rule "
                    "needs the examples in their order. Freeze it, or use linear layers and elementwise operations there."
                )

    def _used_as_they_are(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for operand in _operands(args, kwargs):
            if (slot := self._slots.get(id(operand))) is not None:
                self.used_as(slot, None)

    def _note_output(self, result: Any) -> None:
        again = _saved_tensors_hooks(False) is not None
        self.recomputes = self.recomputes or again
        if self.rehearsing and not again:
            self.outputs += outputs_of(result)

    def _meets_no_batch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        tensors = tensors_in((args, kwargs))
        if func is Tensor.__getitem__:  # weight[e]: one number, wherever it comes from, only selects a part
            tensors = (t for t in tensors if t.dim() or t.is_floating_point())
        return not any(map(self._is_of_batch, tensors))

    def run(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """An operation that a rule is made of, as if the model had called it."""
        result = self._operate(func, args, kwargs)
        self._note(func, args, kwargs, result)
        return result

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        assert self.examples is not None
        self.constants.note(func, args, kwargs, result)
        self.owners.note(func, args, kwargs, result, self.examples, self._is_of_batch)

    def _is_of_batch(self, tensor: Tensor) -> bool:
        return self.slot(tensor) is None and tensor not in self.constants

    def _has_examples(self, tensor: Tensor) -> bool:
        """Whether dropping entries of this affects each example on its own. Dropping weights, or one mask for all, does not."""
        assert self.examples is not None
        return self._is_of_batch(tensor) and tensor.dim() > 0 and tensor.shape[0] % self.examples == 0

    def rows(self, *tensors: Tensor) -> int | Owned:
        """Which examples the rows belong to: the number of examples, if they come first, or the owners of picked rows."""
        assert self.examples is not None
        found = [owned for tensor in tensors if self.owners and (owned := self.owners.of(tensor)) is not None]
        if len({id(owned) for owned in found}) > 1:
            raise LayoutError("rows that were picked out of the batch in two different ways met in one operation")
        return found[0] if found else self.examples


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


def _refuse_grad_readers() -> None:
    frame: FrameType | None = sys._getframe(2)
    for _ in range(6):
        if frame is None:
            return
        if frame.f_code.co_name.startswith("clip_grad_"):
            raise WrongUseError(
                f"torch.nn.utils.{frame.f_code.co_name} has nothing to clip here: run.step clips each example's gradient "
                "(the clip argument of privatize). Remove the call."
            )
        if frame.f_code.co_name == "_unscale_grads_":
            raise WrongUseError(
                "leave the GradScaler out: run.step(loss) takes the loss as it is, and there are no gradients to unscale. A loss "
                "that was scaled has gradients above the clip norm for every example."
            )
        frame = frame.f_back


def _refuse_batch_statistics(func, args, kwargs) -> None:
    training = kwargs.get("training", args[5] if len(args) > 5 else False)
    if training:
        raise UnsupportedError(
            "replace batch norm with rgp.fix(model), which puts GroupNorm in its place; or call .eval() on a frozen network or a "
            "teacher, whose statistics are to stay as they are. As it is, batch norm in training mode mixes the examples of a "
            "batch (in a network or a teacher alike): one example's gradient depends on the others and no clipping bounds it."
        )
