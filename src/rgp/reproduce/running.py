"""The cells that are not finished yet, one after the other. One that fails does not stop the others.

A cell's run lies in OUT/runs/HASH, a run's folder like any other: an interrupted one resumes from its checkpoint.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rgp._version import __version__
from rgp.reproduce.items import Cell
from rgp.reproduce.store import Store, from_summary
from rgp.train import language, runner
from rgp.train.config import Config, ConfigError
from rgp.train.errors import Interrupted, RunFolderError
from rgp.train.folder import RunFolder, free_name
from rgp.train.progress import Progress, Silent
from rgp.train.sections import IMAGE_MODELS, IMAGES, TEXTS, WEIGHTS

UNAVAILABLE = "not run here: data unavailable"


@dataclass
class Work:
    """Everything that running a cell needs besides the cell."""

    store: Store
    out: Path
    progress: Progress
    data: Path | None = None
    resume: bool = False
    deadline: float | None = None  # of time.monotonic(), after which nothing new is started

    def run(self, cells: Iterable[Cell]) -> dict[str, str]:
        """Name of a cell -> why it has no result, for those that have none."""
        wanted = {(cell.key, cell.record): cell for cell in cells if self.store.get(cell) is None}
        problems: dict[str, str] = {}
        short_first = sorted(
            wanted.values(), key=lambda cell: math.inf if cell.column.minutes is None else cell.column.minutes
        )
        for number, cell in enumerate(short_first, 1):
            why = unavailable(cell, self.data)
            if why is not None:
                problems[cell.name] = why
            elif self.deadline is not None and time.monotonic() >= self.deadline:
                problems[cell.name] = "not started: the time given was over"
            else:
                self.progress.say(f"\n{cell.name} ({number} of {len(wanted)})")
                try:
                    self.measure(cell)
                except Interrupted as error:
                    error.args = (
                        f"stopped; {cell.name} is saved, finished ones are kept. Resume with the same command and --resume",
                    )
                    raise
                except Exception as error:
                    from rgp.train.command import disk_error

                    if disk_error(error):
                        raise
                    reason = " ".join(str(error).split()) or type(error).__name__
                    problems[cell.name] = f"failed: {reason}"
                    self.progress.say(f"{cell.name} failed: {reason}")
        return problems

    def measure(self, cell: Cell) -> None:
        began = time.monotonic()
        if cell.record == "accuracy":
            self.trained(cell)
            return
        content = {"attack": self.attacked, "spectra": self.followed, "cost": self.costs}[cell.record](cell)
        seconds = round(time.monotonic() - began, 1)
        self.store.add(cell, cell.record, {**content, "wall_seconds": seconds, **_made()})

    # ------------------------------------------------------------------ kinds of cells

    def trained(self, cell: Cell) -> Path:
        """The folder of the cell's finished run."""
        key = cell.key
        if key in self.store.folders:
            return self.store.folders[key]
        path = self.out / "runs" / key
        folder = RunFolder(path)
        if path.exists() and not folder.config.exists():  # failed before it began: nothing was released
            path.rename(free_name(path.with_name(f"{key}-failed")))
        if not path.exists():
            summary = runner.train(cell.settings(self.data), path, progress=self.progress)
        elif folder.finished:
            summary = folder.read_json(folder.summary)
        elif self.resume:
            settings = runner.resumed_config(path, None)
            summary = runner.train(settings, path, progress=self.progress, resume=True)
        else:
            raise RunFolderError(f"the run in {path} is not finished; --resume resumes it")
        for checkpoint in path.glob("checkpoint-*"):  # of no use to a finished run, and as large as three models
            shutil.rmtree(checkpoint)
        if self.store.get(cell, "accuracy") is None:
            self.store.add(cell, "accuracy", {**from_summary(summary), **_made()})
        return path

    def attacked(self, cell: Cell) -> dict[str, Any]:
        from rgp.attacks.attacking import attack_run

        found = attack_run(self.trained(cell), progress=_NoBar(self.progress))
        kept = ("success_rate", "standard_error", "auc", "tpr_at_0.01", "members", "nonmembers")
        return {name: found[name] for name in kept if name in found}

    def followed(self, cell: Cell) -> dict[str, Any]:
        from rgp.analysis.follow import follow

        found = follow(cell.settings(self.data), **cell.options, say=self.progress.say)
        matrices = [
            {
                "name": m["name"],
                "shape": m["shape"],
                "stable_rank": _rounded(m["stable_rank"]),
                "residual": {
                    "random": round(m["residual"]["random"], 4),
                    **{kind: _rounded(m["residual"][kind]) for kind in ("self", "historical", "update")},
                },
            }
            for m in found["matrices"]
        ]
        kept = {name: found[name] for name in ("warning", "rank", "batch", "steps")}
        return {**kept, "epochs": _rounded(found["epochs"]), "matrices": matrices}

    def costs(self, cell: Cell) -> dict[str, Any]:
        from rgp.bench.scaling import BASE, run_scaling

        contenders = ["rgp", "dpsgd"]
        if importlib.util.find_spec("opacus") is not None:
            contenders.append("opacus-hooks")
        settings = replace(BASE, repeats=cell.options.get("repeats", BASE.repeats))
        found = run_scaling(cell.column.name, settings, contenders, cell.options.get("values"), self.progress.say)
        return {name: found[name] for name in ("axis", "values", "rows", "machine", "commit")}


