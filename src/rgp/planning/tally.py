"""Live bytes and flops of a computation on meta tensors: nothing is computed, everything is counted.

Each operation passes through `Tally`. A storage that appears counts until it is freed, so views cost nothing, a saved
activation costs once, and what the garbage collector would keep is kept here too. Flops are torch's own counts
(`torch.utils.flop_counter`): two for each multiply-add of a product, a convolution or attention, none for the rest.

A meta tensor has no numbers, so where code asks for one it gets the answer of an ordinary step: all examples finite,
nothing that needs special treatment.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

_aten = torch.ops.aten


def _attention_flops(products: int):
    """q k^T and p v: two products; their backward with the scores computed anew: five. Keys may have fewer heads."""

    def flops(*tensors: Any, out_val: Any = None, **_: Any) -> int:
        query, key = [t for t in tensors if isinstance(t, Tensor)][products == 5 :][:2]
        batch, heads, length, width = query.shape
        return products * 2 * batch * heads * length * key.shape[-2] * width

    return flops


_FLOPS = {
    **flop_registry,
    _aten.addmm_: flop_registry[_aten.addmm],  # torch counts the form that makes a new tensor only
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops(2),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_flops(5),
}
_ANSWERS = {_aten.all: 1, _aten.any: 0, _aten.sum: 0}  # what an ordinary step finds


class Tally(TorchDispatchMode):
    """Counts while it is active; `enter(phase)` says what the counts that follow belong to."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peaks: dict[str, int] = {}  # phase -> most bytes alive at once
        self.flops: dict[str, int] = defaultdict(int)
        self._storages: dict[int, weakref.ref[Any]] = {}
        self._answers: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self.enter("setup")

    def enter(self, phase: str) -> None:
        self.phase = phase
        self.peaks[phase] = max(self.peaks.get(phase, 0), self.live)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        packet = func._overloadpacket
        if packet is _aten._local_scalar_dense and args[0].is_meta:
            return self._answer(args[0])
        if packet is _aten.equal and args[0].is_meta:
            return False  # the weights moved
        if packet is _aten.nonzero and args[0].is_meta:
            return torch.empty(0, args[0].dim(), dtype=torch.int64)  # a real one: its length may be asked for
        out = _run(func, args, kwargs)
        if packet in _FLOPS:
            self.flops[self.phase] += int(_FLOPS[packet](*args, **kwargs, out_val=out))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.count(tensor)
        if packet in _ANSWERS:
            self._answers[id(out)] = (weakref.ref(out), _ANSWERS[packet])
        return out

    def count(self, tensor: Tensor) -> None:
        """Count a tensor's storage, unless it is counted already."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return
        size = storage.nbytes()
        self._storages[key] = weakref.ref(storage, lambda _: self._freed(key, size))
        self.live += size
        if self.live > self.peaks[self.phase]:
            self.peaks[self.phase] = self.live

    def _freed(self, key: int, size: int) -> None:
        self.live -= size
        del self._storages[key]

    def _answer(self, tensor: Tensor) -> bool | int | float:
        known, answer = self._answers.get(id(tensor), (lambda: None, 1))
        value = answer if known() is tensor else 1
        return bool(value) if tensor.dtype == torch.bool else value


# Shapes of results -----------------------------------------------------------------------------------------------------
# torch finds most of them in Python, a millisecond an operation; the layers of a model ask the same again and again.

_IN_PLACE = {
    *(_aten.add_, _aten.sub_, _aten.mul_, _aten.div_, _aten.copy_, _aten.zero_, _aten.fill_, _aten.sqrt_, _aten.lerp_),
    *(_aten.addcmul_, _aten.addcdiv_, _aten.addmm_, _aten.addmv_, _aten.clamp_min_, _aten.masked_fill_),
    *(_aten.normal_, _aten.uniform_, _aten.bernoulli_),
}
_KNOWN: dict[Any, Any] = {}  # operation and arguments -> shapes of its new tensors


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """func(*args, **kwargs), from memory where it was met before and makes new tensors only."""
    if func._overloadpacket in _IN_PLACE and args[0].is_meta:
        return args[0]
    if func._schema.is_mutable:
        return func(*args, **kwargs)
    given: list[Tensor] = []
    try:
        key = (func, _describe(args, given), _describe(tuple(kwargs.items()), given))
        known = _KNOWN.get(key)
    except TypeError:  # an argument that has no hash
        return func(*args, **kwargs)
    if known is not None:
        return _make(known)
    out = func(*args, **kwargs)
    new = tree_leaves(out)
    storages = {t.untyped_storage()._cdata for t in given}
    fresh = all(t is None or (isinstance(t, Tensor) and t.untyped_storage()._cdata not in storages) for t in new)
    if new and fresh and all(t is None or t.is_meta for t in new) and all(t.is_meta for t in given):
        _KNOWN[key] = _describe(out, [])
    return out


def _describe(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value)
        return _Described((tuple(value.shape), value.stride(), value.dtype, value.is_meta))
    if isinstance(value, (tuple, list)):
        return tuple(_describe(v, tensors) for v in value)
    return (type(value), value) if isinstance(value, (bool, int, float)) else value


class _Described(tuple):
    """Shape, strides, dtype and place of a tensor."""


def _make(described: Any) -> Any:
    if isinstance(described, _Described):
        shape, stride, dtype, _ = described
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    return None if described is None else tuple(_make(d) for d in described)


def bytes_of(tensors: Any) -> int:
    """Bytes of the distinct storages behind these tensors."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors if isinstance(t, Tensor)}
    return sum(storages.values())
