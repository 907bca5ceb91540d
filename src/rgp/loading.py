"""How drawn examples become micro-batches: one value for every argument that changes speed and memory, not the promise.

`Loading` goes from `privatize` or `resume` to the loop unchanged. What it holds may differ after a resume.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset

from rgp.members import Members, cut_units
from rgp.sampling import check_lengths
from rgp.streams import Streams
from rgp.torchstate import seed_others
from rgp.validate import check_count, check_one_of

REDUCTIONS = ("mean", "sum", "none")
DEFAULT_MICROBATCH = 32


@dataclass(frozen=True, kw_only=True)
class Loading:
    """microbatch_size: examples per forward and backward pass; None: the expected batch, at most 32
    views, augment: passes over each micro-batch, and what makes another view of it
    loss_reduction: how the loss of a micro-batch was reduced over its examples
    collate_fn, workers, pin_memory: as for torch's DataLoader
    lengths: one number per row; examples of similar length share a micro-batch
    members: which rows belong to which unit, where a unit is not a row; microbatch_size still counts rows
    """

    microbatch_size: int | None = None
    views: int = 1
    loss_reduction: str = "mean"
    collate_fn: Callable[[list[Any]], Any] | None = None
    augment: Callable[[Any], Any] | None = None
    workers: int = 0
    pin_memory: bool = False
    lengths: Any = None
    members: Members | None = None

    def __post_init__(self) -> None:
        check_one_of("loss_reduction", self.loss_reduction, REDUCTIONS)
        if self.microbatch_size is not None:
            check_count("microbatch_size", self.microbatch_size)
        check_count("views", self.views)
        if self.views > 1 and self.augment is None:
            raise ValueError(
                f"views={self.views} without augment= would train on {self.views} copies of each example; give augment"
            )

    def to_json(self) -> dict[str, Any]:
        """What a checkpoint keeps: the rest is given again."""
        return {
            "microbatch_size": self.microbatch_size,
            "views": self.views,
            "loss_reduction": self.loss_reduction,
        }


class Loader:
    """The dataset's examples as micro-batches, in the order in which the run consumes them."""

    def __init__(self, dataset: Any, loading: Loading, streams: Streams) -> None:
        self._dataset, self._loading, self._streams = dataset, loading, streams
        self._lengths = check_lengths(loading.lengths, len(dataset))

    def cut(self, drawn: np.ndarray, step: int, attempt: int) -> list[list[int]]:
        """The rows of the units that were drawn, in micro-batches."""
        size, members = self._loading.microbatch_size, self._loading.members
        assert size is not None
        if members is None:
            return cut(drawn, size, self._lengths)
        rows = [members.draw(self._streams, step, attempt, unit) for unit in drawn]
        return [*cut_units(drawn.tolist(), rows, size, self._lengths)]

    def batches(self, schedule: BatchSampler, seed: int) -> Iterator[Any]:
        given = self._loading
        loader = DataLoader(
            Seeded(self._dataset),
            batch_sampler=schedule,
            generator=torch.Generator().manual_seed(seed),
            collate_fn=given.collate_fn,
            num_workers=given.workers,
            pin_memory=given.pin_memory,
        )
        return iter(loader)


def cut(indices: np.ndarray, microbatch_size: int, lengths: np.ndarray | None = None) -> list[list[int]]:
    """Micro-batches of at most `microbatch_size`, as equal as they can be.

    With `lengths` (N,), examples of similar length share one, the longest first. Which examples are in the batch was
    settled by the sampler, and every example is clipped on its own: this saves padding and changes nothing else.
    """
    if len(indices) == 0:
        return []
    if lengths is not None:
        indices = indices[np.argsort(-lengths[indices], kind="stable")]
    parts = -(-len(indices) // microbatch_size)
    return [part.tolist() for part in np.array_split(indices, parts)]


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
