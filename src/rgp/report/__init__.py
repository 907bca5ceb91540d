"""Reports of runs: one HTML file each, complete in itself."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rgp.files import write_text
from rgp.report.runs import RunError, read_run

__all__ = ["RunError", "write"]


def write(folders: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str]) -> Path:
    """Write a report of one run, or a comparison of several, and return its path.

    The file needs no network and no other file. What the guarantee does not cover is in marked sections: it is for the
    owner of the data. What may be published is each run's `model/`.
    """
    from rgp.report.page import page

    if not folders:
        raise RunError("give the folder of at least one run, such as runs/digits-rgp.")
    content = str(page([read_run(Path(folder)) for folder in folders]))
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, content, mode=0o600)  # readable by its owner alone: it has private sections
    return out
