"""Figures of the Markdown page (matplotlib): one set of axes per column."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from matplotlib.figure import Figure

from rgp.reproduce.content import NOT_COVERED, Section

STYLES = ("-", "--", ":", "-.")
WIDTH, HEIGHT, INSIDE = 5.2, 3.4, 4  # of a panel in inches; entries of a legend that have room in it


def looks(names: list[str]) -> tuple[list[tuple[str, str]], dict[str, tuple[str, str]]]:
    """Colour and style of every line, and of every entry of the legend.

    Of names such as "RGP, head: own" the part after the colon has the colour and the part before it the style, and the legend
    lists both parts; others are listed one by one.
    """
    parts = [name.partition(": ")[::2] for name in names]
    if not all(kind for _, kind in parts):
        lines = [(f"C{i % 6}", STYLES[i // 6 % len(STYLES)]) for i in range(len(names))]
        return lines, dict(zip(names, lines, strict=True))
    styles = {whole: STYLES[i % len(STYLES)] for i, whole in enumerate(dict.fromkeys(whole for whole, _ in parts))}
    colours = {kind: f"C{i}" for i, kind in enumerate(dict.fromkeys(kind for _, kind in parts))}
    legend = {kind: (colour, "-") for kind, colour in colours.items()}
    legend |= {whole: ("black", style) for whole, style in styles.items()}
    return [(colours[kind], styles[whole]) for whole, kind in parts], legend


def draw(section: Section, path: Path) -> None:
    columns = min(2, len(section.panels))
    lines = -(-len(section.panels) // columns)
    figure = Figure(figsize=(max(7.0, WIDTH * columns), 0.9 + HEIGHT * lines), layout="constrained")
    grid = list(figure.subplots(lines, columns, squeeze=False).flat)
    for axes, panel in zip(grid, section.panels, strict=False):
        drawn, legend = looks(list(panel.lines))
        for points, (colour, style) in zip(panel.lines.values(), drawn, strict=True):
            axes.plot(*zip(*points, strict=True), style, marker=".", color=colour)
        handles = [axes.plot([], [], style, color=colour)[0] for colour, style in legend.values()]
        axes.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
        ticks = sorted({x for points in panel.lines.values() for x, _ in points})
        if len(ticks) <= 8 and all(b - a > (ticks[-1] - ticks[0]) / 20 for a, b in pairwise(ticks)):
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.spines[["top", "right"]].set_visible(False)
        below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16), "ncols": 2} if len(legend) > INSIDE else {}
        axes.legend(handles, list(legend), frameon=False, fontsize=7, **below)
    for axes in grid[len(section.panels) :]:
        axes.set_visible(False)
    if section.private:
        figure.supxlabel(NOT_COVERED, color="#a4262c", fontsize=7)
    figure.savefig(path, dpi=130, metadata={"Software": None})
