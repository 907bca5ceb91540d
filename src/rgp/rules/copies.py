"""A copy of a parameter for each example. Then autograd itself keeps the examples apart, in any operation that broadcasts.

y = x op w with x (m, ...) and w broadcast to it: autograd's gradient of the broadcast w has a row for each example, and
summing it back to w's shape over everything but the examples gives theirs. No operation needs a formula of its own.

Here: elementwise operations (in place too), torch.cat and stack, products with stacks of matrices, einsum.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from rgp.errors import LayoutError, UnsupportedError
from rgp.rules import ANYTIME, rule
from rgp.rules.forms import FormSlot, TurnedSlot, on_diagonal
from rgp.rules.owners import Owned
from rgp.slots import Slot

_T = torch.Tensor


class _Copies(torch.autograd.Function):
    """value, expanded to `shape`, whose first dimension is the examples."""

    @staticmethod
    def forward(ctx, value, shape, slot, m):
        ctx.slot, ctx.m, ctx.shape = slot, m, tuple(value.shape)
        return value.detach().expand(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        add_summed(ctx.slot, g, ctx.m, ctx.shape)
        return None, None, None, None


def copies(capture: Any, value: Tensor, shape: tuple[int, ...], rows: int | Owned | None = None) -> Tensor:
    """The value expanded to `shape`, examples first; rows: the owners of the first dimension, if it was picked."""
    slot, transposed = capture.find(value)
    if transposed:
        slot = TurnedSlot(slot)
    if isinstance(rows, Owned) and (value.dim() < len(shape) or value.shape[0] == 1):
        return _Copies.apply(value, tuple(shape), slot, rows)
    m = capture.examples
    check_lead(tuple(shape), m, value.dim(), slot)
    with_rows = m > 1 and value.dim() == len(shape) and value.shape[0] != 1
    if with_rows and not (isinstance(slot, FormSlot) and slot.has_rows_for(m)):
        raise LayoutError(
            f"parameter {slot.entry.name!r} has a row for each row of an activation of shape {tuple(shape)}: then these are not "
            f"the {m} examples of the micro-batch (experts, say, to which tokens were sent). Freeze the parameter."
        )
    return _Copies.apply(value, tuple(shape), slot, capture.examples)


def check_lead(shape: tuple[int, ...], m: int, features: int, slot: Slot) -> None:
    """The first dimension is the examples, or a flattening with the examples outermost; or which it is cannot be told."""
    if m == 1 or (shape and shape[0] == m):
        return
    between = shape[1 : max(1, len(shape) - features)]
    if not shape:
        raise UnsupportedError(
            "use the optimizer's weight_decay in place of a penalty on weights in the loss, which belongs to no example: "
            f"parameter {slot.entry.name!r} met a single number. (If that is no penalty: put the {m} examples of the "
            "micro-batch first, or freeze the parameter.)"
        )
    if shape[0] % m or not shape[0] or m in between:
        raise LayoutError(
            f"parameter {slot.entry.name!r} met something of shape {tuple(shape)}, whose first dimension is not the {m} "
            "examples of the micro-batch. Put the examples first, or freeze the parameter."
        )


def add_summed(slot: Slot, g: Tensor, m: int | Owned, shape: tuple[int, ...]) -> None:
    """Give `slot` the per-example gradients of a tensor of `shape` whose copies (m k, ...) have the gradient g."""
    dtype = torch.float32 if g.dtype in (torch.float16, torch.bfloat16) else g.dtype
    if g.dim() == 0:
        g = g.reshape(1)
    wide = (1,) * (g.dim() - len(shape)) + tuple(shape)
    if isinstance(m, Owned):
        g, m = m.padded(g), m.m  # (m, k, ...)
    else:
        g = g.reshape(m, -1, *g.shape[1:])
    axes = [i + 1 for i in range(1, len(wide)) if wide[i] == 1 and g.shape[i + 1] != 1]
    if wide[0] != 1 and m > 1:
        rows = g.sum(axes, keepdim=True, dtype=dtype) if axes else g.to(dtype)
        if isinstance(slot, FormSlot):
            slot.add_rows(rows)
        else:
            slot.add_dense(on_diagonal(rows))
        return
    if wide[0] == 1:
        axes = [1, *axes]
    slot.add_dense((g.sum(axes, keepdim=True, dtype=dtype) if axes else g.to(dtype)).reshape(m, *shape))


# -------- elementwise

_BINARY = "add sub rsub mul multiply subtract div divide true_divide pow maximum minimum fmax fmin atan2 hypot logaddexp xlogy"
_OTHERS = "where lerp addcmul addcdiv clamp clamp_min clamp_max copysign float_power"
_DUNDERS = "add radd sub rsub mul rmul truediv rtruediv pow rpow iadd isub imul itruediv ipow"
_IN_PLACE = "add_ sub_ mul_ div_ pow_ addcmul_ addcdiv_ lerp_ clamp_"


def _named(owner: Any, names: str, form: str = "{}") -> list[Any]:
    return [found for name in names.split() if (found := getattr(owner, form.format(name), None)) is not None]


_ELEMENTWISE = [
    *_named(torch, _BINARY + " " + _OTHERS),
    *_named(_T, _BINARY + " " + _OTHERS + " " + _IN_PLACE),
    *_named(_T, _DUNDERS, "__{}__"),
]


@rule(*dict.fromkeys(_ELEMENTWISE), transposed=True, picked=True)
def elementwise(capture, func, args, kwargs):
    tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)]
    of_batch = [t for t in tensors if capture.slot(t) is None and t not in capture.constants]
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    if not of_batch or max(t.dim() for t in of_batch) < len(shape):
        return NotImplemented
    name = getattr(func, "__name__", "")
    in_place = (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")
    if in_place and capture.slot(args[0]) is not None:
        return NotImplemented

    rows = capture.rows(*of_batch)

    def own(value: Any) -> Any:
        return (
            copies(capture, value, shape, rows)
            if isinstance(value, Tensor) and capture.slot(value) is not None
            else value
        )

    return func(*map(own, args), **{k: own(v) for k, v in kwargs.items()})


# -------- side by side


@rule(torch.cat, torch.concat, torch.concatenate, torch.stack, transposed=True)
def side_by_side(capture, func, args, kwargs):
    tensors = args[0] if args else kwargs["tensors"]
    dim = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis", 0))
    dim = dim % (tensors[0].dim() + (func is torch.stack))
    if dim == 0 and capture.examples > 1:
        return NotImplemented
    own = [copies(capture, t, tuple(t.shape)) if capture.slot(t) is not None else t for t in tensors]
    return func(own, dim)


# -------- products with stacks of matrices


def stacked_product(capture, func, x, y):
    """torch.matmul where a trained operand is the left one, or has more or fewer than two dimensions."""
    if capture.slot(y) is not None and y.dim() == 1 and capture.slot(x) is None:
        return elementwise(capture, torch.mul, (x, y), {}).sum(-1)
    if min(x.dim(), y.dim()) < 2:
        return NotImplemented
    own = []
    for trained, other in ((x, y), (y, x)):
        if capture.slot(trained) is None:
            own.append(trained)
            continue
        if capture.slot(other) is not None or other.dim() < 3 or trained.dim() > other.dim():
            return NotImplemented
        if trained.dim() == other.dim() and trained.shape[0] != 1:
            return NotImplemented  # stacks that are paired off: nothing says that they are the examples
        lead = (1,) * (other.dim() - trained.dim()) + tuple(trained.shape)
        own.append(copies(capture, trained, (other.shape[0], *lead[1:])))
    return torch.matmul(*own)


@rule(torch.bmm, torch.Tensor.bmm, transposed=True)
def paired_product(capture, func, args, kwargs):
    own = [copies(capture, t, tuple(t.shape)) if capture.slot(t) is not None else t for t in (*args, *kwargs.values())]
    return torch.bmm(*own)


# -------- attention with learned queries, or a learned bias as its mask


@rule(F.scaled_dot_product_attention)
def attention(capture, func, args, kwargs):
    names = ("query", "key", "value", "attn_mask")
    given = {**dict(zip((*names, "dropout_p", "is_causal"), args, strict=False)), **kwargs}
    of_batch = [x for name in names[:3] if capture.slot(x := given[name]) is None]
    if not of_batch:
        return NotImplemented
    lead, dims = of_batch[0].shape[0], of_batch[0].dim()
    for name in names:
        value = given.get(name)
        if value is None or capture.slot(value) is None:
            continue
        shape = (1,) * (dims - value.dim()) + tuple(value.shape)
        if shape[0] not in (1, lead):
            return NotImplemented
        given[name] = copies(capture, value, (lead, *shape[1:]))
    return ANYTIME[func](capture, func, (), given)


# -------- einsum


@rule(torch.einsum, transposed=True)
def einsum(capture, func, args, kwargs):
    equation, *operands = args
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = list(operands[0])
    if not isinstance(equation, str) or "." in equation or "->" not in equation:
        return NotImplemented
    inputs, output = equation.replace(" ", "").split("->")
    letters = inputs.split(",")
    trained = [capture.slot(operand) is not None for operand in operands]
    letter = _letter_of_examples(capture.examples, letters, output, operands, trained)
    if letter is None:
        return NotImplemented
    own, terms = [], []
    for operand, term, is_trained in zip(operands, letters, trained, strict=True):
        own.append(copies(capture, operand, (capture.examples, *operand.shape)) if is_trained else operand)
        terms.append(letter + term if is_trained else term)
    return torch.einsum(f"{','.join(terms)}->{output}", own)


def _letter_of_examples(m, letters, output, operands, trained) -> str | None:
    """The letter that stands for the examples: the first one of all activations. Any other of the same size would be a guess."""
    data = [(term, x) for term, x, is_trained in zip(letters, operands, trained, strict=True) if not is_trained]
    taken = {letter for term, is_trained in zip(letters, trained, strict=True) if is_trained for letter in term}
    first = {(term[:1], x.shape[:1]) for term, x in data}
    if len(first) != 1:
        return None
    ((letter, size),) = first
    return letter if size == (m,) and letter in output and letter not in taken else None
