"""Randomness: one secret, four independent streams, no hidden state.

Every stream is numpy's Philox counter generator under its own 128-bit key. A draw is addressed by (step, attempt, part)
in the counter, so the numbers of one step are a function of the secret alone: a crashed step can be computed again, and
nothing but the secret has to be kept.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import Any

import numpy as np

from rgp.errors import WrongUseError

PURPOSES = ("sampling", "noise", "carriers", "dropout")
SECRET_BYTES = 32


class Streams:
    """The random streams of one run.

    >>> a, b = Streams.from_seed(1), Streams.from_seed(1 + 2**32)
    >>> bool(a.generator("noise", 0).random() == b.generator("noise", 0).random())
    False
    """

    def __init__(self, secret: bytes, *, known: bool, rank: int = 0) -> None:
        if len(secret) != SECRET_BYTES:
            raise ValueError(f"secret must have {SECRET_BYTES} bytes; got {len(secret)}")
        self.secret = secret
        self._rank = rank  # in a distributed run: each rank has its own dropout and augmentation, all else is common
        self.known = known  # a user gave the seed: the guarantee does not hold against whoever knows it
        self._keys = {
            purpose: np.frombuffer(hashlib.blake2b(secret, digest_size=16, person=purpose.encode()).digest(), np.uint64)
            for purpose in PURPOSES
        }

    @classmethod
    def from_system(cls) -> Streams:
        return cls(secrets.token_bytes(SECRET_BYTES), known=False)

    @classmethod
    def from_seed(cls, seed: int) -> Streams:
        if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
            raise ValueError(f"seed must be a non-negative integer or None; got {seed!r}")
        return cls(hashlib.blake2b(str(seed).encode(), digest_size=SECRET_BYTES).digest(), known=True)

    def generator(self, purpose: str, step: int, attempt: int = 0, part: int = 0) -> np.random.Generator:
        """The generator of one part of one step. Different arguments never share a number: the low counter word is free."""
        counter = np.array([0, part, attempt, step], dtype=np.uint64)
        return np.random.Generator(np.random.Philox(key=self._keys[purpose], counter=counter))

    def torch_seed(self, step: int, part: int, attempt: int = 0) -> int:
        """A seed for torch's own generator, which drives dropout. 63 bits; nothing private rests on it. Each rank's own."""
        return int(self.generator("dropout", step, attempt, part=part + (self._rank << 48)).integers(0, 2**63 - 1))

    def loading_seed(self, step: int, part: int, attempt: int = 0) -> int:
        """A seed for what a dataset and its collate_fn draw at random (augmentation), per micro-batch."""
        return self.torch_seed(step, part + 2**34, attempt)

    @property
    def run_id(self) -> str:
        """Tells runs apart in ledgers and checkpoints; reveals nothing about the secret."""
        return hashlib.blake2b(self.secret, digest_size=8, person=b"run").hexdigest()

    def __reduce__(self) -> Any:
        raise WrongUseError(
            "a run's random streams hold its secret, with which the noise can be removed: they cannot be pickled or copied. "
            "Save the run with run.save(folder), and continue with rgp.resume."
        )
