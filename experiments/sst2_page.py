"""The tables of docs/results-sst2*.md, from the kept results: whatever stands between `<!-- NAME -->` and `<!-- end -->` there.

python experiments/sst2_page.py
"""

from __future__ import annotations

from itertools import product
from typing import Any

import sst2
import sst2_tune
from driver import HERE, by_setting, mean_and_error, verdict
from pages import Rows, Tables, difference, fill, rounded, table, words
from sst2 import EPSILONS, ROWS, STEPS

RESULTS = (sst2.RESULTS, sst2_tune.RESULTS)
PAGES = tuple(HERE.parent / "docs" / name for name in ("results-sst2.md", "results-sst2-details.md"))
MEASURES = ("accuracy", "accuracy_held_out")
HEAD = ("method", "noise dimensions", "epsilon", "seeds", "validation", "held-out rows", "CPU s")
FINAL = {
    "rgp-r16-ema": "RGP, rank 16, EMA",
    "rgp-bands": "RGP, rank 16, EMA, correlated noise",
    "rgp-r16": "RGP, rank 16",
    "dpsgd-ema": "DP-SGD, EMA",
    "dpsgd-bands": "DP-SGD, EMA, correlated noise",
    "dpsgd-lr2e-3": "DP-SGD",
    "dp-lora-ema": "DP-LoRA, rank 8, EMA",
    "dp-lora-head-first": "DP-LoRA, rank 8, head first",
    "dp-lora-lr1e-2": "DP-LoRA, rank 8",
    "bitfit-ema": "BiTFiT, EMA",
    "bitfit-lr1e-2": "BiTFiT",
    "linear-ema": "linear probing, EMA",
}
LONG = {"rgp-long": "RGP, rank 16, 200 steps of 1024", "dpsgd-long": "DP-SGD, 200 steps of 1024"}
OTHER = {
    "rgp-public": "RGP, rank 2",
    "dpsgd-clip2": "DP-SGD, rate 1e-3",
    "rgp": "RGP, first settings",
    "rgp-random": "RGP-random, first settings",
    "dpsgd": "DP-SGD, first settings",
    "dp-lora": "DP-LoRA, first settings",
    "bitfit": "BiTFiT, first settings",
    "linear": "linear probing, first settings",
}
NOT_PRIVATE = {
    "nonprivate": "full fine-tuning, not private",
    "rgp-np": "RGP without clip and noise, rank 8",
    "linear-np": "linear probing without noise",
}
MPNET = {
    "nonprivate": "full fine-tuning, not private",
    "rgp": "**RGP, rank 16, correlated noise**",
    "dpsgd-bands": "DP-SGD, correlated noise",
    "dpsgd": "DP-SGD",
    "dp-lora": "DP-LoRA, rank 8",
    "linear": "linear probing",
}
PAIRS = (  # with EMA against with EMA, without against without, and the two settings that tuning chose
    ("rgp-r16-ema", "dpsgd-ema"),
    ("rgp-bands", "rgp-r16-ema"),
    ("dpsgd-bands", "dpsgd-ema"),
    ("rgp-bands", "dpsgd-bands"),
    ("rgp-bands", "dpsgd-ema"),
    ("rgp-r16", "dpsgd-lr2e-3"),
    ("rgp-r16", "dpsgd-ema"),
    ("rgp-r16-ema", "rgp-r16"),
    ("dpsgd-ema", "dpsgd-lr2e-3"),
    ("rgp-r16-ema", "dp-lora-ema"),
    ("rgp-r16", "dp-lora-lr1e-2"),
    ("rgp-r16-ema", "bitfit-ema"),
    ("rgp-r16", "bitfit-lr1e-2"),
    ("rgp-r16-ema", "linear-ema"),
    ("rgp-long", "dpsgd-long"),
)

OTHERS = ("dpsgd", "dp-lora", "bitfit", "linear")


def same(rgp: str, change: str) -> tuple[str, ...]:
    """A trial that all had: RGP's tuning run, and those of the others, which are named after what was changed."""
    return rgp, *(f"{method}-{change}" for method in OTHERS)


def rates(*changes: str) -> tuple[str, ...]:
    return f"public-r16-clip2{changes[0]}", *(f"{m}-clip2{c}" for m, c in zip(OTHERS, changes[1:], strict=True))


