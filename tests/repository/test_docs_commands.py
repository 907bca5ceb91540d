"""Commands on pages besides `rgp`: the target, the extra, the script with these arguments, the tests that they name exist.

They are not run as they stand, for they install or take hours. A line that is none of these needs a reason before its block,
`<!-- not run: why -->`, or fails here.
"""

import argparse
import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from page_commands import BLOCK, CHECKED, ROOT, pages, shown, text_of


class Accepted(Exception):
    """The script's own parser has taken the arguments: far enough."""


def wrong(words):
    """What is wrong with this command; None if nothing is."""
    if words[0] == "rgp":  # test_docs.py and test_docs_fragments.py
        return None
    if words[0] in ("torchrun", "accelerate"):
        return None if "rgp" in words or words[-1] in ("launch", "program.py") else "launches something unknown"
    if words[0] == "cat":  # what follows is the file
        return None
    name = Path(words[0]).name if words[0].startswith(".venv/bin/") else words[0]
    check = {
        "make": wrong_make,
        "pip": wrong_pip,
        "python": wrong_python,
        "python3": wrong_python,
        "pytest": wrong_pytest,
    }
    return check[name](words[1:]) if name in check else "no test knows such a command: mark it, or check it here"


def wrong_make(targets):
    done = subprocess.run(["make", "-n", *targets], cwd=ROOT, capture_output=True, text=True)
    return done.stderr if done.returncode or not targets else None


def wrong_pip(words):
    extras = re.findall(r"^(\w+) = \[", section("project.optional-dependencies"), re.M)
    for place in words[1:]:
        match = re.fullmatch(r"\.(?:\[([\w,]+)\])?", place)
        if words[0] != "install" or match is None:
            return "not an installation of this repository"
        if unknown := set((match[1] or "").split(",")) - {*extras, ""}:
            return f"pyproject.toml has no extra {', '.join(sorted(unknown))}"
    return None


def section(name):
    return (ROOT / "pyproject.toml").read_text(encoding="utf-8").split(f"[{name}]\n")[1].split("\n[")[0]


def wrong_python(words):
    if words[0] == "-m":
        return None if importlib.util.find_spec(words[1]) else f"no module {words[1]}"
    script = ROOT / words[0]
    if not script.is_file():
        return f"no file {words[0]}"
    source = script.read_text(encoding="utf-8")
    if "argparse" in source or "driver.arguments" in source:
        return refused(script, words[1:])
    usage = re.search(rf"python \S*{script.name}(.*)", ast.get_docstring(ast.parse(source)) or "")
    if usage is None:
        return "the script does not say how it is called"
    takes = re.split(r"\s+#", usage[1])[0].split()
    least = [word for word in takes if not word.startswith("[")]
    return None if len(least) <= len(words[1:]) <= len(takes) else f"the script takes {usage[1].strip() or 'nothing'}"


def refused(script, arguments):
    """What the script's own parser says against these arguments. Nothing after it is run."""
    said, own = [], (argparse.ArgumentParser.parse_args, argparse.ArgumentParser.parse_known_args)

    def accept(parser, *_, **__):
        rest = own[1](parser, arguments)[1]
        if rest and "parse_known_args" not in script.read_text(encoding="utf-8"):
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        raise Accepted

    def error(parser, message):
        said.append(message)
        raise Accepted

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(script.parent))
        for name, value in {"parse_args": accept, "parse_known_args": accept, "error": error}.items():
            patch.setattr(argparse.ArgumentParser, name, value)
        patch.setattr(sys, "argv", [str(script), *arguments])
        spec = importlib.util.spec_from_file_location(f"shown_{script.stem}", script)
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, spec.name, module)
        try:
            spec.loader.exec_module(module)
            module.main()
        except Accepted:
            return said[0] if said else None
    return "it never looked at its arguments"


def wrong_pytest(words):
    """Paths exist, and what -k and -m ask for is there to be found. Collecting would take longer than it tells."""
    paths = [ROOT / word.split("::")[0] for word in words if word.startswith("tests")]
    if not paths or not all(path.exists() for path in paths):
        return "no such test"
    files = [file for path in paths for file in ([path] if path.is_file() else path.rglob("test_*.py"))]
    sought = [words[i + 1] for i, word in enumerate(words) if word in ("-k", "-m")]
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    return next((f"nothing for {word}" for word in sought if word not in text), None)


@pytest.mark.parametrize("path", pages(), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_command_on_a_page_is_one_that_can_be_called(path):
    found = {f"{path.name}:{line}: {' '.join(words)}": wrong(words) for line, words in shown(path)}
    assert {line: why for line, why in found.items() if why} == {}


def test_every_block_is_of_a_kind_that_is_checked():
    """Or it is `text`: what a command or a program answers."""
    found = {f"{path.name}: {match['language']}" for path in pages() for match in BLOCK.finditer(text_of(path))}
    assert {name for name in found if name.split(": ")[1] not in (*CHECKED, "text")} == set()


def test_there_are_commands_of_every_kind():
    kinds = {words[0] for path in pages() for _, words in shown(path)}
    assert {"make", "pip", "python", "pytest", "torchrun", "rgp"} <= kinds


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("make dmeo", "No rule to make target"),
        ("pip install '.[dmeo]'", "no extra dmeo"),
        ("pip install numpy", "not an installation of this repository"),
        ("python experiments/sst3.py tables", "no file"),
        ("python experiments/sst2.py tabels --data DATA", "invalid choice"),
        ("python experiments/sst2.py tables --dta DATA", "unrecognized arguments"),
        ("python experiments/sst2_energy.py", "the script takes RUN"),
        ("python -m no_such_module", "no module"),
        ("pytest tests/test_clippings.py", "no such test"),
        ("pytest tests/test_clipping.py -k nothing_like_it", "nothing for"),
        ("torchrun program2.py", "something unknown"),
        ("curl example.org", "no test knows"),
    ],
)
def test_a_command_that_cannot_be_called_is_noticed(line, why, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"Text.\n\n```console\n$ {line}\nan answer\n```\n")
    assert [why in (wrong(words) or "") for _, words in shown(page)] == [True]
    page.write_text(f"Text.\n\n<!-- not run: it is wrong on purpose -->\n```console\n$ {line}\n```\n")
    assert list(shown(page)) == []


def test_how_lines_are_read(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "See `make demo`.\n\n```\n"
        'S="--set a=1"\n(1) rgp train $S; rgp eval  # both\nrgp plan \\\n  --model x > file\n'
        "# a comment\nmake docs | tee log\n```\n"
        "Not `make clean`. <!-- not run: it deletes -->\n"
    )
    assert list(shown(page)) == [
        (1, ["make", "demo"]),
        (5, ["rgp", "eval"]),
        (5, ["rgp", "train", "--set", "a=1"]),
        (6, ["rgp", "plan", "--model", "x"]),
        (9, ["make", "docs"]),
    ]
