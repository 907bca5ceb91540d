"""One contender in a process of its own: `python -m rgp.bench.worker`.

It speaks in lines of JSON. In: first `{"contender": ..., "settings": {...}}`, then the words "step" and "finish".
Out: one line for each, in order; `{"error": ...}` ends the conversation.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any, TextIO

import torch

from rgp.bench import contenders, workloads
from rgp.bench.measure import MemoryMeter, seconds_of
from rgp.bench.settings import LONG_WARM_UP, WARM_UP_STEPS, Settings


def serve(name: str, settings: Settings, requests: TextIO) -> Iterator[dict[str, Any]]:
    """Build, warm up, then answer each request; what is yielded is sent to the parent."""
    torch.set_num_threads(settings.threads)
    device = settings.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    workloads.preload(settings.model)
    rehearse(name, settings, device)

    meter = MemoryMeter(device)
    workload = workloads.build(settings)
    workload.model.to(device)
    contender = contenders.build(name, settings, workload)
    meter.reset()  # building may need more for a moment than training ever does (a checkpoint's copy)
    started = time.perf_counter()
    for _ in range(WARM_UP_STEPS):
        contender.step()
        if time.perf_counter() - started > LONG_WARM_UP:
            break
    yield {
        "trained_parameters": contender.trained_parameters(),
        "machine": {
            "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
            "torch": torch.__version__,
        },
    }
    for request in map(json.loads, requests):
        if request == "step":
            before = time.process_time()
            seconds = seconds_of(contender.step, device)
            yield {"seconds": seconds, "cpu_seconds": time.process_time() - before}
        else:
            break
    yield {"peak_bytes": meter.peak_bytes(), "per_example_bytes": contender.per_example_bytes()}
    contender.close()


def rehearse(name: str, settings: Settings, device: str) -> None:
    """One step of the same contender on the toy model.

    Libraries that are imported on first use and threads that start on first use are then part of the
    baseline, as are all other imports.
    """
    small = dataclasses.replace(settings, model="toy", batch=2, microbatch=1, seq=4, rank=1)
    workload = workloads.build(small)
    workload.model.to(device)
    contender = contenders.build(name, small, workload)
    contender.step()
    contender.close()
    del contender, workload
    gc.collect()


def main() -> None:
    # Anything that a library prints must not get between the lines of JSON.
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    job = json.loads(sys.stdin.readline())
    try:
        for reply in serve(job["contender"], Settings(**job["settings"]), sys.stdin):
            print(json.dumps(reply), file=replies)
    except Exception as error:
        traceback.print_exc()
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=replies)


if __name__ == "__main__":
    main()