# The trials that the methods share: a row of the table, and the tuning runs of RGP and of the others
TRIED = {
    "half or a third of its best rate": rates("-lr5e-4", "", "", "", "-lr3e-3"),
    "**its best rate, nothing else changed**": rates("", "-lr2e-3", "-lr1e-2", "-lr1e-2", ""),
    "two or three times that": rates("-lr2e-3", "-lr4e-3", "-lr3e-2", "-lr3e-2", "-lr3e-2"),
    "clip 10": ("public-r16-clip10", "dpsgd-clip10-lr2e-3", "dp-lora-clip10", "bitfit-clip10-lr1e-2", "linear-clip10"),
    "head at 3e-3": same("public-r16-clip2-headlr3e-3", "clip2-headlr3e-3"),
    "EMA 0.9, constant rate": same("public-r16-clip2-ema", "clip2-ema"),
    "SGD with momentum": same("public-r16-clip2-sgd", "clip2-sgd"),
    "head first": same("public-r16-clip2-head-first", "clip2-head-first"),
    "Adam, corrected for noise": same("public-r16-clip2-corrected", "clip2-corrected"),
    "30 steps of 512, twice the rate": same("public-r16-clip2-b512", "clip2-b512"),
    "first settings": (
        "short-rgp-lr1e-3",
        "short-dpsgd-lr1e-3",
        "short-dp-lora-lr3e-3",
        "short-bitfit-lr3e-3",
        "short-linear-lr1e-2",
    ),
}


def main() -> None:
    fill(PAGES, RESULTS, TABLES)


def short(rows: Rows) -> str:
    """What comes first on the page: validation / held-out rows by method and epsilon."""
    labels = {name: label for name, label in (FINAL | LONG).items() if name.endswith(("-ema", "-long", "-bands"))}

    def cell(name: str) -> str:
        runs = runs_of(rows, name)
        means = (mean_and_error([100 * row[key] for row in runs])[0] for key in MEASURES)
        return " / ".join(f"{mean:.1f}" for mean in means) if runs else ""

    lines = [(label, *(cell(f"{name}-e{e}") for e in (8, 3, 1))) for name, label in labels.items()]
    return table(("method", "epsilon 8", "epsilon 3", "epsilon 1"), lines)


def final(rows: Rows) -> str:
    """Every method at its best rate, with EMA and without, then what is not private."""
    lines = [line(rows, f"{name}-e{e}", label, str(e)) for e in (8, 3, 1) for name, label in (FINAL | LONG).items()]
    return table(HEAD, [*lines, *(line(rows, name, label, "none") for name, label in NOT_PRIVATE.items())])


def other(rows: Rows) -> str:
    return table(HEAD, [line(rows, f"{name}-e{e}", label, str(e)) for name, label in OTHER.items() for e in (8, 3)])


def line(rows: Rows, name: str, label: str, epsilon: str) -> tuple[str, ...]:
    """A line of the table of accuracies; empty if there is no such run."""
    runs = runs_of(rows, name)
    if not runs:
        return ()
    noise = f"{runs[0]['noise_dimensions']:,}" if epsilon != "none" else "-"
    measured = (words([100 * row[key] for row in runs]) for key in MEASURES)
    return label, noise, epsilon, str(len(runs)), *measured, f"{seconds(rows, name):.0f}"


def differences(rows: Rows) -> str:
    """One method less another, paired by seed."""
    measured = [by_setting(rows, measure=measure) for measure in MEASURES]
    lines = []
    for epsilon in (8, 3, 1):
        for first, second in PAIRS:
            a, b = f"{first}-e{epsilon}", f"{second}-e{epsilon}"
            if a in measured[0] and b in measured[0]:
                cells = (difference(*verdict(found[a], found[b])) for found in measured)
                label = " - ".join((FINAL | LONG)[name] for name in (first, second))
                lines.append((label, str(epsilon), *cells, f"{seconds(rows, a) / seconds(rows, b):.2f}"))
    return table(("difference in points", "epsilon", "validation", "held-out rows", "CPU time, ratio"), lines)


