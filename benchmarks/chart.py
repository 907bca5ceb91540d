"""The figure of the README: `python benchmarks/chart.py OUT.png TITLE=RESULT.json ...`, results of `rgp bench --json`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLORS = {
    "rgp": "#1b7f5c",
    "plain": "#8a8f98",
    "bound": "#d4d7dc",
    "dpsgd": "#7fbf9f",
    "opacus-ghost": "#d98c5f",
    "opacus-hooks": "#c0603a",
}
PANELS = {"ratio_to_plain": "time of a step / plain training", "memory_ratio_to_plain": "peak memory / plain training"}


def main(out: str, *results: str) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6))
    for axis, (key, title) in zip(axes, PANELS.items(), strict=True):
        x, ticks = 0.0, []
        for result in results:
            label, _, path = result.partition("=")
            rows = {r["name"]: r for r in json.loads(Path(path).read_text())["rows"] if not r.get("error")}
            start = x
            for name, color in COLORS.items():
                if name in rows:
                    value = rows[name][key]
                    axis.bar(x, value, color=color, width=0.9)
                    axis.text(x, value + 0.03, f"{value:.2f}", ha="center", fontsize=7)
                    x += 1
            ticks.append(((start + x - 1) / 2, label.replace(", ", "\n")))
            x += 0.8
        axis.axhline(1, color="#8a8f98", lw=0.8, ls=":")
        axis.set_xticks([at for at, _ in ticks], [label for _, label in ticks], fontsize=8)
        axis.set_title(title, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in COLORS.values()]
    figure.legend(handles, list(COLORS), ncol=6, loc="lower center", frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.savefig(out, dpi=130)


if __name__ == "__main__":
    main(*sys.argv[1:])
