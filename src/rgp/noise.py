"""Gaussian noise from an explicit stream.

Formal guarantees (each has a test in tests/test_noise.py):
- every entry is an independent N(0, std^2) draw, also between steps, attempts and positions
- the numbers depend on the secret, the step and the attempt only, not on the number of threads
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from rgp.streams import Streams

CHUNK = 1 << 20  # entries per counter block; fixed, so that threads do not change the numbers


class NoiseSource(Protocol):
    """Adds noise in place.

    name: under which checkpoints know it.
    replayable: the same (step, attempt) gives the same numbers again.
    """

    name: str
    replayable: bool

    def add(self, total: Tensor, *, std: float, step: int, attempt: int) -> None: ...


class PhiloxNoise:
    """The default: numpy's Philox, 128-bit key, counter addressed by step, attempt and chunk."""

    name = "philox"
    replayable = True

    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    def add(self, total: Tensor, *, std: float, step: int, attempt: int) -> None:
        def fill(part: Tensor, number: int) -> None:
            rng = self._streams.generator("noise", step, attempt, part=number)
            part.add_(torch.from_numpy(_normals(rng, part)).to(part.device), alpha=std)

        for_chunks(fill, total)


def noise_source(name: str, streams: Streams) -> NoiseSource:
    """The source of this name; ValueError for one that this version does not know."""
    if name == PhiloxNoise.name:
        return PhiloxNoise(streams)
    if name == "secure":
        from rgp.secure import SecureNoise

        return SecureNoise()
    raise ValueError(f"noise source {name!r} is not one of 'philox', 'secure': another version of rgp wrote this")


def _normals(rng: np.random.Generator, like: Tensor) -> np.ndarray:
    return rng.standard_normal(like.numel(), dtype=np.float64 if like.dtype == torch.float64 else np.float32)


def for_chunks(work: Callable[[Tensor, int], None], total: Tensor) -> None:
    """`work(chunk, its number)` for all of `total`, in parallel; a chunk is a view."""
    assert total.is_contiguous()
    flat = total.view(-1)
    parallel(lambda start: work(flat[start : start + CHUNK], start // CHUNK), range(0, flat.numel(), CHUNK))


def parallel(work: Callable[[int], None], items: Iterable[int]) -> None:
    items = list(items)
    threads = min(len(items), torch.get_num_threads())
    if threads <= 1:
        for item in items:
            work(item)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, items))
