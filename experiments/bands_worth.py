"""What correlated noise is worth: python experiments/bands_worth.py [PNG]

Prints the tables of docs/correlated-noise.md and draws its figure. Nothing is trained: all of it follows from the numbers
of steps, batches and examples. Two minutes on one core.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rgp.accounting import planned_steps
from rgp.band_choice import Choice, choose, evaluate
from rgp.bands import noise_by_step

EXAMPLES, BATCH, STEPS, DELTA = 62_349, 512, 60, 1e-5  # SST-2 without the rows held out
EPSILONS, BANDS = (8, 3, 1), (2, 4, 8, 15, 30, 60)
FIGURE = Path(__file__).parents[1] / "docs" / "img" / "correlated-noise.png"
COLOURS = {8: "#1b7f5c", 3: "#c2571a", 1: "#4b5fa8"}

# name -> examples, batch size, steps, momentum
RUNS = {
    "SST-2, 60 steps of 512, no momentum": (62_349, 512, 60, 0.0),
    "SST-2, 60 steps of 512, momentum 0.9": (62_349, 512, 60, 0.9),
    "SST-2, 1,010 steps of 2,000, momentum 0.9": (67_349, 2000, 1010, 0.9),
    "CIFAR-10, 20,000 steps of 1,000, momentum 0.9": (50_000, 1000, 20_000, 0.9),
    "digits, 112 steps of 256, momentum 0.9": (1437, 256, planned_steps(20, 1437, 256), 0.9),
    "a million examples, 10,000 steps of 512, no momentum": (1_000_000, 512, 10_000, 0.0),
}


def worth(epsilon: float, bands: int) -> Choice:
    return evaluate(bands, steps=STEPS, sampling_rate=BATCH / EXAMPLES, epsilon=epsilon, delta=DELTA)


def table() -> list[str]:
    """Factors mean / last for every number of bands, as in METHOD.md."""
    lines = [f"| {STEPS} steps of {BATCH} | " + " | ".join(f"b = {b}" for b in BANDS) + " |", "|---" * 7 + "|"]
    for epsilon in EPSILONS:
        cells = [f"{found.factor_mean:.2f} / {found.factor_last:.2f}" for found in (worth(epsilon, b) for b in BANDS)]
        sigma = worth(epsilon, 1).noise_multiplier
        lines.append(f"| epsilon {epsilon} (independent: sigma {sigma:.3f}) | " + " | ".join(cells) + " |")
    return lines


def choices() -> list[str]:
    """What `bands="auto"` would choose, for runs of several kinds."""
    lines = ["| run | q | epsilon 8 | epsilon 3 | epsilon 1 |", "|---" * 5 + "|"]
    for name, (examples, batch, steps, momentum) in RUNS.items():
        cells = []
        for epsilon in EPSILONS:
            found = choose(
                steps=steps, dataset_size=examples, batch_size=batch, epsilon=epsilon, delta=DELTA, momentum=momentum
            )
            gain = f"{found.factor_mean:.2f} / {found.factor_last:.2f}, step {found.step_factor:.1f}"
            cells.append("independent" if found.bands == 1 else f"b = {found.bands}: {gain}")
        lines.append(f"| {name} | {batch / examples:.4f} | " + " | ".join(cells) + " |")
    return lines


def draw(path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.8), layout="constrained")
    axes = figure.subplots()
    steps = range(1, STEPS + 1)
    for epsilon, colour in COLOURS.items():
        best = choose(steps=STEPS, dataset_size=EXAMPLES, batch_size=BATCH, epsilon=epsilon, delta=DELTA)
        alone = worth(epsilon, 1)
        for found, style in ((alone, "--"), (best, "-")):
            noise = found.noise_multiplier * noise_by_step(found.coefficients, STEPS)
            words = "independent" if found.bands == 1 else f"correlated over {found.bands} steps"
            axes.plot(steps, noise, style, color=colour, label=f"epsilon {epsilon}, {words}")
    axes.set_xlabel("step")
    axes.set_ylabel("noise in a weight\n(in units of rate x C / batch size)")
    axes.set_xlim(1, STEPS)
    axes.set_ylim(0)
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    print("\n".join(table()), "\n")
    print("\n".join(choices()))
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else FIGURE)
