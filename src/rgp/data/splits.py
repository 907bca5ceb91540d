"""Rows held out for testing, chosen before anything is looked at."""

from __future__ import annotations

import numpy as np

from rgp.data.spec import DataError


def hold_out(rows: int, share: float, seed: int, source: str) -> tuple[np.ndarray, np.ndarray]:
    """Indices (train, test), ascending. They depend on the number of rows, the share and the seed only."""
    tests = max(1, round(rows * share))
    if rows - tests < 1:
        raise DataError(f"{source}: {rows} row(s), too few to hold out {share:g} of them for testing.")
    order = np.random.Generator(np.random.PCG64(seed)).permutation(rows)
    return np.sort(order[tests:]), np.sort(order[:tests])
