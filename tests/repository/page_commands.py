"""The commands that pages show: each line of a shell block, and what stands in the text as `make ...`, `python ...` and so on."""

import json
import re
import shlex
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
BLOCK = re.compile(
    r"^(?P<before>[^\n]*\n)?\n?(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^(?P=indent)```", re.M | re.S
)
SHELL = ("", "console", "bash", "sh")
CHECKED = (*SHELL, "python", "diff", "yaml")  # whatever is none of these is a block of `text`
LAUNCHERS = ("make", "pip", "python", "python3", "pytest", "torchrun", "accelerate", "rgp")
INLINE = re.compile(rf"`((?:{'|'.join(LAUNCHERS)}) [^`\n]+)`")


def pages():
    """Every page of the site that is written by hand or by an experiment, and the README."""
    top = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY", "CHANGELOG")]
    folders = [(DOCS, "*.md"), (DOCS / "tutorials", "*.ipynb"), (ROOT / "benchmarks", "*.md")]
    return [*top, *(path for folder, names in folders for path in sorted(folder.rglob(names)))]


def text_of(path):
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return text
    return "\n\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown")


def marked(before):
    """Whether the line before a block says why it is not run."""
    return (before or "").startswith("<!-- not run: ")


def blocks(path, *languages):
    """(line, code) of every block in one of these languages, unless a comment before it says why it is not run."""
    text = text_of(path)
    for match in BLOCK.finditer(text):
        if match["language"] in languages and not marked(match["before"]):
            yield text[: match.start("code")].count("\n") + 1, textwrap.dedent(match["code"])


def shell_lines(path):
    """(line, command) of everything that a reader would type: without prompt, comment and number, with variables filled in."""
    for first, code in blocks(path, *SHELL):
        prompted, variables = re.search(r"^\$ ", code, re.M), {}
        numbered = re.sub(r"\\\n", lambda _: "\0", code).splitlines()
        line = first
        for text in numbered:
            here, line = line, line + 1 + text.count("\0")
            text = text.replace("\0", " ")
            if prompted and not text.startswith("$ "):  # what the command answers
                continue
            text = re.sub(r"^(\$ |\(\d+\) )", "", re.split(r"(?:^|\s+)#", text)[0]).strip()
            for part in filter(None, map(str.strip, text.split(";"))):
                if assigned := re.fullmatch(r'([A-Z]+)="([^"]*)"', part):
                    variables[assigned[1]] = assigned[2]
                    continue
                for name, value in variables.items():
                    part = part.replace(f"${name}", value)
                yield here, re.split(r"\s+[>|]", part)[0].strip()


def inline(path):
    """(line, command) of the commands in the text itself, unless the line says why it is not run."""
    text = text_of(path)
    text = re.sub(r"^ *```.*?^ *```", lambda m: "\n" * m[0].count("\n"), text, flags=re.M | re.S)
    for number, line in enumerate(text.splitlines(), 1):
        if "<!-- not run: " not in line:
            yield from ((number, command) for command in INLINE.findall(line))


def shown(path):
    """(line, words) of every command of a page, in blocks and in the text."""
    for line, command in sorted([*shell_lines(path), *inline(path)]):
        try:
            yield line, shlex.split(command)
        except ValueError:  # an apostrophe
            yield line, command.split()
