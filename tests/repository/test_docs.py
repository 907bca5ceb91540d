"""The pages of the site: their code runs, their commands exist, and the reference has every public name."""

import doctest
import importlib.util
import re
import sys
import warnings
from pathlib import Path

import pytest
from page_commands import DOCS, ROOT, blocks, pages, shown

RUN = [  # pages whose Python is run; a block after `<!-- not run: why -->` is not
    DOCS / "index.md",
    DOCS / "epsilon.md",
    DOCS / "accounting.md",
    DOCS / "faq.md",
    *(path for path in sorted((DOCS / "guides").glob("*.md")) if path.stem != "lightning"),  # its block is not run
]
SLOW = ("epsilon", "tuning")  # several calibrations


@pytest.mark.parametrize(
    "path",
    [pytest.param(p, marks=pytest.mark.slow if p.stem in SLOW else (), id=p.stem) for p in RUN],
)
def test_python_on_a_page_runs(path, tmp_path, monkeypatch, capsys):
    """The blocks of a page one after the other, as a reader would paste them."""
    found = list(blocks(path, "python"))
    for module in ("transformers", "accelerate"):
        if any(module in code or "PrivateTrainer" in code for _, code in found):
            pytest.importorskip(module)
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for line, code in found:
            exec(compile("\n" * line + code, str(path), "exec"), names)  # errors name the line of the page
    if found:
        assert capsys.readouterr().out or path.stem in ("faq", "accounting")


def test_every_page_of_guides_has_a_block_that_runs():
    assert len(RUN) >= 12
    assert all(list(blocks(path, "python")) for path in RUN)


