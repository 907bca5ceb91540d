"""Transposes and casts of a parameter: the rules know what to do with them, and need not know that they are not the parameter."""

from __future__ import annotations

import torch

from rgp.rules import alias

_T = torch.Tensor


@alias(torch.t, _T.t, _T.T.__get__, _T.mT.__get__)  # type: ignore[attr-defined]
def transpose(capture, func, args, kwargs):
    slot, transposed = capture.find(args[0])
    if len(slot.entry.shape) != 2:
        return NotImplemented
    return _remembered(capture, func(*args, **kwargs), slot, not transposed)


@alias(torch.transpose, _T.transpose, torch.swapaxes, _T.swapaxes)
def swap(capture, func, args, kwargs):
    tensor, dims = args[0], list(args[1:])
    a, b = [*dims, *(kwargs[name] for name in ("dim0", "dim1", "axis0", "axis1") if name in kwargs)]
    slot, transposed = capture.find(tensor)
    if slot is None or len(slot.entry.shape) != 2:
        return NotImplemented
    return _remembered(capture, func(*args, **kwargs), slot, transposed == ((a - b) % 2 == 0))


@alias(_T.float, _T.double, _T.half, _T.bfloat16, _T.to, _T.type, _T.type_as, _T.contiguous, torch.clone, _T.clone)
def cast(capture, func, args, kwargs):
    slot, transposed = capture.find(args[0])
    if slot is None:
        return _like(func, args, kwargs)
    result = func(*args, **kwargs)
    if not isinstance(result, torch.Tensor) or not result.requires_grad or result is args[0]:
        return result
    if result.is_complex() != args[0].is_complex():
        return NotImplemented
    return _remembered(capture, result, slot, transposed)


@alias(_T.expand_as, _T.view_as, _T.reshape_as)
def shaped_as(capture, func, args, kwargs):
    """Only the shape of the other tensor is used, which may well come from the batch."""
    tensor, other = args
    if capture.slot(tensor) is None:
        return _like(func, args, kwargs)
    same = {_T.expand_as: _T.expand, _T.view_as: _T.view, _T.reshape_as: _T.reshape}[func]
    return capture.run(same, tensor, tuple(other.shape))


def _like(func, args, kwargs):
    """x.to(weight), x.view_as(weight): the parameter only lends its dtype or its shape."""

    def lent(value):
        return value.detach() if isinstance(value, torch.Tensor) else value

    return func(args[0], *map(lent, args[1:]), **{name: lent(value) for name, value in kwargs.items()})


def _remembered(capture, result, slot, transposed: bool):
    if not result.requires_grad:
        return result
    # a leaf: a form of both the parameter and its transpose (W - W.T) must not count the way from one to the other twice
    return capture.hand_on(result, slot, transposed)
