"""The probe: does each example stay in its own rows? Asked once per run, before anything is released.

Per-example gradients rest on knowing which rows of an activation belong to which example, and clipping rests on no row
depending on another example. Shapes cannot always tell: with as many positions as examples, a layout with positions
first looks just like one with examples first. So the model's calls are repeated with one example replaced by another,
larger than all: in every operation that meets a trained parameter, and in the model's outputs, all other examples' rows
must be the same. The repetition with the examples as they are comes last, so that what a model kept of another batch shows.

Nor may the rows be something else altogether: positions that all examples share have a gradient that sums over them.
There every example is replaced by the next, and rows that differ from each other must not all come out the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from rgp.errors import UnsupportedError
from rgp.rules.derived import derived
from rgp.torchstate import forked_rng, kept_rng, seed_others

CALLS = 4  # of the model, of one micro-batch, that are repeated
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
Call = tuple[tuple[Any, ...], dict[str, Any]]
Fingerprint = tuple[str, Tensor, float]  # a parameter, per-example sums (m, 2) of what it met or made, tolerance
# operations with a dropout of their own: where its probability stands among the arguments
_DROPOUT_AT = {F.scaled_dot_product_attention: 4, F.multi_head_attention_forward: 10}
_DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout)


class Recorder:
    """Keeps the arguments of the model's calls that are made for a loss."""

    def __init__(self, model: nn.Module) -> None:
        self.calls: list[Call] = []
        self._hook = model.register_forward_pre_hook(self._keep, with_kwargs=True)

    def _keep(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled() and len(self.calls) < CALLS:
            self.calls.append((args, kwargs))

    def remove(self) -> None:
        self._hook.remove()


def check_examples_apart(
    model: nn.Module,
    call: Call,
    m: int,
    names: Mapping[int, str],
    seed: int,
    every: Callable[[bool], bool] = bool,
    some: Callable[[bool], bool] = bool,
) -> bool:
    """Raise if replacing one example changes another's rows; `names` maps ids of trained parameters to names.

    Returns False if the call cannot tell: its examples are all alike, some are not finite, or no tensor has them first.
    every, some: whether something holds on all ranks, or on any, where they have to make the same passes.
    """
    rows = [len(leaf) for leaf in tree_leaves(call) if isinstance(leaf, Tensor) and leaf.dim() > 0]
    if m not in rows and (several := [n for n in rows if n > m and n % m == 0]) and m > 1:
        raise UnsupportedError(
            f"the model was called with {several[0]} rows for {m} examples. Which rows belong to an example cannot be "
            "seen from that: torch.cat([x, x]) would be taken apart wrongly. Give the model a tensor with the examples "
            "first, (m, k, ...) or batch_first=True, and flatten inside; or, if each example's rows are side by side, "
            "pass probe=False."
        )
    if m not in rows:
        warnings.warn(
            f"the model was called without a tensor of {m} rows, one for each example, so it could not be checked that it keeps "
            "the examples of a batch apart. Check it once with rgp.check(model, batch, loss_fn): see docs/pitfalls.md."
        )
    swapped = _swap(call, m)
    if not every(swapped is not None):
        return False
    assert swapped is not None
    after = _fingerprints(model, swapped, m, names, seed)
    before = _fingerprints(model, call, m, names, seed)
    for one, two in zip(chain(*before), chain(*after), strict=False):
        if not bool(_still(one, two)[1:].all()):
            where = f"at parameter {one[0]!r}" if one[0] else "in the model's output"
            raise UnsupportedError(
                f"{where} an example's activations changed when only another example of the batch was replaced. "
                "Either the model mixes the examples of a batch (then no clipping bounds one example's influence), or its "
                "activations do not have the examples in their first dimension (batch_first=True in nn.Transformer and "
                "nn.MultiheadAttention). Nothing was released. See docs/pitfalls.md."
            )
    pairs = enumerate(zip(before, after, strict=False))
    suspects = [
        i
        for i, (one, two) in pairs
        if one[0][0]  # not the outputs
        and all(bool(_still(a, b)[0]) for a, b in zip(one, two, strict=False))
        and any(map(_differ, one))
    ]
    turned = _fingerprints(model, _roll(call, m), m, names, seed) if some(bool(suspects)) else []
    for i in suspects:
        if i < len(turned) and all(bool(_still(a, b).all()) for a, b in zip(before[i], turned[i], strict=False)):
            raise UnsupportedError(
                f"parameter {before[i][0][0]!r} met something that is the same for all examples of the batch (positions, "
                "a relative bias), so that its gradient belongs to none of them. Give each example its own copy "
                "(.expand(m, ...) before the operation), freeze the parameter, or use microbatch_size=1. Nothing was "
                "released."
            )
    return every(all(bool(sums[1:].isfinite().all()) for _, sums, _ in chain(*before)))


def _still(one: Fingerprint, two: Fingerprint) -> Tensor:
    """Which rows did not change."""
    (_, a, limit), (_, b, _) = one, two
    near = (a - b).abs() <= limit * (1 + a[:, 1:2].abs())
    return (near | ~(a.isfinite() | b.isfinite())).all(1)


def _differ(one: Fingerprint) -> bool:
    """Whether the rows are not all alike."""
    name, a, limit = one
    return not bool(_still(one, (name, a[:1].expand_as(a), limit)).all())


def _swap(call: Call, m: int) -> Call | None:
    """The call with example 0 replaced by another that differs from it, made larger than all."""

    tensors = [leaf for leaf in tree_leaves(call) if has_rows(leaf, m)]
    other = next((k for k in range(1, m) if any(not torch.equal(t[0], t[k]) for t in tensors)), None)
    if other is None:
        return None

    def swap(leaf: Any) -> Any:
        if not has_rows(leaf, m):
            return leaf
        row = leaf[other : other + 1]
        if leaf.is_floating_point():
            scale = 2 * leaf.detach().abs().amax() / row.detach().abs().amax()
            row = row * scale if bool(scale.isfinite()) else row
        return torch.cat([row, leaf[1:]])

    return tree_map(swap, call)


def _roll(call: Call, m: int) -> Call:
    """The call with every example replaced by the next one."""
    return tree_map(lambda leaf: leaf.roll(-1, 0) if has_rows(leaf, m) else leaf, call)


def has_rows(leaf: Any, m: int) -> bool:
    """Whether this is a tensor with a row for each of m examples."""
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == m


def as_tree(batch: Any) -> Any:
    """For torch's tree functions: Hugging Face's BatchEncoding is a mapping, but no dict."""
    return dict(batch) if isinstance(batch, Mapping) else batch


class _Watch(TorchFunctionMode):
    """Per-example sums of every result that a trained parameter had a part in, and of what it met there."""

    def __init__(self, m: int, names: Mapping[int, str]) -> None:
        super().__init__()
        self.m, self.names = m, dict(names)
        self.seen: list[list[Fingerprint]] = []  # for each operation; the model's outputs are the last
        self._alive: list[Tensor] = []  # tensors in `names`, whose ids must not be given to others

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _DROPOUTS:  # rows that are alike must stay so
            return args[0] if args else kwargs["input"]
        if func in _DROPOUT_AT:
            args, kwargs = _without_dropout(_DROPOUT_AT[func], args, kwargs)
        result = func(*args, **kwargs)
        name = next((self.names[id(a)] for a in (*args, *kwargs.values()) if id(a) in self.names), None)
        if name is not None and (func is derived or self._is_of_parameters(args, kwargs)):
            self.names[id(result)] = name
            self._alive.append(result)
        elif name is not None:
            y = result[0] if isinstance(result, tuple) and result else result
            if func is F.multi_head_attention_forward and y.dim() == 3:
                y = y.transpose(0, 1)
            operands = [
                a for a in (*args, *kwargs.values()) if not isinstance(a, nn.Parameter) and id(a) not in self.names
            ]
            if func is F.multi_head_attention_forward:  # which has the examples second
                operands.clear()
            self.note(name, y, *operands)
        return result

    def _is_of_parameters(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Nothing of the batch takes part: W.T is no activation."""
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        return all(id(t) in self.names or isinstance(t, nn.Parameter) for t in tensors)

    def note(self, name: str, *tensors: Any) -> None:
        found = []
        for y in tensors:
            if isinstance(y, Tensor) and not y.is_complex() and y.dim() and y.numel() and len(y) % self.m == 0:
                rows = y.detach().reshape(self.m, -1)
                weights = torch.cos(torch.arange(rows.shape[1], dtype=torch.float64, device=rows.device))
                # row by row: in float64 all at once would be the largest thing in memory
                sums = torch.stack([torch.stack([r @ weights, r.abs().sum()]) for r in map(Tensor.double, rows)])
                found.append((name, sums, TOLERANCE.get(y.dtype, 1e-2) if y.is_floating_point() else 0.0))
        if found:
            self.seen.append(found)


def _without_dropout(at: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    if len(args) > at:
        return (*args[:at], 0.0, *args[at + 1 :]), kwargs
    return args, {**kwargs, "dropout_p": 0.0}


def _fingerprints(model: nn.Module, call: Call, m: int, names: Mapping[int, str], seed: int) -> list[list[Fingerprint]]:
    """For each operation with trained parameters: of its result and of what they met. Those of the outputs are the last."""
    args, kwargs = call
    with torch.no_grad(), kept_rng(), forked_rng(seed):
        seed_others(seed)
        with _Watch(m, names) as watch:
            outputs = model(*args, **kwargs)
    # with as many positions as examples it cannot be seen which of them come first
    watch.note("", *(y for y in tree_leaves(outputs) if has_rows(y, m) and (y.dim() == 1 or y.shape[1] != m)))
    return watch.seen
