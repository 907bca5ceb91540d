"""The `rgp analyze` command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from rgp.files import write_text


def register(app: typer.Typer) -> None:
    """Add `analyze` to a command line."""
    app.command("analyze")(analyze)


def analyze(
    run: Annotated[Path | None, typer.Argument(help="A run's folder, finished or not.")] = None,
    preset: Annotated[str | None, typer.Option(help="Instead of a run: settings that come with rgp.")] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one setting of the preset.")
    ] = None,
    least_squares: Annotated[
        bool,
        typer.Option("--least-squares", help="The paper's proposition and remark on least squares, on made-up data."),
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="With --least-squares: fewer and smaller problems.")] = False,
    rank: Annotated[int, typer.Option(help="Rank of the subspaces that gradients are projected on.")] = 8,
    batch: Annotated[int, typer.Option(help="Examples of the fixed batch whose gradient is measured.")] = 500,
    steps: Annotated[int | None, typer.Option(help="Stop after this many steps.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder to write to; by default RUN/analysis, runs/PRESET-analysis or runs/least-squares."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all numbers as one JSON object.")] = False,
) -> None:
    """Measure what RGP rests on: are gradients of low rank, and does their past tell where they point?

    Repeats a training from its settings and measures, at every epoch and on one fixed batch: the stable rank of each
    weight's gradient; what is left of it after projection on the principal subspace of the gradient itself, of the
    gradient one epoch earlier, of the update so far, and on the run's carriers; and how well these point the same way.

    This reads private gradients without noise. The numbers and figures are NOT covered by any guarantee.

    \b
    Examples:
      rgp analyze runs/digits-rgp
      rgp analyze --preset digits-rgp --set method.source=history
      rgp analyze --least-squares
    """
    from rgp.train.command import exit_codes

    with exit_codes():
        if (run is not None) + (preset is not None) + least_squares != 1:
            raise ValueError("give one of a run's folder, --preset NAME or --least-squares")
        if changes and preset is None:
            raise ValueError("--set changes a preset; a run is repeated with the settings that it had")
        if quick and not least_squares:
            raise ValueError("--quick goes with --least-squares; to shorten a training use --steps")
        say = (lambda text: typer.echo(text, err=True)) if not as_json else (lambda _: None)
        if least_squares:
            out = prepare(out or Path("runs") / "least-squares")
            found, figures = _least_squares(out, quick, say)
        else:
            target = prepare(out or (run / "analysis" if run is not None else Path("runs") / f"{preset}-analysis"))
            found, figures = _training(run, preset, changes or [], target, rank, batch, steps, say)
            out = target
        if as_json:
            typer.echo(json.dumps(found, allow_nan=False))
            return
        typer.echo(found["warning"])
        (_show_least_squares if least_squares else _show)(found)
        for path in (out / "analysis.json", *figures):
            typer.echo(str(path))


def prepare(folder: Path) -> Path:
    """A folder for private numbers, readable by its owner alone; never a model/, which is there to be published."""
    if "model" in folder.resolve().parts[-2:]:
        raise ValueError(
            f"--out {folder} lies in a folder model/, which is for publishing; this is private. Choose another."
        )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _training(
    run: Path | None,
    preset: str | None,
    changes: list[str],
    out: Path,
    rank: int,
    batch: int,
    steps: int | None,
    say: Any,
) -> tuple[dict[str, Any], list[Path]]:
    from rgp.analysis.figures import draw_analysis
    from rgp.analysis.follow import follow
    from rgp.train import config
    from rgp.train.folder import RunFolder

    model = None
    if run is not None:
        folder = RunFolder(run)
        if not folder.config.exists():
            raise ValueError(f"{run} is not a run's folder: it has no config.yaml")
        settings, model = config.load(folder.config), folder.model
    else:
        settings = config.load(preset=preset, changes=changes)
    found = {"run": None if run is None else str(run), "preset": preset}
    found |= follow(settings, rank=rank, batch=batch, steps=steps, model_folder=model, say=say)
    return found, _write(found, out, draw_analysis)


def _least_squares(out: Path, quick: bool, say: Any) -> tuple[dict[str, Any], list[Path]]:
    from rgp.analysis.figures import draw_rate
    from rgp.analysis.least_squares import study

    def draw(found: dict[str, Any], folder: Path) -> list[Path]:
        draw_rate(found, folder / "rate.png")
        return [folder / "rate.png"]

    found = study(quick=quick, say=say)
    return found, _write(found, out, draw)


def _write(found: dict[str, Any], out: Path, draw: Any) -> list[Path]:
    write_text(out / "analysis.json", json.dumps(found, indent=1, allow_nan=False) + "\n", mode=0o600)
    try:
        return draw(found, out)
    except ImportError:
        typer.echo("rgp: no figures: they need pip install 'rgp[plots]'", err=True)
        return []


def _show(found: dict[str, Any]) -> None:
    def last(values: list[float | None]) -> str:
        kept = [v for v in values if v is not None]
        return f"{kept[-1]:.3f}" if kept else "-"

    typer.echo(
        f"{'weight':<28} {'stable rank':>16} {'self':>7} {'hist.':>7} {'update':>7} {'carriers':>9} {'random':>7}"
    )
    for row in found["matrices"]:
        ranks, left = [v for v in row["stable_rank"] if v is not None], row["residual"]
        spread = f"{min(ranks):.1f} to {max(ranks):.1f}" if ranks else "-"
        cells = [f"{last(left['self']):>7} {last(left['historical']):>7} {last(left['update']):>7}"]
        cells += [f"{last(left['carriers']):>9} {left['random']:>7.3f}"]
        typer.echo(f"{row['name'][:28]:<28} {spread:>16} {' '.join(cells)}")
    typer.echo("stable rank over training; residuals at the last measurement (1: nothing of the gradient is kept)")
    if found["same_weights_as_run"] is not None:
        same = "the weights of the run" if found["same_weights_as_run"] else "other weights than the run: another draw"
        typer.echo(f"the repeated training gave {same}")


def _show_least_squares(found: dict[str, Any]) -> None:
    typer.echo("the largest parts outside the first gradient's subspace, relative to it:")
    for row in found["proposition"]:
        typer.echo(f"  {row['data']:<55} left {row['left']:.1e}  right {row['right']:.1e}  both {row['both']:.1e}")
    typer.echo("slopes of the excess risk, and of the remark's bound:")
    for row in found["rate"]:
        typer.echo(
            f"  {row['setting']:<22} {row['label']:<26} {row['slope']:+.2f} +- {row['slope_standard_error']:.2f}   "
            f"bound {row['promised_slope']:+.1f}"
        )
