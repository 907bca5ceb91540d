"""The page as Markdown, with figures beside it: what a repository keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rgp.files import write_text
from rgp.reproduce.content import NOT_COVERED, Section

Say = Callable[[str], None]


def write(sections: Sequence[Section], path: Path, *, title: str, words: Sequence[str], say: Say) -> list[Path]:
    """The page, and one PNG per figure in img/ beside it. Returns what was written."""
    written = [path]
    lines = [f"# {title}", "", *(line for word in words for line in (word, ""))]
    for section in sections:
        lines += [f"## {section.title}", ""]
        if section.private:
            lines += [f"*{NOT_COVERED}*", ""]
        lines += [line for word in section.words for line in (word, "")]
        picture = _figure(section, path, say)
        if picture is not None:
            written.append(picture)
            lines += [f"![{section.title}]({picture.relative_to(path.parent).as_posix()})", ""]
        if section.rows:
            lines += [*table(section.headers, section.rows), ""]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "\n".join(lines).rstrip() + "\n")
    return written


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    return [_line(headers), "|" + "---|" * len(headers), *map(_line, rows)]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _figure(section: Section, path: Path, say: Say) -> Path | None:
    if not section.panels:
        return None
    try:
        from rgp.reproduce.figures import draw
    except ImportError:
        say("no figures: they need pip install 'rgp[plots]'")
        return None
    picture = path.parent / "img" / f"{path.stem}-{section.name}.png"
    picture.parent.mkdir(parents=True, exist_ok=True)
    draw(section, picture)
    return picture
