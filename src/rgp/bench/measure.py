"""Seconds of a call and the peak of memory, on the CPU and on CUDA."""

from __future__ import annotations

import contextlib
import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch


def seconds_of(call: Callable[[], None], device: str) -> float:
    if device == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1000
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


class MemoryMeter:
    """Peak memory above what was in use when the meter was made.

    On CUDA the allocator counts. On the CPU it is resident memory as the kernel counts it, which includes what
    the allocator keeps for later: that is what a user's machine must have.
    """

    def __init__(self, device: str):
        self.device = device
        gc.collect()
        self.reset()
        self.baseline = self._peak()

    def reset(self) -> None:
        """Forget peaks so far: the high-water mark falls to what is in use now."""
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        else:
            # Where this cannot be written (a locked-down container) the mark stays as it was. It is
            # then the highest since the process began, which importing libraries only sets for tiny models.
            with contextlib.suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")

    def peak_bytes(self) -> int:
        return self._peak() - self.baseline

    def _peak(self) -> int:
        if self.device == "cuda":
            return torch.cuda.max_memory_allocated()
        status = Path("/proc/self/status")
        if status.exists():
            for line in status.read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        import resource

        highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return highest if sys.platform == "darwin" else highest * 1024
