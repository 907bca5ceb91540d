"""LiRA, online (Carlini et al. 2022): is the target's confidence more like that of models trained with the row, or without?

Shapes: n rows, S shadow models. confidence: log(p / (1 - p)) of the right answer, which is nearly Gaussian over models
target (n,)  the attacked model's    shadows (S, n)  the shadow models'    inside (S, n)  who was trained on which row
"""

from __future__ import annotations

import numpy as np

PER_ROW = 64  # shadows from which every row has its own variances; with fewer, all rows share them (as in the paper)


def lira(target: np.ndarray, shadows: np.ndarray, inside: np.ndarray) -> np.ndarray:
    """Log likelihood ratio (n,), high for members: Gaussians fitted to the shadows with the row and to those without."""
    return _log_density(target, shadows, inside) - _log_density(target, shadows, ~inside)


def _log_density(target: np.ndarray, shadows: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    count = chosen.sum(0)
    if (count < 2).any():
        raise ValueError(
            "every row must be in the training data of at least two shadow models, and outside that of at least two."
        )
    mean = np.where(chosen, shadows, 0.0).sum(0) / count
    squares = np.where(chosen, (shadows - mean) ** 2, 0.0).sum(0)
    if len(shadows) >= PER_ROW:
        variance = squares / (count - 1)
    else:
        variance = np.full(len(target), squares.sum() / (count - 1).sum())
    variance = np.maximum(variance, 1e-12)
    return -0.5 * ((target - mean) ** 2 / variance + np.log(variance))
