"""What is watched while a run trains: time, losses and norms, epsilon so far, and whether somebody wants it to stop."""

from __future__ import annotations

import math
import signal
from dataclasses import dataclass
from typing import Any

import torch

from rgp import accounting
from rgp.run import Run


@dataclass
class Clock:
    """Seconds of earlier processes, read from metrics.jsonl."""

    wall: float = 0.0
    steps: float = 0.0

    def later(self, row: dict[str, Any]) -> Clock:
        return Clock(max(self.wall, row.get("seconds", 0.0)), max(self.steps, row.get("step_seconds", 0.0)))


class Seen:
    """What the steps since the last evaluation showed. Private: computed from training rows without noise."""

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
        row: dict[str, Any] = {"training_loss": _finite(self._loss / self._count)}
        if self.diagnostics:
            row["bad_examples"] = self._bad
            norms = torch.cat(self._norms)
            if len(norms):
                row["clip_fraction"] = self._clipped / len(norms)
                row["norm_mean"] = _finite(norms.mean().item())
                row["norm_median"] = _finite(norms.median().item())
        self._clear()
        return row


class EpsilonSoFar:
    """A cheap upper bound on what was spent, for every step."""

    def __init__(self, run: Run) -> None:
        settings = run.mechanism
        event: Any = settings.event(0) if len(settings.events()) == 1 else settings.event
        turns = -(-settings.steps // settings.bands)  # of the first group, which spends the most
        curve = accounting.epsilon_curve(event, turns, delta=settings.delta, accountant=settings.accountant, points=20)
        self._curve = [(turn * settings.bands, epsilon) for turn, epsilon in curve]

    def after(self, run: Run) -> float:
        count = run.ledger.count  # more than the steps, if some were charged twice after a crash
        if count > run.step_index and run.mechanism.bands > 1:  # twice in which group?
            return run.epsilon()
        found = next((epsilon for step, epsilon in self._curve if step >= count), None)
        return run.epsilon() if found is None else found


class Signals:
    """The first Ctrl-C (or SIGTERM) is noted, and the loop ends in its own time; a second one interrupts at once."""

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


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
