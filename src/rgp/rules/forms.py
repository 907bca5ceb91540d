"""Forms: what is computed from trained parameters alone, before it meets the batch.

`weight.float()`, `pos[:, :T]`, `-exp(A_log)`, `F.normalize(W)`, weight norm and other parametrizations, a table of
positions that goes through trained layers. Let F = f(W) be such a form. Where it meets the batch, the operation's rule
gives each example's gradient of F, as if F were a parameter; f involves no example, so W's is the vector-Jacobian product
of f with it, exact, and one product for all examples together. f may use any operation.

What is handed on to the model is a leaf of autograd's graph: gradients reach parameters through rules only.

Shapes: F (*shape), its gradients (m, *shape).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map

from rgp.errors import UnsupportedError
from rgp.norms import EmbeddingUse
from rgp.rules.constants import tensors_in
from rgp.slots import DeferredSlot, DenseSlot, Slot

_EXPANSIONS = (torch.Tensor.expand, torch.Tensor.expand_as, torch.broadcast_to, torch.Tensor.broadcast_to)


class FormSlot(Slot):
    """The slot of a form: carries what it is given back to the slots of what the form was computed from."""

    was_written = False  # whether the form is a tensor of the model's into which others were written

    def __init__(
        self,
        graph: Tensor,
        parents: list[tuple[Tensor, Slot]],
        made_by: tuple[Any, Any, Any],
        assume: Callable[[Tensor], None] | None = None,
    ) -> None:
        """assume: takes what is to be checked when the graph runs that is being made now (compiled/)."""
        first = parents[0][1].entry
        super().__init__(replace(first, shape=tuple(graph.shape), treatment="exact", rank=0, scale=1.0))
        self._graph, self._parents, self._made_by = graph, parents, made_by
        self._assume = assume

    def add_outer(self, left, right, *, thin_left=None, thin_right=None) -> None:
        self.add_dense(torch.bmm(left.transpose(1, 2), right).view(left.shape[0], *self.entry.shape))

    def add_dense(self, gradients: Tensor) -> None:
        gradients = gradients.reshape(gradients.shape[0], *self.entry.shape)
        lookup = self._lookup()
        if lookup is not None:
            table, ids, keep = lookup
            g = gradients.reshape(gradients.shape[0], ids.numel(), -1) * keep.reshape(-1, 1)
            look_up(table, ids.reshape(1, -1).expand(g.shape[0], -1), g)
            return
        if (part := self._part()) is not None:
            parent, slot = self._parents[0]
            whole = gradients.new_zeros(gradients.shape[0], *parent.shape)
            where = (slice(None), *part)
            whole[where] = gradients
            slot.add_dense(whole)
            return
        tensors = [tensor for tensor, _ in self._parents]
        for (tensor, slot), found in zip(self._parents, _products(self._graph, tensors, gradients), strict=True):
            if found is not None:
                slot.add_dense(found.reshape(gradients.shape[0], *tensor.shape))

    def add_rows(self, rows: Tensor) -> None:
        """The form has a row (or several) for each example: `rows` (m, k, *shape[1:]) are those of example i."""
        m, func = rows.shape[0], self._made_by[0]
        parent, slot = self._parents[0]
        lookup = self._lookup()
        if lookup is not None:
            table, ids, keep = lookup
            g = rows.reshape(m, ids.numel() // m, -1) * keep.reshape(m, -1, 1)
            look_up(table, ids.reshape(m, -1), g)
        elif func in _EXPANSIONS and len(self._parents) == 1 and _is_copied(parent, self.entry.shape):
            # all rows are copies of one: the parent's gradient is the sum over them
            shape = (1,) * (len(self.entry.shape) - parent.dim()) + tuple(parent.shape)
            g = rows.sum(1, keepdim=True).reshape(m, 1, *self.entry.shape[1:])
            axes = [i for i in range(1, len(shape)) if shape[i] == 1 and g.shape[i + 1] != 1]
            slot.add_dense((g.sum([a + 1 for a in axes], keepdim=True) if axes else g).reshape(m, *parent.shape))
        else:
            self.add_dense(on_diagonal(rows))

    def has_rows_for(self, m: int) -> bool:
        """Whether its rows are m times the same, and were made by repeating something: the examples' own copies.

        A stack of experts may look like that too, if they all start at zero; but nothing was repeated to make it.
        """
        value = self._graph.detach()
        if value.shape[0] % m or not self._is_repeated():
            return False
        if self._made_by[0] in _EXPANSIONS and _is_copied(self._parents[0][0], self.entry.shape):
            return True  # all rows are one, whatever is in it
        groups = value.reshape(m, -1)
        if self._assume is None:
            return bool(torch.equal(groups, groups[:1].expand_as(groups)))
        self._assume((groups == groups[:1]).all())
        return True

    def _is_repeated(self) -> bool:
        func, args, kwargs = self._made_by
        rows, parents = self._graph.shape[0], [tensor for tensor, _ in self._parents]
        if func is F.embedding or any(slot._is_repeated() for _, slot in self._parents if isinstance(slot, FormSlot)):
            return True
        if func in _EXPANSIONS and _is_copied(parents[0], self.entry.shape):
            return True
        if any(tensor.dim() and tensor.shape[0] == rows for tensor in parents):  # they may be its own rows
            return False
        constants = [t for t in tensors_in((args, kwargs)) if all(t is not tensor for tensor in parents)]
        grown = all(self._graph.numel() > tensor.numel() for tensor in parents)
        return grown or any(t.dim() and t.shape[0] == rows for t in constants)

    def _part(self) -> tuple[Any, ...] | None:
        """The index of a part of one parameter, as in positions[:, :T], which needs no product."""
        func, args, _ = self._made_by
        if func is not torch.Tensor.__getitem__ or len(self._parents) > 1:
            return None
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return index if all(isinstance(i, (slice, int)) for i in index) else None

    def _lookup(self) -> tuple[Slot, Tensor, Tensor] | None:
        """A table that is looked up with the same ids for all examples: its slot, the ids, and which of them count."""
        func, args, kwargs = self._made_by
        slot = self._parents[0][1]
        if func is not F.embedding or len(self._parents) > 1 or not isinstance(slot, (DenseSlot, DeferredSlot)):
            return None
        ids = args[0] if args else kwargs["input"]
        padding = args[2] if len(args) > 2 else kwargs.get("padding_idx")
        if padding is None:
            return slot, ids, torch.ones_like(ids)
        return slot, ids, (ids != padding % slot.entry.shape[0]).long()


def look_up(table: Slot, ids: Tensor, g: Tensor) -> None:
    """Give the slot of a table what lookups of `ids` (m, T) mean for it, whose results have the gradient g (m, T, d)."""
    use = EmbeddingUse(ids, g, table.entry.shape)
    if isinstance(table, DeferredSlot):
        table.add_use(use)
    else:
        table.add_dense(use.gradients())


def on_diagonal(rows: Tensor) -> Tensor:
    """(m, k, ...) -> (m, m k, ...): example i's rows in its own place, zeros in the others'."""
    m, k = rows.shape[:2]
    whole = rows.new_zeros(m, m, *rows.shape[1:])
    where = torch.arange(m, device=rows.device)
    whole[where, where] = rows
    return whole.reshape(m, m * k, *rows.shape[2:])


def _is_copied(parent: Tensor, shape: tuple[int, ...]) -> bool:
    return parent.dim() < len(shape) or (parent.dim() == len(shape) and parent.shape[0] == 1)


def _products(graph: Tensor, inputs: list[Tensor], gradients: Tensor) -> tuple[Tensor | None, ...]:
    """Each example's vector-Jacobian product, all at once where torch can."""
    gradients = gradients.to(graph.dtype)
    with torch._C.DisableTorchFunction():
        try:
            return torch.autograd.grad(
                graph, inputs, gradients, retain_graph=True, allow_unused=True, is_grads_batched=True
            )
        except RuntimeError:  # an operation that cannot be vectorised
            each = [torch.autograd.grad(graph, inputs, g, retain_graph=True, allow_unused=True) for g in gradients]
            return tuple(None if column[0] is None else torch.stack(column) for column in zip(*each, strict=True))