def test_a_broken_block_is_noticed(tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    page.write_text("Text.\n\n```python\nimport rgp\n\nrgp.no_such_name()\n```\n")
    with pytest.raises(AttributeError, match="no_such_name"):
        test_python_on_a_page_runs(page, tmp_path, monkeypatch, capsys)


def commands():
    pytest.importorskip("typer")
    return dict(reference().commands())


def reference():
    spec = importlib.util.spec_from_file_location("rgp_docs_reference", DOCS / "reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def wrong_commands(path, known):
    """Lines with `rgp ...` that name a command or an option which does not exist."""
    wrong = []
    for line, words in shown(path):
        if words[0] in ("torchrun", "accelerate") and "rgp" in words:
            words = words[words.index("rgp") :]
        if words[0] != "rgp" or words[1] in ("...", "--help", "--install-completion", "--show-completion"):
            continue
        name = next((n for n in (" ".join(words[:k]) for k in (2, 3)) if n in known), None)
        options = {word.strip("[]").split("=")[0] for word in words if re.match(r"\[?--", word)}
        has = {option for p in known[name].params for option in (*p.opts, *p.secondary_opts)} if name else set()
        if name is None or options - has - {"--help"}:
            wrong.append(f"{path.name}:{line}: {' '.join(words)}")
    return wrong


@pytest.mark.parametrize("path", pages(), ids=lambda path: path.stem)
def test_commands_on_a_page_exist(path):
    assert not wrong_commands(path, commands())


@pytest.mark.parametrize(
    "line", ["rgp trian --preset digits-rgp", "rgp train --prset digits-rgp", "torchrun --nproc-per-node 2 -m rgp tran"]
)
def test_a_command_that_does_not_exist_is_noticed(line, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"Text.\n\n```console\n$ {line}\n```\n")
    assert wrong_commands(page, commands())


def test_presets_that_pages_name_exist():
    pytest.importorskip("yaml")
    from rgp.train.config import presets

    pages = "\n".join(path.read_text(encoding="utf-8") for path in RUN)
    named = set(re.findall(r"--preset ([\w-]+)", pages))
    assert named and named <= set(presets())


@pytest.mark.parametrize(
    "path", [p for p in sorted(DOCS.rglob("*.md")) if list(blocks(p, "yaml"))], ids=lambda p: p.stem
)
def test_settings_on_a_page_are_settings(path, tmp_path, monkeypatch):
    """YAML on a page is a config that `rgp train` reads, or a space that `rgp tune` searches."""
    pytest.importorskip("yaml")
    monkeypatch.chdir(tmp_path)
    for name in ("reviews.csv", "stories.txt", "visits.csv"):  # the reader's own
        Path(name).touch()
    for name in ("my-bert", "my-gpt2"):
        Path(name).mkdir()
        Path(name, "config.json").write_text("{}")
    for _, code in blocks(path, "yaml"):
        assert not wrong_settings(code, tmp_path / "config.yaml")


def wrong_settings(code, file):
    from rgp.train.config import ConfigError, load

    changes = []
    if re.match(r"\w+\.\w+: \[", code):  # a space: a list of values for each key of a config
        import yaml

        changes, code = [f"{key}={values[0]}" for key, values in yaml.safe_load(code).items()], "{}"
    elif "training:" not in code:  # a part of a config: the sections that the page does not speak of
        rest = {
            "model": "{name: ./my-bert}",
            "training": "{batch_size: 100, epochs: 3, clip: 1}",
            "budget": "{epsilon: 8}",
        }
        code += "".join(f"\n{key}: {value}" for key, value in rest.items() if f"{key}:" not in code)
    file.write_text(code)
    try:
        load(file, preset="digits-rgp" if changes else None, changes=changes)
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize("code", ["data: {nmae: x.csv}\n", "optimizer.nmae: [0.1, 1]\n"])
def test_a_setting_that_does_not_exist_is_noticed(code, tmp_path):
    pytest.importorskip("yaml")
    assert "nmae" in wrong_settings(code, tmp_path / "config.yaml")


def test_reference_has_every_public_name():
    import rgp

    page = reference().python_page()
    missing = [name for name in rgp.__all__ if f"`rgp.{name}`" not in page]
    assert not missing
    for argument in ("microbatch_size", "loss_reduction", "process_group"):
        assert f"- `{argument}`: " in page  # the docstring's list has become one
    assert "`.epsilon(delta: float | None = None" in page  # methods of a run


def test_examples_in_the_reference_run(tmp_path, monkeypatch):
    import rgp

    monkeypatch.chdir(tmp_path)
    finder, runner = doctest.DocTestFinder(recurse=True), doctest.DocTestRunner()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in set(rgp.__all__) - {"__version__"}:
            for example in finder.find(getattr(rgp, name), name):
                runner.run(example)
    assert runner.failures == 0 and runner.tries > 10


def test_reference_has_every_command_and_option():
    known, page = commands(), reference().commands_page()
    assert {"rgp train", "rgp doctor", "rgp data get"} <= set(known)
    sections = {part.split("`")[1]: part for part in page.split("\n## ")[1:]}
    assert set(sections) == set(known)
    for name, command in known.items():
        shown = [p for p in command.params if p.name != "help" and not getattr(p, "hidden", False)]
        options = {option for p in shown for option in p.opts if option.startswith("--")}
        assert all(f"`{option}`" in sections[name] for option in options), name


def test_errors_on_the_faq_are_errors_that_are_raised():
    """Each heading in quotation marks is part of an error's text that a test of tests/faults provokes."""
    headings = re.findall(r'^### "(.*)"$', (DOCS / "faq.md").read_text(encoding="utf-8"), re.MULTILINE)
    faults = (DOCS / "faults.md").read_text(encoding="utf-8")
    assert len(headings) > 10
    assert [text for text in headings if text not in faults] == []


def hooks():
    spec = importlib.util.spec_from_file_location("rgp_docs_hooks", DOCS / "hooks.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_links_that_leave_the_site():
    pages = {"method.md", "guides/people.md", "project/SECURITY.md"}
    links = hooks().site_links
    assert links("[a](method.md#x)", "index.md", pages) == "[a](method.md#x)"
    assert links("[a](../SECURITY.md)", "faults.md", pages) == "[a](project/SECURITY.md)"
    assert links("[a](../../SECURITY.md#b)", "guides/people.md", pages) == "[a](../project/SECURITY.md#b)"
    assert links("[a](docs/method.md)", "project/SECURITY.md", pages) == "[a](../method.md)"
    assert links("[a](../examples/)", "rules.md", pages) == "a (`examples` in the repository)"
    assert links("![a](img/x.png)", "method.md", {"img/x.png"}) == "![a](img/x.png)"
    assert links("[a](nowhere.md)", "index.md", pages) == "[a](nowhere.md)"  # mkdocs refuses it
    assert links("```\n[a](../SECURITY.md)\n```", "faults.md", pages) == "```\n[a](../SECURITY.md)\n```"


def test_what_would_be_loaded_from_another_host_is_noticed():
    foreign = hooks().foreign
    assert foreign('<script async src="https://a.org/x.js"></script>') == ["https://a.org/x.js"]
    assert foreign("<link rel=stylesheet href=//fonts.a.org/css>") == ["//fonts.a.org/css"]
    assert foreign('<a href="https://a.org">a</a><img src="img/x.png">') == []


def test_only_pages_that_may_be_missing_are_left_out_of_the_menu(tmp_path):
    (tmp_path / "index.md").write_text("")
    nav = [{"Start": "index.md"}, {"Guides": [{"Units": "units.md"}, {"Gone": "gone.md"}]}]
    assert hooks().present(nav, tmp_path) == [{"Start": "index.md"}, {"Guides": [{"Gone": "gone.md"}]}]
    (tmp_path / "units.md").write_text("")
    assert hooks().present(nav, tmp_path) == nav


def test_every_page_is_in_the_menu_once():
    yaml = pytest.importorskip("yaml")
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]

    def pages(items):
        for item in items:
            [value] = item.values()
            yield from pages(value) if isinstance(value, list) else [value]

    listed = list(pages(nav))
    written = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    made = {"reference/python.md", "reference/commands.md", *hooks().outside_pages().values(), *hooks().tutorials()}
    assert len(listed) == len(set(listed))
    assert written | made | hooks().OPTIONAL == set(listed) | hooks().OPTIONAL


def test_workflows_forms_and_citation_can_be_read():
    """YAML that a hosting service would take: triggers, jobs with steps, the Pythons that pyproject.toml promises."""
    yaml = pytest.importorskip("yaml")
    folder = ROOT / ".github"
    workflows = {path.stem: yaml.safe_load(path.read_text()) for path in folder.glob("workflows/*.yml")}
    assert set(workflows) == {"test", "docs"}
    for content in workflows.values():
        assert content[True]  # YAML 1.1 reads the key `on` as true
        assert all(job["runs-on"] and job["steps"] for job in content["jobs"].values())
    project = (ROOT / "pyproject.toml").read_text()
    promised = re.findall(r"Python :: (3\.\d+)", project)
    assert workflows["test"]["jobs"]["versions"]["strategy"]["matrix"]["python"] == promised
    called = re.findall(r"run: make (\w+)", "".join(path.read_text() for path in folder.glob("workflows/*.yml")))
    assert called and all(re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M) for target in called)
    for path in folder.glob("ISSUE_TEMPLATE/*.yml"):
        form = yaml.safe_load(path.read_text())
        assert path.stem == "config" or {"name", "description", "body"} <= set(form)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    from rgp import __version__

    assert citation["version"] == __version__ and citation["authors"] == [{"name": "the rgp authors"}]
    assert {"cff-version", "message", "title"} <= set(citation)
