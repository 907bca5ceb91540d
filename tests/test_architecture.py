"""Who may know what: no file outside the core reads private names of a run, and the core knows nothing of what is built on it."""

from __future__ import annotations

import re
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "rgp"


def test_no_private_name_of_a_run_is_used_outside_of_it():
    allowed = {SOURCE / "run.py"}
    found = [
        f"{path.relative_to(SOURCE)}:{number}: {line.strip()}"
        for path in SOURCE.rglob("*.py")
        if path not in allowed
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(r"\b(run|self\.run|self\._run)\._[a-z]", line)
    ]
    assert not found, "\n".join(found)


def test_the_core_imports_nothing_that_is_built_on_it():
    above = {
        "train",
        "attacks",
        "analysis",
        "report",
        "integrations",
        "reproduce",
        "audit",
        "bench",
        "planning",
        "data",
    }
    core = [p for p in SOURCE.glob("*.py") if p.name not in ("cli.py", "__main__.py")]
    core += [*(SOURCE / "rules").glob("*.py"), *(SOURCE / "checks").glob("*.py")]
    found = [
        f"{path.name}: rgp.{name}"
        for path in core
        for name in above
        if re.search(rf"^\s*(from|import) rgp\.{name}\b", path.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert not found, found
