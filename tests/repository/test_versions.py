"""What is promised about versions: the syntax of the oldest Python, one name for the distribution, one version everywhere."""

import ast
import re
from pathlib import Path

import pytest

import rgp

ROOT = Path(__file__).parents[2]
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
LATER = {  # in the standard library or in typing since a later Python than the oldest
    "3.11": ("tomllib", "ExceptionGroup", "StrEnum", "typing.Self", "typing.assert_never", "add_note", "datetime.UTC"),
    "3.12": ("itertools.batched", "typing.override"),
}


def sources():
    folders = ("src", "docs", "examples", "tests", "experiments", "benchmarks")
    return [path for folder in folders for path in (ROOT / folder).rglob("*.py")]


def test_everything_is_written_in_the_oldest_python_that_is_promised():
    assert 'requires-python = ">=3.10' in PROJECT
    for path in sources():
        ast.parse(path.read_text(encoding="utf-8"), str(path), feature_version=(3, 10))


def test_the_check_notices_later_syntax():
    with pytest.raises(SyntaxError):
        ast.parse("try: pass\nexcept* ValueError: pass", feature_version=(3, 10))


def test_nothing_from_later_standard_libraries_is_imported():
    for path in (ROOT / "src").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                names |= {alias.name for alias in node.names} | {f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.Attribute):
                names.add(node.attr)
        assert not names & {name for later in LATER.values() for name in later}, path


def test_version_and_name_agree_wherever_they_stand():
    assert re.search(r'^name = "rgp"$', PROJECT, re.M)
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^## {re.escape(rgp.__version__)}\b", changes, re.M)
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|rc\d+)?", rgp.__version__)
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    installed = {
        name for path in pages for name in re.findall(r"pip install '?([\w-]+)\[", path.read_text(encoding="utf-8"))
    }
    assert installed <= {"rgp"}
