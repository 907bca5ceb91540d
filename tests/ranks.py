"""Processes for tests of distributed runs: gloo on this machine, and the training that each of them does."""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import tempfile
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import rgp
from rgp.ledger import FILE

TIMEOUT = 20.0  # of the group, in seconds
SIZE = 40

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "rgp",
        "torch._dynamo",
        "torch.distributed.fsdp",
        "safetensors.torch",
        "dp_accounting.pld.privacy_loss_distribution",
    ]
)  # imported once, for all


class RankDied(AssertionError):
    """A process of `launch` ended without an answer: killed, or crashed outside of Python.

    Seen once, in about 3,000 launches with sharded weights: a rank's heap was corrupted (SIGABRT in malloc). Nothing of ours
    writes to memory itself, and neither a thousand launches more nor valgrind nor the address sanitizer showed it again. So the
    tests of distributed runs are tried a second time for this reason alone, and say so in a warning.
    """


class Ranks:
    """Processes under way; `results` waits for them. After it, `traces` has what a crash left of those that died."""

    def __init__(self, work: Callable[..., Any], size: int, args: tuple[Any, ...], timeout: float) -> None:
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        self._pipes, self.processes = [], []
        self.traces: dict[int, str] = {}
        for rank in range(size):
            receiver, sender = _context.Pipe(duplex=False)
            process = _context.Process(
                target=_entry, args=(sender, folder, rank, size, timeout, work, args), daemon=True
            )
            process.start()
            sender.close()
            self._pipes.append(receiver)
            self.processes.append(process)

    def results(self, patience: float = 90.0, *, first: float | None = None) -> list[Any]:
        """What each rank returned; an exception as an exception, None for a process that died.

        patience: seconds to wait for a rank; `first` for the first one.
        """
        found: list[Any] = []
        for process, pipe in zip(self.processes, self._pipes, strict=True):
            wait = patience if first is None or found else first
            try:
                found.append(pipe.recv() if pipe.poll(wait) else TimeoutError("no answer"))
            except EOFError:
                found.append(None)
            process.join(min(wait, 10.0))
            if process.is_alive():
                process.kill()
        for rank, process in enumerate(self.processes):
            if found[rank] is None:
                trace = Path(self._folder.name, f"trace{rank}")
                left = trace.read_text() if trace.exists() else ""
                self.traces[rank] = f"rank {rank} ended with exit code {process.exitcode}\n{left}"
        self._folder.cleanup()
        return found


def launch(work: Callable[..., Any], size: int, *args: Any, timeout: float = TIMEOUT) -> list[Any]:
    """work(*args), which does not return None, on `size` ranks; raises if any rank failed."""
    ranks = Ranks(work, size, args, timeout)
    found = ranks.results()
    if ranks.traces:  # the others' errors say only that it is gone
        message = "\n".join(ranks.traces.values())
        warnings.warn(f"{work.__name__}: {message}")  # shown even if a second try goes well
        raise RankDied(message)
    for result in found:
        if isinstance(result, BaseException):
            raise result
    return found


def _entry(pipe, folder: Path, rank: int, size: int, timeout: float, work, args) -> None:
    traces = (folder / f"trace{rank}").open("w")
    faulthandler.enable(traces)
    torch.set_num_threads(1)
    try:
        if size > 1:
            limit = timedelta(seconds=timeout)
            dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=size, timeout=limit)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="noise_multiplier is 0")
            result = work(*args)
    except Exception as error:
        trace = "".join(traceback.format_exception(error))
        result = type(error)(f"{error}\n{trace}") if len(error.args) == 1 else RuntimeError(trace)
    pipe.send(result)
    pipe.close()
    os._exit(0)  # no goodbyes: what the test needs was sent, and a process may have lost its group


# ---------------------------------------------------------------------- what they train


class Net(nn.Module):
    """Carried matrices, an exact head, a norm, a buffer; dropout if asked."""

    def __init__(self, seed: int = 0, dropout: float = 0.0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.first, self.second = nn.Linear(6, 12), nn.Linear(12, 12)
        self.norm, self.drop = nn.LayerNorm(12), nn.Dropout(dropout)
        self.head = nn.Linear(12, 3)
        self.register_buffer("shift", torch.zeros(6))
        self.double()
        with torch.no_grad():
            for tensor in self.state_dict().values():
                tensor.copy_(torch.randn(tensor.shape, generator=generator) / 3)

    def forward(self, x):
        return self.head(self.norm(torch.tanh(self.second(self.drop(torch.tanh(self.first(x + self.shift)))))))


class Data:
    """Remembers what was asked for."""

    def __init__(self, size: int = SIZE) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(size, 6, generator=generator, dtype=torch.float64)
        self.y = torch.randint(0, 3, (size,), generator=generator)
        self.asked: list[int] = []

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int):
        self.asked.append(i)
        return self.x[i], self.y[i]


def parts(seed: int = 0, dropout: float = 0.0) -> tuple[Net, torch.optim.Optimizer, Data]:
    model = Net(seed, dropout)
    return model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), Data()


OPTIONS: dict[str, Any] = {
    "method": rgp.RGP(rank=2),
    "noise_multiplier": 0.0,
    "clip": 0.5,
    "batch_size": 8,
    "microbatch_size": 3,
    "steps": 6,
    "seed": 3,
}


def train(run: rgp.Run, *, until: int | None = None) -> list[int]:
    """Steps at which the loop's body ran."""
    ran = []
    for x, y in run:
        ran.append(run.step_index)
        run.step(nn.functional.cross_entropy(run.model(x), y))
        if until is not None and run.step_index >= until:
            run.stop()
    return ran


def state_of(run: rgp.Run, **more: Any) -> dict[str, Any]:
    return {
        "rank": run.ranks.rank,
        "weights": {name: p.detach().numpy().copy() for name, p in run.model.state_dict().items()},
        "records": run.ledger.records,
        "head": run.ledger.head,
        "path": run.ledger.path,
        "step": run.step_index,
        "bad": run.bad_examples,
        "never_used": run.never_used,
        **more,
    }


# ---------------------------------------------------------------------- what they found


def close(a: dict[str, np.ndarray], b: dict[str, np.ndarray], tolerance: float = 1e-10) -> bool:
    return all(np.abs(a[name] - b[name]).max() <= tolerance for name in a)


def equal(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return all(np.array_equal(a[name], b[name]) for name in a)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / FILE).read_text().splitlines()][1:]


def whole_run(
    options: dict[str, Any], folder: Any = None, own_seed: bool = False, dropout: float = 0.0
) -> dict[str, Any]:
    """A whole run on this rank. `own_seed`: every rank begins with other weights."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    model, optimizer, data = parts(rank if own_seed else 0, dropout)
    run = rgp.privatize(model, optimizer, data, folder=folder, **{**OPTIONS, **options})
    data.asked.clear()  # what ranks compared
    with run:
        ran = train(run)
        return state_of(run, ran=ran, asked=data.asked, traffic=run.traffic)


def kept(work: Any, *args: Any, **options: Any) -> dict[str, Any]:
    """What one process finds; asked again, the same answer."""
    key = repr((work.__name__, args, sorted(options.items())))
    if key not in _kept:
        _kept[key] = launch(work, 1, *args, options)[0]
    return _kept[key]


_kept: dict[str, Any] = {}


def alone_with(**options: Any) -> dict[str, Any]:
    return kept(whole_run, **options)
