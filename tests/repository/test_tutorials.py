"""The tutorials: every notebook runs from top to bottom, and what is kept of it is what a reader should see."""

import importlib.util
import json
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
NOTEBOOKS = sorted((DOCS / "tutorials").glob("*.ipynb"))
NEEDS = {
    "first-private-model": ("sklearn",),
    "bert-on-your-csv": ("transformers", "safetensors"),
    "how-much-noise": ("sklearn", "matplotlib"),
}


@pytest.fixture(scope="module")
def notebooks():
    spec = importlib.util.spec_from_file_location("rgp_docs_notebooks", DOCS / "notebooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def code(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_tutorial_runs(path, notebooks, monkeypatch):
    for module in NEEDS.get(path.stem, ()):
        pytest.importorskip(module)
    monkeypatch.setenv("MPLBACKEND", "agg")
    kept, now = notebooks.read(path), notebooks.run(path)
    kinds = [[[o["output_type"] for o in cell["outputs"]] for cell in code(book)] for book in (kept, now)]
    assert kinds[0] == kinds[1], f"what is kept is old: python docs/notebooks.py {path.relative_to(DOCS.parent)}"
    assert sum("assert" in notebooks.source(cell) for cell in code(now)) >= 1  # it notices when it goes wrong


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_one_that_jupyter_opens(path, notebooks):
    notebook = notebooks.read(path)
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(ids) == len(set(ids)) and all(len(name) <= 64 for name in ids)
    assert notebooks.source(notebook["cells"][0]).startswith("# Tutorial: ")
    assert path.stat().st_size < 150_000
    if importlib.util.find_spec("nbformat"):  # its own check of the format
        import nbformat

        nbformat.validate(nbformat.from_dict(notebook))


def test_four_tutorials():
    assert len(NOTEBOOKS) == 4


def test_a_cell_that_fails_is_noticed_and_named(notebooks, tmp_path):
    cell = {"cell_type": "code", "id": "a", "metadata": {}, "outputs": [], "source": ["1 / 0"], "execution_count": None}
    path = tmp_path / "broken.ipynb"
    path.write_text(json.dumps({"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    with pytest.raises(ZeroDivisionError) as error:
        notebooks.run(path)
    assert "broken.ipynb, cell 1" in str(error.traceback[-1])


def test_page_shows_code_output_and_a_link_to_the_notebook(notebooks, tmp_path):
    cells = [
        {"cell_type": "markdown", "id": "a", "metadata": {}, "source": ["# Tutorial: adding\n", "\n", "Words."]},
        {"cell_type": "code", "id": "b", "metadata": {}, "outputs": [], "source": ["print(1)\n", "1 + 1"]},
    ]
    path = tmp_path / "adding.ipynb"
    notebooks.write(path, {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5})
    notebooks.write(path, notebooks.run(path))
    page = notebooks.page(path)
    assert page.startswith("# Tutorial: adding\n\n[Download this page as a notebook](adding.ipynb)")
    assert "```python\nprint(1)\n1 + 1\n```\n\n```text\n1\n```\n\n```text\n2\n```" in page
