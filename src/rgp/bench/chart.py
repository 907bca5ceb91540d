"""Reports as figures (matplotlib, file type by the path's ending)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

OURS, OTHERS = "#1b7f5c", "#9aa5b1"
LINES = {"rgp": OURS, "dpsgd": "#c2571a", "opacus-hooks": "#5b6bb5", "opacus-ghost": "#8c5fa8"}


def draw_bench(report: dict[str, Any], path: Path) -> None:
    """Bars of time and of memory, as multiples of plain training where that was measured."""
    from matplotlib.figure import Figure

    rows = [row for row in report["rows"] if "error" not in row][::-1]
    relative = all(row["ratio_to_plain"] is not None for row in rows)
    panels = (
        [("ratio_to_plain", "time per step / plain training", 1), ("memory_ratio_to_plain", "peak memory / plain", 1)]
        if relative
        else [("seconds_per_step", "seconds per step", 1), ("peak_bytes", "peak memory, GB", 1e9)]
    )
    figure = Figure(figsize=(10, 1.2 + 0.45 * len(rows)), layout="constrained")
    for axes, (key, label, unit) in zip(figure.subplots(1, 2, sharey=True), panels, strict=True):
        colours = [OURS if row["name"] == "rgp" else OTHERS for row in rows]
        bars = axes.barh([row["name"] for row in rows], [row[key] / unit for row in rows], color=colours)
        axes.bar_label(bars, fmt="%.2f", padding=3, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5})
        axes.margins(x=0.12)
        axes.set_xlabel(label)
        axes.spines[["top", "right"]].set_visible(False)
        if relative:
            axes.axvline(1, color="black", linewidth=0.8, linestyle=":")
    settings = report["settings"]
    figure.suptitle(
        f"{settings['model']}, batch {settings['batch']} in {settings['microbatch']}s, rank {settings['rank']}, "
        f"{settings['sides']}, {settings['optimizer']}",
        fontsize=11,
    )
    figure.savefig(path, dpi=150)


def draw_scaling(report: dict[str, Any], path: Path) -> None:
    """Log-log lines of time and of per-example gradient memory, the fitted slopes in the legend."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    time_axes, memory_axes = figure.subplots(1, 2)
    for axes, key, slope_key in (
        (time_axes, "seconds_per_step", "time_slope"),
        (memory_axes, "memory_bytes", "memory_slope"),
    ):
        for row in report["rows"]:
            if row[slope_key] is None:
                continue
            points = [(x, y) for x, y in zip(report["values"], row[key], strict=True) if y]
            axes.loglog(
                *zip(*points, strict=True),
                "o-",
                color=LINES.get(row["name"]),
                label=f"{row['name']}, slope {row[slope_key]:.2f}",
            )
        axes.set_xlabel(report["axis"].replace("-", " "))
        axes.set_xticks(report["values"], [str(value) for value in report["values"]])
        axes.minorticks_off()
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1))  # above: lines may be anywhere
    time_axes.set_ylabel("seconds per step")
    measures = {row["memory_measure"] for row in report["rows"]}
    memory_axes.set_ylabel("bytes of per-example gradients" if measures == {"per_example_bytes"} else "peak bytes")
    figure.savefig(path, dpi=150)
