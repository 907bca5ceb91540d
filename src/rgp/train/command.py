"""The commands `rgp train` and `rgp eval`.

Exit codes: 0 done, 1 failed, 2 wrong use or config, 3 disk full or not writable, 130 interrupted (143 by SIGTERM), 141 the
reader of the output has gone.
Results go to stdout, everything else to stderr; with --json, stdout holds one JSON object.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

WRONG_USE, FAILED, NO_DISK, INTERRUPTED, UNREAD = 2, 1, 3, 130, 141
_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO}


def register(app: typer.Typer) -> None:
    """Add the commands to a command line."""
    app.command("train")(train)
    app.command("eval")(evaluate)


def complete_preset(incomplete: str) -> list[str]:
    from rgp.train.config import presets

    return [name for name in presets() if name.startswith(incomplete)]


def complete_set(incomplete: str) -> list[str]:
    from rgp.train.config import KEYS

    return [f"{key}=" for key in KEYS if key.startswith(incomplete)]


Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change one setting; may be repeated.", autocompletion=complete_set
    ),
]


def train(
    config: Annotated[Path | None, typer.Argument(help="A YAML file; see --print-config for what it may hold.")] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            help="Start from settings that come with rgp; --presets lists them.", autocompletion=complete_preset
        ),
    ] = None,
    changes: Changes = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder to make for this run. Default: runs/ and the name of the preset or of the config file."
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Resume the interrupted run in --out from its last checkpoint."),
    ] = False,
    diagnostics: Annotated[
        bool,
        typer.Option(
            "--diagnostics",
            help="Also keep clip fractions, gradient norms and NaN counts, in private.jsonl: not to be published.",
        ),
    ] = False,
    tensorboard: Annotated[
        bool,
        typer.Option(
            "--tensorboard",
            help="Also write event files: tensorboard/, and tensorboard-private/ for what must not be published.",
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the run's summary as JSON, and nothing else on stdout.")
    ] = False,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print all settings with their meaning, and stop.")
    ] = False,
    list_presets: Annotated[bool, typer.Option("--presets", help="List the presets, and stop.")] = False,
) -> None:
    """Train a model privately: data in, weights with a proven guarantee out.

    Settings come from a preset, then a config file, then --set; later ones win. All of them are checked before any work
    starts. The run's folder then holds the model with its privacy card (model/), a report for people (report.html) and
    everything needed to resume after an interruption. Ctrl-C saves the run and says how to resume it.

    \b
    Examples:
      rgp train --preset digits-rgp                             a first private model, in seconds
      rgp train --preset digits-rgp --set budget.epsilon=3      the same with more privacy
      rgp train --preset cifar10-mini-rgp --print-config > my.yaml
      rgp train my.yaml --out runs/mine                         with your own settings
      rgp train --resume --out runs/mine                        after an interruption
      torchrun --nproc-per-node 2 -m rgp train --preset digits-rgp       by two processes together
    """
    with exit_codes():
        from rgp.train import config as configs

        if list_presets:
            return show_presets(as_json)
        given = None
        if not resume or config is not None or preset is not None or changes:
            given = configs.load(config, preset=preset, changes=changes or ())
        if print_config:
            if given is None:
                raise ValueError("--print-config prints a preset or a config file; give one")
            typer.echo(json.dumps(given.to_dict()) if as_json else given.to_yaml().rstrip())
            return None
        if out is None:
            if resume:
                raise ValueError("--resume needs --out, the folder of the run to resume")
            out = Path("runs") / (config.stem if config is not None else preset or "run")

        from rgp.distributed import launched
        from rgp.train import progress, runner

        with launched() as ranks:
            settings = runner.resumed_config(out, given, ranks) if resume else given
            assert settings is not None
            shown = progress.for_stream() if ranks.first else progress.Silent()
            with spoken_warnings(shown):
                summary = runner.train(
                    settings,
                    out,
                    progress=shown,
                    resume=resume,
                    diagnostics=diagnostics,
                    tensorboard=tensorboard,
                    ranks=ranks,
                )
        if not ranks.first:
            return None
        if as_json:
            typer.echo(json.dumps(summary, allow_nan=False))
        else:
            show_summary(summary, out)
    return None


def evaluate(
    folder: Annotated[Path, typer.Argument(help="A run's folder.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure a run's model on its held-out rows, and compute epsilon again from its ledger.

    An unfinished run is measured at its last checkpoint.

    \b
    Examples:
      rgp eval runs/digits-rgp
      rgp eval runs/digits-rgp --json
    """
    with exit_codes():
        from rgp.rounding import round_up
        from rgp.train.evaluation import evaluate_run

        result = evaluate_run(folder)
        if as_json:
            typer.echo(json.dumps(result, allow_nan=False))
            return
        typer.echo(f"accuracy {result['accuracy']:.4f} and loss {result['loss']:.4f} on {result['rows']} held-out rows")
        for name, value in extra_scores(result):
            typer.echo(f"{name} {value:.4f}")
        if not result["accuracy_is_publishable"]:
            typer.echo("  These rows are private data: the guarantee does not cover numbers computed from them.")
        if result["epsilon"] is None:
            typer.echo("NOT PRIVATE: the ledger records releases without noise")
        else:
            spent, releases = round_up(result["epsilon"]), result["releases"]
            typer.echo(f"epsilon {spent} at delta {result['delta']:g}, from {releases} releases on record")


