"""What is watched while a run trains: time, losses and norms, and whether it was asked to stop."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Any

import torch

from rgp.rounding import finite
from rgp.run import Run


@dataclass
class Clock:
    """Seconds that earlier processes spent on the run, read from metrics.jsonl."""

    wall: float = 0.0
    steps: float = 0.0

    def later(self, row: dict[str, Any]) -> Clock:
        return Clock(max(self.wall, row.get("seconds", 0.0)), max(self.steps, row.get("step_seconds", 0.0)))


class TrainingStatistics:
    """Losses and norms of the steps since the last evaluation. Private: computed from training rows without noise."""

    def __init__(self, diagnostics: bool) -> None:
        self.diagnostics = diagnostics
        self.examples = 0  # since the last step, for the throughput on the screen
        self._bad = 0
        self._clear()

    def _clear(self) -> None:
        self._loss, self._count, self._norms = 0.0, 0, [torch.empty(0)]
        self._clipped = 0

    def add(self, loss: torch.Tensor, examples: int, run: Run) -> None:
        self.examples += examples
        self._count += examples
        self._loss += loss.item() * examples
        norms = run.norms if self.diagnostics else None
        if norms is not None:
            clip = run.clip_norm
            self._norms.append(norms.detach().float().cpu())
            self._clipped += 0 if clip is None else int((norms > clip).sum())
        self._bad = run.bad_examples

    def take(self) -> dict[str, Any]:
        if not self._count:
            return {}
        row: dict[str, Any] = {"training_loss": finite(self._loss / self._count)}
        if self.diagnostics:
            row["bad_examples"] = self._bad
            norms = torch.cat(self._norms)
            if len(norms):
                row["clip_fraction"] = self._clipped / len(norms)
                row["norm_mean"] = finite(norms.mean().item())
                row["norm_median"] = finite(norms.median().item())
        self._clear()
        return row


class Signals:
    """Notes the first Ctrl-C (or SIGTERM), so that the loop can end in good order; a second one interrupts at once."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._old: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._old[number] = signal.signal(number, self._note)
            except ValueError:  # not the main thread: whoever runs us has their own way to stop
                break
        return self

    def _note(self, number: int, _: Any) -> None:
        if self.number is not None:
            raise KeyboardInterrupt
        self.number = number

    def __exit__(self, *_: object) -> None:
        for number, old in self._old.items():
            signal.signal(number, old)
