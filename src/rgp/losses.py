"""Does the loss keep the examples apart? Asked before a batch is used, of what stands between the model and the loss.

Clipping bounds an example's influence only if its gradient does not depend on the others. Two ways in which losses break
that can be seen:

- what one example's output is pushed towards depends on another's output (contrastive terms, the root of a mean, a
  ranking). Then mixed second derivatives are not zero: `check_loss_apart`, once per run;
- a mean over tokens, or over weighted classes, whose divisor depends on everybody's labels: `uneven`, for every batch.

A divisor that the loop computes itself (`losses.sum() / mask.sum()`) cannot be seen. `rgp.check` finds that too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils._pytree import tree_leaves

from rgp.errors import UnsupportedError

MEANS = (F.cross_entropy, F.nll_loss)
LARGEST = 2**24  # entries: second derivatives of more (a language model's logits) would be the largest thing in memory
TOLERANCE = 1e-6  # where examples are apart, the second derivatives are zeros, not small numbers
Output = tuple[GradientEdge, tuple[int, ...]]  # where gradients arrive at an operation's result, and its shape


def outputs_of(result: Any) -> list[Output]:
    """For `check_loss_apart`: without the tensors, which may be freed meanwhile."""
    tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.requires_grad]
    return [(get_gradient_edge(tensor), tuple(tensor.shape)) for tensor in tensors]


def check_loss_apart(loss: Tensor, outputs: Sequence[Output], m: int) -> None:
    """Raise if what reaches one example's last activations depends on another example's.

    outputs: results of operations with trained parameters. Those are looked at that no other one stands behind.
    """
    last = [(edge, shape) for edge, shape in _last(loss, outputs) if shape and shape[0] and shape[0] % m == 0]
    if not last or sum(prod(shape) for _, shape in last) > LARGEST:
        return
    edges = [edge for edge, _ in last]
    try:
        rows = _reached_from_first(loss, edges, m)
    except (RuntimeError, NotImplementedError):  # an operation without second derivatives: nothing can be seen
        return
    limit = TOLERANCE * max((float(r.abs().max()) for r in rows), default=0.0)
    if any(bool((r[1:].abs() > limit).any()) for r in rows):
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


def uneven(m: int, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether this call of one of MEANS divides by a number that is not the same for all examples."""
    names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    target, weight = given["target"], given.get("weight")
    if given.get("reduction", "mean") != "mean" or target.is_floating_point() or target.numel() % m:
        return False
    if weight is not None and bool((weight != weight[0]).any()):
        return True
    counts = (target != given.get("ignore_index", -100)).reshape(m, -1).sum(1)
    return bool((counts != counts[0]).any())


def check_even(loss: Tensor, means: Sequence[Output]) -> None:
    """Raise if the loss is made of a mean that was found to be uneven."""
    if means and _reached([loss.grad_fn], [edge.node for edge, _ in means], through=True):
        raise UnsupportedError(
            "the loss is a mean over the tokens of a whole batch (labels that are not ignored), or one with class weights: its "
            "divisor depends on all examples' labels, and so does each example's gradient. Reduce each example on its own: "
            "F.cross_entropy(..., reduction='none') gives a loss for each label; take their sum or mean within each example, "
            "and .mean() over the examples. Nothing of this batch was released. See docs/pitfalls.md."
        )
