"""ROC curves on logarithmic axes, which show attacks that are sure about a few rows. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib.style
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

SMALLEST = 1e-4
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")


def draw_roc(curves: Mapping[str, Sequence[Sequence[float]]], promised: Mapping[str, float] | None, path: Path) -> None:
    """One line per attack, the chance diagonal, and the limit that mu-GDP sets to every attack."""
    from scipy.special import ndtr, ndtri

    with matplotlib.style.context("default"):
        figure = Figure(figsize=(5.2, 4.6), dpi=150, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        chance = np.geomspace(SMALLEST, 1, 100)
        axes.plot(chance, chance, color="0.6", linewidth=1, linestyle=":", label="chance")
        if promised is not None:
            limit = ndtr(ndtri(chance) + promised["mu"])
            axes.plot(chance, limit, color="0.3", linewidth=1, linestyle="--", label="promised limit")
        for (name, curve), colour in zip(curves.items(), COLOURS, strict=False):
            points = np.maximum(np.asarray(curve, float), SMALLEST)
            axes.plot(points[:, 0], points[:, 1], color=colour, linewidth=1.6, label=name)
        axes.set(xscale="log", yscale="log", xlim=(SMALLEST, 1), ylim=(SMALLEST, 1))
        axes.set(xlabel="false-positive rate", ylabel="true-positive rate")
        axes.set_title("Membership attacks. Not covered by the guarantee: do not publish.", fontsize=9, color="#a40000")
        axes.legend(frameon=False, fontsize=9, loc="lower right")
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, metadata={"Software": None})
