"""The `rgp report` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add `report` to a command line."""
    app.command("report")(report)


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, such as runs/digits-rgp.")],
    out: Annotated[
        Path | None,
        typer.Option(help="File to write; by default report.html in the run's folder, or here for several runs."),
    ] = None,
) -> None:
    """Write one HTML page about a run, or a comparison of several. It needs no network to be read.

    Parts that the guarantee does not cover are marked: publish a run's folder model/, not this page. The page of a search
    (rgp tune) has no such parts.

    \b
    Examples:
      rgp report runs/digits-rgp
      rgp report runs/demo/rgp runs/demo/dpsgd --out compare.html
    """
    from rgp.report import write

    try:
        path = write(runs, out or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html")))
    except OSError as error:
        raise ValueError(f"the report cannot be written: {error}. Choose another place with --out.") from error
    typer.echo(str(path))
