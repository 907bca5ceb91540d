"""What the scripts that fill tables into pages share."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from driver import mean_and_error, read

from rgp.reproduce import markdown

Rows = list[dict[str, Any]]
Tables = dict[str, Callable[[Rows], str]]


def rows_in(results: tuple[Path, ...]) -> Rows:
    return [row for path in results if path.exists() for row in read(path)]


def fill(pages: tuple[Path, ...], results: tuple[Path, ...], tables: Tables) -> None:
    rows = rows_in(results)
    for page in pages:
        page.write_text(filled(page.read_text(encoding="utf-8"), rows, tables), encoding="utf-8")


def filled(text: str, rows: Rows, tables: Tables) -> str:
    """The text with new tables between `<!-- NAME -->` and `<!-- end -->`."""

    def block(match: re.Match[str]) -> str:
        return f"<!-- {match[1]} -->\n{tables[match[1]](rows)}\n<!-- end -->"

    return re.sub(r"<!-- (\w+) -->\n.*?<!-- end -->", block, text, flags=re.DOTALL)


def difference(mean: float, error: float | None, word: str) -> str:
    return f"{mean:+.1f}" + (f" ± {error:.1f}: **{word}**" if error is not None else "")


def words(values: list[float]) -> str:
    mean, error = mean_and_error(values)
    return f"{mean:.1f}" + (f" ± {error:.1f}" if error is not None else "")


def rounded(difference: float) -> float:
    """To a tenth, and never -0.0."""
    return round(difference, 1) + 0.0


def table(head: tuple[str, ...], lines: list[tuple[str, ...]]) -> str:
    return "\n".join(markdown.table(head, [line for line in lines if line]))
