"""A row that is in the dataset several times: oversampling a rare class, subsets that overlap.

Each of its copies is drawn and clipped on its own, so that its person has several rows, and epsilon is for one of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, Subset


def check_repeats(dataset: Any) -> None:
    """Refuse a Subset or a ConcatDataset that holds a row twice. What other datasets hold cannot be seen."""
    if not isinstance(dataset, (Subset, ConcatDataset)):
        return
    _, counts = np.unique(_rows_behind(dataset), axis=0, return_counts=True)
    if (most := int(counts.max())) > 1:
        raise ValueError(
            f"dataset holds a row {most} times ({int((counts > 1).sum())} rows are in it more than once): each copy would be "
            "drawn and clipped on its own, and epsilon would be for one copy, not for the row. Leave the copies out (a weight in "
            "the loss does what oversampling does), or give units=, one id per row, the same for all copies."
        )


def _rows_behind(dataset: Any) -> np.ndarray:
    """(N, 2): of each row, which dataset it is from in the end, and its index there."""
    if isinstance(dataset, Subset):
        return _rows_behind(dataset.dataset)[np.asarray(dataset.indices, dtype=np.int64)]
    if isinstance(dataset, ConcatDataset):
        return np.concatenate([_rows_behind(part) for part in dataset.datasets])
    size = len(dataset)
    return np.stack([np.full(size, id(dataset), np.int64), np.arange(size)], 1)
