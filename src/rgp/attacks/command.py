"""The `rgp attack` command. Exit codes: those of `rgp train`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer


def register(app: typer.Typer) -> None:
    """Add `attack` to a command line."""
    app.command("attack")(attack)


def attack(
    folder: Annotated[Path, typer.Argument(help="A run's folder.")],
    shadows: Annotated[
        int,
        typer.Option(
            help="Shadow models for LiRA and RMIA: an even number of at least 4. 0: the loss threshold alone."
        ),
    ] = 0,
    seed: Annotated[int, typer.Option(help="Repeats the attack: halves, shadow models, thresholds.")] = 0,
    keep: Annotated[
        bool, typer.Option("--keep-shadows", help="Keep the shadow models, not only their losses.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Attack a run: how well can its training rows be told from rows that it never saw?

    The loss threshold takes every row with a low loss for a training row. LiRA and RMIA ask whether the loss is low for THIS row,
    compared with shadow models that were trained with and without it; each shadow is a training run of its own. An
    interrupted attack continues where it stopped.

    Where the run protects persons (data.units), the question is asked about persons: whether somebody was in the data is
    guessed from all their rows together.

    The results are statistics of private rows, which the guarantee does not cover: they stay in the run's folder
    (attack.json, attack.png, the marked part of report.html) and never get into model/.

    \b
    Examples:
      rgp attack runs/digits-rgp                   the loss threshold, in seconds
      rgp attack runs/digits-rgp --shadows 16      and LiRA and RMIA
    """
    from rgp.train.command import exit_codes, spoken_warnings

    with exit_codes():
        from rgp.attacks.attacking import attack_run
        from rgp.train import progress

        shown = progress.for_stream()
        with spoken_warnings(shown):
            result = attack_run(folder, shadows=shadows, seed=seed, keep=keep, progress=shown)
        if as_json:
            typer.echo(json.dumps(result, allow_nan=False))
        else:
            show(result)


def show(result: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from rgp.report.words import ceiling

    table = Table(title="NOT COVERED BY THE GUARANTEE", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("attack")
    for column in ("right guesses", "AUC", "found at 1% false alarms", "at 0.1%"):
        table.add_column(column, justify="right")
    for name, found in result["attacks"].items():
        cells = []
        for key, form in (
            ("success_rate", "{:.1%}"),
            ("auc", "{:.3f}"),
            ("tpr_at_0.01", "{:.2%}"),
            ("tpr_at_0.001", "{:.2%}"),
        ):
            low, high = found["intervals"][key]
            cells.append(f"{form.format(found[key])} ({form.format(low)} to {form.format(high)})")
        table.add_row(name, *cells)
    console = Console(highlight=False)
    console.print(table)
    limit, noun = result["promised"], result["unit"]
    if limit is not None:
        console.print(
            f"promised: no attack gets more than {ceiling(limit['success_rate'])} right, or finds more than "
            f"{ceiling(limit['tpr_at_0.01'])} at 1% false alarms and {ceiling(limit['tpr_at_0.001'])} at 0.1%"
        )
    console.print(
        f"{result['members']:,} training {noun}s, {result['nonmembers']:,} held-out {noun}s, {result['shadows']} shadow models; "
        f"in brackets {result['confidence']:.0%} intervals"
    )
    for path in result["files"]:
        console.print(f"[dim]{path}[/]", soft_wrap=True)
