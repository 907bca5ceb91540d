"""What mkdocs calls while it builds the site: generated pages, pages from outside of docs/, and links that leave it."""

from __future__ import annotations

import importlib.util
import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
OPTIONAL = {"units.md", "opacus.md", "thin.md", "compile.md"}  # pages that have a place in the menu once they exist
OUTSIDE = [
    "SECURITY.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "benchmarks/*.md",
]  # of the repository, shown under project/
LISTS = {"mutants.md", "architectures.md", "project/CHANGELOG.md"}  # long lists of words: last in a search
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"^(```.*?^```)", re.MULTILINE | re.DOTALL)


def on_config(config: Any) -> Any:
    config.nav = present(config.nav, Path(config.docs_dir))
    return config


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    reference = load("reference")
    pages = {"reference/python.md": reference.python_page(), "reference/commands.md": reference.commands_page()}
    notebooks = load("notebooks")
    pages |= {place: notebooks.page(path) for place, path in tutorials().items()}
    for path, place in outside_pages().items():
        pages[place] = (ROOT / path).read_text(encoding="utf-8")
    for place, text in pages.items():
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    if page.file.src_uri in LISTS or page.file.src_uri.startswith("project/benchmarks/"):
        page.meta["search"] = {"boost": 0.2}
    return site_links(markdown, page.file.src_uri, {file.src_uri for file in files})


def on_post_page(output: str, page: Any, config: Any) -> str:
    if loads := foreign(output):
        raise SystemExit(f"{page.file.src_uri} would load from another host: {', '.join(loads)}")
    return output


def foreign(html: str) -> list[str]:
    """Addresses on other hosts that a browser would load by itself; links that a reader may follow are none of them."""
    return re.findall(r"""<(?!a\b)[a-z]+\b[^>]*?\b(?:src|href)=["']?((?:https?:)?//[^"'\s>]+)""", html)


def present(nav: list[Any], folder: Path) -> list[Any]:
    """The menu without optional pages that do not exist; any other missing page stays, and fails the build."""
    kept = []
    for item in nav:
        [(title, value)] = item.items()
        if isinstance(value, list):
            kept.append({title: present(value, folder)})
        elif value not in OPTIONAL or (folder / value).exists():
            kept.append(item)
    return kept


def outside_pages() -> dict[str, str]:
    """Path in the repository -> page of the site."""
    found = [path for pattern in OUTSIDE for path in sorted(ROOT.glob(pattern))]
    return {path.relative_to(ROOT).as_posix(): f"project/{path.relative_to(ROOT).as_posix()}" for path in found}


def site_links(markdown: str, place: str, pages: set[str]) -> str:
    """Links of a page that work in the repository, made to work on the site.

    A link to a page goes to its place on the site. A link to another file of the repository becomes its path in words,
    for the site does not hold it. A link to nothing stays as it is, and fails the build.
    """
    outside = outside_pages()
    source = {site: path for path, site in outside.items()}.get(place, f"docs/{place}")

    def replace(match: re.Match[str]) -> str:
        image, text, target = match.groups()
        path, hash_, anchor = target.partition("#")
        if not path or re.match(r"[a-z]+:", path):
            return match[0]
        there = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        page = outside.get(there) or there.removeprefix("docs/")
        if page in pages and (there.startswith("docs/") or there in outside):
            return f"{image}[{text}]({posixpath.relpath(page, posixpath.dirname(place) or '.')}{hash_}{anchor})"
        if (ROOT / there).exists() and not there.startswith("docs/") and not image:
            if text.lower().replace("-", "_") == Path(there).stem:
                return f"`{there}`"
            return text if there in text else f"{text} (`{there}` in the repository)"
        return match[0]

    parts = FENCE.split(markdown)
    return "".join(part if part.startswith("```") else LINK.sub(replace, part) for part in parts)


def tutorials() -> dict[str, Path]:
    """Page of the site -> the notebook that it shows."""
    found = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))
    return {f"tutorials/{path.stem}.md": path for path in found}


def load(name: str) -> Any:
    """A script that is next to this file and not on the path."""
    spec = importlib.util.spec_from_file_location(f"rgp_docs_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
