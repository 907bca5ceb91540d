"""Files that exist completely or not at all: one way to write them, for ledgers, checkpoints, cards and downloads."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows: two processes on one file are then not prevented
    fcntl = None  # type: ignore[assignment]

PATIENCE = 8.0  # seconds: DataLoader workers of a killed process hold its locks until they notice
PAST_NOISE = "past-noise."  # followed by the name of its checkpoint; as secret as secret.json
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


def lock(handle: int, *, patience: float) -> bool:
    """Lock an open file or folder against other processes; False if another one holds it for so many seconds."""
    end = time.monotonic() + patience
    while fcntl is not None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > end:
                return False
            time.sleep(0.1)
        except OSError:  # a file system without locks
            break
    return True


def make_folder(folder: Path) -> None:
    """Make a folder and its parents; it is for the owner alone, because secrets will be kept in it."""
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        sync_folder(folder.parent)


def cache_folder() -> Path:
    """What can be made or fetched again is kept here."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "rgp"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", str(Path.home() / "AppData" / "Local"))) / "rgp"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rgp"


def remove(path: Path) -> None:
    """Remove a file, and what an interrupted write of it may have left."""
    for name in (path.name, path.name + NEW):
        path.with_name(name).unlink(missing_ok=True)


def write_atomically(path: Path, write: Callable[[Path], None], *, shared: bool = False) -> None:
    """`write(new)` fills a new file beside `path`, which then takes its place. Durable when this returns.

    shared: several processes may write this file at the same time, each under a name of its own; the last one stays.
    """
    new = path.with_name(f".{path.name}.{os.getpid()}{NEW}" if shared else path.name + NEW)
    try:
        write(new)
        with open(new, "r+b") as file:
            os.fsync(file.fileno())
        os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_file(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    def write(new: Path) -> None:
        new.unlink(missing_ok=True)
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)

    write_atomically(path, write)


def write_text(path: Path, text: str, *, mode: int = 0o666) -> None:
    write_file(path, text.encode(), mode=mode)


def write_json(path: Path, content: Any, *, mode: int = 0o666) -> None:
    write_text(path, json.dumps(content, indent=1) + "\n", mode=mode)


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file with one per line; without the lines that a crash cut short. Empty if there is no file."""
    found = []
    if path.is_file():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                found.append(row)
    return found


@contextmanager
def complete_folder(path: Path, *, mode: int = 0o755) -> Iterator[Path]:
    """An empty folder to fill; it takes the place of `path` at the end, and is removed after a failure."""
    folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        yield folder
        folder.chmod(mode)
        shutil.rmtree(path, ignore_errors=True)
        os.replace(folder, path)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    sync_folder(path.parent)


def bare_name(name: str) -> str:
    """A file's or folder's name without its path, which is not to be published; a name on the hub stays as it is."""
    path = Path(name).expanduser()
    return path.resolve().name if path.is_absolute() or path.exists() or name.startswith(".") else name
