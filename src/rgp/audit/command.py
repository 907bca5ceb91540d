"""The `rgp audit` command.

Exit codes: those of `rgp train`, and 4 when the lower bound is above the proven epsilon: the mechanism is broken.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from rgp.rounding import round_down, round_up
from rgp.train.command import Changes, complete_preset

BROKEN = 4


def register(app: typer.Typer) -> None:
    """Add `audit` to a command line."""
    app.command("audit")(audit)


def audit(
    config: Annotated[Path | None, typer.Argument(help="A YAML file, as for rgp train.")] = None,
    preset: Annotated[
        str | None, typer.Option(help="Settings that come with rgp.", autocompletion=complete_preset)
    ] = None,
    changes: Changes = None,
    run: Annotated[
        Path | None, typer.Option(help="Audit the settings of this run; the result goes on its privacy card.")
    ] = None,
    canaries: Annotated[int, typer.Option(help="Number of canaries, each included by the toss of a coin.")] = 1000,
    kind: Annotated[
        str,
        typer.Option(
            metavar="white-box|black-box",
            help="Canaries are gradients and every noisy sum is seen; or inputs, and only their losses are seen.",
        ),
    ] = "white-box",
    steps: Annotated[int | None, typer.Option(help="Steps of the audit's run. Default: the config's.")] = None,
    sampling_rate: Annotated[
        float | None, typer.Option(help="q of the audit's run; 1 is the sharpest. Default: the config's.")
    ] = None,
    rows: Annotated[
        int | None,
        typer.Option(help="Real training rows to train on besides. Default: none for white-box, all for black-box."),
    ] = None,
    confidence: Annotated[float, typer.Option(help="With which the lower bound holds.")] = 0.95,
    guesses: Annotated[
        int | None,
        typer.Option(help="Guess about so many canaries. Default: the best of four numbers, corrected for the choice."),
    ] = None,
    canary_norm: Annotated[
        float, typer.Option(help="Norm of a white-box canary in multiples of C; above 1, clipping is audited too.")
    ] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Repeats coins and canaries (not the noise: run.seed).")] = None,
    out: Annotated[Path | None, typer.Option(help="A new folder for the audit's run.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    weaken_noise: Annotated[float, typer.Option(hidden=True)] = 1.0,
) -> None:
    """Try to refute the promise: a lower bound on epsilon from one training run with canaries in it.

    Trains a model of its own, through the same engine as rgp train. Every canary is put in or left out by the toss of a
    coin, and guessing how the coins fell must not succeed more often than the proven epsilon allows. If the lower bound is
    above the proven epsilon, the mechanism is broken, and the exit code is 4.

    \b
    Examples:
      rgp audit --preset digits-rgp --sampling-rate 1 --steps 100
      rgp audit --run runs/digits-rgp                      the settings of a run; adds the result to its privacy card
      rgp audit --preset digits-rgp --kind black-box       what shows in the losses alone
    """
    from rgp.train.command import exit_codes, spoken_warnings

    with exit_codes():
        from rgp.audit.auditing import AuditSettings
        from rgp.audit.auditing import audit as run_audit
        from rgp.train import config as configs
        from rgp.train import progress
        from rgp.train.errors import RunFolderError
        from rgp.train.folder import RunFolder, free_name

        settings = AuditSettings(
            canaries=canaries,
            kind=kind,
            steps=steps,
            rows=rows,
            sampling_rate=sampling_rate,
            confidence=confidence,
            guesses=guesses,
            canary_norm=canary_norm,
            seed=seed,
            weaken_noise=weaken_noise,
        )
        if run is not None:
            if config is not None or preset is not None or changes:
                raise ValueError("--run audits the settings of a run as they are: give no config, --preset or --set")
            if not RunFolder(run).config.exists():
                raise RunFolderError(f"--run {run} is not a run's folder: it has no config.yaml")
            config = RunFolder(run).config
            out = free_name(run / "audit") if out is None else out
        given = configs.load(config, preset=preset, changes=changes or ())
        if out is None:
            out = free_name(Path("runs") / f"audit-{config.stem if config is not None else preset or 'run'}")
        shown = progress.for_stream()
        with spoken_warnings(shown):
            result = run_audit(given, settings, out, progress=shown)
        if run is not None and settings.weaken_noise == 1:
            from rgp.train.card import record_audit
            from rgp.train.runner import write_report

            record_audit(RunFolder(run), result)
            if RunFolder(run).summary.exists():
                write_report([run], RunFolder(run).report, shown.say)
        if as_json:
            typer.echo(json.dumps(result, allow_nan=False))
        else:
            show(result)
        if result["broken"]:
            typer.echo(f"rgp: {_broken(result)}", err=True)
            raise typer.Exit(BROKEN)


def _broken(result: dict[str, Any]) -> str:
    return (
        f"THE MECHANISM IS BROKEN: epsilon is at least {round_down(result['epsilon_lower'])} with {result['confidence']:.0%} "
        f"confidence, and the ledger promises {result['epsilon_proven']:.3f}. Do not publish models trained with this code."
    )


def show(result: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    title = f"A {result['kind']} audit of {result['method']}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_header=False)
    table.add_column(style="dim")
    table.add_column(justify="right")
    table.add_row("epsilon is at least", round_down(result["epsilon_lower"]), style="bold")
    table.add_row("proven: at most", round_up(result["epsilon_proven"]), style="bold")
    table.add_row("delta", f"{result['delta']:g}")
    table.add_row("confidence", f"{result['confidence']:.0%}")
    table.add_row("canaries", f"{result['canaries']:,}, {result['included']:,} of them included")
    table.add_row("right guesses", f"{result['correct']:,} of {result['guesses']:,}")
    table.add_row("multiple tries", result["correction"])
    table.add_row("bound", "f-DP in one run (Mahloujifar et al. 2024)")
    table.add_row("by counting guesses", f"{round_down(result['bounds']['guesses'])} (Steinke et al. 2023)")
    table.add_row("steps, sampling rate", f"{result['steps']}, {result['sampling_rate']:.4g}")
    table.add_row("noise multiplier", f"{result['noise_multiplier']:g}")
    if result["weakened_noise"] is not None:
        table.add_row("DEMONSTRATION", f"only {result['weakened_noise']:g} of that noise was added", style="red")
    console = Console(highlight=False)
    console.print(table)
    if not result["broken"]:
        console.print(
            "The audit does not contradict the promise. That does not prove it: the ledger and the theorem do."
        )
    if result["private_rows"]:
        console.print(
            f"This run trained on {result['private_rows']:,} private rows: it spent the proven epsilon on them once more."
        )
    console.print(f"ledger: {result['folder']}", soft_wrap=True)
