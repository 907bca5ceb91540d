"""Where a measurement was made: machine and commit."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parents[1]


def describe_machine() -> dict[str, Any]:
    """Ask before the measurement: the load average shows whether anything else was running."""
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None,
        "load_before": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "platform": platform.platform(),
        "python": platform.python_version(),
    }


def busy_seconds() -> float | None:
    """CPU time that all processes of this machine have had so far; None where the kernel does not say."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        user, nice, system, _idle, _wait, irq, softirq, steal = map(
            int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        )
        return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    return None


def cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def describe_commit() -> dict[str, Any]:
    """Short hash of the checkout that this package is part of; None for an installed copy."""

    def git(*words: str) -> str:
        # only this checkout is read, whoever owns it: git refuses others' checkouts where hooks might run, and none do here
        command = ["git", "-c", "safe.directory=*", "-C", str(PACKAGE), *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "_version.py")  # not a .venv inside someone else's repository
        return {"commit": git("rev-parse", "--short", "HEAD"), "uncommitted_changes": bool(git("status", "-s", "."))}
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None}
