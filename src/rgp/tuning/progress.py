"""Progress over all trials, on the screen of whoever runs the search. As secret as the trials: it shows how many there are."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from typing import Any, TextIO

from rgp.train.progress import SECONDS_BETWEEN_LINES


class OverTrials:
    """The `Progress` of every trial's run, as a share of the whole search. What a run says of itself is not shown."""

    def __init__(self, trials: int, done: int = 0, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._trials, self._done, self._first = trials, float(done), float(done)
        self._steps = 1
        self._began = self._shown = time.monotonic()
        self._bar: Any = None
        if self._stream.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            words = TextColumn("{task.description}")
            self._bar = Progress(words, BarColumn(bar_width=24), console=Console(file=self._stream, highlight=False))
            self._task = self._bar.add_task("", total=trials, completed=done)
            self._bar.start()

    def words(self) -> str:
        """Which trial it is, and how long the rest will take."""
        text = f"trial {min(int(self._done) + 1, self._trials)} of {self._trials}"
        if self._done > self._first:
            spent = time.monotonic() - self._began
            left = spent / (self._done - self._first) * (self._trials - self._done)
            text += f", about {timedelta(seconds=round(left))} left"
        return text

    def trial(self, index: int) -> None:
        self._done = float(index)
        self._show()

    def start(self, name: str, done: int, total: int) -> None:
        self._steps = total

    def step(self, done: int, *, epsilon: float | None, examples: int) -> None:
        self._done = int(self._done) + min(done / self._steps, 0.999)
        if self._bar is not None or time.monotonic() - self._shown >= SECONDS_BETWEEN_LINES:
            self._show()

    def accuracy(self, value: float) -> None: ...

    def say(self, text: str) -> None: ...

    def stop(self) -> None: ...

    def _show(self) -> None:
        self._shown = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, description=self.words())
        else:
            print(self.words(), file=self._stream, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
