"""Who may know what: no file outside the core reads private names of a run, and the core knows nothing of what is built on it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "rgp"


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
        "cards",
        "demo",
        "doctor",
    }
    core = [p for p in SOURCE.glob("*.py") if p.name not in ("cli.py", "__main__.py")]
    core += [path for name in ("rules", "checks", "compiled") for path in (SOURCE / name).glob("*.py")]
    found = [
        f"{path.name}: rgp.{name}"
        for path in core
        for name in above
        if re.search(rf"^\s*(from|import) rgp\.{name}\b", path.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert not found, found


def test_packages_do_not_import_in_circles():
    graph = {name: others - {name, "core"} for name, others in imports().items() if name != "core"}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path, name))
        if name not in done:
            for other in sorted(graph.get(name, ())):
                visit(other, (*path, name))
            done.add(name)

    for name in sorted(graph):
        visit(name, ())


def test_the_page_on_the_architecture_lists_who_imports_whom():
    page = (SOURCE.parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| ([`\w, ]*) ?\|", page.split("## Who may import whom")[1], re.MULTILINE)
    listed = {f"rgp.{name}": {f"rgp.{other}" for other in re.findall(r"\w+", others)} for name, others in rows}
    core = {"core", "rgp.rules", "rgp.checks", "rgp.compiled"}
    found = {name: others - core - {name} for name, others in imports().items() if name not in core}
    assert {name: others for name, others in found.items() if name != "command line"} == listed


def imports() -> dict[str, set[str]]:
    """Package -> the packages that it imports when it is loaded or called."""
    found: dict[str, set[str]] = {}
    for module, tree in modules().items():
        for node in ast.walk(tree):
            names: list[str] = []
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("rgp"):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names if alias.name.startswith("rgp")]
            for name in names:
                found.setdefault(package(module), set()).add(package(name))
    return found


def modules() -> dict[str, ast.Module]:
    return {
        ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__"): ast.parse(
            path.read_text(encoding="utf-8")
        )
        for path in SOURCE.rglob("*.py")
    }


def package(module: str) -> str:
    """rgp.train.card -> rgp.train; the files next to rgp/__init__.py are the core, cli.py is by itself."""
    parts = module.split(".")
    if parts[1:2] in (["cli"], ["__main__"]):
        return "command line"
    return ".".join(parts[:2]) if len(parts) > 1 and (SOURCE / parts[1]).is_dir() else "core"


def test_tests_mirror_the_source():
    """Tests of rgp/X.py are tests/test_X*.py, those of a package are in a folder of its name."""
    tests = Path(__file__).parents[1]
    of_no_package = {"release", "repository", "golden", "hostile", "kept", "mutants", "torture", "faults", "data"}
    packages = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    folders = {path.name for path in tests.iterdir() if path.is_dir() and any(path.rglob("*.py"))}
    assert not folders - packages - of_no_package
    assert not packages - folders - {"cards"}  # words on a card are tested where the cards are made
    modules = {path.stem for path in SOURCE.glob("*.py")}
    names = {path.stem.removeprefix("test_") for path in tests.glob("test_*.py")}
    homeless = {name for name in names if not any(name == m or name.startswith(f"{m}_") for m in modules)}
    assert not homeless


def test_nobody_asks_what_kind_a_part_of_the_promise_is():
    """Samplers, units, clip rules, noise sources and methods answer for themselves; a new one touches no other file."""
    parts = "Poisson|Cyclic|Rows|Persons|Flat|AutoClip|GroupClip|AdaptiveClip|Philox|Secure\\w*|RGP\\w*|DPSGD|DPPowerSGD|PowerSGD"
    asks = re.compile(rf"isinstance\([^()]*,\s*\(?[^)]*\b({parts})\b")
    found = [
        f"{path.relative_to(SOURCE)}:{number}: {line.strip()}"
        for path in SOURCE.rglob("*.py")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if asks.search(line)
    ]
    assert not found, "\n".join(found)
