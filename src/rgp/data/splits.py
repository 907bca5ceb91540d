"""Rows held out for testing: each row's side is decided by itself.

The side of a row is a hash of its own content (of a file, its name; with units, of the unit's id) under the seed. It does not
depend on the other rows, nor on how many there are: one row more or less in the file is one row more or less on one side. So
neighbouring files give neighbouring training sets, and what is promised for a row of the training data holds for a row of the
file. Rows that are equal are on the same side, and so are all rows of one person.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from rgp.data.spec import DataError


def hold_out(keys: Iterable[bytes], share: float, seed: int, source: str) -> tuple[np.ndarray, np.ndarray]:
    """Indices (train, test), ascending. Each row is held out with probability `share`, by its own key and the seed."""
    aside = np.array([_is_held_out(key, share, seed) for key in keys], bool)
    train, test = np.flatnonzero(~aside), np.flatnonzero(aside)
    if not len(train) or not len(test):
        side = "the test" if len(train) else "the training"
        raise DataError(
            f"{source}: {len(aside)} row(s), too few to hold out {share:g} of them for testing: {side} side came out empty. Each "
            "row's side is decided by itself; choose another seed or held_out, or bring a test split."
        )
    return train, test


def hold_out_published(rows: int, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices (train, test) of a published data set whose rows are fixed, such as digits: a permutation of it."""
    tests = max(1, round(rows * share))
    order = np.random.Generator(np.random.PCG64(seed)).permutation(rows)
    return np.sort(order[tests:]), np.sort(order[:tests])


def content(*values: Any) -> bytes:
    """One row as bytes; different rows are different bytes."""
    parts = []
    for value in values:
        if isinstance(value, np.ndarray):
            head = f"{value.dtype.str} {value.shape}".encode()
            data = head + b"\0" + np.ascontiguousarray(value).tobytes()
        else:
            data = value if isinstance(value, bytes) else repr(value).encode()
        parts += [str(len(data)).encode(), b" ", data]
    return b"".join(parts)


def _is_held_out(key: bytes, share: float, seed: int) -> bool:
    digest = hashlib.blake2b(key, key=str(seed).encode(), digest_size=8, person=b"held-out").digest()
    return int.from_bytes(digest, "little") < share * 2**64
