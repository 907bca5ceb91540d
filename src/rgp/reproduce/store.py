"""What is finished: one line of JSON per result. The settings' hash says which cell it is, wherever it was computed.

A share is what others have computed: a file of such lines, a file of {preset, set, seed, accuracy} as the scripts in
experiments/ write (lines named tuning/... are of other rows, and left out), or a folder whose folders are runs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rgp.files import read_json_lines
from rgp.reproduce.items import Cell, as_changes, fingerprint
from rgp.train import config
from rgp.train.config import ConfigError
from rgp.train.folder import RunFolder

FROM_SUMMARY = (
    *("accuracy", "accuracy_mismatched", "epsilon", "noise_multiplier", "steps", "held_out_rows"),
    *("wall_seconds", "peak_memory_bytes", "device"),
)


class Store:
    def __init__(self, results: Path, shares: Iterable[Path] = ()) -> None:
        self.path = results
        self._records: dict[tuple[str, str], dict[str, Any]] = {}
        self.folders: dict[str, Path] = {}  # finished runs elsewhere, by the hash of their settings
        self.left_out: list[str] = []
        for share in shares:
            if share.resolve() != results.resolve():
                self._take_share(share)
        for row in read_json_lines(results):
            self._take(row, str(results))

    def get(self, cell: Cell, kind: str | None = None) -> dict[str, Any] | None:
        return self._records.get((cell.key, kind or cell.record))

    def add(self, cell: Cell, kind: str, content: dict[str, Any]) -> dict[str, Any]:
        """Add a result, on disk before it is used."""
        about = {"preset": cell.preset, "set": dict(cell.changes), "seed": cell.seed} if cell.preset else {}
        row = {"key": cell.key, "measure": kind, **about, **content}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        torn = self.path.exists() and not self.path.read_bytes().endswith(b"\n") and self.path.stat().st_size > 0
        with self.path.open("a", encoding="utf-8") as file:
            file.write(("\n" if torn else "") + json.dumps(row, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._records[row["key"], kind] = row
        return row

    def _take_share(self, share: Path) -> None:
        if share.is_file():
            for row in read_json_lines(share):
                self._take(row, share.name)
        elif share.is_dir():
            for path in sorted(share.rglob("config.yaml")):
                self._take_run(path.parent)
        else:
            raise ValueError(f"--share {share}: there is neither a file of results nor a folder of runs")

    def _take(self, row: dict[str, Any], source: str) -> None:
        if "key" in row and "measure" in row:
            self._records[row["key"], row["measure"]] = {**row, "source": source}
            return
        if "preset" not in row or row.get("accuracy") is None or str(row.get("name", "")).startswith("tuning"):
            return
        changes = {**row.get("set", {}), "run.seed": row.get("seed")}
        try:
            # a result says what it was made with: the preset may have changed since
            key = row.get("settings") or fingerprint(config.load(preset=row["preset"], changes=as_changes(changes)))
        except ConfigError as error:
            self.left_out.append(f"{source}, {row.get('name', row['preset'])}: {error}")
            return
        self._records.setdefault((key, "accuracy"), {**row, "key": key, "measure": "accuracy", "source": source})

    def _take_run(self, path: Path) -> None:
        folder = RunFolder(path)
        try:
            if folder.finished:
                key = fingerprint(config.load(folder.config))
                self.folders[key] = path
                row = from_summary(folder.read_json(folder.summary))
                self._records.setdefault(
                    (key, "accuracy"), {**row, "key": key, "measure": "accuracy", "source": path.name}
                )
        except (ConfigError, ValueError, OSError) as error:
            self.left_out.append(f"{path}: {error}")


def from_summary(summary: dict[str, Any]) -> dict[str, Any]:
    return {name: summary[name] for name in FROM_SUMMARY if name in summary}
