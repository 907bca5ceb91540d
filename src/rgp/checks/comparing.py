"""Two trials of a rehearsal: whether an example's gradient has changed, where examples met, what to do about it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from rgp.checks.items import same_rows, shapes_of_rows
from rgp.checks.trial import Sketches, Trial
from rgp.errors import UnsupportedError
from rgp.torchstate import as_tree

DEALS = (
    4000  # random assignments of copies to seeds, all of which must be farther apart for randomness to count as shared
)
COARSE = 1e-2  # tolerance where half precision was used
ROUGH = 3e-2  # and where autocast is on, whose rounding adds up from layer to layer


def same_weights(one: Trial, two: Trial) -> bool:
    return one.weights is None or two.weights is None or torch.equal(one.weights, two.weights)


def stage_of(one: Trial, two: Trial, stayed: list[int], same_shapes: bool, tolerance: float) -> str:
    """Where examples met."""
    if same_shapes and not same_rows(one.batch, two.batch, stayed):
        return "collate_fn or augment mixes the examples of a batch"

    def changed(before: list[Tensor], after: list[Tensor]) -> bool:
        return any(relative(a[stayed], b[stayed]) > tolerance for a, b in zip(before, after, strict=False))

    if same_shapes and changed(one.inputs, two.inputs):
        return "the loop mixes the examples of a batch before it calls the model"
    if changed(one.outputs, two.outputs):
        if same_shapes:
            return "the model mixes the examples of a batch"
        return "an example's outputs depend on the padding that a longer example brings"
    return "the loss couples the examples of a batch, or something that the loop computes from the whole batch does"


def advice_on(one: Trial, two: Trial, stayed: list[int], same_shapes: bool, tolerance: float) -> str:
    stage = stage_of(one, two, stayed, same_shapes, tolerance)
    if stage.startswith(("collate_fn", "the loop")):
        return (
            "Leave out what looks at the whole batch: mixup, cutmix, statistics over it (its mean, its largest value); and put "
            "the examples into the first dimension of the inputs (batch_first=True)."
        )
    if stage.startswith("the model"):
        return (
            "Take out what looks at the whole batch: rgp.fix(model) replaces batch norm, .eval() does for a frozen network or a "
            "teacher, and batch_first=True puts the examples first. Or pass microbatch_size=1, and none meets another."
        )
    if stage.startswith("an example's"):
        return "Mask the padding in the model and in the loss (attention_mask, labels of -100), or pad to one length."
    return (
        "Compute one loss per example from its own outputs and labels, and take their mean. Common causes: outputs of shape "
        f"(m, 1) against targets of shape (m,), {_causes(one.batch)}contrastive and ranking terms, statistics over the batch."
    )


def _causes(batch: Any) -> str:
    """Means over tokens where the batch has integers in rows, class weights where it has integers at all."""
    whole = [leaf for leaf in tree_leaves(as_tree(batch)) if isinstance(leaf, Tensor) and not leaf.is_floating_point()]
    tokens = any(leaf.dim() > 1 for leaf in whole)
    return ("a mean over the tokens or labels that are there, " if tokens else "") + (
        "class weights, " if whole else ""
    )


def check_shared(passes: Tensor, tolerance: float, released: str) -> None:
    """passes (seeds, 2, K): the sketches of two copies of one example. Raise if they share what differs between seeds."""
    passes = passes.nan_to_num()
    scale = passes.norm(dim=2).amax().clamp_min(1e-30)
    spread = passes.flatten(0, 1).std(0)
    informative = spread > tolerance * scale
    if not bool(informative.any()):
        return  # whatever was drawn, gradients do not depend on it
    alike = bool((passes[:, 0] - passes[:, 1]).abs().amax() <= tolerance * scale)
    if alike or _nearer_than_by_chance(passes[:, :, informative] / spread[informative]):
        raise UnsupportedError(
            "draw random numbers for each example on its own: torch.rand(len(x)) in place of torch.rand(1). As it is, the "
            "examples of a batch share random numbers: two copies of one example gave the same result under each of several "
            "seeds, and otherwise under others. A flip drawn once for a batch does that, a layer that is left out for a whole "
            "batch (layerdrop, stochastic depth in batch mode), or dropout of weights. Which examples share a draw depends on "
            f"who else is in the batch, so one example more would change everybody's gradient. {released} See docs/pitfalls.md."
        )


def _nearer_than_by_chance(passes: Tensor) -> bool:
    """Whether two copies of one pass are nearer to each other than copies of different passes, by a permutation test."""
    distances = torch.cdist(passes[:, 0], passes[:, 1]).square().numpy()
    seeds, rng = np.arange(len(distances)), np.random.Generator(np.random.PCG64(0))
    own = distances.trace()
    return all(distances[seeds, rng.permutation(len(seeds))].sum() > own for _ in range(DEALS))


def rows_of(sketches: Sketches) -> Tensor:
    return torch.cat(list(sketches.values()), 1)


def moved(one: Trial, two: Trial, stayed: list[int]) -> tuple[float, str]:
    """By how much the gradient of an example that stayed has changed, relative to its norm, and where most.

    A collate_fn or the loop may sort the examples: then so many gradients of the first trial have to be found again in the
    second, wherever they are.
    """
    before, after, names = rows_of(one.sketches), rows_of(two.sketches), list(one.sketches)
    if _in_place(one, two, stayed):
        before, after, stayed = before[stayed], after[stayed], list(range(len(stayed)))
    finite, still = before.isfinite().all(1), after.isfinite().all(1)
    replaced, added = len(before) - len(stayed), len(after) - len(stayed)
    if int(still.sum()) < int(finite.sum()) - replaced or int(finite.sum()) < int(still.sum()) - added:
        return float("inf"), names[0]  # one example made others NaN or Inf
    if not bool(finite.any()):
        return 0.0, ""
    scale = before[finite][:, ::3].norm(dim=1)  # the norms
    scale = (scale + 1e-6 * scale.amax() + 1e-30).view(-1, 1, 1)
    if replaced == added == 0:
        if bool((finite != still).any()):
            return float("inf"), names[0]
        found = (before - after)[finite].abs() / scale[:, 0]
        sure = len(found)
    else:
        change = (before[finite][:, None] - after[still][None]).abs() / scale
        found = change[torch.arange(len(change)), change.amax(2).argmin(1)]
        sure = min(len(stayed), len(found) - replaced)
        if sure <= 0:
            return 0.0, ""
    worst = int(found.amax(1).argsort()[sure - 1])
    return float(found[worst].max()), names[int(found[worst].argmax()) // 3]


def sums_differ(whole: Trial, alone: list[Trial]) -> tuple[float, str]:
    """By how much a batch's plain gradient differs from the sum of what its examples give alone, and where most.

    Relative to the sum of their norms. What examples that are NaN or Inf give is not known, and says nothing.
    """
    parts, names = torch.stack([rows_of(trial.sketches)[0] for trial in alone]), list(whole.sketches)
    found = rows_of(whole.sketches)[0]
    if not bool(parts.isfinite().all()):
        return 0.0, ""
    projections = torch.arange(found.numel()) % 3 > 0  # norms do not add up
    scale = parts[:, ::3].norm(dim=1).sum() + 1e-30
    change = ((found - parts.sum(0)).abs() / scale).nan_to_num(float("inf"))[projections]
    return float(change.max()), names[int(change.argmax()) // 2]


def _in_place(one: Trial, two: Trial, stayed: list[int]) -> bool:
    """Whether the examples that stayed are in the same rows, in the batch and where the model got them."""
    return (
        shapes_of_rows(one.batch) == shapes_of_rows(two.batch)
        and same_rows(one.batch, two.batch, stayed)
        and not any(relative(a[stayed], b[stayed]) > COARSE for a, b in zip(one.inputs, two.inputs, strict=False))
    )


def percent(moved: float) -> str:
    if moved == float("inf"):
        return "turning into NaN or Inf"
    if moved > 100:
        return "more than a hundred times its norm"
    return f"{moved:.0%} of its norm" if moved >= 0.01 else f"{100 * moved:.1g}% of its norm"


def relative(one: Tensor, two: Tensor) -> float:
    usable = one.isfinite().all(1) & two.isfinite().all(1)
    if one.shape != two.shape or not bool(usable.any()):
        return 0.0
    return float(((one - two).abs().amax(1) / (one[:, 0] + 1e-30))[usable].max())
