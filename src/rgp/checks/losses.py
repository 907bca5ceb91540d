"""Does the loss keep the examples apart? Asked before a batch is used, of what stands between the model and the loss.

Clipping bounds an example's influence only if its gradient does not depend on the others. Three ways in which losses break
that can be seen:

- what one example's output is pushed towards depends on another's output (contrastive terms, the root of a mean, a
  ranking). Then mixed second derivatives are not zero; or, with hinges, something that is not linear is applied to numbers
  that depend on both: `check_apart`, once per run;
- a mean over tokens, over weighted classes, or over what a mask left, whose divisor depends on everybody's labels:
  `check_even`, for every batch;
- a factor that was counted over the whole batch (`losses.sum() / mask.sum()`). It may be the same whatever the examples
  are, so this is a warning: `check_factors`, once per run.

Numbers that have left torch (`mask.sum().item()`) cannot be seen. `rgp.check` finds those too.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils._pytree import tree_leaves

from rgp.errors import UnsupportedError

_OF_LABELS = (F.cross_entropy, F.nll_loss)
_OF_ENTRIES = (
    torch.mean,
    torch.Tensor.mean,
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.kl_div,
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
)
MEANS = frozenset((*_OF_LABELS, *_OF_ENTRIES))
_FACTORS = ("mul", "multiply", "div", "divide", "true_divide", "rdiv", "rmul", "rtruediv", "truediv")
_REDUCTIONS = ("mean", "sum", "std", "var", "amax", "amin", "bincount", "logsumexp", "count_nonzero", "norm", "prod")
_LINEAR = (
    "Sum Mean Add Sub Rsub Neg View UnsafeView Reshape Squeeze Unsqueeze Expand Select Slice Index Stack Cat T Transpose "
    "Permute Clone AsStrided ToCopy Alias Copy Where MaskedFill MaskedSelect Gather NllLoss NllLoss2D NllLossNd Split Unbind "
    "Repeat Flatten Diagonal Narrow"
)
_PRODUCTS = ("Mul", "Div")  # linear if one of the factors is a constant
_CHOICES = ("Index", "IndexSelect", "MaskedSelect")  # some of the rows, by what is in them
NONLINEAR = 16  # places before operations that are not linear, at which dependence is looked at
LARGEST = 2**24  # entries: second derivatives of more (a language model's logits) would be the largest thing in memory
TOLERANCE = 1e-6  # where examples are apart, the second derivatives are zeros, not small numbers
Output = tuple[GradientEdge, tuple[int, ...]]  # where gradients arrive at an operation's result, and its shape


class Trail:
    """What the operations of a micro-batch show of its loss, kept by the capture."""

    def __init__(self) -> None:
        self.outputs: list[Output] = []  # of operations with trained parameters
        self.uneven: list[Output] = []  # means with a divisor that is not the same for all examples
        self.scaled: list[Output] = []  # products with a number that was computed from the batch
        self.again: set[Node] = set()  # outputs that an activation checkpoint will compute again
        self._counted: dict[int, Tensor] = {}  # numbers that were computed from the whole batch

    def clear(self) -> None:
        for kept in (self.outputs, self.uneven, self.scaled, self.again, self._counted):
            kept.clear()

    def add_outputs(self, result: Any, *, again: bool) -> None:
        """Of an operation with a trained parameter. again: whether it stands in an activation checkpoint."""
        found = outputs_of(result)
        self.outputs += found
        if again:
            self.again.update(_nodes(found))

    def note(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """For `check_factors`."""
        if not isinstance(result, Tensor):
            return
        operands = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        counted = any(id(operand) in self._counted for operand in operands)
        if result.requires_grad:
            if counted and getattr(func, "__name__", "").strip("_") in _FACTORS:
                self.scaled += outputs_of(result)
        elif counted or _is_of_whole_batch(func, operands, result):
            self._counted[id(result)] = result


def _is_of_whole_batch(func: Any, operands: Sequence[Tensor], result: Tensor) -> bool:
    """Whether this is a number, or numbers per class and the like, to which all rows have contributed."""
    if result.dim() == 0:
        return any(t.dim() or t.requires_grad for t in operands)
    name = getattr(func, "__name__", "")
    if name not in _REDUCTIONS or not operands or not operands[0].dim():
        return False
    return name == "bincount" or (result.dim() < operands[0].dim() and len(result) != len(operands[0]))


def outputs_of(result: Any) -> list[Output]:
    """Without the tensors, which may be freed meanwhile."""
    tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.requires_grad]
    return [(get_gradient_edge(tensor), tuple(tensor.shape)) for tensor in tensors]


def check_apart(loss: Tensor, trail: Trail, m: int) -> None:
    """Raise if what reaches one example's last activations depends on another example's.

    Those outputs are looked at that no other one stands behind.
    """
    last = [(edge, shape) for edge, shape in _last(loss, trail.outputs) if shape and shape[0] and shape[0] % m == 0]
    if not last or sum(prod(shape) for _, shape in last) > LARGEST:
        return
    edges = [edge for edge, _ in last]
    if any(edge.node in trail.again for edge in edges):
        return
    try:
        rows = _reached_from_first(loss, edges, m)
    except RuntimeError:  # an operation without second derivatives: nothing can be seen
        return
    limit = TOLERANCE * max((float(r.abs().max()) for r in rows), default=0.0)
    if any(bool((r[1:].abs() > limit).any()) for r in rows) or _meets_mixtures(loss, last, m):
        raise UnsupportedError(
            "the loss couples the examples of a batch: the gradient of one example depends on the outputs of another, so "
            "no clipping bounds its influence. Contrastive and ranking terms do that, a power or a root of the mean loss, "
            "statistics over the batch. Compute a loss for each example from its own outputs alone and take their mean. "
            "Nothing was released. See docs/pitfalls.md."
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
    """Which of these nodes a backward pass comes to; through: also those behind others of them."""
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
    """Whether an operation that is not linear (a hinge) is given numbers that depend on several examples.

    Where it is piecewise linear, second derivatives are zero and cannot tell.
    """
    edges = [edge for edge, _ in last]
    for place in _inputs_of_nonlinear(loss, {edge.node for edge in edges}):
        if (shape := _shape_at(place)) is None or prod(shape) > LARGEST:
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


def _inputs_of_nonlinear(loss: Tensor, ends: set[Node]) -> list[GradientEdge]:
    """Where gradients leave the operations between the outputs and the loss that are not linear; those next to it first."""
    found: list[GradientEdge] = []
    seen, waiting = set(), [loss.grad_fn]
    while waiting and len(found) < NONLINEAR:
        node = waiting.pop(0)
        if node is None or node in seen or node in ends:
            continue
        seen.add(node)
        parents = [(parent, at) for parent, at in node.next_functions if parent is not None]
        kind = _kind(node)
        if not (kind in _LINEAR.split() or (kind in _PRODUCTS and len(parents) == 1)):
            found += [GradientEdge(parent, at) for parent, at in parents]
        waiting += [parent for parent, _ in parents]
    return found


def _kind(node: Node) -> str:
    return node.name().removesuffix("Backward").rstrip("0123456789").removesuffix("Backward")


def _shape_at(place: GradientEdge) -> tuple[int, ...] | None:
    metadata = getattr(place.node, "_input_metadata", ())
    return tuple(metadata[place.output_nr].shape) if place.output_nr < len(metadata) else None


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


def _reached_from_first(loss: Tensor, edges: list[GradientEdge], m: int) -> list[Tensor]:
    """(m, -1) for each output: what the first example's loss, or the gradient of its outputs, depends on."""
    options: Any = {"retain_graph": True, "allow_unused": True}
    if loss.dim() and len(loss) == m:  # a loss for each example
        depends = torch.autograd.grad(loss[0], edges, **options)
    else:
        gradients = torch.autograd.grad(loss, edges, create_graph=True, **options)
        own = [g.reshape(m, -1)[0] for g in gradients if g is not None and g.requires_grad]
        if not own:
            return []
        # any fixed direction but a constant one, which a softmax does not feel
        along = [torch.cos(torch.arange(len(g), dtype=g.dtype, device=g.device)) for g in own]
        depends = torch.autograd.grad(own, edges, along, **options)
    return [d.detach().reshape(m, -1).nan_to_num() for d in depends if d is not None]


