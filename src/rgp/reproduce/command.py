"""The `rgp reproduce` command. Exit codes: those of `rgp train`; 1 if any run failed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer


def register(app: typer.Typer) -> None:
    """Add `reproduce` to a command line."""
    app.command("reproduce")(reproduce)


def complete_item(incomplete: str) -> list[str]:
    from rgp.reproduce.items import files

    return [name for name in ("list", "all", *files()) if name.startswith(incomplete)]


def reproduce(
    what: Annotated[
        list[str],
        typer.Argument(
            help="table1 to table5, fig2 to fig6, all; or list: what there is.", autocompletion=complete_item
        ),
    ],
    scale: Annotated[
        str, typer.Option(metavar="mini|paper", help="mini: hours on two cores. paper: its models, a GPU's work.")
    ] = "mini",
    seeds: Annotated[
        int | None, typer.Option(help="Runs of every cell, with seeds 0, 1, ... Default: each file's own.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume runs that were interrupted.")] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Run only cells with this in their name, such as digits or 'RGP (N.P.)'; may be repeated."),
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Start no new run after this many. 0: run nothing, write the pages again.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Take a few steps of every run, to see that it starts.")
    ] = False,
    data: Annotated[Path | None, typer.Option(help="Folder of `rgp data get`, if not in its usual place.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the runs and the pages.")] = Path("runs/reproduce"),
    results: Annotated[
        Path | None, typer.Option(help="File of finished cells. Default: results.jsonl in --out.")
    ] = None,
    share: Annotated[
        list[Path] | None,
        typer.Option(
            help="Results of others: a .jsonl file, or a folder of runs. Default: experiments/results/*.jsonl."
        ),
    ] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one setting of all runs; for trials.")
    ] = None,
    page: Annotated[
        Path | None, typer.Option(help="Also write the page as Markdown here, figures in img/ beside it.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run the paper's tables and figures again, and set ours beside its numbers.

    Every cell is one run of `rgp train`, from a preset. Finished ones are kept, known by a hash of their settings, and never
    run twice: a reproduction that was stopped continues where it was. One that fails does not stop the others. What the paper
    claims is checked by code: held, did not hold, level, not run.

    \b
    Examples:
      rgp reproduce list                             what there is, and how long it takes
      rgp reproduce table2 --only digits             seconds
      rgp reproduce all --minutes 60 --resume        what fits in an hour, continuing where it was
      rgp reproduce all --scale paper --check        does every run of the paper's scale start?
      rgp reproduce all --minutes 0 --page docs/reproduction.md
    """
    from rgp.train.command import exit_codes, spoken_warnings

    with exit_codes():
        from rgp.reproduce.reproducing import Reproduction
        from rgp.train import progress

        shown = progress.for_stream()
        made = Reproduction(
            what,
            scale=scale,
            seeds=seeds,
            only=only or (),
            data=data,
            out=out,
            results=results,
            shares=share,
            changes=changes or (),
            progress=shown,
        )
        with spoken_warnings(shown):
            if made.listing:
                result = made.overview()
            elif check:
                result = made.check()
            else:
                result = made.run(resume=resume, minutes=minutes)
            if not made.listing:
                result["files"] = made.write(page)
        if as_json:
            typer.echo(json.dumps(result, allow_nan=False))
        else:
            show(result)
        if result.get("failed"):
            raise typer.Exit(1)


def show(result: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(box=box.SIMPLE_HEAD)
    if "list" in result:
        for column in ("", "what it shows", "runs", "finished", "time left"):
            table.add_column(column)
        for row in [*result["list"], {"name": "all", "title": "runs in common counted once", **result["all"]}]:
            left = "not measured" if row["minutes_left"] is None else f"{row['minutes_left']:.0f} min"
            table.add_row(row["name"], row["title"], str(row["runs"]), str(row["finished"]), left)
    elif "checked" in result:
        for column in ("run", "", "seconds", "stand-ins"):
            table.add_column(column)
        for row in result["checked"]:
            state = "starts" if row["ok"] else f"FAILED: {row['error']}"
            table.add_row(row["name"], state, f"{row.get('seconds', 0):.1f}", ", ".join(row.get("stand_ins", ())))
    else:
        for column in ("claim", "from", "on", "verdict", "numbers"):
            table.add_column(column)
        for row in result["claims"]:
            if row["verdict"] != "not run":
                table.add_row(row["claim"], row["item"], row["where"], row["verdict"], row["why"])
        console.print("\n".join(f"{name}: {why}" for name, why in result["problems"].items()))
    console.print(table)
    for path in result.get("files", ()):
        console.print(f"[dim]{path}[/]", soft_wrap=True)
