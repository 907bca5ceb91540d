"""Noise from a cryptographic generator, hardened against floating-point attacks: `privatize(..., secure_noise=True)`.

The default noise (noise.py) comes from Philox: statistically sound, with a 128-bit secret key, but not designed to
resist cryptanalysis, and drawn in the precision of the gradients, where the spacing of floating-point numbers lets an
attacker rule out some values of the sum (Mironov 2012; Jin et al. 2022). Here

- bits come from AES-128 in counter mode (`randomgen`); every chunk of every step has its own key and starting counter,
  256 bits from the operating system, which are used once and forgotten
- a Gaussian is the sum of four independent ones divided by 2, as in section 5.1 of Holohan and Braghin, "Secure Random
  Sampling in Differential Privacy" (2021, arXiv 2107.10138): undoing it takes about 2^(53 x 3) trials
- the sum is noised in float64 and then rounded to the gradient's precision, so its low bits are post-processing

Formal guarantees (tests/test_noise.py):
- every entry is an independent N(0, std^2) draw
- nothing is repeatable, seed or not: a step that is computed again is a new release

Cost in CPU seconds per step, one core of an AMD EPYC, 15 November 2026 (chunks run in parallel on more cores):

    entries       Philox    here
    1,500,000     0.019     0.082    4.3 times
    20,000,000    0.27      1.11     4.2 times
"""

from __future__ import annotations

import secrets
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rgp.noise import for_chunks

TERMS = 4
_BLOCK = 1 << 15  # entries summed at a time, small enough to stay in cache


class SecureNoise:
    """A `NoiseSource` (noise.py) that is never repeated."""

    name = "secure"
    replayable = False

    def __init__(self) -> None:
        try:
            from randomgen import AESCounter
        except ImportError as error:
            raise ImportError("secure_noise=True needs randomgen: pip install 'rgp[secure]'") from error
        self._generator = AESCounter

    def add(self, total: Tensor, *, std: float, step: int, attempt: int) -> None:
        def fill(part: Tensor, _: int) -> None:
            noisy = part.to("cpu", torch.float64)
            self._fill(noisy.numpy(), std)
            part.copy_(noisy)

        for_chunks(fill, total)

    def _fill(self, noisy: np.ndarray, std: float) -> None:
        rng = np.random.Generator(_fresh(self._generator))
        normals, total = np.empty(_BLOCK), np.empty(_BLOCK)
        for start in range(0, len(noisy), _BLOCK):
            block = noisy[start : start + _BLOCK]
            one, more = total[: len(block)], normals[: len(block)]
            rng.standard_normal(out=one)
            for _ in range(TERMS - 1):
                rng.standard_normal(out=more)
                one += more
            one *= std / TERMS**0.5
            block += one


def _fresh(generator: Any) -> Any:
    """A bit generator whose key and starting counter nobody has, and nobody will."""
    key, counter = (int.from_bytes(secrets.token_bytes(16), "little") for _ in range(2))
    return generator(key=key, counter=counter)