def is_in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    by_name = (name.endswith("_") and not name.endswith("__")) or name in (
        "__iadd__",
        "__isub__",
        "__imul__",
        "__setitem__",
    )
    return by_name or kwargs.get("inplace") is True or (name in ("relu", "silu", "gelu", "elu") and True in args[1:])


def make_form(capture: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """func(*args, **kwargs), all of whose tensors are trained parameters, forms and constants."""
    if func is torch.Tensor.__setitem__ and not capture.tracing and _can_be_written(capture, args[0]):
        return _write(capture, *args)
    # a form that is changed in place: the model continues with the result, as after nn.ReLU(inplace=True), not with the form
    follows = getattr(func, "__name__", "") != "__setitem__"  # which has no result for the model to continue with
    changed = (
        args[0] if follows and is_in_place(func, args, kwargs) and isinstance(capture.slot(args[0]), FormSlot) else None
    )
    # its own hooks: an activation checkpoint must not drop what is needed here, it will not compute it again
    try:
        with saved_tensors_hooks(lambda x: x, lambda x: x):
            result = func(*args, **kwargs) if changed is None else func(changed.clone(), *args[1:], **kwargs)
    except RuntimeError as error:
        if "in-place operation" not in str(error):
            raise
        name = next(slot for t in tensors_in((args, kwargs)) if (slot := capture.slot(t)) is not None).entry.name
        raise UnsupportedError(
            f"something computed from parameter {name!r} was changed in place, which the rules cannot follow. Write it without "
            "the change: torch.where, torch.cat, y = x * mask."
        ) from error
    parents: dict[int, tuple[Tensor, Slot]] = {}
    for operand in tensors_in((args, kwargs)):
        slot, transposed = capture.find(operand)
        if slot is not None:
            parents[id(operand)] = (operand, TurnedSlot(slot) if transposed else slot)
    if changed is not None:
        capture.forbid(changed)

    assume = capture.assume if capture.tracing else None

    def hand_on(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.requires_grad:
            return leaf
        if id(leaf) in parents:
            return leaf
        if capture.sharded:
            name = next(iter(parents.values()))[1].entry.name
            raise UnsupportedError(
                f"parameter {name!r} is sharded by fully_shard and was used in {getattr(func, '__name__', func)} before it met "
                "the batch, which needs the whole of it in the backward pass. Freeze it, or let every rank hold the model."
            )
        return capture.hand_on(leaf, FormSlot(leaf, list(parents.values()), (func, args, kwargs), assume), False)

    return tree_map(hand_on, result)


def _can_be_written(capture: Any, target: Tensor) -> bool:
    """Whether it is a constant, or one into which forms were written before; not a form that the model computed."""
    slot = capture.slot(target)
    return not target.requires_grad if slot is None else isinstance(slot, FormSlot) and slot.was_written


def _write(capture: Any, target: Tensor, index: Any, value: Tensor) -> None:
    """target[index] = value: from now on the target is a form, of what it was and of the value."""
    with torch.no_grad(), torch._C.DisableTorchFunction():
        before = target.detach().clone()
    if (slot := capture.slot(target)) is not None:
        before.requires_grad_()
        capture.remember(before, slot, False)
    form = make_form(capture, _written, (before, index, value), {})
    slot = capture.slot(form)
    slot.was_written = True
    with torch.no_grad(), torch._C.DisableTorchFunction():
        target.copy_(form)
        if not target.requires_grad:
            target.requires_grad_()
            capture.guard(target, slot)
    capture.remember(target, slot, False)


def _written(before: Tensor, index: Any, value: Tensor) -> Tensor:
    after = before.clone()
    after[index] = value
    return after


class TurnedSlot(Slot):
    """Passes gradients of a parameter's transpose on to the parameter's own slot."""

    def __init__(self, slot: Slot) -> None:
        super().__init__(slot.entry)
        self._slot = slot

    def add_dense(self, gradients: Tensor) -> None:
        self._slot.add_dense(gradients.mT)
