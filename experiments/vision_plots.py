"""Figures of the vision results: accuracy by method and epsilon, and what the rank and the source of the carriers do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from driver import by_setting, mean_and_error

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
COLOURS = {8: "#1b7f5c", 3: "#c2571a"}


def draw(rows: list[dict[str, Any]], folder: Path) -> None:
    draw_methods(by_setting(rows), folder / "vision-methods.png")
    draw_tuning(by_setting(rows, "tuning"), folder / "vision-tuning.png")


def draw_methods(found: dict[str, dict[int, float]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    for i, name in enumerate(reversed(METHODS)):
        for epsilon, colour in COLOURS.items():
            values = list(found.get(f"{name}-e{epsilon}", {}).values())
            if values:
                mean, error = mean_and_error(values)
                y = i + (0.12 if epsilon == 8 else -0.12)
                axes.errorbar(mean, y, xerr=error or 0, fmt="o", color=colour, capsize=3)
                axes.scatter(values, [y] * len(values), s=10, color=colour, alpha=0.4, linewidths=0)
    for epsilon, colour in COLOURS.items():
        axes.plot([], [], "o", color=colour, label=f"epsilon {epsilon}")
    for name, words, style in (("nonprivate", "not private", "--"), ("rgp-np", "RGP without clip and noise", ":")):
        if name in found:
            axes.axvline(mean_and_error(list(found[name].values()))[0], color="black", linestyle=style, label=words)
    axes.set_yticks(range(len(METHODS)), list(reversed(METHODS.values())))
    axes.set_xlabel("test accuracy on CIFAR-10 in %\n(bars: one standard error, where several seeds)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=150)


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
