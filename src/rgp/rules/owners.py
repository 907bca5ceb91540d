"""Rows that were picked out of the batch, such as the tokens that are sent to one expert: to which example each belongs.

Elsewhere the examples come first in an activation, in their order. Rows picked by an index are in no such order and of any
number, so their owners are looked up when they are picked, and travel along through operations that keep rows in their
places; added back into the batch (index_add_, index_put_) they are ordinary again. After any other operation their
owners are unknown, and a rule that meets them refuses.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rgp.errors import LayoutError
from rgp.rules.constants import tensors_in

_T = torch.Tensor
_ACTIVATIONS = (
    "relu gelu silu sigmoid tanh softplus elu leaky_relu hardswish hardsigmoid relu6 mish logsigmoid selu celu"
)
_ELEMENTWISE = (
    "add sub rsub mul div true_divide pow maximum minimum exp log sqrt rsqrt neg abs clamp clamp_min clamp_max square where "
    "to type type_as float double half bfloat16 clone contiguous detach dropout add_ sub_ mul_ div_ clamp_ "
    "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __pow__ __neg__ __iadd__ __isub__ "
    "__imul__ __itruediv__ erf linear layer_norm rms_norm"
)
_KEEPS_ROWS = frozenset((*_ACTIVATIONS.split(), *_ELEMENTWISE.split()))
_ALONG = ("chunk", "split", "unbind", "mean", "sum", "softmax", "cat", "unsqueeze", "squeeze", "norm", "var")  # by dim
_PRODUCTS = ("matmul", "__matmul__", "mm")
_RESHAPES = ("reshape", "view", "flatten", "squeeze")
_BACK = (_T.index_add_, _T.index_add, torch.index_add, _T.index_put_, _T.index_put, _T.__setitem__)
_LOOKS = ("shape", "dtype", "device", "size", "dim", "requires_grad", "numel", "is_floating_point", "ndim", "__get__")


class Owned:
    """The owners of n picked rows: `example` (n,); and a place (example, place) for each in a padded (m, K, ...)."""

    def __init__(self, example: Tensor, m: int) -> None:
        self.example, self.m = example, m
        order = torch.argsort(example, stable=True)
        counts = torch.bincount(example, minlength=m)
        first = counts.cumsum(0) - counts
        self.place = torch.empty_like(example)
        self.place[order] = torch.arange(len(example), device=example.device) - first[example[order]]
        self.longest = int(counts.max()) if len(example) else 0

    def padded(self, x: Tensor) -> Tensor:
        """x (n, ...) as (m, K, ...), with zeros where an example has fewer rows."""
        out = x.new_zeros(self.m, max(1, self.longest), *x.shape[1:])
        out[self.example, self.place] = x
        return out


class Owners:
    """Keeps the owners of picked rows through one micro-batch."""

    def __init__(self, assume: Callable[[Tensor], None] | None = None) -> None:
        """assume: takes what is to be checked when the graph runs that is being made now (compiled/)."""
        self._assume = assume
        self._known: dict[int, tuple[weakref.ref[Tensor], Owned | None]] = {}

    def clear(self) -> None:
        self._known.clear()

    def __bool__(self) -> bool:
        return bool(self._known)

    def is_picked(self, tensor: Any) -> bool:
        found = self._known.get(id(tensor))
        return found is not None and found[0]() is tensor

    def of(self, tensor: Tensor) -> Owned | None:
        """The owners of a tensor of picked rows; an error if they are not known."""
        if not self.is_picked(tensor):
            return None
        owned = self._known[id(tensor)][1]
        if owned is None or len(tensor) != len(owned.example):
            raise LayoutError(
                f"an activation of shape {tuple(tensor.shape)} was made of rows that an index had picked out of the batch, by an "
                "operation after which it is not known which example they belong to. Freeze what is trained on it (experts, "
                "say), or write it so that every example keeps its own rows."
            )
        return owned

    def note(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any, m: int, of_batch: Any
    ) -> None:
        """After an operation: whether its result has picked rows. of_batch: whether a tensor comes from the batch."""
        if m == 1:
            return
        if self._known and func in _BACK:
            return self._put_back(func, args, m)
        if not isinstance(result, (Tensor, tuple, list)):
            return
        if picked := _picked(func, args, kwargs):
            source, index = picked
            if isinstance(result, Tensor) and of_batch(source) and source.dim():
                self._pick(source, index, result, m)
            return
        if not self._known:
            return
        known = [t for t in tensors_in((args, kwargs)) if self.is_picked(t)]
        name = getattr(func, "__name__", "")
        if not known or name in _LOOKS:
            return
        owned = self._known[id(known[0])][1]
        if owned is not None and self._cut(func, name, args, kwargs, result, owned):
            return
        same = all(self._known[id(t)][1] is owned for t in known)
        keeps = name in _KEEPS_ROWS or (name in _ALONG and _dim(args, kwargs) not in (0, None))
        keeps = (
            keeps or (name in _PRODUCTS and known[0] is args[0]) or (func is _T.__getitem__ and _is_of_columns(args[1]))
        )
        n = -1 if owned is None else len(owned.example)
        shape = known[0].shape
        # (n, ...) -> (n, ...), or (1, n, ...) -> (n, ...)
        keeps = keeps or (name in _RESHAPES and (shape[:1] == (n,) or shape[:2] == (1, n)))
        for leaf in tensors_in(result):
            self._set(leaf, owned if same and keeps and leaf.dim() and len(leaf) == n else None)

    def _cut(self, func: Any, name: str, args: tuple[Any, ...], kwargs: Any, result: Any, owned: Owned) -> bool:
        """Picked rows that are cut into pieces, one after the other, or pieces that are put together again."""
        pieces = list(tensors_in(result))
        if name in ("split", "chunk") and _dim(args, kwargs) == 0:
            start = 0
            for piece in pieces:
                self._set(piece, Owned(owned.example[start : start + len(piece)], owned.m))
                start += len(piece)
            return True
        if func is _T.__getitem__ and isinstance(args[1], slice):
            self._set(pieces[0], Owned(owned.example[args[1]], owned.m))
            return True
        if name in ("cat", "concat") and (_dim(args, kwargs) or 0) == 0:
            parts = [self._known[id(t)][1] if self.is_picked(t) else None for t in tensors_in(args)]
            known = [part for part in parts if part is not None]
            if len(known) == len(parts):
                self._set(pieces[0], Owned(torch.cat([part.example for part in known]), owned.m))
                return True
        return False

    def _put_back(self, func: Any, args: tuple[Any, ...], m: int) -> None:
        """Rows are written into `target`: into their own examples' rows, or its owners are no longer known."""
        target, *rest = args
        if not any(self.is_picked(t) for t in tensors_in(args)):
            return
        if self._assume is not None:
            return self._set(target, None)
        index = rest[0][0] if isinstance(rest[0], (tuple, list)) and rest[0] else rest[0]
        if func in (_T.index_add_, _T.index_add, torch.index_add):
            dim, index, rows = rest[:3]
        else:
            dim, rows = 0, rest[1]
        owned = self._known[id(rows)][1] if self.is_picked(rows) else None
        each, left = divmod(len(target), m)
        fits = owned is not None and not self.is_picked(target) and dim == 0 and not left and isinstance(index, Tensor)
        if fits and index.dtype == torch.bool:
            index = index.nonzero()[:, 0]
        assert not fits or owned is not None
        if not fits or index.shape != owned.example.shape or not torch.equal(index // each, owned.example):  # type: ignore[union-attr]
            self._set(target, None)

    def _set(self, tensor: Tensor, owned: Owned | None) -> None:
        self._known[id(tensor)] = (weakref.ref(tensor), owned)

    def _pick(self, source: Tensor, index: Tensor, result: Tensor, m: int) -> None:
        if self._assume is not None:
            return self._pick_in_order(source, index, result, m, self._assume)
        if self.is_picked(source):
            before = self._known[id(source)][1]
            owner_of = None if before is None else before.example
        else:
            each, rest = divmod(len(source), m)
            owner_of = None if rest or not each else torch.arange(m, device=source.device).repeat_interleave(each)
        if owner_of is None:
            return self._set(result, None)
        owners = owner_of[index.nonzero()[:, 0]] if index.dtype == torch.bool else owner_of[index]
        rows = owners.flatten(1) if owners.dim() > 1 else owners.unsqueeze(1)
        fits = result.shape[:1] == (len(rows),) or result.shape[:2] == (1, len(rows))  # the latter: x[None, index]
        if not fits or not rows.shape[1] or bool((rows != rows[:, :1]).any()):
            return self._set(result, None)
        example = rows[:, 0]
        if (
            len(example)
            and len(example) % m == 0
            and torch.equal(example, torch.arange(m, device=example.device).repeat_interleave(len(example) // m))
        ):
            return None  # in their order, as they are everywhere else
        # equal owners are one object: the rows of two tensors that were picked alike may meet
        for _, owned in self._known.values():
            if owned is not None and torch.equal(owned.example, example):
                return self._set(result, owned)
        return self._set(result, Owned(example, m))

    def _pick_in_order(
        self, source: Tensor, index: Tensor, result: Tensor, m: int, assume: Callable[[Tensor], None]
    ) -> None:
        """While a graph is made there are no numbers to look at: the rows are taken to be in their order, to be checked."""
        n = index.shape[0]
        each, bits = source.shape[0] // m, index.dtype == torch.bool
        if (
            bits
            or source.shape[0] % m
            or not each
            or not n
            or n % m
            or result.shape[:1] != (n,)
            or self.is_picked(source)
        ):
            return self._set(result, None)
        owners = torch.arange(n, device=index.device).view(-1, *[1] * (index.dim() - 1)) // (n // m)
        assume((index % source.shape[0] // each == owners).all())
        return None


def _is_of_columns(index: Any) -> bool:
    """Whether x[index] has all rows of x."""
    first = index[0] if isinstance(index, tuple) and index else index
    return first is Ellipsis or first == slice(None)


def _dim(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    dim = kwargs.get("dim")
    numbers = [v for v in args[1:] if isinstance(v, int) and not isinstance(v, bool)]
    return dim if dim is not None else (numbers[-1] if numbers else None)


def _picked(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor] | None:
    """(source, index) of an operation that picks rows by a tensor."""
    if func is _T.__getitem__:
        source, index = args
        first = next((i for i in index if i is not None), None) if isinstance(index, tuple) else index
        if isinstance(first, Tensor) and first.dim() and isinstance(source, Tensor):
            return source, first
    elif func in (torch.index_select, _T.index_select):
        given = {**dict(zip(("input", "dim", "index"), args, strict=False)), **kwargs}
        if given["dim"] % max(1, given["input"].dim()) == 0:
            return given["input"], given["index"]
    elif func in (torch.masked_select, _T.masked_select):
        return args[0], args[1]
    return None
