"""What can go wrong with a run, other than a mistake in its settings (checks.ConfigError)."""

from __future__ import annotations

from pathlib import Path


class RunFolderError(ValueError):
    """The folder is not what the command needs; nothing in it was changed."""


class Interrupted(Exception):
    """A run was asked to stop by a signal, and is saved."""

    def __init__(self, folder: Path, step: int, steps: int, signal: int) -> None:
        self.signal = signal
        super().__init__(
            f"stopped after step {step} of {steps}; everything is saved. Resume it: rgp train --resume --out {folder}"
        )


class DemoError(RuntimeError):
    """One of the demo's runs failed."""
