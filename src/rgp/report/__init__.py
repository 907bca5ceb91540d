"""Reports of runs: one HTML file each, complete in itself."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rgp.files import write_text
from rgp.report.html import Html
from rgp.report.runs import RunError, read_json, read_run

__all__ = ["RunError", "write"]
SEARCH = "tune.json"


def write(folders: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str]) -> Path:
    """Write a report of one run, or a comparison of several, and return its path.

    The file needs no network and no other file. What the guarantee does not cover is in marked sections: it is for the
    owner of the data. What may be published is each run's `model/`.
    """
    from rgp.report.page import page

    if not folders:
        raise RunError("give the folder of at least one run, such as runs/digits-rgp.")
    paths = [Path(folder) for folder in folders]
    searches = [path for path in paths if (path / SEARCH).exists()]
    if searches and len(paths) > 1:
        raise RunError(f"{searches[0]} holds a search (rgp tune), which has a page of its own: give it alone.")
    content = str(_of_search(paths[0]) if searches else page([read_run(path) for path in paths]))
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    mode = 0o666 if searches else 0o600  # a run's page has private sections: it is for its owner alone
    write_text(out, content, mode=mode)
    return out


def _of_search(folder: Path) -> Html:
    from rgp.report.search import search_page

    found = read_json(folder / SEARCH)
    if not found["finished"]:
        raise RunError(f"the search in {folder} is not finished: rgp tune --resume --out {folder}")
    card = None if found["best"] is None else read_json(folder / "model" / "privacy_card.json")
    return search_page(found, card, folder.resolve().name)
