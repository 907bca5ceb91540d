"""A hinge between examples: `relu(margin - a + b)`, a mean loss that is capped or flooded.

Where a hinge is not active, the rehearsal cannot see it; later it may affect everyone. So, in the rehearsal's
first batch, operations with a kink between the model's last activations and the loss are looked at: none may be given
numbers that depend on several examples.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from rgp.checks.means import Output, kind_of, shape_at
from rgp.errors import UnsupportedError

# autograd's names of piecewise linear operations, whose second derivatives are zero and show nothing
# fmt: off
KINKS = {
    "Relu", "LeakyRelu", "Prelu", "Threshold", "Hardtanh", "Clamp", "ClampMin", "ClampMax", "Abs", "Max", "Min",
    "Amax", "Amin", "Aminmax", "Maximum", "Minimum", "Fmax", "Fmin", "Sort", "Topk", "Kthvalue", "Median",
    "Quantile", "Nanmedian", "Cummax", "Cummin", "Huber", "HuberLoss", "SmoothL1Loss", "MarginRanking",
    "Hardshrink", "Softshrink", "Norm", "LinalgVectorNorm",
}
# fmt: on
PLACES = 16  # that are looked at
LARGEST = 2**24  # entries: derivatives of more (a language model's logits) would be the largest thing in memory


def check_kinks(loss: Tensor, outputs: Sequence[Output], m: int) -> None:
    """Raise if an operation with a kink is given numbers of several of the m examples.

    outputs: those of the operations with trained parameters; only the last ones before the loss are examined.
    """
    last = [(edge, shape) for edge, shape in _last(loss, outputs) if shape and shape[0] and shape[0] % m == 0]
    if not last or sum(prod(shape) for _, shape in last) > LARGEST:
        return
    if _meets_mixtures(loss, last, m):
        raise UnsupportedError(
            "the loss couples the examples of a batch: a hinge, a cap, a maximum or the like is applied to a number that several "
            "examples have a part in (ranking terms, a mean loss that is capped). Whether it is active depends on all of them, "
            "and no clipping bounds one example's influence. Compute a loss for each example from its own outputs alone and take "
            "their mean. Nothing was released. See docs/pitfalls.md."
        )


def _last(loss: Tensor, outputs: Sequence[Output]) -> list[Output]:
    """The outputs that the loss is made of directly."""
    at: dict[Node, list[Output]] = {}
    for output in outputs:
        at.setdefault(output[0].node, []).append(output)
    near = _reached([loss.grad_fn], at)
    behind = _reached([parent for node in near for parent, _ in node.next_functions], near, through=True)
    return [output for node in near if node not in behind for output in at[node]]


def _reached(starts: Iterable[Node | None], among: Iterable[Node], *, through: bool = False) -> set[Node]:
    """The nodes among these that a backward pass reaches. through: also those beyond others of them."""
    wanted, found, seen = set(among), set(), set()
    waiting = [node for node in starts if node is not None]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in wanted:
            found.add(node)
        if through or node not in wanted:
            waiting += [parent for parent, _ in node.next_functions if parent is not None]
    return found


def _meets_mixtures(loss: Tensor, last: list[Output], m: int) -> bool:
    """Whether an operation with a kink is given numbers that depend on several examples.

    Where it is piecewise linear, second derivatives are zero and show nothing.
    """
    edges = [edge for edge, _ in last]
    for place in _inputs_of_kinks(loss, {edge.node for edge in edges}):
        if (shape := shape_at(place)) is None or prod(shape) > LARGEST:
            continue
        across = torch.zeros(shape, dtype=loss.dtype, device=loss.device, requires_grad=True)
        options: Any = {"retain_graph": True, "allow_unused": True}
        try:
            found = torch.autograd.grad([place], edges, [across], create_graph=True, **options)
            back = [(g, s) for g, (_, s) in zip(found, last, strict=True) if g is not None and g.requires_grad]
            if not back:
                continue
            # J u, for a u of the first example's outputs, and for one of all others'
            pulled, directions = [g for g, _ in back], ([_along(g, s, m, f) for g, s in back] for f in (True, False))
            own, rest = (torch.autograd.grad(pulled, across, along, **options)[0] for along in directions)
        except (RuntimeError, TypeError):  # an operation without second derivatives, or a torch that cannot start here
            continue
        if own is not None and rest is not None and bool(((own != 0) & (rest != 0)).any()):
            return True
    return False


def _along(like: Tensor, shape: tuple[int, ...], m: int, first: bool) -> Tensor:
    """Some direction in which only the first example's rows move, or all but them."""
    direction = torch.cos(torch.arange(like.numel(), dtype=like.dtype, device=like.device)).reshape(m, -1)
    direction[slice(1, None) if first else slice(0, 1)] = 0
    return direction.reshape(shape)


def _inputs_of_kinks(loss: Tensor, ends: set[Node]) -> list[GradientEdge]:
    """Where gradients leave the operations between the outputs and the loss that have a kink; those next to it first."""
    found: list[GradientEdge] = []
    seen, waiting = set(), [loss.grad_fn]
    while waiting and len(found) < PLACES:
        node = waiting.pop(0)
        if node is None or node in seen or node in ends:
            continue
        seen.add(node)
        parents = [(parent, at) for parent, at in node.next_functions if parent is not None]
        if kind_of(node) in KINKS:
            found += [GradientEdge(parent, at) for parent, at in parents]
        waiting += [parent for parent, _ in parents]
    return found
