"""A contender's process, seen from the parent."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rgp.bench.settings import Settings

SOURCE = Path(__file__).resolve().parents[2]

# glibc keeps freed blocks for later: a third of the peak, and never the same third, so that ratios of memory vary by
# 6%. With a fixed threshold, tensors go back to the system when they are freed and peaks repeat to 0.1%. Steps then
# take half as long again, so time is measured without it.
RETURN_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536"}


class WorkerFailed(RuntimeError):
    """A contender could not be built, or stopped on the way."""


class Worker:
    """`python -m rgp.bench.worker` and the conversation with it. Making one waits until its warm-up step is done.

    about: what the worker said of itself then.
    """

    def __init__(self, name: str, settings: Settings, **environment: str):
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115, closed by `stop`
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rgp.bench.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            bufsize=1,
            env=worker_environment(settings) | environment,
        )
        try:
            self.about = self._ask({"contender": name, "settings": dataclasses.asdict(settings)})
        except BaseException:
            self.stop()
            raise

    def step(self) -> tuple[float, float]:
        """Seconds of one logical step, and CPU seconds of all its threads."""
        reply = self._ask("step")
        return reply["seconds"], reply["cpu_seconds"]

    def finish(self) -> dict[str, Any]:
        """Peaks over all steps so far; the last thing that can be asked."""
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
        if code == -signal.SIGKILL:
            return "killed, most likely for lack of memory"
        self._log.seek(0)
        tail = self._log.read().strip().splitlines()[-1:]
        return f"ended with code {code}: {' '.join(tail)}"


def worker_environment(settings: Settings) -> dict[str, str]:
    """The same for every contender: its threads, and this very copy of the package."""
    threads = str(settings.threads)
    path = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH"), os.getcwd()]))
    return {
        **os.environ,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "PYTHONPATH": path,
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_OFFLINE": "1",
    }
