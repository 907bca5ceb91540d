"""Attacks that were run, beside what the guarantee allows any attack. For the marked part of the page only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rgp.report import words
from rgp.report.charts import Series, roc_chart
from rgp.report.html import Html, join, table, tag
from rgp.report.runs import RecordedRun
from rgp.rounding import finite

_ABOUT = {
    "LiRA": "LiRA and RMIA compare the loss of a {noun} with that under shadow models, trained with and without it.",
}


def attacks(runs: Sequence[RecordedRun]) -> Html:
    attacked = [run for run in runs if run.attack]
    if not attacked:
        return Html("")
    rows = [_row(run, name, found, several=len(runs) > 1) for run in attacked for name, found in _found(run)]
    results = [found for run in attacked for _, found in _found(run)]
    names = {name for run in attacked for name, _ in _found(run)}
    counts = attacked[0].attack or {}
    members, others = finite(counts.get("members")), finite(counts.get("nonmembers"))
    nouns = {words.noun(run) for run in attacked}
    noun = nouns.pop() if len(nouns) == 1 else "unit"
    if names == {""}:
        title = f"A real attack: a {noun} with a low loss is taken for a training {noun}"
    else:
        title = f"Real attacks: which {noun}s are taken for training {noun}s"
    return join(
        tag("h3", title, style="margin-top:22px"),
        table(
            ("run", "guesses that were right", "promised limit", "found, 1 in 100 wrong", "promised limit", "AUC"), rows
        ),
        tag(
            "p",
            "50% is a coin. "
            + better_than_a_coin([(row[0], found) for row, found in zip(rows, results, strict=True)])
            + "That an attack fails proves nothing, the promised limit does. "
            + "".join(f"{about.format(noun=noun)} " for name, about in _ABOUT.items() if name in names)
            + (f"{words.whole(members)} training {noun}s against {words.whole(others)} others; " if members else "")
            + "± is two standard errors.",
            class_="note",
            style="margin-top:10px",
        ),
        *(_curves(run, several=len(runs) > 1) for run in attacked),
    )


def better_than_a_coin(results: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """Which attacks do better than a coin: more than two standard errors above a half."""
    found: list[str] = []
    lost: list[str] = []
    for name, result in results:
        rate, error = finite(result.get("success_rate")), finite(result.get("standard_error"))
        if rate is not None and error is not None:
            (found if rate > 0.5 + 2 * error else lost).append(name)
    if found and lost:
        return f"More right guesses than a coin: {', '.join(found)}. No more than a coin: {', '.join(lost)}. "
    if found:
        return f"More right guesses than a coin: {', '.join(found)}. "
    return "No row here has more right guesses than a coin: nothing was found out. " if lost else ""


def _found(run: RecordedRun) -> list[tuple[str, dict[str, Any]]]:
    """(name, result) of every attack; the demo's single one has no name."""
    result = run.attack or {}
    several = result.get("attacks")
    if isinstance(several, dict) and several:
        return [(str(name), found) for name, found in several.items() if isinstance(found, dict)]
    return [("", result)]


def _row(run: RecordedRun, name: str, found: dict[str, Any], *, several: bool) -> tuple[str, ...]:
    rate, error = finite(found.get("success_rate")), finite(found.get("standard_error"))
    spread = f" ± {200 * error:.1f}" if error is not None else ""
    unknown = "no limit" if run.epsilon is None else "–"
    label = run.name if not name else f"{run.name}: {name}" if several else name
    return (
        label,
        f"{words.percent(rate)}{spread}",
        words.ceiling(words.coin(run.meaning.mu)) if run.meaning else unknown,
        words.percent(finite(found.get("tpr_at_0.01"))),
        words.ceiling(run.meaning.tpr_at_1_percent) if run.meaning else unknown,
        "–" if finite(found.get("auc")) is None else f"{found['auc']:.3f}",
    )


def _curves(run: RecordedRun, *, several: bool) -> Html:
    """The ROC curves of one run, on logarithmic axes."""
    lines = []
    for i, (name, found) in enumerate(_found(run)):
        curve = found.get("roc")
        points = [(float(x), float(y)) for x, y in curve] if isinstance(curve, list) else []
        lines.append(Series(name or "attack", points, i))
    title = "Found against false alarms, both on logarithmic axes" + (f": {run.name}" if several else "")
    figure = roc_chart(title, lines)
    if not figure:
        return Html("")
    key = tag(
        "div",
        *(tag("span", tag("i", class_=f"s{s.colour}"), s.name) for s in lines if s.points),
        class_="key",
        style="margin:14px 0 8px",
    )
    return join(key, tag("div", figure, class_="two"))
