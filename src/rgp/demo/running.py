"""`rgp demo`: one small network on digits without privacy, with DP-SGD and with RGP; then one step of a larger network.

Accuracy is measured where training takes seconds; time and memory where they mean something, on a transformer that is too
large to train here. Every run is the command `rgp train`, in a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rgp.attacks.attacking import threshold_attack
from rgp.bench.harness import run_bench
from rgp.bench.settings import Settings
from rgp.naming import LABELS
from rgp.train import runner
from rgp.train.errors import DemoError, RunFolderError
from rgp.train.folder import RunFolder, free_name

RUNS = {"nonprivate": "digits-nonprivate", "dpsgd": "digits-dpsgd", "rgp": "digits-rgp"}
# Chosen with five seeds and other rows held out, the same trials for both: experiments/demo_settings.py
PRIVATE = ("training.ema=0.9", "optimizer.lr=0.25")
NAMES = {**LABELS, "nonprivate": "no privacy", "plain": "no privacy"}
STEP = Settings(model="transformer:512", batch=32, microbatch=8, seq=64, keep=1000, state="thin", repeats=3)


def run_demo(
    out: Path | None,
    *,
    epsilon: float,
    seed: int | None = None,
    changes: tuple[str, ...] = (),
    step: Settings = STEP,
    quiet: bool = False,
) -> dict[str, Any]:
    """Three runs, three attacks, one report, and what a step of a larger network costs.

    changes: --set options for all runs. step: the larger network.
    """
    if out is None:
        out = free_name(Path("runs/demo"))
    elif out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunFolderError(f"{out} exists; it was not touched. Choose another folder: --out {free_name(out)}")
    began = time.monotonic()
    rows = []
    for method, preset in RUNS.items():
        settings = [] if seed is None else [f"run.seed={seed}"]
        if method != "nonprivate":
            settings += [*PRIVATE, f"budget.epsilon={epsilon:g}"]
        settings += changes
        rows.append({"name": method, "folder": str(out / method), **_train(preset, out / method, settings, quiet)})
    if not quiet:
        print("attacking the three models with the membership test", file=sys.stderr)
    for row in rows:
        row["attack"] = threshold_attack(Path(row["folder"]))
        _keep_attack(Path(row["folder"]), row["attack"])
    cost = run_bench(step, ("plain", "dpsgd", "rgp"), say=lambda text: None if quiet else print(text, file=sys.stderr))
    report = runner.write_report(
        [Path(row["folder"]) for row in rows], out / "report.html", lambda text: print(text, file=sys.stderr)
    )
    return {
        "runs": rows,
        "cost": cost,
        "report": None if report is None else str(report),
        "seconds": time.monotonic() - began,
    }


def _train(preset: str, out: Path, settings: list[str], quiet: bool) -> dict[str, Any]:
    command = [sys.executable, "-m", "rgp", "train", "--preset", preset, "--out", str(out)]
    for change in settings:
        command += ["--set", change]
    if not quiet:
        print(f"\n$ rgp {' '.join(command[3:])}", file=sys.stderr, flush=True)
    done = subprocess.run(
        [*command, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE if quiet else None, text=True
    )
    if done.returncode == 130:
        raise KeyboardInterrupt
    if done.returncode:
        raise DemoError(
            f"the run in {out} failed with exit code {done.returncode}. {(done.stderr or '').strip()}".strip()
        )
    return json.loads(done.stdout)


def _keep_attack(out: Path, result: dict[str, Any]) -> None:
    """The attack's result is private: it goes with the other numbers that the guarantee does not cover."""
    folder = RunFolder(out)
    step = folder.read_json(folder.summary)["steps"]
    folder.append(folder.private, {"step": step, "attack": result})


def show_demo(result: dict[str, Any]) -> None:
    from rich.console import Console

    from rgp.bench.report import busy_note
    from rgp.report.attacks import better_than_a_coin

    console = Console(highlight=False)
    console.print(_accuracy_table(result["runs"]))
    first = result["runs"][0]
    attacked = better_than_a_coin([(NAMES[row["name"]], row["attack"]) for row in result["runs"]])
    console.print(
        f"accuracy: on {first['held_out_rows']} held-out images; two runs of one method differ by a point or two. attack finds: "
        "right guesses about who was in the training data, ± two standard errors; 50% is a coin. "
        f"{attacked}That an attack fails proves nothing; epsilon does.\n"
    )
    console.print(_cost_table(result["cost"]))
    settings = result["cost"]["settings"]
    console.print(
        f"{settings['batch']} texts of {settings['seq']} tokens, median of {settings['repeats']} steps each, taken in turn. RGP "
        "keeps its carriers and the optimizer's state thin."
    )
    if busy := busy_note(result["cost"]["machine"]):
        console.print(f"[yellow]These times say little: {busy}. Try again on a quiet machine.[/]")
    if result["report"] is not None:
        console.print(f"\nreport: [bold]{result['report']}[/]", soft_wrap=True)
    console.print(f"runs:   {Path(first['folder']).parent}", soft_wrap=True)


def _accuracy_table(runs: list[dict[str, Any]]) -> Any:
    from rgp.rounding import round_up

    table = _table("The same small network, trained in three ways", ("accuracy", "epsilon", "noise in", "attack finds"))
    for row in runs:
        table.add_row(
            NAMES[row["name"]],
            f"{row['accuracy']:.1%}",
            "none" if row["epsilon"] is None else round_up(row["epsilon"], 2),
            f"{row['noise_dimensions']:,} numbers" if row["noise_dimensions"] else "",
            f"{row['attack']['success_rate']:.1%} ± {200 * row['attack']['standard_error']:.0f}",
            style="bold" if row["name"] == "rgp" else None,
        )
    return table


def _cost_table(cost: dict[str, Any]) -> Any:
    rows = cost["rows"]
    trained = max(row["trained_parameters"] or 0 for row in rows)
    table = _table(
        f"One step of a transformer with {trained / 1e6:.0f} million parameters",
        ("time", "", "memory", ""),
    )
    for row in rows:
        if "error" in row:
            table.add_row(NAMES[row["name"]], "failed")
            continue
        table.add_row(
            NAMES[row["name"]],
            f"{row['seconds_per_step']:.2f} s",
            f"x {row['ratio_to_plain']:.2f}",
            f"{row['peak_bytes'] / 2**20:.0f} MiB",
            f"x {row['memory_ratio_to_plain']:.2f}",
            style="bold" if row["name"] == "rgp" else None,
        )
    return table


def _table(title: str, columns: tuple[str, ...]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, min_width=len(title) + 2)
    table.add_column("", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table
