"""The page: what is promised, what came of it, what it cost; and in marked sections, what must not be published."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rgp._version import __version__
from rgp.report import words
from rgp.report.attacks import attacks
from rgp.report.charts import COLOURS, Series, line_chart, trade_off
from rgp.report.details import details, method_name
from rgp.report.html import Html, document, items, join, table, tag
from rgp.report.promise import promise, promises
from rgp.report.runs import RecordedRun
from rgp.report.signing import signing_sheet

_STAMP = "Not covered by the guarantee — do not publish"


def page(runs: Sequence[RecordedRun]) -> Html:
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared"
    body = _one(runs[0]) if len(runs) == 1 else _several(runs)
    footer = tag(
        "footer",
        f"Written by rgp {__version__}. This page needs no network and loads nothing. "
        "To publish a model, publish the run's folder model/, not this page.",
    )
    return document(f"{title} · rgp report", body, footer, listed=False)


# One run


def _one(run: RecordedRun) -> Html:
    units = words.units(run)
    about = " · ".join(
        part
        for part in (
            f"{method_name(run)} on {run.text('dataset')}" if run.text("dataset") else method_name(run),
            f"model {run.text('model')}" if run.text("model") else "",
            f"{words.whole(units)} training {words.noun(run)}s" if units else "",
        )
        if part
    )
    header = tag(
        "header",
        tag("div", "Private training report" if run.epsilon is not None else "Training report", class_="eyebrow"),
        tag("h1", run.name),
        tag("p", about, class_="soft"),
    )
    parts = (signing_sheet(run), promise(run), _over_steps([run]), _private([run]), details(run))
    main = tag("main", _tiles(run), _problems([run]), *parts)
    return join(header, main)


def _tiles(run: RecordedRun) -> Html:
    delta = run.number("delta")
    accuracy_note: Any = "of the published test rows"
    if not run.publishable_accuracy:
        accuracy_note = tag("span", "on held-out private rows: not covered", class_="flag")
    tiles = [
        _tile(
            "Privacy spent, ε",
            words.epsilon_text(run.epsilon),
            f"at δ = {words.small(delta)}" if delta else "not private",
            True,
        ),
        _tile("Accuracy", words.percent(run.number("accuracy")), accuracy_note),
        _tile("Time", words.seconds(run.number("wall_seconds")), f"{words.whole(run.number('steps'))} steps"),
        _tile("Peak memory", words.size(run.number("peak_memory_bytes")), _device(run)),
    ]
    return tag("div", *tiles, class_="tiles")


def _tile(label: str, value: str, more: Any, main: bool = False) -> Html:
    return tag(
        "div",
        tag("div", label, class_="label"),
        tag("div", value, class_="value"),
        tag("div", more, class_="more"),
        class_="tile main" if main else "tile",
    )


def _problems(runs: Sequence[RecordedRun]) -> Html:
    """What does not add up, and what weakens the promise."""
    said = [f"{run.name}: {problem}" for run in runs for problem in run.problems]
    for run in runs:
        if run.summary.get("finished") is False:
            said.append(
                f"{run.name} was stopped at step {words.whole(run.number('steps'))} of "
                f"{words.whole(run.number('planned_steps'))}: ε is what it had spent by then."
            )
    if not said:
        return Html("")
    return tag("section", tag("h2", "This needs your attention"), tag("ul", *items(said)), class_="alert", role="alert")


def _over_steps(runs: Sequence[RecordedRun]) -> Html:
    """What may be published of the course of training."""
    spending = [Series(run.name, _from_nothing(run.curve("epsilon")), _colour(runs, run)) for run in runs]
    figures = [line_chart("Privacy spent (ε) over steps", spending, y_format=_short, from_zero=True)]
    if all(run.publishable_accuracy for run in runs):
        figures.insert(0, _accuracy_chart(runs))
    if not any(figures):
        return Html("")
    if figures[-1]:
        figures.append(_how_spent(next((run for run in runs if run.epsilon is not None), runs[0])))
    return tag("section", tag("h2", "Step by step"), _legend(runs), tag("div", *figures, class_="two"))


def _from_nothing(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Before the first step nothing has been released, and nothing spent."""
    return [(0.0, 0.0), *points] if points else []


def _how_spent(run: RecordedRun) -> Html:
    batch, units, noun = run.number("batch_size"), words.units(run), words.noun(run)
    drawn = f"about {words.whole(batch)} of {words.whole(units)} {noun}s" if batch and units else f"some of the {noun}s"
    return tag(
        "div",
        tag("h3", "How it is spent"),
        tag(
            "p",
            f"Every step draws {drawn}, each by a toss of its own. It bounds what any one {noun} can contribute, adds noise "
            "to the sum, and writes a line in the run's ledger before the noisy sum is used.",
        ),
        tag(
            "p",
            "ε is computed from those lines and from nothing else. It grows with every step, fast at first and more "
            "slowly later, and what was spent cannot be taken back.",
        ),
    )


