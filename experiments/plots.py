"""The figure that both results pages have: accuracy by method and epsilon."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from driver import mean_and_error

COLOURS = {8: "#1b7f5c", 3: "#c2571a"}


def draw_methods(
    found: Mapping[str, Mapping[int, float]],
    methods: Mapping[str, str],
    references: Mapping[str, tuple[str, str]],
    label: str,
    path: Path,
) -> None:
    """found: `METHOD-eEPSILON` -> seed -> accuracy; methods: METHOD -> words; references: lines, name -> words, style."""
    from matplotlib.figure import Figure

    methods = {name: words for name, words in methods.items() if any(f"{name}-e{e}" in found for e in COLOURS)}
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    for i, name in enumerate(reversed(methods)):
        for epsilon, colour in COLOURS.items():
            values = list(found.get(f"{name}-e{epsilon}", {}).values())
            if values:
                mean, error = mean_and_error(values)
                y = i + (0.12 if epsilon == 8 else -0.12)
                axes.errorbar(mean, y, xerr=error or 0, fmt="o", color=colour, capsize=3)
                axes.scatter(values, [y] * len(values), s=10, color=colour, alpha=0.4, linewidths=0)
    for epsilon, colour in COLOURS.items():
        axes.plot([], [], "o", color=colour, label=f"epsilon {epsilon}")
    for name, (words, style) in references.items():
        if name in found:
            axes.axvline(mean_and_error(list(found[name].values()))[0], color="black", linestyle=style, label=words)
    axes.set_yticks(range(len(methods)), list(reversed(methods.values())))
    axes.set_xlabel(f"{label}\n(bars: one standard error, where several seeds)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=150)
