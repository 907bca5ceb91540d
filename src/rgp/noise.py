"""Gaussian noise from an explicit stream.

Formal guarantees (each has a test in tests/test_noise.py):
- every entry is an independent N(0, std^2) draw, also between steps, attempts and positions
- the numbers depend on the secret, the step and the attempt only, not on the number of threads
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from rgp.streams import Streams

CHUNK = 1 << 20  # entries per counter block; fixed, so that threads do not change the numbers


class NoiseSource(Protocol):
    """Adds noise in place. `replayable`: the same (step, attempt) gives the same numbers again."""

    replayable: bool

    def add(self, total: Tensor, *, std: float, step: int, attempt: int) -> None: ...


class PhiloxNoise:
    """The default: numpy's Philox, 128-bit key, counter addressed by step, attempt and chunk."""

    replayable = True

    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    def add(self, total: Tensor, *, std: float, step: int, attempt: int) -> None:
        assert total.is_contiguous()
        flat = total.view(-1)

        def fill(start: int) -> None:
            part = flat[start : start + CHUNK]
            rng = self._streams.generator("noise", step, attempt, part=start // CHUNK)
            add_scaled(part, _normals(rng, part), std)

        parallel(fill, range(0, flat.numel(), CHUNK))


def _normals(rng: np.random.Generator, like: Tensor) -> np.ndarray:
    return rng.standard_normal(like.numel(), dtype=np.float64 if like.dtype == torch.float64 else np.float32)


def add_scaled(part: Tensor, normals: np.ndarray, std: float) -> None:
    part.add_(torch.from_numpy(normals).to(part.device), alpha=std)


def parallel(work, items) -> None:
    items = list(items)
    threads = min(len(items), torch.get_num_threads())
    if threads <= 1:
        for item in items:
            work(item)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, items))
