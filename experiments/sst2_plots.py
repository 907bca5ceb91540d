"""Figures of the results on SST-2: accuracy by method and epsilon, and over the steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from driver import by_setting
from plots import draw_methods

METHODS = {
    "rgp-r16": "RGP",
    "rgp-public": "RGP, rank 2",
    "rgp": "RGP, first settings",
    "rgp-random": "RGP-random",
    "dpsgd-lr2e-3": "DP-SGD",
    "dpsgd": "DP-SGD, first settings",
    "bitfit-lr1e-2": "BiTFiT",
    "dp-lora-lr1e-2": "DP-LoRA",
    "linear": "linear probing",
}
LINES = ("#1b7f5c", "#4fa886", "#86c2a8", "#b9dccd", "#c2571a", "#dd9c74", "#8c6d31", "#5b6bb5", "#777777")


def draw(rows: list[dict[str, Any]], folder: Path) -> None:
    references = {"nonprivate": ("full fine-tuning,\nnot private", "--")}
    found = by_setting(rows, measure="accuracy_held_out")
    label = "accuracy on 5,000 held-out training rows of SST-2 in %"
    draw_methods(found, METHODS, references, label, folder / "sst2-methods.png")
    draw_curves(rows, folder / "sst2-curves.png")


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
