"""Rules: how one kind of operation gives per-example gradients. One small file per kind.

A rule is called in place of an operation that met a trained parameter: `rule(capture, func, args, kwargs) -> result`.
It computes the ordinary result and arranges that the backward pass fills the slots of the trained parameters.
A rule may return NotImplemented for a way of calling it that it does not know: then fallback.py steps in.
`capture.slot(tensor)` is the slot of a trained parameter or None; `capture.examples` is the number of examples m.

To add one, give `register` a function from an operation's inputs and output gradient to per-example gradients:

>>> import torch
>>> def double(x, w): ...
>>> @register(double)
... def gradients(m, grad, x, w):             # called in the backward pass
...     return {1: 2 * x * grad}              # position of the parameter -> (m, *w.shape)
>>> del RULES[double]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

RULES: dict[Any, Callable[..., Any]] = {}
ALIASES: dict[Any, Callable[..., Any]] = {}  # operations that give the parameter itself: its transpose, a cast
TRANSPOSED: set[Any] = set()  # operations whose rules know what to do with a transposed parameter
PICKED: set[Any] = set()  # operations whose rules know what to do with rows picked out of the batch (owners.py)
ANYTIME: dict[Any, Callable[..., Any]] = {}  # applied during capture whether or not a trained parameter takes part


def rule(
    *operations: Any, transposed: bool = False, picked: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a full rule for these operations. transposed: it uses `capture.find`, and so handles transposed parameters.
    picked: it uses `capture.rows`, and so handles rows that an index picked."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        for operation in operations:
            RULES[operation] = function
            if transposed:
                TRANSPOSED.add(operation)
            if picked:
                PICKED.add(operation)
        return function

    return add


def alias(*operations: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register operations on a parameter alone, whose result the rules may take for the parameter or its transpose."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        ALIASES.update(dict.fromkeys(operations, function))
        return function

    return add


def anytime(operation: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a rule for an operation that holds no parameter."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        ANYTIME[operation] = function
        return function

    return add


def register(*operations: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register per-example gradients for operations; autograd takes care of the operation's inputs."""
    from rgp.rules.generic import from_gradients

    def add(gradients: Callable[..., Any]) -> Callable[..., Any]:
        rule(*operations)(from_gradients(gradients))
        return gradients

    return add


def load() -> None:
    """Import the built-in rules; each registers itself."""
    from rgp.rules import (  # noqa: F401
        aliases,
        attention,
        bags,
        bilinear,
        conv,
        conv_transpose,
        copies,
        derived,
        dropout,
        embedding,
        linear,
        norm,
        recurrent,
    )
