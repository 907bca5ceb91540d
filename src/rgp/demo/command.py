"""The `rgp demo` command. Exit codes: those of `rgp train`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add `demo` to a command line."""
    app.command("demo")(demo)


def demo(
    out: Annotated[
        Path | None,
        typer.Option(help="A new folder for the runs and the report. Default: runs/demo, or -2, -3, ..."),
    ] = None,
    epsilon: Annotated[float, typer.Option(help="The budget of the two private runs.")] = 8.0,
    seed: Annotated[
        int | None, typer.Option(help="Repeat a demo exactly. Whoever knows the seed can undo the protection.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """See what private training costs: one small network, trained without privacy, with DP-SGD and with RGP.

    Trains for real, on scikit-learn's handwritten digits; attacks all three models with the membership test; measures one step
    of a transformer with 19 million parameters in the same three ways; writes one report. Two minutes on two cores.
    """
    from rgp.train.command import exit_codes

    with exit_codes():
        from rgp.demo.running import run_demo, show_demo

        result = run_demo(out, epsilon=epsilon, seed=seed)
        if as_json:
            typer.echo(json.dumps(result, allow_nan=False))
        else:
            show_demo(result)
