"""What training costs without this library: `python -m rgp.train.plain RUN` repeats a run's steps as a plain loop.

The engine without clip and noise computes more than plain PyTorch does, so comparing with its time would flatter the private
runs. This is the loop that anyone would write: same model, optimizer, batch size and number of steps.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from rgp.bench.measure import MemoryMeter
from rgp.train import config, setup
from rgp.train.folder import RunFolder


def measure(out: Path) -> dict[str, Any]:
    """Seconds and peak memory of as many steps as the run in `out` took."""
    folder = RunFolder(out)
    settings, steps = config.load(folder.config), folder.read_json(folder.summary)["steps"]
    parts = setup.make(settings)
    model, optimizer, data = parts.model.train(), parts.optimizer, parts.data
    size = settings.training.batch_size
    part = settings.training.microbatch_size or min(size, 32)
    kind = "cuda" if parts.device.type == "cuda" else "cpu"
    meter, began = MemoryMeter(kind), time.monotonic()
    sampler = torch.utils.data.RandomSampler(data.train, replacement=True, num_samples=steps * size)
    loader = torch.utils.data.DataLoader(data.train, size, sampler=sampler, collate_fn=lambda rows: rows)
    collate = data.collate_fn or torch.utils.data.default_collate
    for rows in loader:
        for start in range(0, size, part):
            chunk = rows[start : start + part]
            logits, labels = setup.logits_and_labels(model, collate(chunk), parts.device)
            (F.cross_entropy(logits, labels) * len(chunk) / size).backward()
        optimizer.step()
        optimizer.zero_grad()
    if kind == "cuda":
        torch.cuda.synchronize()
    return {"step_seconds": time.monotonic() - began, "peak_memory_bytes": meter.peak_bytes()}


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]))))
