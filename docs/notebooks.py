"""The tutorials: notebooks that are run here, and shown as pages of the site.

python docs/notebooks.py docs/tutorials/*.ipynb      runs them, and keeps what the cells print and draw in them

No kernel is needed: the code cells of a notebook run one after the other in one namespace, in an empty folder. Warnings and
other lines for stderr are left out, because they differ from machine to machine.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import os
import sys
import tempfile
import textwrap
import warnings
from pathlib import Path
from typing import Any

Cell = dict[str, Any]


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def source(cell: Cell) -> str:
    return "".join(cell["source"])


def title(path: Path) -> str:
    return source(read(path)["cells"][0]).splitlines()[0].removeprefix("# ")


def run(path: Path) -> dict[str, Any]:
    """The notebook with the outputs that its cells have now. An error names the notebook and the cell."""
    notebook, names = read(path), {"__name__": "__main__"}
    before, count = os.getcwd(), 0
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.chdir(folder)
        try:
            for number, cell in enumerate(notebook["cells"]):
                if cell["cell_type"] == "code":
                    count += 1
                    cell["execution_count"] = count
                    cell["outputs"] = outputs(source(cell), f"{path.name}, cell {number + 1}", names)
        finally:
            os.chdir(before)
    return notebook


def outputs(code: str, where: str, names: dict[str, Any]) -> list[Cell]:
    """What one cell prints, the value of its last line, and the figures it draws."""
    tree, printed, value = ast.parse(code), io.StringIO(), None
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        exec(compile(tree, where, "exec"), names)
        if last is not None:
            assert isinstance(last, ast.Expr)
            value = eval(compile(ast.Expression(last.value), where, "eval"), names)
    found: list[Cell] = []
    if printed.getvalue():
        found.append({"name": "stdout", "output_type": "stream", "text": lines(printed.getvalue())})
    drawn = figures()
    if value is not None and not drawn:
        data = {"text/plain": lines(repr(value))}
        found.append({"data": data, "execution_count": None, "metadata": {}, "output_type": "execute_result"})
    return found + drawn


def figures() -> list[Cell]:
    """The open figures of pyplot as small PNGs; they are closed."""
    plt = sys.modules.get("matplotlib.pyplot")
    found = []
    for number in plt.get_fignums() if plt else ():
        picture = io.BytesIO()
        plt.figure(number).savefig(picture, format="png", dpi=80, bbox_inches="tight", metadata={"Software": None})
        data = {"image/png": base64.b64encode(picture.getvalue()).decode()}
        found.append({"data": data, "metadata": {}, "output_type": "display_data"})
    if plt:
        plt.close("all")
    return found


def lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def page(path: Path) -> str:
    """The notebook as Markdown, with a link to itself."""
    first, *cells = read(path)["cells"]
    heading, _, rest = source(first).partition("\n")
    parts = [heading, f"[Download this page as a notebook]({path.name}){{ download }}", rest.strip()]
    for cell in cells:
        if cell["cell_type"] == "markdown":
            parts.append(source(cell))
            continue
        parts.append(f"```python\n{source(cell)}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                parts.append(
                    f'<img alt="The figure that this cell draws" src="data:image/png;base64,{data["image/png"]}">'
                )
            else:
                text = "".join(output.get("text") or data.get("text/plain", [])).rstrip()
                parts.append(f"```text\n{folded(text)}\n```")
    return "\n\n".join(parts) + "\n"


def folded(text: str, width: int = 100) -> str:
    """Long sentences on several lines, as a notebook shows them; a row of a table or a list stays in one piece."""
    rows = text.splitlines()
    return "\n".join(textwrap.fill(line, width) if len(line) > width and "  " not in line else line for line in rows)


def write(path: Path, notebook: dict[str, Any]) -> None:
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    os.environ.setdefault("MPLBACKEND", "agg")
    for name in sys.argv[1:]:
        write(Path(name), run(Path(name)))
