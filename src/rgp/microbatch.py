"""How many rows go through the model at once, where the user has not said so.

A forward pass of a small model over 32 rows is mostly overhead; one of a large model over 256 does not fit into memory. The
choice is made from shapes alone, those of the plan and of the first row, before anything is drawn, and never from a
measured time: all ranks and a later replay choose alike, and the size that was chosen is in the checkpoint.

What a row costs is overestimated: every layer's output at every position of the input, as if nothing were pooled, and
the row's own gradients. Rows of integers may be longer than the first one, and attention may look at pairs of them.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
from torch.utils._pytree import tree_leaves

from rgp.plan import Plan
from rgp.torchstate import as_tree, kept_rng

LEAST, MOST = 32, 256
BYTES = 2**28  # that the rows of a micro-batch may take by this estimate
TOKENS = 512  # a row of integers is taken for at least as long


def choose_microbatch(dataset: Any, plan: Plan, expected: int) -> int:
    """The rows of a micro-batch: 32 to 256, a power of two, or as many as are expected in a batch if these are fewer."""
    each = row_bytes(dataset, plan)
    size = LEAST
    while each is not None and 2 * size <= MOST and 2 * size * each <= BYTES:
        size *= 2
    return min(size, expected)


def row_bytes(dataset: Any, plan: Plan) -> int | None:
    """What one row takes on its way through the model, at most; None where the first row does not tell."""
    try:
        with kept_rng():
            shapes = [leaf for leaf in map(_positions, tree_leaves(as_tree(dataset[0]))) if leaf is not None]
    except Exception:  # whatever reading a row may raise is raised again, and better told, when batches are made
        return None
    if not shapes:
        return None
    positions, pairs = max(shapes)
    matrices = [e for e in plan.entries if len(e.shape) > 1]
    outputs = sum(e.d if e.kind in ("embedding", "token") else e.p for e in matrices)
    return 4 * (positions * outputs + pairs * len(matrices) + plan.noise_dimensions)


def _positions(leaf: Any) -> tuple[int, int] | None:
    """(positions of an input, pairs of them that attention may look at); None for what is no array."""
    if isinstance(leaf, (int, float)):
        return (1, 0)
    shape, kind = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    if shape is None or kind is None or not all(isinstance(n, (int, np.integer)) for n in shape):
        return None
    floats = getattr(
        kind, "is_floating_point", np.issubdtype(kind, np.floating) if isinstance(leaf, np.ndarray) else False
    )
    if floats:
        return (prod(shape), 0)
    tokens = max(TOKENS, prod(shape)) if len(shape) == 1 else prod(shape)
    return (tokens, tokens**2 if len(shape) == 1 else 0)
