"""Figures of the results on SST-2: accuracy by method and epsilon, and over the steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from driver import by_setting, mean_and_error

METHODS = {
    "rgp": "RGP",
    "rgp-random": "RGP-random",
    "dpsgd": "DP-SGD",
    "dp-lora": "DP-LoRA",
    "bitfit": "BiTFiT",
    "linear": "linear probing",
}
COLOURS = {8: "#1b7f5c", 3: "#c2571a"}
LINES = ("#1b7f5c", "#7fbf9f", "#c2571a", "#5b6bb5", "#8c6d31", "#777777")


def draw(rows: list[dict[str, Any]], folder: Path) -> None:
    draw_methods(by_setting(rows, measure="accuracy_held_out"), folder / "sst2-methods.png")
    draw_curves(rows, folder / "sst2-curves.png")


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
    for epsilon, colour in COLOURS.items():
        axes.plot([], [], "o", color=colour, label=f"epsilon {epsilon}")
    if "nonprivate" in found:
        mean, _ = mean_and_error(list(found["nonprivate"].values()))
        axes.axvline(mean, color="black", linestyle="--", label="full fine-tuning,\nnot private")
    axes.set_yticks(range(len(METHODS)), list(reversed(METHODS.values())))
    axes.set_xlabel(
        "accuracy on 5,000 held-out training rows of SST-2 in %\n(bars: one standard error, where several seeds)"
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=150)


def draw_curves(rows: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    curves = {
        row["name"].split("/")[1]: row["curve"]
        for row in rows
        if row["name"].startswith("tables/") and row["seed"] == 0
    }
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    for (name, label), colour in zip(METHODS.items(), LINES, strict=True):
        if f"{name}-e8" in curves:
            steps, values = zip(*curves[f"{name}-e8"], strict=True)
            axes.plot(steps, [100 * v for v in values], "o-", markersize=3, color=colour, label=label)
    if "nonprivate" in curves:
        steps, values = zip(*curves["nonprivate"], strict=True)
        axes.plot(steps, [100 * v for v in values], "k--", label="full fine-tuning, not private")
    axes.set_xlabel("step")
    axes.set_ylabel("validation accuracy in %, epsilon 8")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=150)
