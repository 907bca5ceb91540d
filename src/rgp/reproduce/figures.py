"""Figures of the Markdown page (matplotlib): one set of axes per column."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from rgp.reproduce.content import NOT_COVERED, Section

STYLES = ("-", "--", ":", "-.")
WIDTH, HEIGHT = 5.2, 3.4


def draw(section: Section, path: Path) -> None:
    columns = min(2, len(section.panels))
    lines = -(-len(section.panels) // columns)
    figure = Figure(figsize=(max(7.0, WIDTH * columns), 0.9 + HEIGHT * lines), layout="constrained")
    grid = list(figure.subplots(lines, columns, squeeze=False).flat)
    for axes, panel in zip(grid, section.panels, strict=False):
        for i, (name, points) in enumerate(panel.lines.items()):
            style = STYLES[i // 6 % len(STYLES)]
            axes.plot(*zip(*points, strict=True), style, marker=".", color=f"C{i % 6}", label=name)
        axes.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
        ticks = sorted({x for points in panel.lines.values() for x, _ in points})
        if len(ticks) <= 8:
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=7)
    for axes in grid[len(section.panels) :]:
        axes.set_visible(False)
    if section.private:
        figure.supxlabel(NOT_COVERED, color="#a4262c", fontsize=7)
    figure.savefig(path, dpi=130, metadata={"Software": None})
