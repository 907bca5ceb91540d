"""Figures like the paper's 2 and 3, and those of the least-squares study (matplotlib). Each says that it is not private."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rgp.analysis import NOT_PRIVATE

MOST_LINES, MOST_PANELS = 8, 6
KINDS = {
    "historical": ("gradient one epoch earlier", "#c2571a", "-"),
    "self": ("gradient itself", "#1b7f5c", "-"),
    "update": ("update $W_t - W_0$", "#5b6bb5", "-"),
    "carriers": ("carriers of the run", "#8c5fa8", "--"),
}
WARNING = {"color": "#a4262c", "fontsize": 8, "fontweight": "bold"}


def draw_analysis(found: dict[str, Any], folder: Path) -> list[Path]:
    """stable_rank.png, projection_residual.png and, if the run has carriers, overlap.png."""
    paths = [folder / "stable_rank.png", folder / "projection_residual.png"]
    draw_stable_rank(found, paths[0])
    draw_residuals(found, paths[1])
    if any(m["carrier_rank"] for m in found["matrices"]):
        paths.append(folder / "overlap.png")
        draw_overlap(found, paths[2])
    return paths


def draw_stable_rank(found: dict[str, Any], path: Path) -> None:
    figure, axes = _figure(found, (7.5, 4.2), "stable rank of the gradient")
    for matrix in spread(found["matrices"], MOST_LINES):
        axes.plot(found["epochs"], _gaps(matrix["stable_rank"]), marker=".", label=_name(matrix))
    axes.set(xlabel="epoch", ylabel=r"$|G|_F^2\, /\, |G|_2^2$")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=150)


def draw_residuals(found: dict[str, Any], path: Path) -> None:
    chosen = spread(found["matrices"], MOST_PANELS)
    figure, panels = _panels(found, chosen, f"what is left of the gradient after a rank-{found['rank']} projection")
    for axes, matrix in zip(panels, chosen, strict=True):
        for kind, (label, colour, style) in KINDS.items():
            values = matrix["residual"][kind]
            if any(value is not None for value in values):
                axes.plot(found["epochs"], _gaps(values), style, marker=".", color=colour, label=label)
        axes.axhline(
            matrix["residual"]["random"], color="black", linewidth=0.8, linestyle=":", label="random subspaces"
        )
        axes.set_ylim(0, 1.05)
    _share_legend(figure, panels)
    figure.savefig(path, dpi=150)


def draw_overlap(found: dict[str, Any], path: Path) -> None:
    chosen = spread([m for m in found["matrices"] if m["carrier_rank"]], MOST_PANELS)
    figure, panels = _panels(found, chosen, f"share of the gradient's rank-{found['rank']} subspaces in the carriers")
    for axes, matrix in zip(panels, chosen, strict=True):
        for side, colour, symbol in (("left", "#1b7f5c", "L"), ("right", "#5b6bb5", "R")):
            axes.plot(
                found["epochs"], _gaps(matrix["overlap"][side]), marker=".", color=colour, label=f"{side}, {symbol}"
            )
            axes.axhline(
                matrix["overlap"][f"random_{side}"],
                color=colour,
                linewidth=0.8,
                linestyle=":",
                label=f"{side}, random carriers",
            )
        axes.set_ylim(0, 1.05)
    _share_legend(figure, panels)
    figure.savefig(path, dpi=150)


def draw_rate(found: dict[str, Any], path: Path) -> None:
    """Excess risk against n, epsilon and r (p + d), with fitted slopes."""
    from matplotlib.figure import Figure

    rows = found["rate"]
    names = list(dict.fromkeys(row["sweep"] for row in rows))
    figure = Figure(figsize=(11, 8), layout="constrained")
    for axes, name in zip(figure.subplots(2, 2).flat, names, strict=True):
        for row in (row for row in rows if row["sweep"] == name):
            x, y = [p["x"] for p in row["points"]], [p["excess_risk"] for p in row["points"]]
            errors = [p["standard_error"] for p in row["points"]]
            label = f"{row['setting']}: {row['slope']:+.2f} $\\pm$ {row['slope_standard_error']:.2f}"
            axes.errorbar(x, y, yerr=errors, marker="o", markersize=4, label=label)
        axes.set(xscale="log", yscale="log", xlabel=row["label"], ylabel="excess risk")
        axes.set_xticks(x, [f"{value:g}" for value in x])
        axes.minorticks_off()
        axes.set_title(f"slope of the remark's bound: {row['promised_slope']:+.1f}", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8, title="fitted slopes", title_fontsize=8)
    figure.suptitle("Private least squares in a known subspace: excess risk of the averaged iterate", fontsize=12)
    figure.supxlabel("NOT PRIVATE: the subspace is an oracle's. Made-up data.", **WARNING)
    figure.savefig(path, dpi=150)


def spread(rows: Sequence[Any], most: int) -> list[Any]:
    """At most so many of them, evenly from the first to the last."""
    if len(rows) <= most:
        return list(rows)
    return [rows[round(i * (len(rows) - 1) / (most - 1))] for i in range(most)]


def _name(matrix: dict[str, Any]) -> str:
    p, d = matrix["shape"]
    return f"{matrix['name']} ({p} x {d})"


def _gaps(values: list[float | None]) -> list[float]:
    return [float("nan") if value is None else value for value in values]


def _title(found: dict[str, Any], what: str) -> str:
    return f"{found['model']} on {found['dataset']}, {found['method']}: {what}"


def _figure(found: dict[str, Any], size: tuple[float, float], what: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(_title(found, what), fontsize=11)
    figure.supxlabel(NOT_PRIVATE, **WARNING)
    return figure, axes


def _panels(found: dict[str, Any], chosen: list[Any], what: str) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    columns = 2 if len(chosen) == 4 else min(3, len(chosen))
    lines = -(-len(chosen) // columns)
    figure = Figure(figsize=(max(7.5, 3.8 * columns), 1.5 + 2.8 * lines), layout="constrained")
    grid = list(figure.subplots(lines, columns, squeeze=False).flat)
    for axes, matrix in zip(grid, chosen, strict=False):
        axes.set_title(_name(matrix), fontsize=9)
        axes.set_xlabel("epoch")
        axes.spines[["top", "right"]].set_visible(False)
    for axes in grid[len(chosen) :]:
        axes.set_visible(False)
    figure.suptitle(_title(found, what), fontsize=11)
    figure.supxlabel(NOT_PRIVATE, **WARNING)
    return figure, grid[: len(chosen)]


def _share_legend(figure: Any, panels: list[Any]) -> None:
    entries: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    figure.legend(entries.values(), entries.keys(), loc="outside right center", frameon=False, fontsize=8)
