"""What is installed, on which machine, and can it write."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

EXTRAS = {  # as in pyproject.toml, which tests/doctor/test_doctor.py compares
    "cli": ("typer", "rich", "pyyaml"),
    "secure": ("randomgen",),
    "checkpoint": ("safetensors",),
    "hf": ("transformers", "safetensors"),
    "trainer": ("transformers", "safetensors", "accelerate"),
    "peft": ("transformers", "safetensors", "peft"),
    "data": ("pillow", "scipy", "datasets", "pyarrow"),
    "plots": ("matplotlib",),
    "tensorboard": ("tensorboard",),
    "lightning": ("lightning",),
}
ALWAYS = ("torch", "numpy", "dp-accounting")


def version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def installed() -> dict[str, Any]:
    """Versions of all that rgp may use; for every extra, what it lacks."""
    names = [*ALWAYS, *dict.fromkeys(name for needed in EXTRAS.values() for name in needed)]
    found = {name: version(name) for name in names}
    return {
        "packages": found,
        "extras": {extra: [name for name in needed if found[name] is None] for extra, needed in EXTRAS.items()},
    }


def machine() -> dict[str, Any]:
    """Python, system and the device that `run.device: auto` would take."""
    import torch

    from rgp import __version__
    from rgp.rules import conv_native

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "rgp": __version__,
        "python": platform.python_version(),
        "executable": sys.executable,
        "system": f"{platform.system()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": "cuda" if gpus else "cpu",
        "gpus": gpus,
        "native_convolutions": conv_native.library() is not None,
        "mps": bool(torch.backends.mps.is_available()),
    }


def writable(folder: Path) -> dict[str, Any]:
    """Whether a ledger could be kept in `folder`: a line is written, synced and read again. The file is removed."""
    found: dict[str, Any] = {"folder": str(folder.resolve()), "ok": False, "error": None, "free_bytes": None}
    try:
        with tempfile.NamedTemporaryFile("w+b", dir=folder, prefix=".rgp-doctor-") as file:
            file.write(b"a line\n")
            file.flush()
            os.fsync(file.fileno())
            found["ok"] = Path(file.name).read_bytes() == b"a line\n"
        found["free_bytes"] = shutil.disk_usage(folder).free
    except OSError as error:
        found["error"] = str(error)
    return found
