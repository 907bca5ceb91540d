"""The ledger: an append-only record of every noisy release, on disk before the release is used.

One JSON line per drawn batch. The first line describes the run. Each line holds the hash of the line before it and its
own, so a line that was edited, repeated, reordered or removed is noticed; a cut tail is noticed through the count and
head hash that every checkpoint keeps. Epsilon is computed from these lines and from nothing else.

Formal guarantees (tests/test_ledger.py):
- when `append` returns, the line is durable: file and folder are synced
- a torn last line counts as a release: it may have happened
- any other damage is an error that names the line, never a smaller epsilon
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rgp.accounting import Event
from rgp.errors import LedgerError

FORMAT = 1
FILE = "ledger.jsonl"


def _hash(record: Mapping[str, Any]) -> str:
    body = {k: v for k, v in record.items() if k != "hash"}
    return hashlib.sha256(json.dumps(body, sort_keys=True, allow_nan=False).encode()).hexdigest()


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


class Ledger:
    """In memory, or in `folder`/ledger.jsonl."""

    def __init__(self, header: Mapping[str, Any], folder: str | os.PathLike[str] | None = None) -> None:
        self.path = None if folder is None else Path(folder) / FILE
        self.records: list[dict[str, Any]] = []
        self.repaired: str | None = None
        self._lines = 0
        self._head = ""
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists():
                raise LedgerError(
                    f"{self.path} exists: another run's releases are recorded there. Choose another folder, or go on with "
                    "that run: rgp.resume(folder, model, optimizer, dataset)."
                )
        self.header = self._write({"ledger": FORMAT, **header})

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> Ledger:
        """Read and verify a ledger, repairing a torn last line by counting it."""
        path = Path(folder) / FILE
        if not path.exists():
            raise LedgerError(
                f"{path} is missing. Without it nobody knows what was released, so the run cannot go on and has no epsilon. "
                "Put the file back, or start a new run in a new folder."
            )
        self = cls.__new__(cls)
        self.path, self.records, self.repaired, self._lines, self._head = path, [], None, 0, ""
        data = path.read_bytes()
        whole, newline, torn = data.rpartition(b"\n")
        if not newline:
            raise LedgerError(f"{path} has no complete line: its first line, which describes the run, was lost")
        for number, line in enumerate(whole.split(b"\n"), start=1):
            self._read(line, number)
        if torn:
            self._count_torn(len(whole) + 1)
        return self

    def _read(self, line: bytes, number: int) -> None:
        where = f"{self.path}, line {number}"
        try:
            record = json.loads(line)
            right = record["hash"] == _hash(record) and record["previous"] == self._head
        except (ValueError, KeyError, TypeError) as error:
            raise LedgerError(f"{where} is not a ledger line ({error}). Restore the file from a copy.") from error
        if not right:
            raise LedgerError(
                f"{where} does not fit the line before it: it was edited, repeated, moved, or a line is missing. Epsilon is "
                "not computed from a damaged ledger. Restore the file from a copy."
            )
        if number == 1:
            if record.get("ledger") != FORMAT:
                raise LedgerError(f"{where}: format {record.get('ledger')!r} is not {FORMAT}, which this version reads")
            self.header = record
        else:
            key = (record["step"], record["attempt"])
            if any((r["step"], r["attempt"]) == key for r in self.records):
                raise LedgerError(f"{where}: step {key[0]}, attempt {key[1]} is recorded twice")
            self.records.append(record)
        self._lines, self._head = number, record["hash"]

    def _count_torn(self, keep: int) -> None:
        """A release was being recorded when the process died. Whether it was used is unknown, so it is charged."""
        assert self.path is not None
        with open(self.path, "r+b") as file:
            file.truncate(keep)
            file.flush()
            os.fsync(file.fileno())
        step = 1 + max((r["step"] for r in self.records), default=-1)
        worst = self.header["worst"]
        self.append(step=step, attempt=0, digest=None, torn=True, **worst)
        self.repaired = f"the last line of {self.path} was torn; step {step} is counted as released"

    @property
    def head(self) -> str:
        return self._head

    @property
    def count(self) -> int:
        """Releases charged so far."""
        return len(self.records)

    def append(self, **record: Any) -> None:
        """Record one release; durable when this returns."""
        self.records.append(self._write(record))

    def _write(self, record: dict[str, Any]) -> dict[str, Any]:
        record = {**record, "previous": self._head}
        record["hash"] = _hash(record)
        if self.path is not None:
            new = not self.path.exists()
            with open(self.path, "ab") as file:
                file.write(json.dumps(record, sort_keys=True, allow_nan=False).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
            if new:
                sync_folder(self.path.parent)
        self._lines += 1
        self._head = record["hash"]
        return record

    def check_contains(self, count: int, head: str) -> None:
        """Refuse a ledger that was rolled back to before a checkpoint."""
        held = self.header["hash"] if count == 0 else (self.records[count - 1]["hash"] if count <= self.count else None)
        if held != head:
            raise LedgerError(
                f"the checkpoint knows {count} releases, and {self.path} does not hold them: it is an older copy or belongs "
                "to another run. Going on would under-report epsilon. Restore the newer ledger."
            )

    def of_step(self, step: int) -> list[dict[str, Any]]:
        return [r for r in self.records if r["step"] == step]

    def events(self) -> list[Event]:
        """What the accountant is told: one event per line, equal ones counted together."""
        settings = [(r["q"], r["sigma"], r.get("max_batch")) for r in self.records]
        size = self.header["dataset_size"]
        return [
            Event(q, sigma, count, max_batch=cap, dataset_size=size if cap is not None else None)
            for (q, sigma, cap), count in Counter(settings).items()
        ]