class _NoBar(Silent):
    """Passes messages on, and shows no progress bar."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def say(self, text: str) -> None:
        self._progress.say(text)


def unavailable(cell: Cell, data: Path | None) -> str | None:
    """Why a cell cannot run here, if it cannot."""
    if not cell.exists:
        return f"not run: there is no preset {cell.preset}"
    try:
        why = None if cell.measure == "cost" else missing(cell.settings(data))
    except ConfigError as error:
        return f"failed: {' '.join(str(error).split())}"
    return None if why is None else f"{UNAVAILABLE} ({why})"


def missing(settings: Config) -> str | None:
    """What a run needs and this machine does not have, in a few words; None if everything is here."""
    return missing_data(settings.data.name, settings.data.folder) or missing_weights(settings)


def missing_data(name: str, folder: str | None) -> str | None:
    from rgp.data import data_folder

    where = data_folder(folder)
    if name == "digits":
        return None if importlib.util.find_spec("sklearn") else "digits need scikit-learn"
    if name in IMAGES:
        there = (where / f"{name}.npz").is_file() or (name == "svhn" and (where / name / "train_32x32.mat").is_file())
        return None if there else f"{name} is not in the data folder"
    if name in TEXTS:
        return None if (where / name).is_dir() else f"{name} is not in the data folder"
    return None


def missing_weights(settings: Config) -> str | None:
    name = settings.model.name
    if name in IMAGE_MODELS or Path(name).expanduser().is_dir():
        return None
    if importlib.util.find_spec("transformers") is None:
        return f"{name} needs transformers"
    if name in WEIGHTS:
        try:
            language.weights_folder(settings)
        except ConfigError:
            return f"the weights of {name} are not in the data folder"
        return None
    return None if _on_hub(name) else f"the weights of {name} are not here, and the hub cannot be reached"


@functools.cache
def _on_hub(name: str) -> bool:
    """Whether the model is in the library's own cache or on the hub, which is asked once, with a short timeout."""
    from huggingface_hub import HfApi, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        return True
    try:
        HfApi().model_info(name, timeout=10.0)
    except Exception:  # no network, no such model, no access: all the same here
        return False
    return True


def _made() -> dict[str, str]:
    return {"version": __version__, "date": datetime.now(timezone.utc).isoformat(timespec="seconds")}


def _rounded(values: list[float | None]) -> list[float | None]:
    return [None if value is None else round(value, 4) for value in values]