def few(rows: Rows) -> str:
    """With few rows to train on: a head that starts from texts against one that starts from random numbers."""
    measured = [by_setting(rows, "few", measure) for measure in MEASURES]

    def cell(name: str) -> str:
        return " / ".join(words(list(found[name].values())) for found in measured)

    def gained(name: str, over: str) -> str:
        return " / ".join(difference(*verdict(found[name], found[over])) for found in measured)

    lines = [
        (label, cell(name), cell(f"{name}-words"), gained(f"{name}-words", name))
        for name, label in (("rgp", FINAL["rgp-r16-ema"]), ("dpsgd", FINAL["dpsgd-ema"]))
    ]
    lines.append(("RGP - DP-SGD", gained("rgp", "dpsgd"), gained("rgp-words", "dpsgd-words"), ""))
    return table(("validation / held-out rows", "random head", "head from two texts", "difference"), lines)


def noisy(rows: Rows) -> str:
    """Where noise dominates: four rates for both, and the difference at the rates that seed 0 chose on the validation set."""
    measured = [by_setting(rows, "noisy", measure) for measure in MEASURES]
    rates = ("2", "1", "0.5", "0.25")

    def cell(name: str) -> str:
        return " / ".join(words(list(found[name].values())) for found in measured) if name in measured[0] else ""

    best = {}
    lines = []
    for method, label in (("rgp", FINAL["rgp-bands"]), ("dpsgd", FINAL["dpsgd-bands"])):
        names = [f"{method}-x{rate}" for rate in rates]
        lines.append((label, *map(cell, names)))
        run = [name for name in names if name in measured[0]]
        best[method] = max(run, key=lambda name: measured[0][name][0]) if run else None
    for method, label in (("dp-lora", FINAL["dp-lora-ema"]), ("linear", FINAL["linear-ema"])):
        if f"{method}-x1" in measured[0]:
            lines.append((label, "", cell(f"{method}-x1"), "", ""))
    a, b = best["rgp"], best["dpsgd"]
    if a and b:
        gained = " / ".join(difference(*verdict(found[a], found[b])) for found in measured)
        lines.append((f"RGP ({a[4:]}) - DP-SGD ({b[6:]})", gained, "", "", ""))
    return table(
        ("validation / held-out rows", "twice (x2)", "rates of the presets (x1)", "half (x0.5)", "a quarter (x0.25)"),
        lines,
    )


def tuned(rows: Rows) -> str:
    """The search, beside a run of the same length whose rates nobody paid for."""
    lines = []
    for row in rows:
        if row["name"] == "map/rgp-e8-rows62000-steps20/0":
            measured = [f"{100 * row[key]:.1f}" for key in MEASURES]
            epsilon = f"{row['epsilon']:.2f}, for one run"
            lines.append(("the preset's rates", epsilon, f"{row['sigma']:.3f}", " / ".join(measured)))
        elif row["name"].startswith("tune/"):
            found, best = row["search"], row["search"]["best"]
            rates = ", ".join(f"{key.split('.')[1]} {value:g}" for key, value in best["settings"].items())
            measured = [f"{100 * value:.1f}" for value in (best["score"], row["accuracy_held_out"])]
            epsilon = f"**{found['epsilon']:.2f}, rates covered**"
            noise = f"{found['noise'][0]['noise_multiplier']:.3f}"
            lines.append((f"the best of a search: {rates}", epsilon, noise, " / ".join(measured)))
    return table(("20 steps of 256", "epsilon", "noise multiplier", "validation / held-out rows"), lines)


def bands(rows: Rows) -> str:
    """Independent and correlated noise at three rates each, on the rows of tuning."""
    found = {name: seeds[0] for name, seeds in by_setting(rows, "bands").items()}

    def cell(name: str) -> str:
        return "" if name not in found else f"{found[name]:.1f}"

    lines = [
        (
            label,
            str(epsilon),
            noise,
            *(cell(f"{name}-e{epsilon}-bands-{key}-x{rate}") for rate in ("0.5", "1", "2", "4")),
        )
        for epsilon in (8, 1)
        for name, label in (("rgp", "RGP, rank 16, EMA"), ("dpsgd", "DP-SGD, EMA"))
        for key, noise in (("1", "independent"), ("auto", "correlated"))
    ]
    kept = (("1-keep", "RGP, carriers that stay", "independent"), ("auto-thin", "RGP, thin state", "correlated"))
    lines += [
        (label, "8", noise, *(cell(f"rgp-e8-bands-{key}-x{rate}") for rate in ("0.5", "1", "2", "4")))
        for key, label, noise in kept
    ]
    return table(
        (
            "accuracy in %, tuning rows",
            "epsilon",
            "noise",
            "half the rates",
            "rates as they are",
            "twice",
            "four times",
        ),
        lines,
    )


