"""What the pages say, for HTML and Markdown alike: sections of sentences, tables and figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rgp.reproduce.claims import NOT_RUN, Verdict
from rgp.reproduce.items import Column, Item
from rgp.reproduce.numbers import Numbers, Place

NOT_COVERED = (
    "Not covered by any guarantee: computed from training rows without noise. The data sets here are public ones."
)
CONTENDERS = {
    "rgp": "RGP",
    "dpsgd": "DP-SGD, ours",
    "opacus-hooks": "DP-SGD that keeps every example's gradient (Opacus)",
}
SCALE = {
    "mini": "Scale mini: smaller models and shorter runs than the paper's, on real data, on a CPU. Compare the order of the "
    "methods, not the accuracies.",
    "paper": "Scale paper: the paper's models, data and settings.",
}


@dataclass
class Panel:
    """One set of axes: name of a line -> points."""

    title: str
    x_label: str
    y_label: str
    lines: dict[str, list[tuple[float, float]]]


@dataclass
class Section:
    title: str
    words: list[str] = field(default_factory=list)
    headers: Sequence[str] = ()
    rows: list[list[str]] = field(default_factory=list)
    panels: list[Panel] = field(default_factory=list)
    name: str = ""
    private: bool = False


def sections(found: Sequence[Numbers], verdicts: Sequence[Verdict], paper: Sequence[Section] = ()) -> list[Section]:
    return [overview(found), claims(verdicts), *(section(numbers) for numbers in found), *paper]


def overview(found: Sequence[Numbers]) -> Section:
    """Which runs were made, and which were not."""
    rows = []
    for numbers in found:
        counts = Counter(_plainly(place.state) for place in numbers.places.values() if place.state)
        done = sum(min(len(place.seeds), place.wanted) for place in numbers.places.values())
        rest = "; ".join(f"{state}: {count}" for state, count in counts.most_common()) or "all run"
        rows.append([numbers.item.name, numbers.item.title, f"{done} of {len(numbers.item.cells)}", rest])
    words = [SCALE[found[0].item.scale]] if found else []
    if any(column.name == "digits" for numbers in found for column in numbers.item.columns):
        words.append(
            "The digits come without published test rows: accuracy on them is that of held-out rows, which no guarantee covers."
        )
    return Section(
        "What was run", words, ("", "what it shows", "runs finished", "places in it without all of their runs"), rows
    )


def claims(verdicts: Sequence[Verdict]) -> Section:
    counts = Counter(v.verdict for v in verdicts)
    words = [
        ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()) + "."
        if verdicts
        else "None to check.",
        "A difference counts above two standard errors: of the paired differences over seeds, or, with one seed, of accuracies "
        "on so many test rows. Level: neither.",
    ]
    rows = [[v.claim, v.item, v.where, v.verdict, v.why] for v in verdicts if v.verdict != NOT_RUN]
    waiting: dict[tuple[str, str], list[str]] = {}
    for v in verdicts:
        if v.verdict == NOT_RUN:
            waiting.setdefault((v.claim, v.item), []).append(v.where)
    rows += [[claim, item, "; ".join(where), NOT_RUN, ""] for (claim, item), where in waiting.items()]
    return Section("The paper's claims", words, ("claim", "from", "on", "verdict", "numbers"), rows, name="claims")


def section(numbers: Numbers) -> Section:
    item = numbers.item
    number = item.name.removeprefix("table").removeprefix("fig")
    made = Section(f"{'Table' if item.name.startswith('table') else 'Figure'} {number}: {item.title}", name=item.name)
    made.words = [words for words in (f"The paper: {item.about}", item.note) if words]
    used = [f"{column.name}: {column.data}" for column in item.columns if column.data]
    if used:
        made.words.append("Here: " + "; ".join(used) + ".")
    made.private = item.measure in ("attack", "stable_rank", "residual")
    if not numbers.places:
        made.words.append("This scale has no runs of it.")
    elif item.measure == "cost":
        _costs(numbers, made)
    elif item.measure in ("stable_rank", "residual"):
        _lines(numbers, made)
        if not made.panels:
            made.words.append(f"Not drawn: {_states(numbers)}.")
    else:
        _table(numbers, made)
        if item.x is not None:
            _lines(numbers, made)
    return made


def _costs(numbers: Numbers, made: Section) -> None:
    item = numbers.item
    made.headers = (
        "",
        *(part for c in item.columns for part in (f"memory ~ {c.name}^a, ours", "paper", f"time ~ {c.name}^a")),
    )
    for name, label in CONTENDERS.items():
        row = [label]
        for column in item.columns:
            record = numbers.costs.get(column.name)
            found = next((r for r in (record or {}).get("rows", []) if r["name"] == name), None)
            paper = item.of_paper({"rgp": "RGP", "opacus-hooks": "DP-SGD"}.get(name, ""), column)
            row += [
                _number(found and found["memory_slope"], 2) if record else "not run",
                _number(paper[0] if paper else None, 0),
            ]
            row.append(_number(found and found["time_slope"], 2) if record else "not run")
        made.rows.append(row)
    made.words.append("Memory is that of the per-example gradients where it can be counted, the step's peak elsewhere.")


def _table(numbers: Numbers, made: Section) -> None:
    item = numbers.item
    paper = {c.name for c in item.columns if any(item.of_paper(row, c) for row in item.rows)}
    headers = ["" if item.x is None else f"method, {item.x['label']}"]
    for column in item.columns:
        compared = column.name in paper
        headers += [f"{column.name}, ours", f"{column.beside or column.name}, paper"] if compared else [column.name]
    made.headers = headers
    for row in item.rows:
        for x in sorted({x for r, _, x in numbers.places if r == row}, key=lambda x: x or 0.0):
            cells = [row if x is None else f"{row}, {x:g}"]
            for column in item.columns:
                cells.append(_ours(numbers.place(row, column.name, x), numbers.metrics(column)))
                if column.name in paper:
                    cells.append(_paper(item, row, column, x))
            made.rows.append(cells)


def _paper(item: Item, row: str, column: Column, x: float | None) -> str:
    numbers = item.of_paper(row, column)
    if numbers is None or (item.x is not None and x != item.x.get("paper_at", x)):
        return ""
    return "/".join(f"{value:.1f}" for value in numbers)


def _ours(place: Place, metrics: Sequence[str]) -> str:
    means = [place.mean(metric) for metric in metrics]
    if all(mean is None for mean in means):
        return _plainly(place.state) if place.wanted else ""
    words = "/".join("?" if mean is None else f"{mean:.1f}" for mean in means)
    error = place.error(metrics[0])
    if error is None:
        return words if place.wanted <= 1 else f"{words} (one seed)"
    return f"{words} ± {error:.1f} ({len(place.seeds)} seeds)"


def _lines(numbers: Numbers, made: Section) -> None:
    item = numbers.item
    y_label = {"stable_rank": "stable rank", "residual": "share of the gradient that is left"}.get(
        item.measure, "accuracy in %"
    )
    x_label = item.x["label"] if item.x else "epoch"
    for column in item.columns:
        lines = numbers.lines(column)
        if item.x is not None:
            lines = {name: points for name, points in lines.items() if len(points) > 1}
            if not any(numbers.xs(name, column.name) for name in lines):  # nothing but runs for the whole axis
                lines = {}
        if lines:
            made.panels.append(Panel(column.name, x_label, y_label, lines))


def starts(found: Sequence[Numbers], checks: dict[str, dict[str, Any] | None], why: dict[str, str]) -> Section:
    """The paper scale: which of its runs were seen to start, and why they were not run."""
    rows = []
    for numbers in found:
        item = numbers.item
        cells = {cell.key: cell for cell in item.cells if cell.measure != "cost"}
        if not cells:
            continue
        seen = [checks.get(key) for key in cells]
        good = [row for row in seen if row and row.get("ok")]
        stood = sorted({word for row in good for word in row.get("stand_ins", ())})
        reasons = Counter(_plainly(why.get(cell.name, "not run here: a GPU's work")) for cell in cells.values())
        done = sum(bool(place.seeds) for place in numbers.places.values())
        state = "; ".join(f"{reason}: {count}" for reason, count in reasons.most_common())
        bad = [row["error"] for row in seen if row and not row.get("ok")]
        shown = f"{len(good)} of {len(cells)}" + (f"; FAILED: {bad[0]}" if bad else "")
        rows.append([item.name, shown, ", ".join(stood) or "none", state + (f"; run: {done}" if done else "")])
    words = [
        "The paper's own models and settings are a GPU's work. The runs counted here as started were begun (`--check`): noise "
        "calibrated for the whole run, then three steps of 4 rows through the run's own code, with stand-ins where weights or "
        "rows are not available here. The others have not been tried.",
    ]
    headers = ("", "runs that started", "stand-ins", "runs of one seed")
    return Section("Paper scale: which runs start", words, headers, rows, name="paper")


def _states(numbers: Numbers) -> str:
    return "; ".join(dict.fromkeys(place.state or "run" for place in numbers.places.values()))


def _plainly(state: str) -> str:
    """A state without its reason, which is in the JSON."""
    if state.startswith("not started"):
        return "not run"
    return state.partition(": ")[0] if state.startswith("failed") else state.partition(" (")[0]


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
