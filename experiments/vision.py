"""The vision results (docs/results-vision.md): real CIFAR-10 and MNIST, every method, one line of JSON per finished run.

    python experiments/vision.py tables --data FOLDER        the runs of the tables, on the published test set
    python experiments/vision.py tuning --data FOLDER        how the settings were chosen, on 5,000 rows of the training set
    python experiments/vision.py show [--plots FOLDER]       mean, standard error and paired differences of what is there

FOLDER holds cifar10.npz and mnist.npz (`rgp data get cifar10 mnist --to FOLDER`). Settings are presets of `rgp train`, changed by
what vision.yaml lists; each run is what `rgp train --preset NAME --set KEY=VALUE ...` does. Runs whose name is in the
results already are skipped, so that the script goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import yaml

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "vision.jsonl"
HELD_OUT = 5000  # rows of the training set on which settings are chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("tables", "tuning", "show"))
    parser.add_argument("--data", type=Path, help="folder with cifar10.npz and mnist.npz")
    parser.add_argument("--out", type=Path, default=Path("runs/vision"), help="folder for the runs' own folders")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--only", default="*", help="only runs whose name matches, such as 'mnist*'")
    parser.add_argument("--plots", type=Path, help="show: also draw the figures into this folder")
    given = parser.parse_args()
    if given.what == "show":
        show(read(given.results))
        if given.plots is not None:
            from vision_plots import draw

            draw(read(given.results), given.plots)
        return
    if given.data is None:
        parser.error("--data is needed: the folder with cifar10.npz")
    jobs = [job for job in planned(given.what) if fnmatchcase(job["name"].split("/")[1], given.only)]
    folder = given.data if given.what == "tables" else tuning_folder(given.data)
    compute_once()
    for job in jobs:
        if job["name"] not in {row["name"] for row in read(given.results)}:
            row = {**job, **train(job, folder, given.out / job["name"])}
            with given.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{job['name']}: {100 * row['accuracy']:.1f}%, {row['wall_seconds']:.0f} s", flush=True)


def planned(what: str) -> list[dict[str, Any]]:
    """One job per seed of every entry of vision.yaml."""
    content = yaml.safe_load((HERE / "vision.yaml").read_text(encoding="utf-8"))
    jobs = []
    for entry in content[what]:
        for seed in entry.get("seeds", [0]):
            name = f"{what}/{entry['name']}/{seed}"
            jobs.append({"name": name, "preset": entry["preset"], "set": entry.get("set", {}), "seed": seed})
    return jobs


def train(job: dict[str, Any], data: Path, out: Path) -> dict[str, Any]:
    """What `rgp train` does, in this process: importing and calibrating again for every run would cost a third of it."""
    from rgp.train import config, progress, runner

    changes = {**job["set"], "data.folder": str(data), "run.seed": job["seed"], "run.threads": 1, "run.eval_every": 75}
    settings = config.load(
        preset=job["preset"], changes=[f"{key}={json.dumps(value)}" for key, value in changes.items()]
    )
    began = time.process_time()
    summary = runner.train(settings, out, progress=progress.for_stream(), diagnostics=True)
    private = read(out / "private.jsonl")
    return {
        "accuracy": summary["accuracy"],
        "epsilon": summary["epsilon"],
        "sigma": summary["noise_multiplier"],
        "wall_seconds": round(summary["wall_seconds"], 1),
        "cpu_seconds": round(time.process_time() - began, 1),
        "curve": [[row["step"], row["accuracy"]] for row in read(out / "metrics.jsonl")],
        "clip_fraction": [row.get("clip_fraction") for row in private],  # private: not covered by epsilon
        "commit": commit(),
    }


def commit() -> str:
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True)
    return asked.stdout.strip() or "unknown"


def tuning_folder(data: Path) -> Path:
    """The same files with 5,000 training rows in the place of the test set, which tuning must not see."""
    folder = Path(tempfile.gettempdir()) / "rgp-vision-tuning"
    folder.mkdir(exist_ok=True)
    for name in ("cifar10", "mnist"):
        if not (folder / f"{name}.npz").exists():
            with np.load(data / f"{name}.npz") as file:
                x, y = file["x_train"], file["y_train"]
            order = np.random.Generator(np.random.PCG64(0)).permutation(len(x))
            test, rows = np.sort(order[:HELD_OUT]), np.sort(order[HELD_OUT:])
            np.savez(folder / f"{name}.npz", x_train=x[rows], y_train=y[rows], x_test=x[test], y_test=y[test])
    return folder


def compute_once() -> None:
    """Runs of one budget share their noise and their epsilon curve."""
    from rgp import accounting

    for name in ("calibrate_scale", "epsilon_curve"):
        setattr(accounting, name, _remembered(getattr(accounting, name)))


def _remembered(function: Callable[..., Any]) -> Callable[..., Any]:
    kept: dict[str, Any] = {}

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        key = repr((args, sorted(options.items())))
        if " at 0x" in key:  # a function among the arguments: not the same from run to run
            return function(*args, **options)
        if key not in kept:
            kept[key] = function(*args, **options)
        return kept[key]

    return call


# ---------------------------------------------------------------------- what came out


def read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def by_setting(rows: list[dict[str, Any]], what: str = "tables") -> dict[str, dict[int, float]]:
    """Name -> seed -> accuracy in percent."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        stage, name, seed = row["name"].split("/")
        if stage == what:
            found.setdefault(name, {})[int(seed)] = 100 * row["accuracy"]
    return found


def mean_and_error(values: list[float]) -> tuple[float, float | None]:
    """The error is the standard error of the mean; None for one value."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return statistics.mean(values), error


def verdict(a: dict[int, float], b: dict[int, float]) -> tuple[float, float | None, str]:
    """Paired difference a - b over the seeds that both have; a win is one above two standard errors."""
    difference, error = mean_and_error([a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())])
    if error is None:
        return difference, None, "one seed"
    return difference, error, "level" if abs(difference) <= 2 * error else "win" if difference > 0 else "loss"


def show(rows: list[dict[str, Any]]) -> None:
    for what in ("tables", "tuning"):
        found = by_setting(rows, what)
        for name, seeds in found.items():
            mean, error = mean_and_error(list(seeds.values()))
            print(f"{what:7} {name:32} {mean:5.1f}" + (f" +- {error:.1f} ({len(seeds)} seeds)" if error else ""))
    found = by_setting(rows)
    several = [name for name, seeds in found.items() if len(seeds) > 1]
    for i, a in enumerate(several):
        for b in several[i + 1 :]:
            if len(found[a].keys() & found[b].keys()) > 1:
                difference, error, word = verdict(found[a], found[b])
                print(f"{a} - {b}: {difference:+.2f} +- {error:.2f}: {word}")


if __name__ == "__main__":
    main()
