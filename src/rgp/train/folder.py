"""A run's folder: what it holds, and what of it may be published.

config.yaml      the settings
ledger.jsonl     every noisy release (rgp.ledger)
summary.json     the numbers of the run
metrics.jsonl    per step: epsilon, accuracy on a published test split; and times, which hint at batch sizes (SECURITY.md)
private.jsonl    per step, what may NOT: training loss, accuracy on held-out private rows; more with --diagnostics
plan.json        what was trained, and how
model/           what may be published as a whole: weights and privacy card
report.html      for people
tensorboard/, tensorboard-private/    metrics.jsonl and private.jsonl again, with --tensorboard
latest, checkpoint-N/, initial.safetensors, secret.json, past-noise.*    to resume from (rgp.checkpoint); not to be published
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rgp import files
from rgp.train.errors import RunFolderError


class RunFolder:
    """Paths and small files of one run. Every file is replaced as a whole or appended to, never half rewritten."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.ledger = self.path / "ledger.jsonl"
        self.summary = self.path / "summary.json"
        self.metrics = self.path / "metrics.jsonl"
        self.private = self.path / "private.jsonl"
        self.plan = self.path / "plan.json"
        self.model = self.path / "model"
        self.report = self.path / "report.html"
        self.latest = self.path / "latest"

    # ------------------------------------------------------------------ whether it may be used

    def check_free(self) -> None:
        """Refuse a folder that is not empty."""
        if not self.path.exists():
            check_writable(self.path)
            return
        if not self.path.is_dir():
            raise RunFolderError(f"{self.path} is a file; choose another folder with --out")
        if not any(self.path.iterdir()):
            check_writable(self.path)
            return
        other = f"Choose another folder: --out {free_name(self.path)}"
        if not self.config.exists():
            raise RunFolderError(f"{self.path} exists and is not empty; it was not touched. {other}")
        if self.finished:
            raise RunFolderError(f"{self.path} holds a finished run; it was not touched. {other}")
        raise RunFolderError(
            f"{self.path} holds a run that is not finished; it was not touched. Resume it: "
            f"rgp train --resume --out {self.path}. Or c{other[1:]}"
        )

    def check_resumable(self) -> None:
        if not self.path.is_dir():
            raise RunFolderError(f"there is no run in {self.path} to resume; leave --resume out to start one")
        if not self.config.exists():
            raise RunFolderError(f"{self.path} holds no config.yaml, so it is not a run's folder; see --out")
        check_writable(self.path)

    @property
    def finished(self) -> bool:
        return self.summary.exists() and bool(self.read_json(self.summary).get("finished"))

    # ------------------------------------------------------------------ files

    def write_text(self, path: Path, text: str, *, mode: int = 0o666) -> None:
        files.write_text(path, text, mode=mode)

    def write_json(self, path: Path, content: Any, *, mode: int = 0o666) -> None:
        self.write_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n", mode=mode)

    @staticmethod
    def read_json(path: Path) -> Any:
        return json.loads(path.read_text(encoding="utf-8"))

    def append(self, path: Path, row: Mapping[str, Any]) -> None:
        mode = 0o600 if path == self.private else 0o666
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, mode)
        with open(handle, "w", encoding="utf-8") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")

    def rows(self, path: Path) -> list[dict[str, Any]]:
        return files.read_json_lines(path)

    def rewind(self, step: int) -> None:
        """Remove the rows after a checkpoint: those steps are taken again."""
        for path, mode in ((self.metrics, 0o666), (self.private, 0o600)):
            if path.exists():
                kept = [row for row in self.rows(path) if row["step"] <= step]
                self.write_text(path, "".join(json.dumps(row, allow_nan=False) + "\n" for row in kept), mode=mode)


class DetachedRunFolder(RunFolder):
    """The folder on all ranks of a distributed run but the first, which alone reads and writes files."""

    def write_text(self, path: Path, text: str, *, mode: int = 0o666) -> None: ...

    def append(self, path: Path, row: Mapping[str, Any]) -> None: ...

    def rows(self, path: Path) -> list[dict[str, Any]]:
        return []

    def rewind(self, step: int) -> None: ...


def check_writable(path: Path) -> None:
    """Raise PermissionError before any work if the folder, or the one it will be made in, cannot be written."""
    there = path
    while not there.exists():
        there = there.parent
    if not there.is_dir():
        raise RunFolderError(f"{path} cannot be made: {there} is a file")
    if not os.access(there, os.W_OK | os.X_OK):
        raise PermissionError(f"{there} cannot be written; choose another folder with --out")


def free_name(path: Path) -> Path:
    """`path`, or the first of path-2, path-3, ... that does not exist."""
    if not path.exists():
        return path
    number = 2
    while path.with_name(f"{path.name}-{number}").exists():
        number += 1
    return path.with_name(f"{path.name}-{number}")
