"""The tables of docs/results-vision.md, from the kept results: whatever stands between `<!-- NAME -->` and `<!-- end -->` there.

python experiments/vision_page.py
"""

from __future__ import annotations

import demo_settings
import vision
from driver import HERE, by_setting, verdict
from pages import Rows, Tables, difference, fill, table, words

RESULTS = (vision.RESULTS, demo_settings.RESULTS, demo_settings.RUNS)
PAGES = (HERE.parent / "docs" / "results-vision.md",)
METHODS = {
    "dpsgd": "DP-SGD",
    "rgp": "RGP, both sides",
    "rgp-left": "RGP, left side",
    "dp-powersgd": "DP-PowerSGD",
    "rgp-random": "RGP-random",
}
PAIRS = (
    ("rgp", "dpsgd"),
    ("rgp-left", "dpsgd"),
    ("rgp-left", "rgp"),
    ("rgp", "dp-powersgd"),
    ("rgp", "rgp-random"),
    ("dp-powersgd", "dpsgd"),
    ("dpsgd", "rgp-random"),
)
WRN = {
    "dpsgd": "DP-SGD",
    "dpsgd-bands": "DP-SGD, correlated noise",
    "rgp": "RGP, both sides",
    "rgp-bands": "RGP, both sides, correlated noise",
    "rgp-left": "RGP, left side",
    "rgp-left-bands": "RGP, left side, correlated noise",
}
WRN_PLAIN = {
    "nonprivate": "not private, 4,000 steps of 128",
    "nonprivate-b512": "not private, 800 steps of 512",
}


def accuracy(rows: Rows) -> str:
    """Test accuracy by method and epsilon; CPU seconds of the fastest run at epsilon 8."""
    found = by_setting(rows)

    def line(label: str, names: tuple[str, str]) -> tuple[str, ...]:
        seconds = [row["cpu_seconds"] for row in rows if row["name"].startswith(f"tables/{names[1]}/")]
        return label, *(cell(found, name) for name in names), f"{min(seconds):.0f}"

    lines = [line(label, (f"{name}-e3", f"{name}-e8")) for name, label in METHODS.items()]
    plain = {"nonprivate": "not private", "rgp-np": "RGP without clip and noise"}
    lines += [line(label, ("", name)) for name, label in plain.items()]
    return table(("method", "epsilon 3", "epsilon 8", "CPU s"), lines)


def cell(found: dict[str, dict[int, float]], name: str) -> str:
    values = list(found.get(name, {}).values())
    return "" if not values else words(values) + (f" ({len(values)})" if len(values) > 1 else "")


def differences(rows: Rows) -> str:
    """One method less another, paired by seed."""
    found = by_setting(rows)

    def one(first: str, second: str, epsilon: int) -> str:
        return difference(*verdict(found[f"{first}-e{epsilon}"], found[f"{second}-e{epsilon}"]))

    lines = [(f"{METHODS[a]} - {METHODS[b]}", one(a, b, 3), one(a, b, 8)) for a, b in PAIRS]
    return table(("difference in points", "epsilon 3", "epsilon 8"), lines)


def wrn(rows: Rows) -> str:
    """A WRN-16-1: what is finished."""
    found = by_setting(rows, "wrn")
    lines = [(label, "", "", cell(found, name)) for name, label in WRN_PLAIN.items() if name in found]
    for name, label in WRN.items():
        cells = [cell(found, f"{name}-e{epsilon}") for epsilon in (8, 1)]
        if any(cells):
            lines.append((label, *cells, ""))
    return table(("WRN-16-1", "epsilon 8", "epsilon 1", "no privacy"), lines)


def tuning(rows: Rows) -> str:
    """Every tuning run, the best first."""
    runs = [row for row in rows if row["name"].startswith("tuning/")]
    runs.sort(key=lambda row: -row["accuracy"])
    lines = [
        (
            row["name"].split("/")[1],
            f"{100 * row['accuracy']:.1f}",
            f"{row['cpu_seconds']:.0f}" if row.get("cpu_seconds") else "",
        )
        for row in runs
    ]
    return table(("run (name in vision.yaml)", "accuracy", "CPU s"), lines)


DEMO = {
    ("", ""): "the presets: rate 0.5, no EMA",
    ("-ema", "-ema"): "EMA",
    ("-ema-lr1", "-ema-lr1"): "EMA, rate 1",
    ("-ema-lr0.25", "-ema-lr0.25"): "**EMA, rate 0.25**",
    ("-ema-lr0.125", "-ema-lr0.125"): "EMA, rate 0.125",
    ("-ema0.97-lr0.25", "-ema0.97-lr0.25"): "longer EMA (0.97), rate 0.25",
    ("-ema0.97-lr0.25-epochs40", "-ema0.97-lr0.25-epochs40"): "the same, twice the steps",
    ("-ema-width64", "-ema-width64"): "EMA, twice the width",
    ("-bands", "-bands"): "EMA, correlated noise",
    ("-bands", "-noise-bands"): "EMA, correlated noise, RGP with carriers from noise",
    ("-ema-lr0.25", "-ema-lr0.25-rank16"): "EMA, rate 0.25, RGP with rank 16",
}


def demo(rows: Rows) -> str:
    """How the demo's settings were chosen: five seeds, other rows held out."""
    found = by_setting(rows, "trials")

    def line(label: str, dpsgd: str, rgp: str) -> tuple[str, ...]:
        a, b = found[f"rgp{rgp}"], found[f"dpsgd{dpsgd}"]
        return label, words(list(b.values())), words(list(a.values())), difference(*verdict(a, b))

    lines = [line(label, *names) for names, label in DEMO.items()]
    return table(("digits, epsilon 8", "DP-SGD", "RGP", "RGP - DP-SGD"), lines)


def demo_runs(rows: Rows) -> str:
    """What `rgp demo` itself showed, run after run."""
    lines = []
    for row in rows:
        if row["name"].startswith("runs/"):
            accuracies = [f"{100 * run['accuracy']:.1f}" for run in row["runs"]]
            cost = {one["name"]: one for one in row["cost"]["rows"]}
            ratios = [
                f"{cost[name][key]:.2f}"
                for key in ("ratio_to_plain", "memory_ratio_to_plain")
                for name in ("dpsgd", "rgp")
            ]
            lines.append((row["name"].split("/")[2], *accuracies, " / ".join(ratios[:2]), " / ".join(ratios[2:])))
    head = ("run", "no privacy", "DP-SGD", "RGP", "time, DP-SGD / RGP", "memory, DP-SGD / RGP")
    return table(head, lines)


TABLES: Tables = {
    "demo": demo,
    "demo_runs": demo_runs,
    "accuracy": accuracy,
    "differences": differences,
    "wrn": wrn,
    "tuning": tuning,
}

if __name__ == "__main__":
    fill(PAGES, RESULTS, TABLES)
