"""The reference pages, from the code: every name in `rgp.__all__`, and every command with its options.

python docs/reference.py python|commands      prints one of them; mkdocs asks by way of docs/hooks.py
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from typing import Any

# One or more names, a colon, what they mean; further lines are indented.
ARGUMENT = re.compile(r"^(\w+(?:(?:, | or )\w+)*): (.*)$")
PAGE = re.compile(r"\bdocs/([\w-]+)\.md\b")
KINDS = {
    "Training": ("privatize", "Run", "resume", "Budget"),
    "Methods": (
        "RGP",
        "RGPRandom",
        "DPSGD",
        "DPPowerSGD",
        "BiTFiT",
        "LinearProbe",
        "NonPrivate",
        "PowerSGD",
        "ResidualOff",
    ),
    "Before a run": ("make_plan", "Plan", "check", "fix", "without_labels", "tune"),
    "Clipping": ("AutoClip", "GroupClip", "AdaptiveClip"),
    "Errors": ("UnsupportedError", "WrongUseError", "RankError", "LedgerError"),
}


def python_page() -> str:
    """Markdown about every public Python name."""
    import rgp

    public = [name for name in rgp.__all__ if name != "__version__"]
    groups = {title: [name for name in names if name in public] for title, names in KINDS.items()}
    groups["More"] = [name for name in public if not any(name in names for names in KINDS.values())]
    lines = ["# Python", "", "Every public name of `rgp`, made from the code that is documented. `rgp.__version__` is"]
    lines += [f"`{rgp.__version__}` here.", ""]
    for title, names in groups.items():
        if names:
            lines += [f"## {title}", ""]
        for name in names:
            lines += [f"### `rgp.{name}` {{ #{name} }}", "", *describe(f"rgp.{name}", getattr(rgp, name)), ""]
    return "\n".join(lines)


def describe(title: str, thing: Any) -> Iterator[str]:
    """Signature, docstring and, of a class that is no error, its methods and attributes."""
    is_error = inspect.isclass(thing) and issubclass(thing, Exception)
    if is_error:
        yield from ["", f"An error; also a `{thing.__mro__[1].__name__}`.", ""]
    elif title != "rgp.Run":  # nobody makes one by hand
        yield from ["```python", signature(title, thing), "```", ""]
    yield from prose(own_doc(thing))
    if not inspect.isclass(thing) or is_error:
        return
    for name, member in public_members(thing):
        is_property = isinstance(member, property)
        function = member.fget if is_property else member
        shown = f"`.{name}`" if is_property else f"`.{signature(name, getattr(thing, name), bound=True)}`"
        text = "\n".join(prose(own_doc(function))).strip()
        yield from ["", shown, "", ":   " + text.replace("\n", "\n    "), ""]


def public_members(cls: type) -> Iterator[tuple[str, Any]]:
    """Methods and properties with a docstring: what has none is not for users."""
    for base in reversed(cls.__mro__):
        if not base.__module__.startswith("rgp"):
            continue
        for name, member in vars(base).items():
            function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            if not name.startswith("_") and inspect.isfunction(function) and function.__doc__:
                yield name, member


def own_doc(thing: Any) -> str:
    """The docstring, unless a dataclass made it up out of its signature."""
    text = inspect.cleandoc(thing.__doc__ or "")
    return "" if inspect.isclass(thing) and text.startswith(f"{thing.__name__}(") else text


def signature(name: str, thing: Any, *, bound: bool = False) -> str:
    """A call with all its arguments; one to a line where a line would be long."""
    found = inspect.signature(thing)
    parameters = [p for p in found.parameters.values() if not (bound and p.name in ("self", "cls"))]
    shown: list[str] = []
    for p in parameters:
        if p.kind is p.KEYWORD_ONLY and "*" not in shown and not any(s.startswith("*") for s in shown):
            shown.append("*")
        shown.append(tidy(str(p)))
    result = "" if found.return_annotation in (found.empty, None, "None") else f" -> {tidy(annotation(found))}"
    line = f"{name}({', '.join(shown)}){'' if inspect.isclass(thing) else result}"
    if len(line) <= 100 or bound:
        return line
    return "\n".join([f"{name}(", *(f"    {part}," for part in shown), f"){'' if inspect.isclass(thing) else result}"])


def annotation(found: inspect.Signature) -> str:
    kind = found.return_annotation
    return kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))


def tidy(text: str) -> str:
    """Annotations as they are written in the source: without quotes, and without where a name comes from."""
    text = re.sub(r"<factory>", "...", text)
    text = re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Z])", "", text)
    return re.sub(r": '([^']*)'", r": \1", text)


def prose(doc: str) -> list[str]:
    """A docstring as Markdown: examples become code, lists of arguments become lists."""
    lines: list[str] = []
    code = False
    for line in doc.splitlines():
        is_code = line.startswith((">>>", "...")) or (code and line.strip() != "")
        if is_code != code:
            lines += ["", "```pycon"] if is_code else ["```", ""]
            code = is_code
        line = line if code else PAGE.sub(r"[\1](../\1.md)", line)
        argument = ARGUMENT.match(line)
        if code:
            lines.append(line)
        elif argument:
            names = re.sub(r"\w+", lambda m: m[0] if m[0] == "or" else f"`{m[0]}`", argument[1])
            lines += [*([""] if lines and not lines[-1].startswith(("- ", "  ")) else []), f"- {names}: {argument[2]}"]
        else:
            lines.append(f"  {line.strip()}" if line.startswith("    ") and not code else line)
    return [*lines, "```", ""] if code else lines


def commands_page() -> str:
    """Markdown about every command of `rgp`, with its arguments and options."""
    lines = ["# Commands", "", "Made from the code; `rgp COMMAND --help` says the same in a terminal.", ""]
    for path, command in commands():
        lines += [f"## `{path}` {{ #{path.replace(' ', '-')} }}", "", *command_help(command.help or ""), ""]
        rows = [row for parameter in command.params if (row := option(parameter))]
        if rows:
            lines += ["| option | meaning |", "|---|---|", *rows, ""]
    return "\n".join(lines)


def commands() -> Iterator[tuple[str, Any]]:
    """(`rgp train`, the command), for all of them; those of a group one by one."""
    import typer.main

    from rgp.cli import app

    def walk(path: str, command: Any) -> Iterator[tuple[str, Any]]:
        inner = getattr(command, "commands", None)
        if inner is None:
            yield path, command
        for name, one in (inner or {}).items():
            yield from walk(f"{path} {name}", one)

    yield from walk("rgp", typer.main.get_command(app))


def command_help(text: str) -> Iterator[str]:
    """The text of a command; what stands after \\b keeps its lines, and examples are code."""
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        kept = paragraph.lstrip().removeprefix("\b").strip("\n")
        if kept == paragraph.strip("\n"):
            yield from [paragraph, ""]
            continue
        head, *rest = kept.splitlines()
        yield from [head, "", "```text", *(inspect.cleandoc("\n".join(["", *rest])).splitlines()), "```", ""]


def option(parameter: Any) -> str | None:
    """One row of a table; nothing for --help and for options that help hides."""
    if parameter.name == "help" or getattr(parameter, "hidden", False):
        return None
    is_option = parameter.param_type_name == "option"
    names = [*parameter.opts, *parameter.secondary_opts] if is_option else [parameter.metavar or parameter.name]
    shown = ", ".join(f"`{name}`" for name in names)
    default = parameter.default
    given = "" if callable(default) or default in (None, False, "", ()) or not is_option else f"Default: `{default}`."
    note = "Required." if parameter.required else given
    text = " ".join((getattr(parameter, "help", None) or "").split()).replace("|", "\\|")
    return f"| {shown} | {text} {note} |"


if __name__ == "__main__":
    print({"python": python_page, "commands": commands_page}[sys.argv[1]]())
