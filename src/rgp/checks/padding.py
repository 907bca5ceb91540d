"""Does an example's loss depend on how long the others are? Where batches are padded to the longest, it may.

A model that looks at padding (a softmax over all positions, a mean without a mask), or a loss that counts it, gives an example
another gradient beside a longer one: then no clipping bounds the influence of the longer one. So, before a run is made, two
examples of different length are tried alone and together: the loss of both must be the mean of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from rgp.checks.probe import as_tree
from rgp.errors import UnsupportedError
from rgp.torchstate import evaluating, forked_rng

LOOKED_AT = 64  # examples, for a short and a long one among them
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}


def check_padding(
    model: nn.Module, dataset: Any, collate: Callable[[list[Any]], Any], mean_loss: Callable[[Any], Tensor]
) -> None:
    """Raise if it does. mean_loss: of a batch as collate makes it, the mean of one loss per example."""
    items = [dataset[i] for i in range(min(LOOKED_AT, len(dataset)))]
    sizes = [_size(collate([item])) for item in items]
    if len(set(sizes)) < 2:
        return
    pair = [items[sizes.index(min(sizes))], items[sizes.index(max(sizes))]]
    if not _same(
        collate(list(pair)), collate(list(pair))
    ):  # random masks, augmentation: their losses cannot be compared
        return
    with torch.no_grad(), forked_rng(0), evaluating(model):
        both, *each = (mean_loss(collate(list(part))).double().mean() for part in (pair, pair[:1], pair[1:]))
    expected = (each[0] + each[1]) / 2
    parameter = next(model.parameters())
    limit = TOLERANCE.get(parameter.dtype, 3e-2) * (1 + float(expected.abs()))
    if not bool((both - expected).abs() <= limit) and bool(expected.isfinite()):
        raise UnsupportedError(
            f"an example's loss depends on the padding that a longer example brings: two examples of different length have the "
            f"losses {float(each[0]):.4g} and {float(each[1]):.4g} alone, and the mean {float(both):.4g} together. Its gradient "
            "would depend on the others, and no clipping would bound their influence. Mask the padding in the model and in the "
            "loss (attention_mask, labels of -100), or pad all examples to one length. See docs/pitfalls.md."
        )


def _size(batch: Any) -> int:
    return max((leaf.numel() for leaf in tree_leaves(as_tree(batch)) if isinstance(leaf, Tensor)), default=0)


def _same(one: Any, two: Any) -> bool:
    pairs = zip(tree_leaves(as_tree(one)), tree_leaves(as_tree(two)), strict=True)
    return all(torch.equal(a, b) for a, b in pairs if isinstance(a, Tensor))
