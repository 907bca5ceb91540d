"""The paper's membership inference: a row with a low loss is taken for a member (Yeom et al. 2018).

a, b: losses of members and of non-members, as many of one as of the other
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

LEAST = 8  # losses of each kind: with fewer, half of them says nothing


def attack(member_losses: Any, nonmember_losses: Any, *, seed: int = 0) -> dict[str, Any]:
    """How well a threshold on the loss tells rows that were trained on from rows that were not.

    The larger set is thinned to the size of the smaller, at random. A threshold is chosen on one random half of each,
    and `success_rate` is its share of right answers on the other half: 0.5 is a coin. `standard_error` is that rate's.
    `auc` and the true-positive rates at false-positive rates 0.1% and 1% are of all losses and need no choice.

    >>> attack([0.1] * 100, [2.0] * 100)["success_rate"]
    1.0
    """
    members, others = _losses("member_losses", member_losses), _losses("nonmember_losses", nonmember_losses)
    rng = np.random.Generator(np.random.PCG64(seed))
    size = min(len(members), len(others))
    a, b = rng.permutation(members)[:size], rng.permutation(others)[:size]
    half = size // 2
    threshold = _best_threshold(a[:half], b[:half])
    right = np.concatenate([a[half:] <= threshold, b[half:] > threshold])
    rate = float(right.mean())
    return {
        "success_rate": rate,
        "auc": auc(members, others),
        "tpr_at_0.001": tpr(members, others, 0.001),
        "tpr_at_0.01": tpr(members, others, 0.01),
        "standard_error": math.sqrt(max(rate * (1 - rate), 0.25 / len(right)) / len(right)),  # never 0: n is finite
        "judged": len(right),
        "members": len(members),
        "nonmembers": len(others),
    }


def _losses(name: str, values: Any) -> np.ndarray:
    losses = np.asarray(values, np.float64).reshape(-1)
    if len(losses) < LEAST:
        raise ValueError(f"{name} has {len(losses)} losses; the attack needs {LEAST} or more.")
    if np.isnan(losses).any():
        raise ValueError(f"{name}: {int(np.isnan(losses).sum())} of {len(losses)} losses are NaN.")
    return losses


def _best_threshold(a: np.ndarray, b: np.ndarray) -> float:
    """The t with most right answers of "a member if its loss is at most t", halfway between two losses."""
    values = np.unique(np.concatenate([a, b]))
    between = np.concatenate([[-np.inf], (values[1:] + values[:-1]) / 2, [np.inf]])
    below = [np.searchsorted(np.sort(x), between, side="right") for x in (a, b)]
    return float(between[np.argmax(below[0] - below[1])])


def auc(a: np.ndarray, b: np.ndarray) -> float:
    """The chance that a member's loss is below a non-member's; ties count half."""
    ordered = np.sort(b)
    above = len(b) - np.searchsorted(ordered, a, side="right")
    equal = np.searchsorted(ordered, a, side="right") - np.searchsorted(ordered, a, side="left")
    return float((above + equal / 2).sum() / (len(a) * len(b)))


def tpr(a: np.ndarray, b: np.ndarray, rate: float) -> float:
    """Share of members below the highest threshold that takes at most this share of non-members for members."""
    allowed = math.floor(rate * len(b) + 1e-9)
    return float((a < np.sort(b)[allowed]).mean())


def false_positives(ordered: np.ndarray, limit: float) -> int:
    """How many of the sorted losses lie below the limit."""
    return int(np.searchsorted(ordered, limit, side="left"))
