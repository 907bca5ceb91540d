"""`rgp demo`: one small network on digits without privacy, with DP-SGD and with RGP, side by side.

Every run is the command `rgp train`, in a process of its own, so that time and memory are each run's own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rgp.attacks.attacking import threshold_attack
from rgp.naming import LABELS
from rgp.train import runner
from rgp.train.errors import DemoError, RunFolderError
from rgp.train.folder import RunFolder, free_name

RUNS = {"nonprivate": "digits-nonprivate", "dpsgd": "digits-dpsgd", "rgp": "digits-rgp"}
NAMES = {**LABELS, "nonprivate": "no privacy"}


def run_demo(
    out: Path | None, *, epsilon: float, seed: int | None = None, changes: tuple[str, ...] = (), quiet: bool = False
) -> dict[str, Any]:
    """Three runs, three attacks, one report. `changes` are --set options for all runs."""
    if out is None:
        out = free_name(Path("runs/demo"))
    elif out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunFolderError(f"{out} exists; it was not touched. Choose another folder: --out {free_name(out)}")
    began = time.monotonic()
    rows = []
    for method, preset in RUNS.items():
        settings = [*changes] if seed is None else [f"run.seed={seed}", *changes]
        if method != "nonprivate":
            settings.append(f"budget.epsilon={epsilon:g}")
        rows.append({"name": method, "folder": str(out / method), **_train(preset, out / method, settings, quiet)})
    rows[0]["plain"] = _plain(out / "nonprivate")
    if not quiet:
        print("attacking the three models with the membership test", file=sys.stderr)
    for row in rows:
        row["attack"] = threshold_attack(Path(row["folder"]))
        _keep_attack(Path(row["folder"]), row["attack"])
    report = runner.write_report(
        [Path(row["folder"]) for row in rows], out / "report.html", lambda text: print(text, file=sys.stderr)
    )
    return {
        "runs": rows,
        "report": None if report is None else str(report),
        "seconds": time.monotonic() - began,
    }


def _train(preset: str, out: Path, settings: list[str], quiet: bool) -> dict[str, Any]:
    command = [sys.executable, "-m", "rgp", "train", "--preset", preset, "--out", str(out), "--json"]
    for change in settings:
        command += ["--set", change]
    if not quiet:
        print(f"\n$ rgp {' '.join(command[3 : -2 * len(settings) - 1])}", file=sys.stderr, flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE if quiet else None, text=True)
    if done.returncode == 130:
        raise KeyboardInterrupt
    if done.returncode:
        raise DemoError(
            f"the run in {out} failed with exit code {done.returncode}. {(done.stderr or '').strip()}".strip()
        )
    return json.loads(done.stdout)


def _plain(out: Path) -> dict[str, Any]:
    """What the run without privacy costs as a plain PyTorch loop: what the private ones are compared with."""
    done = subprocess.run([sys.executable, "-m", "rgp.train.plain", str(out)], capture_output=True, text=True)
    if done.returncode:
        raise DemoError(f"the plain loop failed with exit code {done.returncode}\n{done.stderr}")
    return json.loads(done.stdout)


def _keep_attack(out: Path, result: dict[str, Any]) -> None:
    """The attack's result is private: it goes with the other numbers that the guarantee does not cover."""
    folder = RunFolder(out)
    step = folder.read_json(folder.summary)["steps"]
    folder.append(folder.private, {"step": step, "attack": result})


def show_demo(result: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from rgp.report.attacks import better_than_a_coin
    from rgp.rounding import round_up

    table = Table(title="The same network, three ways to train it", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    for column in ("accuracy", "epsilon", "time", "memory", "noise dimensions", "attack finds"):
        table.add_column(column, justify="right")
    for row in result["runs"]:
        cost = row.get("plain", row)
        table.add_row(
            NAMES[row["name"]],
            f"{row['accuracy']:.1%}",
            "none" if row["epsilon"] is None else round_up(row["epsilon"], 2),
            f"{cost['step_seconds']:.1f} s",
            f"{cost['peak_memory_bytes'] / 2**20:.0f} MiB",
            f"{row['noise_dimensions']:,}",
            f"{row['attack']['success_rate']:.1%} ± {200 * row['attack']['standard_error']:.0f}",
            style="bold" if row["name"] == "rgp" else None,
        )
    first = result["runs"][0]
    console = Console(highlight=False)
    console.print(table)
    attacked = better_than_a_coin([(NAMES[row["name"]], row["attack"]) for row in result["runs"]])
    console.print(
        f"accuracy: on {first['held_out_rows']} held-out images. time, memory: of the training steps alone; without "
        "privacy, of a plain PyTorch loop with as many. attack finds: right guesses about who was in the training "
        f"data, ± two standard errors; 50% is a coin. {attacked}That an attack fails proves nothing; epsilon does."
    )
    if result["report"] is not None:
        console.print(f"\nreport: [bold]{result['report']}[/]", soft_wrap=True)
    console.print(f"runs:   {Path(first['folder']).parent}", soft_wrap=True)