# ---------------------------------------------------------------------- what is shown


def show_presets(as_json: bool) -> None:
    from rgp.train.config import about_preset, presets

    about = {name: about_preset(name) for name in presets()}
    if as_json:
        typer.echo(json.dumps(about))
        return
    width = max(map(len, about))
    for name, line in about.items():
        typer.echo(f"{name:<{width}}  {line}")


def extra_scores(result: dict[str, Any]) -> list[tuple[str, float]]:
    """What is measured besides accuracy: perplexity, and accuracy on further test sets."""
    return [(k, v) for k, v in result.items() if k in ("perplexity", "accuracy_mismatched")]


def show_summary(summary: dict[str, Any], out: Path) -> None:
    from rgp.cards import short_unit
    from rgp.rounding import round_up

    accuracy = "unknown" if summary["accuracy"] is None else f"{summary['accuracy']:.4f}"
    count = summary["held_out_rows"]
    typer.echo(f"accuracy  {accuracy} on {'' if count is None else f'{count} '}held-out rows")
    for name, value in extra_scores(summary):
        typer.echo(f"{name}  {value:.4f}")
    if summary["epsilon"] is None:
        typer.echo("privacy   NONE: trained without noise")
    else:
        spent = round_up(summary["epsilon"])
        typer.echo(
            f"privacy   epsilon {spent} at delta {summary['delta']:g}, for {short_unit(summary['unit'])} added or removed"
        )
        if summary["seed"] is not None:
            typer.echo("          a seed was given: no protection against whoever knows it")
    typer.echo(
        f"cost      {summary['wall_seconds']:.1f} s, {summary['peak_memory_bytes'] / 2**20:.0f} MiB for training"
    )
    if summary["ranks"] > 1:
        thin, plain = summary["bytes_per_step"], summary["plain_bytes_per_step"]
        typer.echo(
            f"ranks     {summary['ranks']}; {thin / 1024:,.1f} KiB per step between them, {plain / thin:.1f} times less than "
            "plain DistributedDataParallel"
        )
    typer.echo(f"model     {out / 'model'}")
    if (out / "report.html").exists():
        typer.echo(f"report    {out / 'report.html'}")


@contextmanager
def spoken_warnings(shown: Any) -> Iterator[None]:
    """Show each warning as one line, past the progress bar."""
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.showwarning = lambda message, *_, **__: shown.say(f"rgp: warning: {message}")
        yield


# ---------------------------------------------------------------------- what went wrong


@contextmanager
def exit_codes() -> Iterator[None]:
    """Turn every failure into a clear message and an exit code that means something."""
    from rgp.errors import LedgerError, RankError, UnsupportedError, WrongUseError
    from rgp.train.errors import DemoError, Interrupted

    try:
        yield
    except Interrupted as error:
        _stop(str(error), 128 + error.signal, error)
    except KeyboardInterrupt as error:
        _stop("interrupted; what was saved before is kept", INTERRUPTED, error)
    except BrokenPipeError as error:  # the reader of our output, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nor may the interpreter's last flush complain
        raise SystemExit(UNREAD) from error
    except (ValueError, FileNotFoundError) as error:  # configs, folders, data: what the user can correct
        _stop(_words(error), WRONG_USE, error)
    except Exception as error:
        if disk := disk_error(error):
            before_work = isinstance(disk, PermissionError) and disk.errno is None  # folder.check_writable says all
            _stop(_words(disk) if before_work else f"{_words(disk)}. {_KEPT}", NO_DISK, error)
        if isinstance(
            error, (OSError, LedgerError, RankError, UnsupportedError, WrongUseError, ImportError, DemoError)
        ):
            _stop(_words(error), FAILED, error)
        raise


_KEPT = "What was saved before is kept: make room or give access, then resume: rgp train --resume --out FOLDER"


def disk_error(error: BaseException | None) -> BaseException | None:
    """The disk error behind an error, if there is one."""
    while error is not None:
        if isinstance(error, OSError) and (error.errno in _DISK or isinstance(error, PermissionError)):
            return error
        if type(error).__name__ == "SafetensorError" and "os error 28" in str(error):  # not an OSError, but a full disk
            return OSError(errno.ENOSPC, "No space left on device")
        error = error.__cause__ or error.__context__
    return None


def _words(error: BaseException) -> str:
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk is full{f' ({error.filename})' if error.filename else ''}"
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror


def _stop(message: str, code: int, error: BaseException) -> None:
    """Report and exit. What all ranks of a machine find is reported by its first rank; what only one rank knows, by that one."""
    shared = isinstance(error, (ValueError, FileNotFoundError, KeyboardInterrupt)) or code > 128
    if not getattr(error, "told", False) and not (shared and os.environ.get("LOCAL_RANK", "0") != "0"):
        rank = os.environ.get("RANK", "0")
        typer.echo(f"rgp{'' if rank == '0' else f' (rank {rank})'}: {message}", err=True)
    raise typer.Exit(code) from error
