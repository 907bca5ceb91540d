"""The `rgp doctor` command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer


def register(app: typer.Typer) -> None:
    """Add `doctor` to a command line."""
    app.command("doctor")(doctor)


def doctor(
    folder: Annotated[Path, typer.Option(help="Where runs would be kept: can a ledger be written there?")] = Path("."),
    device: Annotated[
        str | None, typer.Option(help="For the self-test: cpu, cuda, mps. Default: as rgp train.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Is this installation fit for private training? Versions, device, disk, and a self-test in seconds.

    The self-test looks at what the guarantee rests on: the sampling of batches, the noise of a step, per-example gradients
    against autograd, epsilon against its closed form, and the ledger on disk. If any of it fails, the exit code is 1.

    \b
    Examples:
      rgp doctor
      rgp doctor --folder /data/runs --json
    """
    from rgp.doctor.facts import installed, machine, writable
    from rgp.doctor.selftest import self_test

    about = machine()
    found: dict[str, Any] = {**about, **installed(), "write": writable(folder)}
    tests = self_test(device or about["device"])
    found["self_test"] = [test.to_json() for test in tests]
    found["ok"] = found["write"]["ok"] and all(test.ok for test in tests)
    typer.echo(json.dumps(found, allow_nan=False) if as_json else text(found))
    if not found["ok"]:
        raise typer.Exit(1)


def text(found: dict[str, Any]) -> str:
    """The findings for people; plain lines, to be pasted into a report of a bug."""
    versions = ", ".join(f"{name} {number}" for name, number in found["packages"].items() if number)
    full = [name for name, lacks in found["extras"].items() if not lacks]
    gpus = ", ".join(found["gpus"]) or ("none that CUDA sees" + ("; MPS is there" if found["mps"] else ""))
    write = found["write"]
    disk = f"yes, {write['free_bytes'] / 1e9:.0f} GB free" if write["ok"] else f"NO: {write['error']}"
    lines = [
        f"rgp        {found['rgp']}, Python {found['python']}, {found['system']}, {found['cores']} cores",
        f"device     {found['device']}; GPUs: {gpus}",
        f"compiled   {'convolutions in C++' if found['native_convolutions'] else 'nothing; torch does it all'}",
        f"installed  {versions}",
        f"extras     complete: {', '.join(full) or 'none'}",
        *(f"           {name} lacks {', '.join(lacks)}" for name, lacks in found["extras"].items() if lacks),
        f"can write  {disk} ({write['folder']})",
        "self-test",
        *(
            f"  {'ok  ' if test['ok'] else 'FAIL'}  {test['name']:<10}  {test['seen']} ({test['seconds']:.1f} s)"
            for test in found["self_test"]
        ),
        "All is well." if found["ok"] else "Do not train on private data with this installation before it is mended.",
    ]
    return "\n".join(lines)
