"""Figures of the results on SST-2: accuracy by method and epsilon, and over the steps."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

from driver import by_setting
from plots import draw_methods

METHODS = {
    "rgp-long": ("RGP, 200 steps of 1024", "#0d4733"),
    "rgp-r16-ema": ("RGP, EMA", "#1b7f5c"),
    "rgp-r16": ("RGP", "#3c9977"),
    "rgp-public": ("RGP, rank 2", "#66b394"),
    "rgp": ("RGP, first settings", "#86c2a8"),
    "rgp-random": ("RGP-random", "#b9dccd"),
    "dpsgd-long": ("DP-SGD, 200 steps of 1024", "#7a3510"),
    "dpsgd-ema": ("DP-SGD, EMA", "#c2571a"),
    "dpsgd-lr2e-3": ("DP-SGD", "#dd9c74"),
    "bitfit-ema": ("BiTFiT, EMA", "#8c6d31"),
    "dp-lora-ema": ("DP-LoRA, EMA", "#5b6bb5"),
    "linear-ema": ("linear probing, EMA", "#777777"),
}


def draw(rows: list[dict[str, Any]], folder: Path) -> None:
    references = {"nonprivate": ("full fine-tuning,\nnot private,\n60 steps of 512", "--")}
    found = by_setting(rows, measure="accuracy_held_out")
    label = "accuracy on 5,000 held-out training rows of SST-2 in %"
    names = {name: words for name, (words, _) in METHODS.items()}
    draw_methods(found, names, references, label, folder / "sst2-methods.png")
    draw_curves(rows, folder / "sst2-curves.png")


def draw_curves(rows: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    curves: dict[str, dict[int, list[float]]] = {}  # name -> step -> accuracy with each seed
    for row in rows:
        stage, name, _ = row["name"].split("/")
        if stage == "tables":
            for step, value in row["curve"]:
                curves.setdefault(name, {}).setdefault(step, []).append(100 * value)
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    styles = {f"{name}-e8": ("o-", colour, label) for name, (label, colour) in METHODS.items()}
    for name, (line, colour, label) in {**styles, "nonprivate": ("--", "k", "full fine-tuning, not private")}.items():
        if name in curves:
            values = [mean(seeds) for seeds in curves[name].values()]
            axes.plot(list(curves[name]), values, line, markersize=3, color=colour, label=label)
    axes.set_xlabel("step")
    axes.set_ylabel("validation accuracy in %, epsilon 8,\nmean over seeds")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=150)
