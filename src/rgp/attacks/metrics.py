"""What an attack's scores are worth: success rate, AUC, true-positive rates at low false-positive rates, with intervals.

Intervals are at 95%. success rate: Clopper-Pearson, on the half that the threshold was not chosen on. AUC: bootstrap over
rows. True-positive rates: bootstrap over rows, which moves the threshold too, widened to Clopper-Pearson's of the members at
the threshold: where a handful of rows decides, resampling them alone would look too sure.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rgp.attacks.threshold import attack, auc, false_positives, tpr

CONFIDENCE = 0.95
RATES = {"tpr_at_0.001": 0.001, "tpr_at_0.01": 0.01}
RESAMPLES = 400
INTERVALS = "success rate: Clopper-Pearson; AUC: bootstrap; TPR: the wider of bootstrap and Clopper-Pearson"


def judge(members: Any, others: Any, *, seed: int = 0) -> dict[str, Any]:
    """As `threshold.attack`, for scores that are LOW for members (losses), with intervals and the ROC curve."""
    a, b = np.asarray(members, np.float64), np.asarray(others, np.float64)
    result = attack(a, b, seed=seed)
    right, judged = round(result["success_rate"] * result["judged"]), result["judged"]
    rng = np.random.Generator(np.random.PCG64([seed, 1]))
    drawn: dict[str, list[float]] = {"auc": [], **{name: [] for name in RATES}}
    for _ in range(RESAMPLES):
        x, y = rng.choice(a, len(a)), np.sort(rng.choice(b, len(b)))
        drawn["auc"].append(auc(x, y))
        for name, rate in RATES.items():
            drawn[name].append(tpr(x, y, rate))
    tail = (1 - CONFIDENCE) / 2
    intervals = {"success_rate": clopper_pearson(right, judged)}
    for name, values in drawn.items():
        low, high = float(np.quantile(values, tail)), float(np.quantile(values, 1 - tail))
        if name in RATES:
            exact = clopper_pearson(round(result[name] * len(a)), len(a))
            low, high = min(low, exact[0]), max(high, exact[1])
        intervals[name] = [low, high]
    return {**result, "intervals": intervals, "roc": roc(a, b)}


def clopper_pearson(right: int, count: int, confidence: float = CONFIDENCE) -> list[float]:
    """The exact interval of a share: the shares under which `right` of `count` is not too rare, on either side.

    >>> [round(x, 4) for x in clopper_pearson(8, 10)]
    [0.4439, 0.9748]
    """
    from scipy.special import betaincinv

    tail = (1 - confidence) / 2
    low = 0.0 if right == 0 else float(betaincinv(right, count - right + 1, tail))
    high = 1.0 if right == count else float(betaincinv(right + 1, count - right, 1 - tail))
    return [low, high]


def roc(members: np.ndarray, others: np.ndarray, *, points: int = 120) -> list[list[float]]:
    """[[false-positive rate, true-positive rate], ...] from (0, ...) to (1, 1), dense where rates are small."""
    ordered, size = np.sort(others), len(others)
    wanted = {0, size, *np.geomspace(1, size, points).astype(int).tolist()}
    found = np.sort(members)
    curve = []
    for allowed in sorted(wanted):
        limit = ordered[allowed] if allowed < size else math.inf
        taken = len(found) if allowed == size else int(np.searchsorted(found, limit, side="left"))
        curve.append([false_positives(ordered, limit) / size, taken / len(found)])
    return curve
