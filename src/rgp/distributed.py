"""Ranks: the processes of one data-parallel run, and the few things they tell each other (torch.distributed).

    draw         every rank draws the same Poisson batch from the common stream and takes its share of it
    meet         all ranks, once per logical batch: are we all here, at one step, with the same weights and carriers?
    sum          clipped sums of the shares, in thin carrier coordinates, to the first rank
    release      noise and the ledger's line, on the first rank alone; only then does the noisy sum go to all
    the rest     rebuild and optimizer, the same on every rank

Formal guarantees (tests/test_distributed.py):
- every example of a draw is on exactly one rank
- noise is added once per release, on the first rank
- no rank has a release before its line in the ledger is durable
- a rank that dies, leaves or differs from the others stops all of them; no rank continues alone

One process is the special case `Ranks()`, so the engine reads the same with and without others. gloo and NCCL go
through the same calls. Messages are JSON and tensors, no pickle.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rgp import errors
from rgp.errors import RankError
from rgp.torchstate import bits_of, is_sharded

NOTE = 1024  # bytes of a short message, sent in one piece
PIECE = 1 << 28  # bytes of a long one that are sent at once
PATIENCE = timedelta(minutes=30)
HERE, STOPS, LEAVES = 0, 1, 2  # what a rank says when it meets the others


@dataclass
class RankReport:
    """Where a rank is at the end of its share. All fields are integers, so that they travel as one small tensor."""

    condition: int = HERE
    step: int = 0
    attempt: int = 0
    releases: int = 0  # lines of the ledger
    weights: int = 0  # fingerprints
    carriers: int = 0
    bad_examples: int = 0
    flag: int = 0  # for a question that comes up in between; whether it holds on all ranks
    used: tuple[int, ...] = ()  # per trained parameter


SAME = ("step numbers", "draws", "releases on record", "weights", "carriers")  # sums over all ranks: columns 1 to 5
COUNTS = len(fields(RankReport)) - 1  # columns before `used`


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank puts into and gets out of the collectives of one step.

    plain_bytes_per_step: the same for plain DistributedDataParallel, which all-reduces the gradients of the same parameters.
    """

    ranks: int
    bytes_per_step: int
    plain_bytes_per_step: int

    @property
    def saved(self) -> float:
        """By how many times this is less than plain training sends."""
        return self.plain_bytes_per_step / self.bytes_per_step if self.bytes_per_step else 1.0


class Ranks:
    """One process: nobody to talk to."""

    rank, size = 0, 1
    sent = 0  # bytes put into collectives so far

    @property
    def first(self) -> bool:
        return self.rank == 0

    def share(self, indices: np.ndarray) -> np.ndarray:
        """This rank's part of a draw."""
        return indices[self.rank :: self.size]

    def meet(self, report: RankReport) -> RankReport:
        """Wait for all ranks. Sums of counts, the union of `used`, and STOPS if any rank wants to stop."""
        return report

    def sum(self, tensor: Tensor) -> None:
        """Add up in place, on the first rank. What the others hold afterwards is undefined."""

    def send(self, tensor: Tensor) -> None:
        """The first rank's tensor to all, in place."""

    def from_first(self, make: Callable[[], Any]) -> Any:
        """What `make` gives on the first rank (JSON), on all ranks; or its error, on all ranks."""
        return make()

    def read(self, path: Path) -> bytes | None:
        """A file of the first rank's disk; None if it does not exist."""
        return path.read_bytes() if path.exists() else None

    def agree(self, problem: str | None, kind: type[Exception] = ValueError) -> None:
        """Raise the problem of the lowest rank that has one, on all ranks."""
        if problem is not None:
            raise kind(problem)

    def leave(self, report: RankReport, error: BaseException) -> None:
        """Tell the ranks that wait for this one that it will not continue."""

    def fingerprint(self, tensors: Iterable[Tensor]) -> int:
        """A number that shows whether tensors that should be equal are; one pass over them, and none if nothing compares it."""
        return 0


