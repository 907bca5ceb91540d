"""Files that are there completely or not at all: one way to write them, for ledgers, checkpoints, cards and downloads."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

PAST_NOISE = "past-noise."  # with the name of its checkpoint: a secret beside secret.json
NEW = ".new"  # what a file is called while it is being written


def sync_folder(folder: Path) -> None:
    """Make a file's creation or renaming durable; a no-op where folders cannot be opened."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)


def make_folder(folder: Path) -> None:
    """With its parents; the last one for the owner alone, because secrets will lie in it."""
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        sync_folder(folder.parent)


def remove(path: Path) -> None:
    """With what an interrupted write of it may have left."""
    for name in (path.name, path.name + NEW):
        path.with_name(name).unlink(missing_ok=True)


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """`write(new)` fills a new file beside `path`, which then takes its place. Durable when this returns."""
    new = path.with_name(path.name + NEW)
    write(new)
    with open(new, "r+b") as file:
        os.fsync(file.fileno())
    os.replace(new, path)
    sync_folder(path.parent)


def write_file(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    def write(new: Path) -> None:
        new.unlink(missing_ok=True)
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)

    write_atomically(path, write)


def write_json(path: Path, content: Any, *, mode: int = 0o666) -> None:
    write_file(path, json.dumps(content, indent=1).encode() + b"\n", mode=mode)
