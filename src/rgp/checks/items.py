"""Examples and batches of any kind, as the rehearsal sees them: their content, how they differ, which to replace by which."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from rgp.torchstate import as_tree


def tensors_of(batch: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(as_tree(batch)) if isinstance(leaf, Tensor)]


def shapes_of(batch: Any) -> list[torch.Size]:
    return [leaf.shape for leaf in tensors_of(batch)]


def shapes_of_rows(batch: Any) -> list[torch.Size]:
    return [leaf.shape[1:] for leaf in tensors_of(batch)]


def same_rows(one: Any, two: Any, rows: list[int]) -> bool:
    pairs = zip(tensors_of(one), tensors_of(two), strict=True)
    return all(torch.equal(a[rows], b[rows]) for a, b in pairs if a.dim() and len(a) > max(rows))


def _values(item: Any) -> list[Any]:
    """The numbers of an item; tensors and arrays as tensors."""
    leaves = tree_leaves(as_tree(item))
    return [
        torch.from_numpy(leaf) if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "fiub" else leaf
        for leaf in leaves
    ]


def are_equal(one: Any, two: Any) -> bool:
    return differing(one, two) == 0


def differing(one: Any, two: Any) -> int:
    """How many of their leaves differ."""
    a, b = _values(one), _values(two)
    if len(a) != len(b):
        return len(a) + len(b)
    return sum(not _alike(x, y) for x, y in zip(a, b, strict=True))


def _alike(x: Any, y: Any) -> bool:
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return torch.equal(x, y)
    try:
        return type(x) is type(y) and bool(x == y)
    except (TypeError, ValueError, RuntimeError):
        return False


def came_out_otherwise(one: Any, two: Any) -> bool:
    """Whether two loadings of one item differ, in what can be compared: numbers and text."""
    a, b = _values(one), _values(two)
    kinds = (Tensor, str, bytes, bool, int, float)
    both = [(x, y) for x, y in zip(a, b, strict=False) if isinstance(x, kinds) and isinstance(y, kinds)]
    return len(a) != len(b) or any(not _alike(x, y) for x, y in both)


def is_finite(item: Any) -> bool:
    return all(bool(leaf.isfinite().all()) for leaf in _values(item) if isinstance(leaf, Tensor))


def length(item: Any) -> int:
    """The size of an item before it is padded."""
    return sum(
        leaf.numel() if isinstance(leaf, Tensor) else len(leaf) if isinstance(leaf, str) else 1
        for leaf in _values(item)
    )


def magnitude(item: Any) -> float:
    sizes = [
        float(leaf.abs().max())
        for leaf in _values(item)
        if isinstance(leaf, Tensor) and leaf.numel() and not leaf.is_complex() and leaf.dtype != torch.bool
    ]
    return max(sizes, default=0.0)


def replacements(items: list[Any], replaced: list[int], spare: list[int]) -> list[int]:
    """For each item to be replaced, the spare one that differs from it in most respects; of equals, the first not taken."""
    found: list[int] = []
    for i in replaced:
        scores = [(differing(items[i], items[k]), k not in found) for k in spare]
        found.append(spare[max(range(len(spare)), key=scores.__getitem__)])
    return found


def extremes(items: list[Any], chosen: list[int]) -> tuple[int, int]:
    """(which of the chosen items to replace, by which): one by the largest of all that were not chosen; where all were
    chosen, the largest by the smallest. Of several that would do, those that differ in most respects."""
    spare = [i for i in range(len(items)) if i not in chosen]
    if spare:
        largest = max(spare, key=lambda i: magnitude(items[i]))
        return max(chosen, key=lambda i: (differing(items[i], items[largest]), -magnitude(items[i]))), largest
    largest = max(chosen, key=lambda i: magnitude(items[i]))
    others = [i for i in chosen if i != largest]
    return largest, max(others, key=lambda i: (differing(items[i], items[largest]), -magnitude(items[i])))