def mpnet(rows: Rows) -> str:
    """A model of BERT-base's size: validation / held-out rows by method and epsilon."""
    runs = {row["name"].split("/")[1]: row for row in rows if row["name"].startswith("mpnet/")}

    def cell(name: str) -> str:
        return " / ".join(f"{100 * runs[name][key]:.1f}" for key in MEASURES) if name in runs else ""

    lines = []
    for name, label in MPNET.items():
        if name in runs:
            lines.append((label, "-", *[cell(name)] * 3))
            continue
        found = [runs[key] for key in (f"{name}-e{epsilon}" for epsilon in (8, 3, 1)) if key in runs]
        if found:
            lines.append((label, f"{found[0]['noise_dimensions']:,}", *(cell(f"{name}-e{e}") for e in (8, 3, 1))))
    return table(("validation / held-out rows", "noise dimensions", "epsilon 8", "epsilon 3", "epsilon 1"), lines)


def cells_of_map(rows: Rows) -> dict[tuple[int, float, int], tuple[float, float]]:
    """(steps, epsilon, rows) -> accuracy of RGP and of DP-SGD on held-out rows in %."""
    found = {row["name"]: 100 * row["accuracy_held_out"] for row in rows if row["name"].startswith("map/")}
    cells = {}
    for cell in product(STEPS, EPSILONS, ROWS):
        steps, epsilon, count = cell
        both = [found.get(f"map/{method}-e{epsilon}-rows{count}-steps{steps}/0") for method in ("rgp", "dpsgd")]
        if both[0] is not None and both[1] is not None:
            cells[cell] = both[0], both[1]
    return cells


def map_(rows: Rows) -> str:
    """RGP less DP-SGD over epsilon, rows and steps."""
    cells = cells_of_map(rows)

    def cell(*key: Any) -> str:
        if key not in cells:
            return ""
        rgp, dpsgd = cells[key]
        return f"{rgp:.1f} - {dpsgd:.1f}: **{rounded(rgp - dpsgd):+.1f}**"

    lines = [(str(s), str(e), *(cell(s, e, count) for count in ROWS)) for s in STEPS for e in EPSILONS]
    return table(("steps of 256", "epsilon", *(f"{count:,} rows" for count in ROWS)), lines)


def effort(rows: Rows) -> str:
    """The trials that the methods share, side by side, and how many there were."""
    found = {name: seeds[0] for name, seeds in by_setting(rows, "tuning").items()}

    def cell(name: str) -> str:
        return "" if name not in found else f"{found[name]:.1f}"

    lines = [(label, *map(cell, names)) for label, names in TRIED.items()]
    counts = [sum(names[i] in found for names in TRIED.values()) for i in range(5)]
    lines.append(("trials in this table", *map(str, counts)))
    return table(("accuracy in %, tuning rows", "RGP, rank 16", "DP-SGD", "DP-LoRA", "BiTFiT", "linear"), lines)


def tuning(rows: Rows) -> str:
    """Every tuning run, the best first."""
    runs = [row for row in rows if row["name"].startswith("tuning/")]
    runs.sort(key=lambda row: -row["accuracy"])
    return table(
        ("run", "accuracy"),
        [(row["name"].split("/")[1] + remark(row), f"{100 * row['accuracy']:.1f}") for row in runs],
    )


def remark(row: dict[str, Any]) -> str:
    """What the name of a tuning run leaves unsaid."""
    steps, batch = row["set"]["training.steps"], row["set"]["training.batch_size"]
    size = "" if (steps, batch) == (60, 256) else f"{steps} steps of {batch}"
    private = "" if row["epsilon"] is not None else "not private"
    said = ", ".join(filter(None, (private, size)))
    return f" ({said})" if said else ""


def seconds(rows: Rows, name: str) -> float:
    return mean_and_error([row["cpu_seconds"] for row in runs_of(rows, name)])[0]


def runs_of(rows: Rows, name: str) -> Rows:
    return [row for row in rows if row["name"].startswith(f"tables/{name}/")]


TABLES: Tables = {
    "short": short,
    "final": final,
    "other": other,
    "differences": differences,
    "few": few,
    "noisy": noisy,
    "tuned": tuned,
    "bands": bands,
    "mpnet": mpnet,
    "map": map_,
    "effort": effort,
    "tuning": tuning,
}

if __name__ == "__main__":
    main()
