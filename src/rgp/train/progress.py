"""What is shown while a run trains: a bar on a terminal, plain lines otherwise, on stderr; TensorBoard if asked."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any, Protocol, TextIO

from rgp.rounding import round_up

SECONDS_BETWEEN_LINES = 10.0


class Progress(Protocol):
    def start(self, name: str, done: int, total: int) -> None: ...
    def step(self, done: int, *, epsilon: float | None, examples: int) -> None: ...
    def accuracy(self, value: float) -> None: ...
    def say(self, text: str) -> None: ...
    def stop(self) -> None: ...


def for_stream(stream: TextIO | None = None) -> Progress:
    stream = sys.stderr if stream is None else stream
    return Bar(stream) if stream.isatty() else Lines(stream)


class Silent:
    def start(self, name: str, done: int, total: int) -> None: ...
    def step(self, done: int, *, epsilon: float | None, examples: int) -> None: ...
    def accuracy(self, value: float) -> None: ...
    def say(self, text: str) -> None: ...
    def stop(self) -> None: ...


class Lines:
    """One line now and then, for logs."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def start(self, name: str, done: int, total: int) -> None:
        self._name, self._total, self._done, self._first = name, total, done, done
        self._examples = 0
        self._accuracy: float | None = None
        self._epsilon: float | None = None
        self._began = self._shown = time.monotonic()
        self.say(f"{name}: {total} steps" + (f", resuming at step {done}" if done else ""))

    def step(self, done: int, *, epsilon: float | None, examples: int) -> None:
        self._done, self._epsilon = done, epsilon
        self._examples += examples
        if time.monotonic() - self._shown >= SECONDS_BETWEEN_LINES or done == self._total:
            self._show()

    def accuracy(self, value: float) -> None:
        self._accuracy = value

    def _show(self) -> None:
        self._shown = now = time.monotonic()
        spent = now - self._began
        parts = [f"step {self._done}/{self._total}"]
        if self._done > self._first:
            left = spent / (self._done - self._first) * (self._total - self._done)
            parts += [f"{self._examples / max(spent, 1e-9):,.0f} examples/s", f"{_clock(left)} left"]
        if self._epsilon is not None:
            parts.append(f"epsilon <= {round_up(self._epsilon, 2)}")
        if self._accuracy is not None:
            parts.append(f"held-out accuracy {self._accuracy:.1%}")
        self.say(f"{self._name}: " + ", ".join(parts))

    def say(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def stop(self) -> None: ...


class Bar:
    """Steps, time left, throughput, epsilon so far, last held-out accuracy."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console

        self._console = Console(file=stream, highlight=False)
        self._bar: Any = None

    def start(self, name: str, done: int, total: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[speed]}"),
            TextColumn("[cyan]{task.fields[epsilon]}"),
            TextColumn("[green]{task.fields[accuracy]}"),
            console=self._console,
        )
        self._task = self._bar.add_task(name, total=total, completed=done, speed="", epsilon="", accuracy="")
        self._examples, self._began = 0, time.monotonic()
        self._bar.start()

    def step(self, done: int, *, epsilon: float | None, examples: int) -> None:
        self._examples += examples
        speed = self._examples / max(time.monotonic() - self._began, 1e-9)
        shown = "not private" if epsilon is None else f"ε ≤ {round_up(epsilon, 2)}"
        self._bar.update(self._task, completed=done, speed=f"{speed:,.0f}/s", epsilon=shown)

    def accuracy(self, value: float) -> None:
        self._bar.update(self._task, accuracy=f"accuracy {value:.1%}")

    def say(self, text: str) -> None:
        self._console.print(text, markup=False)

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class Board:
    """TensorBoard: what may be published under tensorboard/, what may not under tensorboard-private/.

    step: the last one that counts; later ones that earlier processes wrote are hidden, because those steps are taken again
    """

    def __init__(self, folder: Path, step: int = 0) -> None:
        writer = self.needed()
        private = folder / "tensorboard-private"
        private.mkdir(mode=0o700, exist_ok=True)
        self._writers = {
            public: writer(str(path), purge_step=step + 1)
            for public, path in ((True, folder / "tensorboard"), (False, private))
        }

    @staticmethod
    def needed() -> Any:
        """torch's writer; ValueError where TensorBoard is not installed."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError("--tensorboard needs: pip install 'rgp[tensorboard]'") from error
        return SummaryWriter

    def add(self, row: dict[str, Any], *, public: bool) -> None:
        for name, value in row.items():
            if name != "step" and isinstance(value, (int, float)):
                self._writers[public].add_scalar(name, value, row["step"])

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
