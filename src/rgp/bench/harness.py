"""The parent: starts the workers, lets them step in turn, makes the rows of the table."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

from rgp.bench.machine import busy_seconds, describe_commit, describe_machine
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
    machine["busy_elsewhere"] = measure_time(rows, settings, say)
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
        "ratio_to_plain": None,  # median over the rounds of the ratio within a round
        "ratio_to_plain_range": None,  # the smallest and the largest of them
        "ratio_to_bound": None,
        "ratio_to_bound_range": None,
        "cpu_ratio_to_bound": None,  # likewise, of CPU time: less disturbed by others than the clock
        "peak_bytes": None,
        "memory_ratio_to_plain": None,
        "peak_bytes_default_malloc": None,  # with what the C library keeps for later, if left to itself
        "per_example_bytes": None,
        "trained_parameters": None,
        "seconds": [],
        "cpu_seconds": [],
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


def measure_time(rows: Sequence[Row], settings: Settings, say: Callable[[str], None]) -> float | None:
    """All in turn, in processes as users have them. Returns how many cores others kept busy meanwhile, if known."""
    workers: dict[str, Worker] = {}
    others = clock = 0.0
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
                    before = busy_seconds()
                    seconds, cpu = workers[row["name"]].step()
                    row["seconds"].append(seconds)
                    row["cpu_seconds"].append(cpu)
                    if before is not None and (after := busy_seconds()) is not None:
                        others, clock = others + max(0.0, after - before - cpu), clock + seconds
        for row in rows:
            if "error" in row:
                continue
            row["seconds_per_step"] = median(row["seconds"])
            with failure_noted(row):
                row["peak_bytes_default_malloc"] = workers[row["name"]].finish()["peak_bytes"]
    return round(others / clock, 2) if clock else None


def add_ratios(rows: Sequence[Row]) -> None:
    """Contenders that stepped in one round met the same machine, so the ratio is taken within it, and then the median."""
    measured = {row["name"]: row for row in rows if "error" not in row}
    for row in measured.values():
        for name in ("plain", "bound"):
            if (other := measured.get(name)) is not None:
                ratios = per_round(row, other, "seconds")
                row[f"ratio_to_{name}"] = median(ratios)
                row[f"ratio_to_{name}_range"] = [min(ratios), max(ratios)]
        if "bound" in measured:
            row["cpu_ratio_to_bound"] = median(per_round(row, measured["bound"], "cpu_seconds"))
        if "plain" in measured:
            row["memory_ratio_to_plain"] = row["peak_bytes"] / measured["plain"]["peak_bytes"]


def per_round(row: Row, other: Row, key: str) -> list[float]:
    return [a / b if b else float("nan") for a, b in zip(row[key], other[key], strict=True)]


def unequal_work(rows: Sequence[Row]) -> str | None:
    """A sentence if contenders trained different numbers of parameters; then their times do not compare."""
    trained = {row["name"]: row["trained_parameters"] for row in rows if "error" not in row and row["name"] != "bound"}
    if len(set(trained.values())) <= 1:
        return None
    return "not the same work: trained parameters are " + ", ".join(f"{name} {n:,}" for name, n in trained.items())
