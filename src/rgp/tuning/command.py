"""The command `rgp tune`. Exit codes and streams are those of `rgp train`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer

from rgp.train.command import Changes, complete_preset, exit_codes, spoken_warnings


def register(app: typer.Typer) -> None:
    """Add `tune` to a command line."""
    app.command("tune")(tune)


def tune(
    config: Annotated[Path | None, typer.Argument(help="A YAML file, as for rgp train.")] = None,
    preset: Annotated[
        str | None, typer.Option(help="Start from settings that come with rgp.", autocompletion=complete_preset)
    ] = None,
    changes: Changes = None,
    space: Annotated[
        Path | None, typer.Option(help="A YAML file that maps keys of the config to lists of values to try.")
    ] = None,
    trials: Annotated[
        float | None, typer.Option(help="Mean of the number of trials, which is itself random and secret. Default: 10.")
    ] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="The budget of the whole search. Default: budget.epsilon of the config.")
    ] = None,
    law: Annotated[
        str | None,
        typer.Option(
            help="Law of the number of trials: geometric (the default), logarithmic, poisson or negative-binomial:SHAPE."
        ),
    ] = None,
    score: Annotated[
        str | None,
        typer.Option(
            metavar="public|private",
            help="Right answers on public rows, or on private ones with noise. Default: public for data that rgp or the hub "
            "knows with a test split, private for files of your own.",
        ),
    ] = None,
    score_rows: Annotated[
        str | None,
        typer.Option(metavar="held-out|training", help="Which rows a private score counts. Default: held-out."),
    ] = None,
    score_noise: Annotated[
        float | None,
        typer.Option(help="Standard deviation of the noise on a private score. Default: 1% of the rows, at least 5."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder to make for what is released. Default: runs/tune- and the name of the preset or file."
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the interrupted search in --out.")] = False,
    keep_trials: Annotated[
        bool, typer.Option("--keep-trials", help="Do not remove the trials: they are secrets, and nothing covers them.")
    ] = False,
    plan_only: Annotated[
        bool, typer.Option("--plan", help="Print what the search would cost in noise, and stop.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else on stdout.")] = False,
) -> None:
    """Find good settings privately: the printed epsilon covers the search and its scores.

    A random number of private runs is trained, each with settings drawn from SPACE and noise of its own. The best one alone is
    released, with its card; the others are removed, and nothing that is published reveals anything about them.

    \b
    Examples:
      rgp tune --preset digits-rgp --space rates.yaml --trials 10 --epsilon 8
      rgp tune my.yaml --space rates.yaml --plan                what it would cost in noise
      rgp tune --resume --out runs/tune-digits-rgp              after an interruption
    where rates.yaml holds
      optimizer.lr: [0.1, 0.3, 1, 3]
    """
    with exit_codes():
        given = {
            "CONFIG": config,
            "--preset": preset,
            "--set": changes or None,
            "--space": space,
            "--trials": trials,
            "--epsilon": epsilon,
            "--law": law,
            "--score": score,
            "--score-rows": score_rows,
            "--score-noise": score_noise,
        }
        if resume:
            if out is None:
                raise ValueError("--resume needs --out, the folder of the search to resume")
            if named := [name for name, value in given.items() if value is not None]:
                raise ValueError(f"--resume continues a search as it was begun; leave out {', '.join(named)}")
        elif space is None:
            raise ValueError(
                "--space is missing: a YAML file that maps keys to lists, such as optimizer.lr: [0.1, 0.3, 1, 3]"
            )
        alone()

        from rgp.tuning import running
        from rgp.tuning.law import Law

        if out is None:
            out = Path("runs") / f"tune-{config.stem if config is not None else preset or 'run'}"
        if resume:
            plan = running.read_plan(out)
        else:
            from rgp.train import config as configs

            def load(more: list[str]) -> Any:
                return configs.load(config, preset=preset, changes=[*(changes or ()), *more])

            assert space is not None
            plan = running.plan_search(
                load,
                running.read_space(space),
                law=Law.named(law or "geometric", 10 if trials is None else trials),
                epsilon=epsilon,
                score=score,
                score_rows=score_rows or "held-out",
                score_noise=score_noise,
            )
        if plan_only:
            typer.echo(json.dumps(shown(plan.to_dict()), allow_nan=False) if as_json else plan.words())
            return
        typer.echo(plan.words(), err=True)
        if not resume:
            running.begin(out, load([]), plan)
        with spoken_warnings(Once()):
            result = running.go_on(out, keep_trials=keep_trials, say=lambda text: typer.echo(text, err=True))
        if as_json:
            typer.echo(json.dumps({**shown(result), "out": str(out)}, allow_nan=False))
        else:
            show(result, out)


class Once:
    """Says what every trial warns of one time."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            typer.echo(text, err=True)


def alone() -> None:
    """Refuse several ranks: each would draw trials of its own."""
    import os

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("rgp tune runs in one process; start it without torchrun")


def shown(result: dict[str, Any]) -> dict[str, Any]:
    """What is printed: all of it public. `trials` is the law, never the number that was drawn."""
    return {name: value for name, value in result.items() if name not in ("shapes", "finished")}


def show(result: dict[str, Any], out: Path) -> None:
    from rgp.rounding import round_up

    best = result["best"]
    if best is None:
        typer.echo("best      none: the law drew no trial, so nothing was released")
    else:
        settings = ", ".join(f"{key} = {value}" for key, value in best["settings"].items())
        typer.echo(f"best      {settings}")
        noisy = " (with noise)" if result["score"]["kind"] == "private" else ""
        share = math.floor(best["score"] * 1e4 + 0.5) / 1e4
        score = result["score"]
        typer.echo(f"score     {share:.4f}{noisy} of {score['rows']:,} {score['kind']} {score['unit']}s")
    typer.echo(
        f"privacy   epsilon {round_up(result['epsilon'])} at delta {result['delta']:g} for the whole search, scores included"
    )
    if best is not None:
        typer.echo(f"model     {out / 'model'}")
    typer.echo(f"report    {out / 'report.html'}")