def _private(runs: Sequence[RecordedRun]) -> Html:
    """What was computed from private rows without noise."""
    figures = []
    if not all(run.publishable_accuracy for run in runs):
        figures.append(_accuracy_chart(runs))
        if len(runs) > 1:
            figures.insert(0, _trade_off(runs))
    key = next((k for k in ("training_loss", "loss") if any(run.curve(k) for run in runs)), "training_loss")
    figures.append(_chart("Training loss over steps", runs, key, words.plain, from_zero=True))
    figures = [figure for figure in figures if figure]
    found = attacks(runs)
    if not figures and not found:
        return Html("")
    return tag(
        "section",
        tag("div", _STAMP, class_="stamp"),
        tag("h2", "For the owner of the data only"),
        tag(
            "p",
            "These numbers were computed from private rows without noise, so ε says nothing about them. "
            "Look at them if the data are yours; leave them out of papers, tickets and dashboards.",
        ),
        _legend(runs) if figures else "",
        tag("div", *figures, class_="two") if figures else "",
        found,
        class_="private",
    )


# Several runs


def _several(runs: Sequence[RecordedRun]) -> Html:
    private = [run for run in runs if run.epsilon is not None]
    sets = sorted({run.text("dataset") for run in runs if run.text("dataset")})
    header = tag(
        "header",
        tag("div", "Private training report", class_="eyebrow"),
        tag("h1", f"{len(runs)} runs compared"),
        tag("p", " · ".join([f"on {', '.join(sets)}"] if sets else []), class_="soft"),
    )
    each = [
        tag("details", tag("summary", f"{run.name}: parameters, cost and settings"), details(run, heading="h3"))
        for run in runs
    ]
    public_trade = _trade_off(runs) if all(run.publishable_accuracy for run in runs) else Html("")
    main = tag(
        "main",
        _problems(runs),
        _comparison(runs),
        tag("section", tag("h2", "Accuracy for privacy"), _legend(runs), tag("div", public_trade, class_="two"))
        if public_trade
        else "",
        promises(private) if private else "",
        _private(runs),
        _over_steps(runs),
        tag("section", tag("h2", "Each run in detail"), *each),
    )
    return join(header, main)


def _comparison(runs: Sequence[RecordedRun]) -> Html:
    flagged = not all(run.publishable_accuracy for run in runs)
    headers = (
        "run",
        "method",
        "accuracy *" if flagged else "accuracy",
        "ε",
        "δ",
        "time",
        "peak memory",
        "noise dimensions",
    )
    rows = []
    for run in runs:
        delta = run.number("delta")
        rows.append(
            (
                join(tag("i", class_=f"s{_colour(runs, run)}"), run.name),
                method_name(run),
                words.percent(run.number("accuracy")),
                words.epsilon_text(run.epsilon),
                words.small(delta) if delta and run.epsilon is not None else "–",
                words.seconds(run.number("wall_seconds")),
                words.size(run.number("peak_memory_bytes")),
                words.whole(run.number("noise_dimensions")) if run.epsilon is not None else "–",
            )
        )
    note = tag(
        "p",
        tag("span", "* On held-out private rows: not covered by the guarantee, do not publish.", class_="flag"),
        style="margin-top:10px",
    )
    content = table(headers, rows, numbers=(2, 3, 4, 5, 6, 7), flagged=(2,) if flagged else ())
    return tag("section", tag("h2", "Side by side"), content, note if flagged else "")


def _trade_off(runs: Sequence[RecordedRun]) -> Html:
    trails, without = [], []
    for run in runs:
        accuracy = run.number("accuracy")
        if run.epsilon is None:
            points = [(0.0, accuracy)] if accuracy is not None else []
            without.append(Series(run.name, points, _colour(runs, run)))
        else:
            points = run.curve("accuracy", by="epsilon")
            if accuracy is not None:
                points.append((run.epsilon, accuracy))
            trails.append(Series(run.name, points, _colour(runs, run)))
    return trade_off("Accuracy against ε", trails, [s for s in without if s.points], _tick_percent)


# Parts


def _chart(title: str, runs: Sequence[RecordedRun], key: str, form: Callable[[float], str], *, from_zero: bool) -> Html:
    lines = [Series(run.name, run.curve(key), _colour(runs, run)) for run in runs]
    return line_chart(title, lines, y_format=form, from_zero=from_zero)


def _accuracy_chart(runs: Sequence[RecordedRun]) -> Html:
    lines = [Series(run.name, run.curve("accuracy"), _colour(runs, run)) for run in runs]
    return line_chart("Accuracy over steps", lines, y_format=_tick_percent, most=1.0)


def _tick_percent(value: float) -> str:
    return f"{100 * value:.3g}%"


def _short(value: float) -> str:
    return f"{value:.3g}"


def _colour(runs: Sequence[RecordedRun], run: RecordedRun) -> int:
    return next(i for i, other in enumerate(runs) if other is run) % COLOURS


def _legend(runs: Sequence[RecordedRun]) -> Html:
    if len(runs) == 1:
        return Html("")
    return tag(
        "div",
        *(tag("span", tag("i", class_=f"s{_colour(runs, run)}"), run.name) for run in runs),
        class_="key",
        style="margin-bottom:12px",
    )


def _device(run: RecordedRun) -> str:
    threads = run.number("threads")
    device = run.text("device")
    return f"{device}, {threads:.0f} thread{'s' if threads > 1 else ''}" if device == "cpu" and threads else device
