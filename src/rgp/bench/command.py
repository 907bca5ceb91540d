"""The `rgp bench` command."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from rgp.bench.scaling import AXES, BASE
from rgp.bench.settings import CONTENDERS, Settings, check_contenders


def register(app: typer.Typer) -> None:
    """Add `bench` to a command line."""
    app.command("bench")(bench)


def bench(
    model: Annotated[
        str | None,
        typer.Option(
            help="bert-base, minilm, wrn16-4, wrn28-4, toy, a folder with a Hugging Face model, or module:function."
        ),
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Examples per optimizer step.")] = None,
    microbatch: Annotated[int | None, typer.Option(help="Examples that go through the model at once.")] = None,
    seq: Annotated[int | None, typer.Option(help="Tokens per example.")] = None,
    rank: Annotated[int | None, typer.Option(help="Rank of the carriers.")] = None,
    sides: Annotated[str | None, typer.Option(help="both or left.")] = None,
    source: Annotated[str | None, typer.Option(help="weight or history (measured past its warm-up).")] = None,
    keep: Annotated[int | None, typer.Option(help="Steps for which carriers stay.")] = None,
    state: Annotated[str | None, typer.Option(help="Of the optimizer, for carried weights: full or thin.")] = None,
    bands: Annotated[
        int | None, typer.Option(help="Steps over which noise is correlated; with --keep for rgp.")
    ] = None,
    against: Annotated[
        str | None, typer.Option(help=f"Other contenders, by comma: {', '.join(CONTENDERS[1:])}.")
    ] = None,
    repeats: Annotated[int | None, typer.Option(help="Measured steps of each contender.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="adamw or sgd; sgd for wide ResNets by default.")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads of each contender; all cores by default.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; cuda by default where there is one.")] = None,
    scaling: Annotated[str | None, typer.Option(help=f"Fit slopes along one axis instead: {', '.join(AXES)}.")] = None,
    values: Annotated[str | None, typer.Option(help="Values of the scaling axis, by comma.")] = None,
    compile: Annotated[bool, typer.Option("--compile", help="Compile the model of plain, rgp and dpsgd.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
    chart: Annotated[Path | None, typer.Option(help="Write a figure here, such as bench.png.")] = None,
) -> None:
    """Measure time and memory of a private step against plain training and against Opacus.

    Every contender runs in a process of its own, on the same work, and they step in turn; ratios are those of a round.
    """
    from rich.console import Console

    from rgp.bench import chart as charts
    from rgp.bench import report as reports
    from rgp.bench.harness import run_bench
    from rgp.bench.scaling import run_scaling

    given = {
        "model": model,
        "batch": batch,
        "microbatch": microbatch,
        "seq": seq,
        "rank": rank,
        "sides": sides,
        "source": source,
        "keep": keep,
        "state": state,
        "bands": bands,
        "repeats": repeats,
        "optimizer": optimizer,
        "threads": threads,
        "device": device,
        "compile": compile or None,
    }
    chosen = {key: value for key, value in given.items() if value is not None}
    rivals = against.split(",") if against else None
    console = Console()
    try:
        if scaling is None:
            if values is not None:
                raise ValueError("values is for --scaling")
            names = check_contenders(["rgp", *(rivals or ["plain", "bound", "opacus-ghost", "opacus-hooks"])])
            settings = Settings(**chosen)  # type: ignore[arg-type]
            with progress(as_json) as say:
                report = run_bench(settings, names, say)
            show, draw = reports.show_bench, charts.draw_bench
        else:
            if "model" in chosen or "microbatch" in chosen:
                raise ValueError("scaling has its own model, a stack of linear layers, and does not cut the batch")
            names = check_contenders(["rgp", *(rivals or ["dpsgd", "opacus-hooks"])])
            size = chosen.get("batch", BASE.batch)
            settings = replace(BASE, **{**chosen, "microbatch": size})  # type: ignore[arg-type]
            points = [int(value) for value in values.split(",")] if values else None
            with progress(as_json) as say:
                report = run_scaling(scaling, settings, names, points, say)
            show, draw = reports.show_scaling, charts.draw_scaling
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error

    if as_json:
        print(json.dumps(report, indent=2))
    else:
        show(report, console)
    if chart is not None:
        draw(report, chart)
    if any("error" in row for row in report["rows"] if row["name"] == "rgp"):
        raise typer.Exit(1)


@contextlib.contextmanager
def progress(quiet: bool) -> Iterator[Callable[[str], None]]:
    """A line on the error stream that says what is being measured."""
    from rich.console import Console

    console = Console(stderr=True, quiet=quiet)
    with console.status("starting") as status:
        yield status.update
