"""Figures of the Markdown page (matplotlib): one set of axes per column."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path

from matplotlib.figure import Figure

from rgp.reproduce.content import NOT_COVERED, Section

STYLES = ("-", "--", ":", "-.")
WIDTH, HEIGHT, INSIDE = 5.2, 3.4, 4  # of a panel in inches; entries of a legend that have room in it


Look = tuple[str, str]  # colour, style


def looks(names: Iterable[str]) -> dict[str, Look]:
    """The look of every line of a figure, so that a name looks the same in all of its panels.

    In names such as "RGP, head: own" the part after the colon sets the colour and the part before it the style.
    """
    names = list(dict.fromkeys(names))
    if not all(kind for _, kind in map(_in_two, names)):
        return {name: (f"C{i % 6}", STYLES[i // 6 % len(STYLES)]) for i, name in enumerate(names)}
    wholes, kinds = (list(dict.fromkeys(parts)) for parts in zip(*map(_in_two, names), strict=True))
    return {
        name: (f"C{kinds.index(kind)}", STYLES[wholes.index(whole) % len(STYLES)])
        for name in names
        for whole, kind in [_in_two(name)]
    }


def legend(lines: Mapping[str, Look]) -> dict[str, Look]:
    """An entry for every line; or, if names have two parts, for every part."""
    if not all(kind for _, kind in map(_in_two, lines)):
        return dict(lines)
    kinds = {_in_two(name)[1]: (colour, "-") for name, (colour, _) in lines.items()}
    return kinds | {_in_two(name)[0]: ("black", style) for name, (_, style) in lines.items()}


def _in_two(name: str) -> tuple[str, str]:
    whole, _, kind = name.partition(": ")
    return whole, kind


def draw(section: Section, path: Path) -> None:
    columns = min(2, len(section.panels))
    lines = -(-len(section.panels) // columns)
    figure = Figure(figsize=(max(7.0, WIDTH * columns), 0.9 + HEIGHT * lines), layout="constrained")
    grid = list(figure.subplots(lines, columns, squeeze=False).flat)
    look = looks(name for panel in sorted(section.panels, key=lambda panel: -len(panel.lines)) for name in panel.lines)
    for axes, panel in zip(grid, section.panels, strict=False):
        for name, points in panel.lines.items():
            axes.plot(*zip(*points, strict=True), look[name][1], marker=".", color=look[name][0])
        entries = legend({name: look[name] for name in panel.lines})
        handles = [axes.plot([], [], style, color=colour)[0] for colour, style in entries.values()]
        axes.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
        ticks = sorted({x for points in panel.lines.values() for x, _ in points})
        if len(ticks) <= 8 and all(b - a > (ticks[-1] - ticks[0]) / 20 for a, b in pairwise(ticks)):
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.spines[["top", "right"]].set_visible(False)
        below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16), "ncols": 2} if len(entries) > INSIDE else {}
        axes.legend(handles, list(entries), frameon=False, fontsize=7, **below)
    for axes in grid[len(section.panels) :]:
        axes.set_visible(False)
    if section.private:
        figure.supxlabel(NOT_COVERED, color="#a4262c", fontsize=7)
    figure.savefig(path, dpi=130, metadata={"Software": None})
