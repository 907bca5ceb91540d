"""A mean whose divisor depends on all examples' labels: over tokens that are not ignored, or entries that a mask left.

The rehearsal (rehearsal.py) asks the loop itself, once. Whether such a mean is uneven depends on the labels of each batch, so
it is also looked for in every batch, among torch's own means: `check_even`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils._pytree import tree_leaves

from rgp.errors import UnsupportedError

_OF_LABELS = (F.cross_entropy, F.nll_loss)
_NAN_MEANS = (torch.nanmean, torch.Tensor.nanmean)
_LOSSES = tuple(  # operations that torch reduces by a mean
    function
    for name, function in vars(F).items()
    if inspect.isfunction(function)
    and {"input", "reduction"} <= set(inspect.signature(function).parameters)
    and function not in _OF_LABELS
)
_OF_ENTRIES = (torch.mean, torch.Tensor.mean, *_LOSSES)
MEANS = frozenset((*_OF_LABELS, *_OF_ENTRIES, *_NAN_MEANS))
Output = tuple[GradientEdge, tuple[int, ...]]  # where gradients arrive at an operation's result, and its shape
_CHOICES = ("Index", "IndexSelect", "MaskedSelect")  # some of the rows, by what is in them


def outputs_of(result: Any) -> list[Output]:
    """Where gradients arrive at an operation's results; without the tensors, which may be freed meanwhile."""
    tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.requires_grad]
    return [(get_gradient_edge(tensor), tuple(tensor.shape)) for tensor in tensors]


def is_uneven(func: Any, m: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether this call of one of MEANS divides by a number that is not the same for all examples."""
    given = _named(args, kwargs)
    if given.get("reduction", "mean") != "mean":
        return False
    # the second question is a walk through the graph, and seldom asked
    return bool(_unevenness(func, m, given)) and not _is_of_one_or_of_all(given["input"], m)


def reason_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """What the divisor of an uneven mean depends on; nothing is named that this call does not have."""
    if func not in _OF_LABELS:
        return "on how many entries of each example are counted (a mask, an index or a NaN leaves some out)"
    given = _named(args, kwargs)
    target, weight = given["target"], given.get("weight")
    ignored = not target.is_floating_point() and bool((target == given.get("ignore_index", -100)).any())
    causes = [*(["those that are not ignored"] if ignored else []), *(["class weights"] if weight is not None else [])]
    return "on all examples' labels" + (f" ({', '.join(causes)})" if causes else "")


def unevenness(func: Any, m: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool | Tensor:
    """The same, as a tensor where it depends on numbers in the batch, which a graph that is being made does not have."""
    given = _named(args, kwargs)
    if given.get("reduction", "mean") != "mean" or _is_of_one_or_of_all(given["input"], m):
        return False
    return _unevenness(func, m, given)


def _named(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction")
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _unevenness(func: Any, m: int, given: Mapping[str, Any]) -> bool | Tensor:
    if func in _OF_ENTRIES:
        return bool(given["input"].numel() % m)
    if func in _NAN_MEANS:
        return True if given["input"].numel() % m else _differ(~given["input"].isnan(), m)
    target, weight = given["target"], given.get("weight")
    if target.is_floating_point():
        return bool(len(target) % m)
    if target.numel() % m:
        return True
    uneven = _differ(target != given.get("ignore_index", -100), m)
    return uneven if weight is None else uneven | (weight != weight[0]).any()


def _differ(counted: Tensor, m: int) -> Tensor:
    """Whether more entries count of some examples than of others."""
    counts = counted.reshape(m, -1).sum(1)
    return (counts != counts[0]).any()


def _is_of_one_or_of_all(tensor: Tensor, m: int) -> bool:
    """Whether a mean of this divides no example's share by the number of others.

    It does not if all entries belong to one example (in a loop over them), nor if they are numbers that were put together,
    each of them from all examples (the losses of two tasks).
    """
    found: set[int | str] = set()
    waiting = [(get_gradient_edge(tensor), False)] if tensor.requires_grad else []
    seen = set()
    while waiting:
        place, in_number = waiting.pop()
        if (key := (place.node, place.output_nr, in_number)) in seen:
            continue
        seen.add(key)
        shape = shape_at(place)
        in_number = in_number or shape == ()
        if (example := _example_of(place, m)) is not None:
            found.add(example)
        elif shape is not None and shape != () and prod(shape) % m == 0:
            found.add("all" if in_number else "rows")
        elif not (in_number or place.node.next_functions):
            found.add("unknown")
        elif in_number and kind_of(place.node) in _CHOICES:
            found.add("rows")
        else:
            parents = place.node.next_functions
            waiting += [(GradientEdge(parent, at), in_number) for parent, at in parents if parent is not None]
    return len(found) == 1 and not found & {"rows", "unknown"}


def _example_of(place: GradientEdge, m: int) -> int | None:
    """The example whose rows are cut out of a tensor that has rows for each: x[i], x[i : i + 1], `for row in x`."""
    node: Any = place.node
    if getattr(node, "_saved_dim", None) != 0:
        return None
    kind, of_each = kind_of(node), tuple(getattr(node, "_saved_self_sym_sizes", ()))[:1] == (m,)
    if kind == "Unbind" and len(node._input_metadata) == m:
        return place.output_nr
    if kind == "Select" and of_each:
        return _signed(node._saved_index) % m
    if kind == "Slice" and of_each and (shape_at(place) or ())[:1] == (1,):
        return _signed(node._saved_start) % m
    return None


def _signed(index: int) -> int:
    """Undo how autograd stores -1: as the largest 64-bit number."""
    return index - 2**64 if index >= 2**63 else index


def check_even(loss: Tensor, uneven: Mapping[Node, str]) -> None:
    """Raise if the loss is made of a mean that was found to be uneven; uneven: what its divisor depends on."""
    if uneven and (node := _reached(loss, uneven)) is not None:
        raise UnsupportedError(
            "reduce the loss of each example on its own: reduction='none' gives every entry's; take their sum or mean within "
            "each example, and .mean() over the examples. As it is, the loss is a mean in which examples do not count equally: "
            f"its divisor depends {uneven[node]}, and so does each example's gradient. "
            "Nothing of this batch was released. See docs/pitfalls.md."
        )


def kind_of(node: Node) -> str:
    return node.name().removesuffix("Backward").rstrip("0123456789").removesuffix("Backward")


def shape_at(place: GradientEdge) -> tuple[int, ...] | None:
    metadata = getattr(place.node, "_input_metadata", ())
    return tuple(metadata[place.output_nr].shape) if place.output_nr < len(metadata) else None


def _reached(loss: Tensor, nodes: Iterable[Node]) -> Node | None:
    """One of these nodes that a backward pass reaches."""
    wanted, seen, waiting = set(nodes), set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if node in wanted:
            return node
        seen.add(node)
        waiting += [parent for parent, _ in node.next_functions]
    return None


def leaves_of(loss: Tensor) -> list[Tensor]:
    """The tensors in whose .grad a backward pass would leave something."""
    seen, waiting, found = set(), [loss.grad_fn], []
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (variable := getattr(node, "variable", None)) is not None:
            found.append(variable)
        waiting += [parent for parent, _ in node.next_functions]
    return found
