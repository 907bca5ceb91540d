"""The parent: starts the workers, lets them step in turn, makes the rows of the table."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

from rgp.bench.machine import describe_commit, describe_machine
from rgp.bench.process import RETURN_FREED_MEMORY, Worker, WorkerFailed
from rgp.bench.settings import Settings, check_contenders

Row = dict[str, Any]


def run_bench(
    settings: Settings,
    contenders: Sequence[str] = ("rgp", "plain", "bound"),
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure the contenders against each other and return the report that `rgp bench --json` prints.

    First the memory: each contender alone, for its warm-up step and one more. Then the time: all are warmed up, then
    step in turn for `settings.repeats` rounds. A contender that fails gets a row with `error`; the others continue.

    say: called with a line about what happens now.

    >>> report = run_bench(Settings(model="toy", batch=8, microbatch=4, seq=16, repeats=3), ["plain", "bound"])
    >>> [row["name"] for row in report["rows"]]
    ['plain', 'bound']
    """
    names = check_contenders(list(dict.fromkeys(contenders)))
    machine = describe_machine() | {"threads": settings.threads}
    rows = [empty_row(name) for name in names]
    measure_memory(rows, settings, say)
    measure_time(rows, settings, say)
    add_ratios(rows)
    for row in rows:
        machine.update(row.pop("machine"))
    return {
        "rows": rows,
        "machine": machine,
        **describe_commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "settings": dataclasses.asdict(settings),
    }


def empty_row(name: str) -> Row:
    return {
        "name": name,
        "seconds_per_step": None,  # median of `seconds`
        "ratio_to_plain": None,
        "peak_bytes": None,
        "memory_ratio_to_plain": None,
        "peak_bytes_default_malloc": None,  # with what the C library keeps for later, if left to itself
        "per_example_bytes": None,
        "trained_parameters": None,
        "seconds": [],
        "machine": {},
    }


@contextlib.contextmanager
def failure_noted(row: Row) -> Iterator[None]:
    try:
        yield
    except WorkerFailed as failure:
        row["error"] = str(failure)


def measure_memory(rows: Sequence[Row], settings: Settings, say: Callable[[str], None]) -> None:
    """Each alone, in a process that gives back what it frees."""
    for row in rows:
        say(f"memory: {row['name']}")
        with failure_noted(row), contextlib.ExitStack() as at_the_end:
            worker = Worker(row["name"], settings, **RETURN_FREED_MEMORY)
            at_the_end.callback(worker.stop)
            worker.step()
            row.update(worker.finish())


def measure_time(rows: Sequence[Row], settings: Settings, say: Callable[[str], None]) -> None:
    """All in turn, in processes as users have them."""
    workers: dict[str, Worker] = {}
    with contextlib.ExitStack() as at_the_end:
        for row in rows:
            if "error" in row:
                continue
            say(f"warm-up: {row['name']}")
            with failure_noted(row):
                worker = workers[row["name"]] = Worker(row["name"], settings)
                at_the_end.callback(worker.stop)
                row["trained_parameters"] = worker.about["trained_parameters"]
                row["machine"] = worker.about["machine"]
        for turn in range(settings.repeats):
            # Every second round runs backwards, so that nobody always follows the same neighbour.
            for row in rows[:: 1 if turn % 2 == 0 else -1]:
                if "error" in row:
                    continue
                say(f"time, round {turn + 1} of {settings.repeats}: {row['name']}")
                with failure_noted(row):
                    row["seconds"].append(workers[row["name"]].step())
        for row in rows:
            if "error" in row:
                continue
            row["seconds_per_step"] = median(row["seconds"])
            with failure_noted(row):
                row["peak_bytes_default_malloc"] = workers[row["name"]].finish()["peak_bytes"]


def add_ratios(rows: Sequence[Row]) -> None:
    plain = next((row for row in rows if row["name"] == "plain" and "error" not in row), None)
    for row in rows:
        if plain is None or "error" in row:
            continue
        row["ratio_to_plain"] = row["seconds_per_step"] / plain["seconds_per_step"]
        row["memory_ratio_to_plain"] = row["peak_bytes"] / plain["peak_bytes"]


def unequal_work(rows: Sequence[Row]) -> str | None:
    """A sentence if contenders trained different numbers of parameters; then their times do not compare."""
    trained = {row["name"]: row["trained_parameters"] for row in rows if "error" not in row and row["name"] != "bound"}
    if len(set(trained.values())) <= 1:
        return None
    return "not the same work: trained parameters are " + ", ".join(f"{name} {n:,}" for name, n in trained.items())
