"""Does making a batch keep the examples apart? Asked of `collate_fn` and `augment` in their first calls.

Mixup, cutmix and statistics over a batch put one example into another's row, and then no clipping bounds its influence.
The call is repeated, under the same random numbers, with one example replaced by another of the batch: one row of the
result may change. Rows are compared as a set, so that a function may sort them.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from rgp.checks.probe import as_tree, has_rows
from rgp.errors import UnsupportedError
from rgp.torchstate import forked_rng, kept_rng

CALLS = 4  # that are watched: a random partner may be the example itself


class Apart:
    """A `collate_fn`, which is called with a list of examples, or an `augment`, with a batch: watched in its first calls."""

    def __init__(self, make: Callable[[Any], Any], name: str, *, of_list: bool) -> None:
        self._make, self._name, self._of_list = make, name, of_list
        self._calls = CALLS

    def __call__(self, given: Any) -> Any:
        m = len(given) if self._of_list else next((len(leaf) for leaf in _tensors(given) if leaf.dim()), 0)
        if self._calls and m > 1:
            self._calls -= 1
            if (changed := self._changed_rows(given, m)) > 1:
                raise UnsupportedError(
                    f"{self._name} mixes the examples of a batch: when one of them was replaced, {changed} rows of the result "
                    "changed. Mixup, cutmix and statistics over the batch do that, and no clipping bounds an example's "
                    "influence then. Nothing of this batch was released. (If it draws random numbers for one example in an "
                    "order that depends on the others, and does nothing else, pass probe=False.)"
                )
        return self._make(given)

    def _changed_rows(self, given: Any, m: int) -> int:
        """How many rows of the result are new when one example is replaced; 0 if that cannot be told."""
        same = list(range(m))
        try:
            before = self._again(given, same)
            for at, by in ((m - 1, 0), (0, m - 1)):
                after = self._again(given, [*same[:at], by, *same[at + 1 :]])
                if _shapes(before) == _shapes(after):  # else another length to pad to
                    return sum((_rows(after, m) - _rows(before, m)).values())
        except Exception:  # items that cannot be copied; an error of the call itself will come again
            pass
        return 0

    def _again(self, given: Any, order: list[int]) -> Any:
        """The call with these examples, and the random numbers that it would have."""
        with kept_rng(), forked_rng(None):
            return self._make(self._taken(given, order))

    def _taken(self, given: Any, order: list[int]) -> Any:
        """A copy with these examples, each an object of its own: a function may take them apart."""
        if self._of_list:
            return [copy.deepcopy(given[i]) for i in order]
        return tree_map(lambda leaf: leaf[order] if has_rows(leaf, len(order)) else copy.deepcopy(leaf), as_tree(given))


def apart(collate_fn: Callable[[list[Any]], Any] | None) -> Callable[[list[Any]], Any] | None:
    return None if collate_fn is None else Apart(collate_fn, "collate_fn", of_list=True)


def apart_rows(augment: Callable[[Any], Any] | None) -> Callable[[Any], Any] | None:
    return None if augment is None else Apart(augment, "augment", of_list=False)


def _tensors(batch: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(as_tree(batch)) if isinstance(leaf, Tensor)]


def _shapes(batch: Any) -> list[torch.Size]:
    return [leaf.shape for leaf in _tensors(batch)]


def _rows(batch: Any, m: int) -> Counter[bytes]:
    """The rows of a batch, each with all that belongs to it."""
    leaves = [leaf.detach().cpu().contiguous() for leaf in _tensors(batch) if has_rows(leaf, m)]
    return Counter(b"".join(leaf[i].view(-1).view(torch.uint8).numpy().tobytes() for leaf in leaves) for i in range(m))