def is_uneven(func: Any, m: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether this call of one of MEANS divides by a number that is not the same for all examples."""
    names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if given.get("reduction", "mean") != "mean" or _is_of_one_or_of_all(given["input"], m):
        return False
    if func in _OF_ENTRIES:
        return bool(given["input"].numel() % m)
    target, weight = given["target"], given.get("weight")
    if target.is_floating_point():
        return bool(len(target) % m)
    if target.numel() % m or (weight is not None and bool((weight != weight[0]).any())):
        return True
    counts = (target != given.get("ignore_index", -100)).reshape(m, -1).sum(1)
    return bool((counts != counts[0]).any())


def _is_of_one_or_of_all(tensor: Tensor, m: int) -> bool:
    """Whether a mean of this divides nobody's share by how many others there are.

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
        shape = _shape_at(place)
        in_number = in_number or shape == ()
        if (example := _example_of(place, m)) is not None:
            found.add(example)
        elif shape is not None and shape != () and prod(shape) % m == 0:
            found.add("all" if in_number else "rows")
        elif not (in_number or place.node.next_functions):
            found.add("unknown")
        elif in_number and _kind(place.node) in _CHOICES:
            found.add("rows")
        else:
            parents = place.node.next_functions
            waiting += [(GradientEdge(parent, at), in_number) for parent, at in parents if parent is not None]
    return len(found) == 1 and not found & {"rows", "unknown"}


def _example_of(place: GradientEdge, m: int) -> int | None:
    """Which one, where the rows of one example are cut out of one for each: x[i], x[i : i + 1], `for row in x`."""
    node: Any = place.node
    if getattr(node, "_saved_dim", None) != 0:
        return None
    kind, of_each = _kind(node), tuple(getattr(node, "_saved_self_sym_sizes", ()))[:1] == (m,)
    if kind == "Unbind" and len(node._input_metadata) == m:
        return place.output_nr
    if kind == "Select" and of_each:
        return _signed(node._saved_index) % m
    if kind == "Slice" and of_each and (_shape_at(place) or ())[:1] == (1,):
        return _signed(node._saved_start) % m
    return None


def _signed(index: int) -> int:
    """Autograd keeps -1 as the largest number of 64 bits."""
    return index - 2**64 if index >= 2**63 else index


def check_even(loss: Tensor, trail: Trail) -> None:
    """Raise if the loss is made of a mean that was found to be uneven."""
    if trail.uneven and _reached([loss.grad_fn], _nodes(trail.uneven), through=True):
        raise UnsupportedError(
            "the loss is a mean over the tokens of a whole batch (labels that are not ignored, entries that a mask left), or "
            "one with class weights: its divisor depends on all examples' labels, and so does each example's gradient. Reduce "
            "each example on its own: reduction='none' gives a loss for each label; take their sum or mean within each "
            "example, and .mean() over the examples. Nothing of this batch was released. See docs/pitfalls.md."
        )


def check_factors(loss: Tensor, trail: Trail) -> None:
    """Warn if the loss was multiplied or divided by a number that was computed from the batch."""
    scaled = set(_nodes(trail.scaled))
    if scaled and _reached([loss.grad_fn], [*scaled, *_nodes(trail.outputs)]) & scaled:
        warnings.warn(
            "the loss was multiplied or divided by a number that was computed from the whole batch, such as mask.sum(). Unless "
            "that number is the same whatever the examples are, each example's gradient depends on the others, and epsilon "
            "does not hold. Find out with rgp.check(model, batch, loss_fn); see docs/pitfalls.md."
        )


def _nodes(outputs: Iterable[Output]) -> Iterator[Node]:
    return (edge.node for edge, _ in outputs)
