"""Operations without a rule: the operation again on each example's rows alone, and its backward pass by autograd.

Slower than a rule and as exact. It relies on one assumption: the rows of the result that belong to an example are what the
operation computes from that example's rows; so the rows are computed again, one example at a time, and compared. Where they
are not the same (the examples are not first, rows are sorted by something else, the operation draws random numbers or
mixes the examples) it refuses.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.overrides import resolve_name
from torch.utils._pytree import tree_flatten, tree_unflatten

from rgp.errors import LayoutError, UnsupportedError
from rgp.rules.copies import copies
from rgp.rules.forms import FormSlot, is_in_place
from rgp.rules.generic import watched

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}


def name_of(func: Any) -> str:
    return resolve_name(func) or getattr(func, "__name__", str(func))


def with_copies(capture: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """func(*args, **kwargs) where all forms among them have a row for each example (learned queries, expanded): then autograd
    keeps the examples apart, if the operation does. NotImplemented if there are others."""
    leaves, spec = tree_flatten((args, kwargs))
    m = capture.examples
    if is_in_place(func, args, kwargs):
        return NotImplemented
    trained = [i for i, leaf in enumerate(leaves) if capture.slot(leaf) is not None]
    for i in trained:
        slot, transposed = capture.find(leaves[i])
        if m == 1 or transposed or not isinstance(slot, FormSlot) or not slot.has_rows_for(m):
            return NotImplemented

    def call(filled: list[Any]) -> Any:
        inner_args, inner_kwargs = tree_unflatten(filled, spec)
        return func(*inner_args, **inner_kwargs)

    plain = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    with torch.no_grad(), torch._C.DisableTorchFunction():
        whole = call(plain)
        if not isinstance(whole, Tensor) or whole.shape[:1] != (m,):
            return NotImplemented
        limit = TOLERANCE.get(whole.dtype, 3e-2)
        for i in range(m):
            try:
                alone = call([x[i : i + 1] if isinstance(x, Tensor) and x.shape[:1] == (m,) else x for x in plain])
            except (RuntimeError, IndexError):  # operands that no longer fit together
                return NotImplemented
            if alone.shape != whole[i : i + 1].shape or not torch.allclose(alone, whole[i : i + 1], limit, limit):
                return NotImplemented
    filled = list(leaves)
    for i in trained:
        filled[i] = copies(capture, leaves[i], tuple(leaves[i].shape))
    return call(filled)


def loop(capture: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """func(*args, **kwargs), with per-example gradients of the trained parameters and forms among them."""
    leaves, spec = tree_flatten((args, kwargs))
    slots = {i: slot for i, leaf in enumerate(leaves) if (slot := capture.slot(leaf)) is not None}
    data = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and i not in slots]
    m, names = capture.examples, sorted({slot.entry.name for slot in slots.values()})
    if is_in_place(func, args, kwargs):
        raise _refusal(func, names, "changes something in place")
    if any(capture.find(leaves[i])[1] for i in slots):
        raise _refusal(func, names, "met a parameter's transpose")

    def call(*inputs: Tensor, parameters: dict[int, Tensor] | None = None) -> Tensor:
        filled = list(leaves)
        for i in slots:
            filled[i] = leaves[i].detach() if parameters is None else parameters[i]
        for i, value in zip(data, inputs, strict=True):
            filled[i] = value
        inner_args, inner_kwargs = tree_unflatten(filled, spec)
        return func(*inner_args, **inner_kwargs)

    with torch.no_grad(), torch._C.DisableTorchFunction():
        whole = call(*(leaves[i].detach() for i in data))
    if not isinstance(whole, Tensor):
        raise _refusal(func, names, "gives more than one tensor")
    lead = whole.shape[0] if whole.dim() else 0
    if not lead or lead % m:
        why = f"gives a result of shape {tuple(whole.shape)}, which has no rows for {m} examples"
        raise _refusal(func, names, why, LayoutError)

    if lead != m and m in whole.shape[1:-1] and m > 1:
        why = f"gives a result of shape {tuple(whole.shape)}, whose {m} examples are not first"
        raise _refusal(func, names, why, LayoutError)
    k = lead // m

    def inputs_of(i: int, sliced: set[int]) -> list[Tensor]:
        """The operands of example i alone."""
        found = []
        for j in data:
            x = leaves[j].detach()
            each = x.shape[0] // m if j in sliced else 0
            found.append(x[i * each : (i + 1) * each] if j in sliced else x)
        return found

    def is_right(sliced: set[int]) -> bool:
        limit = TOLERANCE.get(whole.dtype, 3e-2)
        with torch.no_grad(), torch._C.DisableTorchFunction():
            for i in range(m):
                try:
                    alone = call(*inputs_of(i, sliced))
                except (RuntimeError, IndexError):  # operands that no longer fit together
                    return False
                rows = whole[i * k : (i + 1) * k]
                if alone.shape != rows.shape or not torch.allclose(alone, rows, limit, limit, equal_nan=True):
                    return False
        return True

    with_rows = {j for j in data if leaves[j].dim() and leaves[j].shape[0] in (m, lead)} if m > 1 else set()
    of_batch = {j for j in with_rows if leaves[j] not in capture.constants}
    sliced = next((choice for choice in (of_batch, with_rows) if is_right(choice)), None)
    if sliced is None:
        raise _refusal(func, names, "does not make each example's rows of that example's rows alone", LayoutError)
    _warn_once(capture, func, names)

    def tell(grad: Tensor) -> None:
        found: dict[int, list[Tensor]] = {i: [] for i in slots}
        with torch.enable_grad(), torch._C.DisableTorchFunction():
            for i in range(m):
                parameters = {j: leaves[j].detach().requires_grad_() for j in slots}
                alone = call(*inputs_of(i, sliced), parameters=parameters)
                if not alone.requires_grad:  # of the parameters, only shapes or dtypes were used
                    return
                grads = torch.autograd.grad(
                    alone, list(parameters.values()), grad[i * k : (i + 1) * k], allow_unused=True
                )
                for j, g in zip(slots, grads, strict=True):
                    found[j].append(torch.zeros_like(leaves[j]) if g is None else g)
        for j, slot in slots.items():
            slot.add_dense(torch.stack(found[j]).detach())

    return watched(call, tell, leaves[next(iter(slots))], *(leaves[i] for i in data))


def _warn_once(capture: Any, func: Any, names: list[str]) -> None:
    key = (name_of(func), tuple(names))
    if key not in capture.looped:
        capture.looped.add(key)
        warnings.warn(
            f"{key[0]} with parameter {', '.join(map(repr, names))} has no rule: its per-example gradients are computed one "
            "example at a time, which is exact and slow. docs/rules.md shows how to add a rule; fallback='error' in the "
            "method refuses such operations.",
            stacklevel=2,
        )


def _refusal(
    func: Any, names: list[str], why: str, kind: type[UnsupportedError] = UnsupportedError
) -> UnsupportedError:
    return kind(
        f"parameter {names[0]!r} is trained but was used in {name_of(func)}, which has no rule for per-example gradients and "
        f"{why}. Freeze it (overrides={{{names[0]!r}: 'frozen'}} in the method), put the examples first, or register a "
        "rule: see docs/rules.md"
    )
