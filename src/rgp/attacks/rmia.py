"""RMIA, online (Zarifzadeh, Liu, Shokri 2024): does the target favour this row over other rows of the population?

A row's ratio is its probability under the target over its mean probability under all reference models, half of which were
trained on it. The score is the share of population rows whose ratio the row's exceeds gamma times.
"""

from __future__ import annotations

import numpy as np


def rmia(target: np.ndarray, shadows: np.ndarray, population: np.ndarray, *, gamma: float = 1.0) -> np.ndarray:
    """Scores (n,), high for members, from confidences log(p / (1 - p)) as in lira.py.

    population: indices of the rows z to compare with, not trained on by the target; a row is never compared with itself.
    Rows with the same share are ordered by their ratio.
    """
    log_p = -np.logaddexp(0.0, -target)
    log_mean = np.logaddexp.reduce(-np.logaddexp(0.0, -shadows), axis=0) - np.log(len(shadows))
    ratio = log_p - log_mean
    others = np.sort(ratio[population])
    beaten: np.ndarray = np.searchsorted(others, ratio - np.log(gamma), side="right").astype(float)
    compared = np.full(len(ratio), float(len(population)))
    itself: np.ndarray = np.zeros(len(ratio), bool)
    itself[population] = True
    beaten[itself] -= gamma <= 1
    compared[itself] -= 1
    share = beaten / np.maximum(compared, 1)
    order = np.lexsort((ratio, share))
    rank = np.empty(len(ratio))
    rank[order] = np.arange(len(ratio))
    return share + 1e-9 * rank / len(ratio)
