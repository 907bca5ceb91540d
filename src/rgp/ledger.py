"""The ledger: an append-only record of every noisy release, on disk before the release is used.

One JSON line per drawn batch. The first line describes the run. Each line holds the hash of the line before it and its
own, so a line that was edited, repeated, reordered or removed is noticed; a cut tail is noticed through the count and
head hash that every checkpoint keeps. Epsilon is computed from these lines and from nothing else.

Formal guarantees (tests/test_ledger.py):
- when `append` returns, the line is durable: file and folder are synced. When it raises, the release is not on record
  and must not be used; the next `append` first removes what the failed one may have left
- a torn last line counts as a release: it may have happened
- any other damage is an error that names the line, never a smaller epsilon
- one process at a time appends; reading changes nothing on disk
"""

from __future__ import annotations

import hashlib
import json
import os
import weakref
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rgp.accounting import Event
from rgp.errors import LedgerError
from rgp.files import PATIENCE, lock, make_folder, sync_folder, write_file

FORMAT = 1
FILE = "ledger.jsonl"

_appending: weakref.WeakValueDictionary[str, Ledger] = weakref.WeakValueDictionary()  # in this process


def _hash(record: Mapping[str, Any]) -> str:
    body = {k: v for k, v in record.items() if k != "hash"}
    return hashlib.sha256(json.dumps(body, sort_keys=True, allow_nan=False).encode()).hexdigest()


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, sort_keys=True, allow_nan=False).encode() + b"\n"