class Group(Ranks):
    """The processes of a torch.distributed group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.size = group.rank(), group.size()
        self._source = dist.get_global_rank(group, 0)
        types = [device.type for device in group._device_types]
        self._types = types or ["cpu"]
        # small messages: on the CPU wherever the group can
        self._device = torch.device("cpu" if "cpu" in self._types else torch.accelerator.current_accelerator() or "cpu")
        self._lost: str | None = None
        self.sent = 0

    # ------------------------------------------------------------------ the calls to torch.distributed

    @contextmanager
    def _together(self, doing: str) -> Iterator[None]:
        """Any failure of a collective as one error that says what to do. Afterwards nothing more is tried."""
        if self._lost is not None:
            raise RankError(self._lost)
        try:
            yield
        except RuntimeError as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            self._lost = (
                f"rank {self.rank} of {self.size} lost the others while {doing}: a process died, hangs or cannot be "
                f"reached ({reason[:200]}). No rank has used a release that is not on record. End all processes and go "
                "on from the last checkpoint: rgp.resume, or rgp train --resume"
            )
            raise RankError(self._lost) from error
        except BaseException:  # interrupted in the middle: out of step with the others
            self._lost = (
                f"rank {self.rank} of {self.size} was interrupted while {doing}; resume from the last checkpoint"
            )
            raise

    def _broadcast(self, tensor: Tensor, source: int = 0) -> None:
        dist.broadcast(tensor, dist.get_global_rank(self._group, source), group=self._group)
        self.sent += tensor.nbytes

    def _gather(self, row: list[int]) -> Tensor:
        mine = torch.tensor(row, dtype=torch.int64, device=self._device)
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(rows, mine, group=self._group)
        self.sent += mine.nbytes * self.size
        return torch.stack(rows).cpu()

    def _carried(self, tensor: Tensor) -> Tensor:
        """The tensor where the group can take it: itself, or a copy."""
        there = tensor.device.type in self._types and tensor.is_contiguous()
        return tensor if there else tensor.to(self._device).contiguous()

    def sum(self, tensor: Tensor) -> None:
        with self._together("adding up the clipped sums"):
            carried = self._carried(tensor)
            dist.reduce(carried, self._source, group=self._group)
            self.sent += tensor.nbytes
            if carried is not tensor:
                tensor.copy_(carried)

    def send(self, tensor: Tensor) -> None:
        with self._together("waiting for the first rank's numbers"):
            carried = self._carried(tensor)
            self._broadcast(carried)
            if carried is not tensor:
                tensor.copy_(carried)

    def _message(self, content: bytes | None, source: int = 0) -> bytes:
        """Send one rank's bytes to all: a short note, followed by what does not fit into it."""
        note = torch.zeros(8 + NOTE, dtype=torch.uint8)
        mine = b"" if content is None else content
        if self.rank == source:
            head = len(mine).to_bytes(8, "little") + mine[:NOTE]
            note[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        note = note.to(self._device)
        self._broadcast(note, source)
        got = bytes(note.cpu().numpy())
        length, got = int.from_bytes(got[:8], "little"), got[8:]
        parts = [got[: min(length, NOTE)]]
        for start in range(NOTE, length, PIECE):
            size = min(PIECE, length - start)
            piece = torch.empty(size, dtype=torch.uint8)
            if self.rank == source:
                piece = torch.frombuffer(bytearray(mine[start : start + size]), dtype=torch.uint8)
            piece = piece.to(self._device)
            self._broadcast(piece, source)
            parts.append(bytes(piece.cpu().numpy()))
        return b"".join(parts)

    # ------------------------------------------------------------------ what is made of them

    def from_first(self, make: Callable[[], Any]) -> Any:
        value, error, message = None, None, b""
        if self.first:
            try:
                value = make()
                message = json.dumps({"value": value}).encode()
            except Exception as found:
                error = found
                message = json.dumps(
                    {"error": [c.__name__ for c in type(found).__mro__], "message": str(found)}
                ).encode()
            except BaseException:
                self._lost = f"rank {self.rank} of {self.size} was interrupted; resume from the last checkpoint"
                raise
        with self._together("waiting for the first rank"):
            answer = json.loads(self._message(message))
        if error is not None:
            raise error
        if "error" in answer:
            raise _error(answer["error"], answer["message"])
        return answer["value"]

    def read(self, path: Path) -> bytes | None:
        exists = self.from_first(path.exists)
        if not exists:
            return None
        content = path.read_bytes() if self.first else None
        with self._together("reading from the first rank's disk"):
            return self._message(content)

    def agree(self, problem: str | None, kind: type[Exception] = ValueError) -> None:
        with self._together("comparing notes"):
            flags = self._gather([int(problem is not None)])[:, 0].tolist()
            if not any(flags):
                return
            worst = flags.index(1)
            said = self._message(None if problem is None else problem.encode(), worst).decode()
        raise kind(said if kind is not RankError else f"rank {worst}: {said}")

    def meet(self, report: RankReport) -> RankReport:
        with self._together(f"waiting for all shares of step {report.step}"):
            rows = self._gather(_row(report))
            conditions = rows[:, 0].tolist()
            if LEAVES in conditions:
                who = conditions.index(LEAVES)
                why = self._message(None, who).decode()
                self._lost = (
                    f"rank {who} of {self.size} left the run at step {int(rows[who, 1])} ({why}), so rank {self.rank} "
                    "stops too. End all processes and go on from the last checkpoint: rgp.resume, or rgp train --resume"
                )
        if self._lost is not None:
            raise RankError(self._lost)
        for column, words in enumerate(SAME, start=1):
            different = (rows[:, column] != rows[0, column]).nonzero().flatten().tolist()
            if different and STOPS not in conditions:
                self._lost = (
                    f"the {words} of rank {different[0]} are not those of rank 0 at step {int(rows[0, 1])}. Ranks may only "
                    "differ in their share of the data: something other than run.step changed the model on one of them, or "
                    "their machines compute differently. Nothing of this step was released. Resume from the last checkpoint"
                )
                raise RankError(self._lost)
        return replace(
            report,
            condition=STOPS if STOPS in conditions else HERE,
            bad_examples=int(rows[:, COUNTS - 2].sum()),
            flag=int(rows[:, COUNTS - 1].amin()),
            used=tuple(rows[:, COUNTS:].amax(0).tolist()) if report.used else (),
        )

    def leave(self, report: RankReport, error: BaseException) -> None:
        if self._lost is not None:
            return
        why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        try:
            conditions = self._gather(_row(replace(report, condition=LEAVES)))[:, 0].tolist()
            self._message(why[:2000].encode(), conditions.index(LEAVES))
        except RuntimeError:  # they are gone already
            pass
        self._lost = f"rank {self.rank} of {self.size} left the run; resume from the last checkpoint"

    def fingerprint(self, tensors: Iterable[Tensor]) -> int:
        found = 0
        for tensor in tensors:
            if not is_sharded(tensor):  # of which each rank holds another part
                found = (found * 31 + int(bits_of(tensor))) % 2**63
        return found


def _row(report: RankReport) -> list[int]:
    return [*(getattr(report, f.name) for f in fields(report) if f.name != "used"), *report.used]


def _error(names: list[str], message: str) -> Exception:
    """The first rank's error, for another rank; `names` are its class and the base classes."""
    known = {"ValueError": ValueError, "FileNotFoundError": FileNotFoundError, "OSError": OSError}
    kind = next((k for name in names if (k := getattr(errors, name, None) or known.get(name)) is not None), None)
    found: Any = RankError(f"the first rank failed: {names[0]}: {message}") if kind is None else kind(message)
    found.told = True  # the first rank reports it
    return found


@contextmanager
def launched() -> Iterator[Ranks]:
    """The processes that torchrun or accelerate launch started, joined while a command runs; otherwise this one alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        yield find_ranks()
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    # the first rank evaluates and saves while the others wait for it
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=PATIENCE)
    try:
        yield find_ranks()
    finally:
        dist.destroy_process_group()


def find_ranks(process_group: dist.ProcessGroup | None = None) -> Ranks:
    """The given group, or the default one where torch.distributed is initialised, or this process alone."""
    if process_group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return Ranks()
        process_group = dist.group.WORLD
    if process_group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("process_group: this process is not in it; only its members may make the run")
    assert process_group is not None
    return Group(process_group) if process_group.size() > 1 else Ranks()
