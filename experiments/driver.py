"""What the experiments share: a list of runs in YAML, one line of JSON per finished run, means, errors and verdicts.

A list has stages: `tables` (the runs of the results page), `tuning` (how its settings were chosen, on rows of the training
set), and perhaps others. An entry is a preset of `rgp train`, what is changed in it, and the seeds. Runs whose name is in the
results already are skipped, and a run that was stopped resumes from its last checkpoint.

`rgp reproduce` has a harness of its own (rgp.reproduce.running): there a cell is known by the hash of its settings and may be an
attack or a cost; here a run is known by its name and keeps its curve, clip fractions and CPU time.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
STAGES = ("tables", "tuning")


def arguments(about: str | None, results: Path, data: str, stages: tuple[str, ...] = STAGES) -> argparse.Namespace:
    """The command line of both scripts. data: what --data holds."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=(*stages, "show"))
    parser.add_argument("--data", type=Path, help=f"folder with {data}")
    parser.add_argument(
        "--out", type=Path, default=Path("runs") / results.stem, help="folder for the runs' own folders"
    )
    parser.add_argument("--results", type=Path, default=results)
    parser.add_argument("--only", default="*", help="only runs whose name matches, such as 'rgp*' or rgp-e8/0")
    parser.add_argument("--share", default="1/1", help="2/3: every third run, from the second on")
    parser.add_argument("--plots", type=Path, help="show: also draw the figures into this folder")
    given = parser.parse_args()
    if given.what != "show" and given.data is None:
        parser.error(f"--data is needed: the folder with {data}")
    if given.plots is not None:
        given.plots.mkdir(parents=True, exist_ok=True)
    return given


def planned(path: Path, what: str) -> list[dict[str, Any]]:
    """One job per seed of every entry."""
    jobs = []
    for entry in yaml.safe_load(path.read_text(encoding="utf-8"))[what]:
        for seed in entry.get("seeds", [0]):
            name = f"{what}/{entry['name']}/{seed}"
            jobs.append({"name": name, "preset": entry["preset"], "set": entry.get("set", {}), "seed": seed})
    return jobs


def run_missing(
    jobs: list[dict[str, Any]],
    results: Path,
    run: Callable[[dict[str, Any]], dict[str, Any]],
    *,
    only: str = "*",
    share: str = "1/1",
) -> None:
    """Run the jobs whose result is missing. `share` 2/3 is every third of them, from the second on: one for each core."""
    first, of = map(int, share.split("/"))
    compute_once()
    chosen = [job for job in jobs if any(fnmatchcase(name, only) for name in _names(job))]
    for job in chosen[first - 1 :: of]:
        if job["name"] in {row["name"] for row in read(results)}:
            continue
        row = {**job, **run(job)}
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{job['name']}: {100 * row['accuracy']:.1f}%, {row['wall_seconds']:.0f} s", flush=True)


def _names(job: dict[str, Any]) -> tuple[str, str]:
    """What --only may say: rgp-e8, or rgp-e8/0 for one seed of it."""
    _, name, seed = job["name"].split("/")
    return name, f"{name}/{seed}"


def train(job: dict[str, Any], data: Path, out: Path, **fixed: Any) -> dict[str, Any]:
    """What `rgp train` does, in this process: importing and calibrating again for every run would cost a third of it.

    fixed: settings that are the same for all runs, `section__key=value`; the results do not list them.
    """
    from rgp.reproduce.items import fingerprint
    from rgp.train import config, progress, runner

    always = {key.replace("__", "."): value for key, value in fixed.items()}
    changes = {**job["set"], **always, "data.folder": str(data), "run.seed": job["seed"], "run.threads": 1}
    settings = config.load(
        preset=job["preset"], changes=[f"{key}={json.dumps(value)}" for key, value in changes.items()]
    )
    began = time.process_time()
    begun = (out / "config.yaml").exists()
    summary = runner.train(settings, out, progress=progress.for_stream(), diagnostics=True, resume=begun)
    private = read(out / "private.jsonl")
    return {
        "settings": fingerprint(settings),
        "accuracy": summary["accuracy"],
        "epsilon": summary["epsilon"],
        "sigma": summary["noise_multiplier"],
        "noise_dimensions": summary["noise_dimensions"],
        "wall_seconds": round(summary["wall_seconds"], 1),
        "cpu_seconds": round(time.process_time() - began, 1),
        "curve": [[row["step"], row["accuracy"]] for row in read(out / "metrics.jsonl") if "accuracy" in row],
        "clip_fraction": [row.get("clip_fraction") for row in private],  # private: not covered by epsilon
        "commit": commit(),
    }


def commit() -> str:
    """The commit of the code that ran."""
    from rgp.bench.machine import describe_commit

    return describe_commit()["commit"] or "unknown"


def compute_once() -> None:
    """Compute noise and epsilon curve once for all runs with the same budget."""
    from rgp import accounting

    for name in ("calibrate_scale", "epsilon_curve"):
        setattr(accounting, name, remembered(getattr(accounting, name)))


def remembered(function: Callable[..., Any]) -> Callable[..., Any]:
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
    from rgp.files import read_json_lines

    return read_json_lines(path)


def by_setting(
    rows: list[dict[str, Any]], what: str = "tables", measure: str = "accuracy"
) -> dict[str, dict[int, float]]:
    """Name -> seed -> accuracy in percent."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        stage, name, seed = row["name"].split("/")
        if stage == what and measure in row:
            found.setdefault(name, {})[int(seed)] = 100 * row[measure]
    return found


def mean_and_error(values: list[float]) -> tuple[float, float | None]:
    """The error is the standard error of the mean; None for one value."""
    from rgp.reproduce.numbers import standard_error

    return statistics.mean(values), standard_error(values)


def verdict(a: dict[int, float], b: dict[int, float]) -> tuple[float, float | None, str]:
    """Paired difference a - b over the seeds that both have; a win is one above two standard errors, of three seeds or more."""
    from rgp.reproduce.numbers import paired_difference

    difference, error, seeds = paired_difference(a, b)
    if error is None or seeds < 3:  # from two, it is less than half of the true error in two cases of five
        return difference, None, "too few seeds"
    return difference, error, "level" if abs(difference) <= 2 * error else "win" if difference > 0 else "loss"


def show(rows: list[dict[str, Any]], *, also: str | None = None, stages: tuple[str, ...] = STAGES) -> None:
    """Every setting's mean, and the paired differences of those with several seeds. also: a second measure of the tables."""
    for what in stages:
        second = by_setting(rows, what, also) if also else {}
        for name, seeds in by_setting(rows, what).items():
            line = f"{what:7} {name:36} {words(seeds)}"
            print(line + (f"   {also} {words(second[name])}" if name in second else ""))
    for measure in ("accuracy", *([also] if also else [])):
        found = by_setting(rows, measure=measure)
        several = [name for name, seeds in found.items() if len(seeds) > 2]
        for i, a in enumerate(several):
            for b in several[i + 1 :]:
                if len(found[a].keys() & found[b].keys()) > 2:
                    difference, error, word = verdict(found[a], found[b])
                    print(f"{measure}, {a} - {b}: {difference:+.2f} +- {error:.2f}: {word}")


def words(seeds: dict[int, float]) -> str:
    mean, error = mean_and_error(list(seeds.values()))
    return f"{mean:5.1f}" + (f" +- {error:.1f} ({len(seeds)} seeds)" if error is not None else "")