class Ledger:
    """In memory, or in `folder`/ledger.jsonl."""

    def __init__(self, header: Mapping[str, Any], folder: str | os.PathLike[str] | None = None) -> None:
        self._clear()
        self.header = self._write({"ledger": FORMAT, **header})
        if folder is not None:
            self.move_to(folder)

    def _clear(self) -> None:
        self.path: Path | None = None
        self.records: list[dict[str, Any]] = []
        self.repaired: str | None = None  # what was repaired when the ledger was opened
        self._by_step: dict[int, list[int]] = {}  # step -> positions in records
        self._torn_attempt = -1  # the largest attempt that a torn line can have been
        self._torn: list[int] = []  # positions of torn lines
        self._head = ""
        self._file: int | None = None
        self._size = 0  # number of bytes on disk that are known to be good
        self._tried = b""  # what an append that did not return was writing after them
        self._why_closed = ""
        self._process = os.getpid()

    @classmethod
    def open(cls, folder: str | os.PathLike[str], *, append: bool = False) -> Ledger:
        """Read and verify a ledger; a torn last line is counted as a release.

        Reading changes nothing on disk and may be done while a run appends. With `append`, for whoever
        continues the run: the torn line is also replaced on disk, and nobody else may append from then on.
        """
        path = Path(folder) / FILE
        if not path.exists():
            raise LedgerError(
                f"{path} is missing. Without it there is no record of what was released, so the run cannot continue and has no "
                "epsilon. Put the file back, or start a new run in a new folder."
            )
        self = cls.__new__(cls)
        self._clear()
        self.path = path
        try:
            if append:
                self._take_over()
            else:
                self._why_closed = "it was opened for reading"
            self._load(path.read_bytes())
        except BaseException:
            self.close()
            raise
        return self

    @classmethod
    def from_text(cls, data: bytes) -> Ledger:
        """A ledger in memory with the lines of another one."""
        self = cls.__new__(cls)
        self._clear()
        self._load(data)
        return self

    def text(self) -> bytes:
        """All lines, as they are on disk."""
        return b"".join(map(_line, [self.header, *self.records]))

    def _load(self, data: bytes) -> None:
        whole, newline, torn = data.rpartition(b"\n")
        if not newline:
            raise LedgerError(
                f"{self.path} has no complete line: its first line, which describes the run, is written before any "
                "release. If no checkpoint lies next to it, nothing was released: delete it and start again."
            )
        lines = whole.split(b"\n")
        if not torn and len(lines) > 1 and not _is_json(lines[-1]):
            torn = lines.pop()  # a page of it never reached the disk
        for number, line in enumerate(lines, start=1):
            self._read(line, number)
            self._size += len(line) + 1
        self._tried = data[self._size :]
        if torn:
            self._count_torn()

    def _read(self, line: bytes, number: int) -> None:
        where = f"{self.path}, line {number}"
        try:
            record = json.loads(line)
            right = record["hash"] == _hash(record) and record["previous"] == self._head
        except (ValueError, KeyError, TypeError) as error:
            raise LedgerError(f"{where} is not a ledger line ({error}). Restore the file from a copy.") from error
        if not right:
            raise LedgerError(
                f"{where} does not fit the line before it: it was edited, repeated, moved, or a line is missing. "
                "Epsilon is not computed from a damaged ledger. Restore the file from a copy."
            )
        if number == 1:
            if record.get("ledger") != FORMAT:
                raise LedgerError(f"{where}: format {record.get('ledger')!r} is not {FORMAT}, which this version reads")
            self.header = record
        else:
            same = [] if record.get("torn") else self.of_step(record["step"])
            if any(r["attempt"] == record["attempt"] for r in same):
                raise LedgerError(f"{where}: step {record['step']}, attempt {record['attempt']} is recorded twice")
            self._keep(record)
        self._head = record["hash"]

    def _count_torn(self) -> None:
        """A release was being recorded when the process died. Whether it was used is unknown, so it is charged.

        Nor is it known which step it was (a repeated one, perhaps). Its attempt is set to the largest it can have been,
        and `fresh_attempt` stays above that for every step: its noise is never drawn again.
        """
        attempt = 1 + max((r["attempt"] for r in self.records), default=-1)
        record = {"step": None, "attempt": attempt, "digest": None, "torn": True, **self.header["worst"]}
        self._keep(self._write(record))
        self.repaired = f"the last line of {self.path} was torn; the release that it may stand for is counted"

    # ------------------------------------------------------------------ the releases

    @property
    def head(self) -> str:
        return self._head

    @property
    def count(self) -> int:
        """Releases charged so far."""
        return len(self.records)

    def of_step(self, step: int, *, since: int = 0) -> list[dict[str, Any]]:
        """The releases on record for a step. since: how many lines at the beginning of the ledger to leave out."""
        return [self.records[i] for i in self._by_step.get(step, ()) if i >= since]

    def fresh_attempt(self, step: int) -> int:
        """The number of an attempt at this step whose draw and noise were certainly not used before."""
        return 1 + max([self._torn_attempt, *(r["attempt"] for r in self.of_step(step))])

    def drawn_before(self, step: int, attempt: int) -> bool:
        """Whether a release of this step may be on record before that of this attempt; a later one does not count.

        A torn line can stand for the first release of the step that follows the last one on record when it was torn.
        """
        own = self._by_step.get(step, [])
        here = next((i for i in own if self.records[i]["attempt"] == attempt), len(self.records))
        since = self._by_step.get(step - 1, [-1])[0]
        return any(i < here for i in own) or any(since < i < here for i in self._torn)

    def events(self, group: int | None = None, *, deal: str | None = None) -> list[Event]:
        """All releases, for the accountant: one event per line, equal ones counted together; and those of earlier runs.

        A line with a group is charged to that group alone, one without (independent noise; a torn line) to everyone. The
        result is the most that a unit of any group was charged; with `group`, what the units of that group were charged. Where
        groups were dealt anew (a run whose secret was lost), a unit may have been in the worst group of each deal: they add up.
        `deal`: the one that `group` is a group of, by default the first.
        """
        charged: dict[str | None, dict[int | None, Counter[tuple[Any, ...]]]] = {}
        for r in self.records:
            key = (r["q"], r["sigma"], r.get("max_batch"))
            charged.setdefault(r.get("deal"), {}).setdefault(r.get("group"), Counter())[key] += 1
        total: Counter[tuple[Any, ...]] = Counter()
        for dealt, counts in charged.items():
            total += counts.pop(None, Counter())
            own = group is not None and dealt == deal
            most: Counter[tuple[Any, ...]] = Counter()
            for count in [counts.get(group, Counter())] if own else counts.values():
                most |= count  # the larger count of each kind: one kind, as in every run with groups, makes it exact
            total += most
        size = self.header["dataset_size"]
        earlier = [Event(*event) for run in self.header.get("after", ()) for event in run["events"]]
        return earlier + [
            Event(q, sigma, count, max_batch=cap, dataset_size=size if cap is not None else None)
            for (q, sigma, cap), count in total.items()
        ]

    def check_contains(self, count: int, head: str) -> None:
        """Refuse a ledger that was rolled back to before a checkpoint."""
        held = self.header["hash"] if count == 0 else (self.records[count - 1]["hash"] if count <= self.count else None)
        if held != head:
            raise LedgerError(
                f"the checkpoint knows {count} releases, and {self.path} does not hold them: it is an older copy or "
                "belongs to another run. Going on would under-report epsilon. Restore the newer ledger."
            )

    # ------------------------------------------------------------------ writing

    def append(self, **record: Any) -> None:
        """Record one release; durable when this returns."""
        self._keep(self._write(record))

    def _keep(self, record: dict[str, Any]) -> None:
        if record.get("torn"):
            self._torn_attempt = max(self._torn_attempt, record["attempt"])
            self._torn.append(len(self.records))
        else:
            self._by_step.setdefault(record["step"], []).append(len(self.records))
        self.records.append(record)

    def _write(self, record: dict[str, Any]) -> dict[str, Any]:
        if os.getpid() != self._process:
            raise LedgerError(
                "this run was made in another process, of which this one is a fork: both would release with the same noise, "
                "and record it in one place. Make or resume the run in the process that trains."
            )
        record = {**record, "previous": self._head}
        record["hash"] = _hash(record)
        if self._file is not None:
            self._put(_line(record))
        elif self._why_closed and not record.get("torn"):
            raise LedgerError(f"nothing can be added to {self.path}: {self._why_closed}")
        self._head = record["hash"]
        return record

    def _put(self, line: bytes) -> None:
        assert self._file is not None and self.path is not None
        try:
            size = os.fstat(self._file).st_size
            if size < self._size or not _same_file(self._file, self.path):
                raise LedgerError(f"{self.path} was removed, replaced or cut during the run. Put it back.")
            if size > self._size:  # what an append left that failed or was interrupted: it never returned
                if not self._tried.startswith(_tail(self._file, self._size)):
                    raise LedgerError(
                        f"{self.path} was added to by someone else during the run: another process works on the "
                        "same folder. End both, and resume one of them."
                    )
                os.ftruncate(self._file, self._size)
            self._tried = rest = line
            while rest:
                rest = rest[os.write(self._file, rest) :]
            os.fsync(self._file)
        except OSError as error:
            raise LedgerError(
                f"a release could not be recorded in {self.path} ({error}), so it was not used: the model has not "
                "moved. Remove the cause, and continue or resume the run."
            ) from error
        self._size += len(line)
        self._tried = b""

    def move_to(self, folder: str | os.PathLike[str]) -> None:
        """Put a ledger that was in memory on disk, where it stays from then on."""
        assert self.path is None, "already on disk"
        path = Path(folder) / FILE
        try:
            make_folder(path.parent)
            if path.exists():
                raise LedgerError(
                    f"{path} exists: another run's releases are recorded there. Choose another folder, or continue "
                    "that run: rgp.resume(folder, model, optimizer, dataset)."
                )
            write_file(path, self.text())
        except OSError as error:
            raise LedgerError(
                f"no ledger can be kept in {folder} ({error}); choose a folder that can be written"
            ) from error
        sync_folder(path.parent)
        self.path = path
        self._take_over()
        self._size = path.stat().st_size

    def _take_over(self) -> None:
        """Become the one who appends: lock the file against other processes, and retire this process's earlier one."""
        assert self.path is not None
        key = str(self.path.resolve())
        if (earlier := _appending.get(key)) is not None:
            earlier.close("the run was resumed after this one; go on with that")
        try:
            self._file = os.open(self.path, os.O_RDWR | os.O_APPEND)
        except OSError as error:
            raise LedgerError(f"{self.path} cannot be written ({error}), so no release could be recorded") from error
        self._closer = weakref.finalize(self, os.close, self._file)
        _lock(self._file, self.path)
        _appending[key] = self

    def close(self, why: str = "it was closed") -> None:
        """Release the file, so that others may append."""
        if self._file is not None:
            self._closer()
            self._file, self._why_closed = None, why


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _tail(file: int, start: int) -> bytes:
    """The content of the file from `start` on. (It is open for appending, so reading does not move where it is written.)"""
    os.lseek(file, start, os.SEEK_SET)
    found = b""
    while part := os.read(file, 1 << 16):
        found += part
    return found


def _same_file(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


def _lock(handle: int, path: Path) -> None:
    if not lock(handle, patience=PATIENCE):
        raise LedgerError(
            f"another process is appending to {path}: one run cannot go on twice. Wait for it, or end it."
        )
