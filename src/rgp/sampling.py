"""Poisson sampling, owned by the run: the rate that is drawn with is the rate that is accounted.

Formal guarantees (tests/test_sampling.py):
- at every step each example is included independently with probability q of that step
- a step's draw depends on the secret and the step only; no example is in a step twice
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset

from rgp.streams import Streams
from rgp.torchstate import seed_others


def draw(
    streams: Streams, step: int, size: int, rate: float, *, attempt: int = 0, max_batch: int | None = None
) -> np.ndarray:
    """The indices of one logical batch, ascending. May be empty; an empty draw is a step like any other.

    `max_batch` caps the draw: a uniformly random subset of that size is kept, which the accountant has to be told.
    """
    indices = np.flatnonzero(streams.generator("sampling", step, attempt).random(size) < rate)
    if max_batch is not None and len(indices) > max_batch:
        indices = np.sort(
            streams.generator("sampling", step, attempt, part=1).choice(indices, max_batch, replace=False)
        )
    return indices


def cut(indices: np.ndarray, microbatch_size: int, lengths: np.ndarray | None = None) -> list[list[int]]:
    """Micro-batches of at most `microbatch_size`, as equal as they can be.

    With `lengths` (N,), examples of similar length share one, the longest first. Which examples are in the batch was
    settled by `draw`, and every example is clipped on its own: this saves padding and changes nothing else.
    """
    if len(indices) == 0:
        return []
    if lengths is not None:
        indices = indices[np.argsort(-lengths[indices], kind="stable")]
    parts = -(-len(indices) // microbatch_size)
    return [part.tolist() for part in np.array_split(indices, parts)]


def check_dataset(dataset: Any) -> int:
    """The dataset's length, or an error that says why this one cannot be sampled."""
    if isinstance(dataset, IterableDataset):
        raise ValueError(
            "dataset is an IterableDataset: Poisson sampling needs len(dataset) and dataset[i], because each example "
            "must be included independently. Use a map-style dataset, or list(dataset) if it fits in memory."
        )
    if isinstance(dataset, DataLoader):
        raise ValueError(
            "dataset is a DataLoader: its sampler is not the one the accountant would be told about. "
            "Pass loader.dataset, and collate_fn=loader.collate_fn; the run samples by itself."
        )
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise ValueError(
            f"dataset must have len() and [index]; got {type(dataset).__name__}. "
            "A list of examples, a torch Dataset or a Hugging Face dataset will do."
        )
    size = len(dataset)
    if size < 1:
        raise ValueError("dataset is empty")
    return size


def check_lengths(lengths: Any, size: int) -> np.ndarray | None:
    """One number per example as an array, or an error."""
    if lengths is None:
        return None
    found = np.asarray(lengths)
    if found.shape != (size,) or not (
        np.issubdtype(found.dtype, np.integer) or np.issubdtype(found.dtype, np.floating)
    ):
        raise ValueError(
            f"lengths must be one number per example of the dataset, shape ({size},); got shape {found.shape} of "
            f"{found.dtype}"
        )
    return found.astype(np.float64)


class Part(list[int]):
    """The indices of one micro-batch, with the seed of what loading it draws at random."""

    seed = 0


class Schedule(BatchSampler):
    """Micro-batch index lists of all steps from `start` on, in the order in which the run consumes them."""

    def __init__(self, batches: Any, start: int, stop: int, *, seed: Callable[[int, int], int]) -> None:
        self._batches, self._start, self._stop, self._seed = batches, start, stop, seed

    def __iter__(self) -> Iterator[Part]:
        for step in range(self._start, self._stop):
            for i, indices in enumerate(self._batches(step)):
                part = Part(indices)
                part.seed = self._seed(step, i)
                yield part

    def __len__(self) -> int:
        return sum(len(self._batches(step)) for step in range(self._start, self._stop))


class Seeded(Dataset):
    """The user's dataset, with the generators that augmentation may use seeded for every micro-batch.

    What is loaded is then a function of the secret and the step, in whichever process: a crashed step can be repeated.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitems__(self, part: Part) -> list[Any]:
        torch.default_generator.manual_seed(part.seed)
        seed_others(part.seed)
        many = getattr(self._dataset, "__getitems__", None)
        return many(list(part)) if callable(many) else [self._dataset[i] for i in part]

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]

    def __len__(self) -> int:
        return len(self._dataset)
