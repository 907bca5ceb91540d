"""Figures of the results on SST-2: accuracy by method and epsilon, and over the steps."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

from driver import by_setting
from pages import rounded
from plots import draw_methods
from sst2 import EPSILONS, ROWS, STEPS
from sst2_page import cells_of_map

METHODS = {
    "rgp-long": ("RGP, 200 steps of 1024", "#0d4733"),
    "rgp-bands": ("RGP, EMA, correlated noise", "#14634a"),
    "rgp-r16-ema": ("RGP, EMA", "#1b7f5c"),
    "rgp-r16": ("RGP", "#3c9977"),
    "rgp-public": ("RGP, rank 2", "#66b394"),
    "rgp": ("RGP, first settings", "#86c2a8"),
    "rgp-random": ("RGP-random", "#b9dccd"),
    "dpsgd-long": ("DP-SGD, 200 steps of 1024", "#7a3510"),
    "dpsgd-bands": ("DP-SGD, EMA, correlated noise", "#9e4512"),
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
    draw_map(rows, folder / "sst2-map.png")


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


def draw_map(rows: list[dict[str, Any]], path: Path) -> None:
    """Accuracy of RGP less that of DP-SGD: a panel for each number of steps, epsilon upwards, rows to the right."""
    from matplotlib.figure import Figure

    cells = cells_of_map(rows)
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    for axes, steps in zip(figure.subplots(1, len(STEPS), sharey=True), STEPS, strict=True):
        gained = {
            (x, y): a - b
            for y, epsilon in enumerate(EPSILONS)
            for x, count in enumerate(ROWS)
            for a, b in [cells.get((steps, epsilon, count), (float("nan"), 0.0))]
        }
        values = [[gained[x, y] for x in range(len(ROWS))] for y in range(len(EPSILONS))]
        image = axes.imshow(values, cmap="BrBG", vmin=-3, vmax=3, origin="lower", aspect="auto")
        for (x, y), value in gained.items():
            said = f"{rounded(value):+.1f}" if value == value else "not run"
            axes.text(x, y, said, ha="center", va="center", color="white" if abs(value) > 1.8 else "black")
        axes.set_xticks(range(len(ROWS)), [f"{count:,}" for count in ROWS])
        axes.set_yticks(range(len(EPSILONS)), list(map(str, EPSILONS)))
        axes.set_xlabel("rows to train on")
        axes.set_title(f"{steps} steps of 256", fontsize=10)
    figure.axes[0].set_ylabel("epsilon")
    figure.colorbar(image, ax=figure.axes, label="RGP - DP-SGD, points on held-out rows")
    figure.savefig(path, dpi=150)
