"""The parent: starts the workers, lets them step in turn, makes the table's rows."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rgp.bench.settings import Settings, check_contenders

PACKAGE = Path(__file__).resolve().parents[1]


class WorkerFailed(RuntimeError):
    """A contender could not be built, or stopped on the way."""


class Worker:
    """A contender's process, seen from the parent. Making one waits until its warm-up step is done."""

    def __init__(self, name: str, settings: Settings, environment: dict[str, str]):
        self.seconds: list[float] = []
        self._log = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rgp.bench.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            bufsize=1,
            env=environment,
        )
        self.about = self._ask({"contender": name, "settings": dataclasses.asdict(settings)})

    def step(self) -> None:
        """One logical step, measured by the worker."""
        self.seconds.append(self._ask("step")["seconds"])

    def finish(self) -> dict[str, Any]:
        return self._ask("finish")

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()

    def _ask(self, request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise WorkerFailed(self._last_words())
        reply = json.loads(line)
        if "error" in reply:
            raise WorkerFailed(reply["error"])
        return reply

    def _last_words(self) -> str:
        code = self._process.wait()
        self._log.seek(0)
        tail = self._log.read().strip().splitlines()[-1:]
        if code == -signal.SIGKILL:
            return "killed, most likely for lack of memory"
        return f"ended with code {code}: {' '.join(tail)}"


def worker_environment(settings: Settings) -> dict[str, str]:
    """The same for every contender: its threads, and this very package."""
    threads = str(settings.threads)
    path = os.pathsep.join(filter(None, [str(PACKAGE.parent), os.environ.get("PYTHONPATH"), os.getcwd()]))
    return {
        **os.environ,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "PYTHONPATH": path,
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_OFFLINE": "1",
    }


# glibc keeps freed blocks for later, a third of the peak and never the same third: ratios of memory would vary by 6%.
# With a fixed threshold tensors go back to the system when freed, and peaks repeat to 0.1%. That makes steps half
# as slow again, so it is for the memory phase only.
RETURN_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536"}


def run_bench(
    settings: Settings, contenders: Sequence[str] = ("rgp", "plain", "bound"), say: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Measure the contenders against each other and return the report that `rgp bench --json` prints.

    First the memory: each contender alone, for its warm-up step and one more. Then the time: all are warmed up and step
    in turn, for `settings.repeats` rounds. A contender that fails gets a row with `error`; the others go on.

    say: called with one line about what happens now.

    >>> report = run_bench(Settings(model="toy", batch=8, microbatch=4, seq=16, repeats=3), ["plain", "bound"])
    >>> [row["name"] for row in report["rows"]]
    ['plain', 'bound']
    """
    names = check_contenders(list(dict.fromkeys(contenders)))
    say = say or (lambda line: None)
    load_before = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    rows: dict[str, dict[str, Any]] = {name: {"name": name, **dict.fromkeys(MEASURED)} for name in names}
    about: dict[str, Any] = {}

    for name in names:
        say(f"memory: {name}")
        try:
            rows[name].update(measure_memory(name, settings))
        except WorkerFailed as failure:
            rows[name]["error"] = str(failure)

    workers: dict[str, Worker] = {}
    with contextlib.ExitStack() as at_the_end:
        for name in names:
            if "error" in rows[name]:
                continue
            say(f"warming up: {name}")
            with failure_recorded(rows[name]):
                workers[name] = Worker(name, settings, worker_environment(settings))
                at_the_end.callback(workers[name].stop)
                about = workers[name].about
                rows[name]["trained_parameters"] = about["trained_parameters"]
        for turn in range(settings.repeats):
            # Every second round runs backwards, so that nobody always follows the same neighbour.
            for name in list(workers)[:: 1 if turn % 2 == 0 else -1]:
                if "error" not in rows[name]:
                    say(f"time, round {turn + 1} of {settings.repeats}: {name}")
                    with failure_recorded(rows[name]):
                        workers[name].step()
        for name, worker in workers.items():
            if "error" not in rows[name]:
                with failure_recorded(rows[name]):
                    rows[name]["peak_bytes_default_malloc"] = worker.finish()["peak_bytes"]
                    rows[name]["seconds_per_step"] = median(worker.seconds)
                    rows[name]["seconds"] = worker.seconds
def unequal_work(rows: Sequence[dict[str, Any]]) -> str | None:
    """A sentence if contenders trained different numbers of parameters; then their times do not compare."""
    trained = {row["name"]: row["trained_parameters"] for row in rows if "error" not in row and row["name"] != "bound"}
    if len(set(trained.values())) <= 1:
        return None
    return "not the same work: trained parameters are " + ", ".join(f"{name} {n:,}" for name, n in trained.items())


def describe_machine(settings: Settings, about: dict[str, Any], load_before: float | None) -> dict[str, Any]:
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "threads": settings.threads,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None,
        "device": about.get("device"),
        "load_before": load_before,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": about.get("torch"),
    }


def cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def commit() -> str | None:
    """Short hash of the checkout that this package is part of, or None for an installed copy."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(PACKAGE), *words], check=True, capture_output=True, text=True
        ).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "_version.py")  # the package may lie in a .venv inside someone else's repository
        return git("rev-parse", "--short", "HEAD")
    except (OSError, subprocess.CalledProcessError):
        return None
