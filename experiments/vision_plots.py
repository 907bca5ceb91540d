"""Figures of the vision results: accuracy by method and epsilon, and what the rank and the source of the carriers do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from driver import by_setting
from plots import COLOURS, draw_methods

METHODS = {
    "dpsgd": "DP-SGD",
    "rgp": "RGP, both sides",
    "rgp-left": "RGP, left side",
    "dp-powersgd": "DP-PowerSGD",
    "rgp-random": "RGP-random",
}
TUNED = {
    "dpsgd-lr1": "DP-SGD",
    "rgp-rank32": "RGP, rank 32, history",
    "rgp-left-rank32": "RGP left, rank 32, momentum",
    "rgp-rank16-momentum": "RGP, rank 16, momentum",
    "rgp-left-rank16-lr1": "RGP left, rank 16, momentum",
    "rgp-rank16-lr1": "RGP, rank 16, history",
    "dp-powersgd-rank32": "DP-PowerSGD, rank 32",
    "dp-powersgd-rank16": "DP-PowerSGD, rank 16",
    "rgp-random-rank16-lr2": "RGP-random, rank 16, rate 2",
    "rgp-alternate-rank16": "RGP alternating, rank 16",
    "rgp-rank16-lr2-head0.1": "RGP, rank 16, rate 2, head scale 0.1",
}
ROWS_ERROR = 0.7  # sqrt(0.5 * 0.5 / 5000), in points: the rows alone, not the seed


def draw(rows: list[dict[str, Any]], folder: Path) -> None:
    references = {"nonprivate": ("not private", "--"), "rgp-np": ("RGP without clip and noise", ":")}
    label = "test accuracy on CIFAR-10 in %"
    draw_methods(by_setting(rows), METHODS, references, label, folder / "vision-methods.png")
    draw_tuning(by_setting(rows, "tuning"), folder / "vision-tuning.png")


def draw_tuning(found: dict[str, dict[int, float]], path: Path) -> None:
    from matplotlib.figure import Figure

    shown = sorted(((found[name][0], words) for name, words in TUNED.items() if name in found))
    figure = Figure(figsize=(7, 0.9 + 0.36 * len(shown)), layout="constrained")
    axes = figure.subplots()
    for i, (value, words) in enumerate(shown):
        axes.errorbar(value, i, xerr=ROWS_ERROR, fmt="o", color="#c2571a" if "DP-" in words else COLOURS[8], capsize=3)
        axes.annotate(f"{value:.1f}", (value, i), xytext=(0, 5), textcoords="offset points", ha="center", fontsize=8)
    axes.set_yticks(range(len(shown)), [words for _, words in shown])
    axes.set_xlabel(
        "accuracy on 5,000 held-out training rows in %, epsilon 8, one seed\n(bars: error from the rows alone)"
    )

    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
