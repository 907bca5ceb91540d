"""Poisson sampling, plain or in groups, owned by the run: the rate that is drawn with is the rate that is accounted.

Formal guarantees (tests/test_sampling.py):
- at every step each example is included independently with probability q of that step
- a step's draw depends on the secret and the step only; no example is in a step twice
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from torch.utils.data import DataLoader, IterableDataset

from rgp.bands import group_rate
from rgp.composition import Event
from rgp.groups import deal, draw_group
from rgp.streams import Streams


@dataclass(frozen=True, kw_only=True)
class Poisson:
    """Each unit is drawn at each step independently, with probability batch_size / size.

    batch_sizes: the expected size of each step's logical batch, which is also the divisor of the noisy sum.
    max_batch: a larger draw is cut down to this many units, chosen at random.
    """

    name: ClassVar[str] = "poisson"
    words: ClassVar[str] = "Poisson"
    groups: ClassVar[int] = 1
    size: int
    batch_sizes: tuple[int, ...]
    max_batch: int | None = None

    def batch_size(self, step: int) -> int:
        return self.batch_sizes[step]

    def rate(self, step: int) -> float:
        """q of this step: drawn with, charged and accounted."""
        return self.batch_sizes[step] / self.size

    @property
    def largest_rate(self) -> float:
        return max(self.batch_sizes) / self.size

    def turns(self, steps: int) -> int:
        """In how many of so many steps in a row any one unit may be drawn, at most."""
        return steps

    def draw(self, streams: Streams, step: int, attempt: int) -> np.ndarray:
        return draw(streams, step, self.size, self.rate(step), attempt=attempt, max_batch=self.max_batch)

    def event(self, rate: float, sigma: float, count: int = 1) -> Event:
        """`count` such draws, for the accountant."""
        size = None if self.max_batch is None else self.size
        return Event(rate, sigma, count, max_batch=self.max_batch, dataset_size=size)

    def charge(self, step: int) -> dict[str, Any]:
        """What the ledger says of a draw."""
        return {"q": self.rate(step), "batch_size": self.batch_size(step), "max_batch": self.max_batch}


@dataclass(frozen=True, kw_only=True)
class Cyclic:
    """Units are dealt into `bands` groups once; step t draws from group t mod bands alone, so that nobody is drawn twice in
    `bands` steps, as correlated noise needs it (groups.py, docs/correlated-noise.md).

    batch_sizes: the expected size of each step's logical batch and the divisor, as for Poisson; all equal here.
    """

    name: ClassVar[str] = "cyclic"
    words: ClassVar[str] = "Poisson in groups, by turns"
    max_batch: ClassVar[None] = None
    size: int
    batch_sizes: tuple[int, ...]
    bands: int

    def __post_init__(self) -> None:
        if len(set(self.batch_sizes)) != 1:
            raise ValueError("batch_size must be one number where noise is correlated: groups are drawn at one rate")
        group_rate(self.batch_sizes[0] / self.size, self.bands)

    def batch_size(self, step: int) -> int:
        return self.batch_sizes[step]

    @property
    def groups(self) -> int:
        return self.bands

    def group(self, step: int) -> int:
        return step % self.bands

    def rate(self, step: int) -> float:
        """The probability with which each member of the step's group is drawn: drawn with, charged and accounted."""
        return group_rate(self.batch_sizes[step] / self.size, self.bands)

    @property
    def largest_rate(self) -> float:
        return self.rate(0)

    def turns(self, steps: int) -> int:
        """In how many of so many steps in a row any one unit may be drawn, at most: the turns of its group."""
        return -(-steps // self.bands)

    def draw(self, streams: Streams, step: int, attempt: int) -> np.ndarray:
        groups = deal(streams, self.size, self.bands)
        return draw_group(streams, step, groups, self.bands, self.rate(step), attempt=attempt)

    def event(self, rate: float, sigma: float, count: int = 1) -> Event:
        return Event(rate, sigma, count)

    def charge(self, step: int) -> dict[str, Any]:
        """A release is charged to its group alone: nobody else can have been in it."""
        return {
            "q": self.rate(step),
            "batch_size": self.batch_size(step),
            "max_batch": None,
            "group": self.group(step),
        }


Sampling = Poisson | Cyclic


def make_sampling(size: int, batch_sizes: tuple[int, ...], *, bands: int, max_batch: int | None) -> Sampling:
    """As noise correlated over so many steps needs it."""
    if bands == 1:
        return Poisson(size=size, batch_sizes=batch_sizes, max_batch=max_batch)
    return Cyclic(size=size, batch_sizes=batch_sizes, bands=bands)


def draw(
    streams: Streams, step: int, size: int, rate: float, *, attempt: int = 0, max_batch: int | None = None
) -> np.ndarray:
    """The indices of one logical batch, ascending. May be empty; an empty draw is a step like any other.

    `max_batch` caps the draw: a uniformly random subset of that size is kept, which the accountant has to know.
    """
    indices = np.flatnonzero(streams.generator("sampling", step, attempt).random(size) < rate)
    if max_batch is not None and len(indices) > max_batch:
        indices = np.sort(
            streams.generator("sampling", step, attempt, part=1).choice(indices, max_batch, replace=False)
        )
    return indices


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
