"""The page as one HTML file that needs no network, in the style of the run reports."""

from __future__ import annotations

from collections.abc import Sequence

from rgp._version import __version__
from rgp.report.charts import COLOURS, Series, line_chart
from rgp.report.html import Html, document, join, table, tag
from rgp.reproduce.content import NOT_COVERED, Panel, Section


def page(sections: Sequence[Section], *, title: str, words: Sequence[str]) -> Html:
    header = tag(
        "header",
        tag("div", "Reproduction", class_="eyebrow"),
        tag("h1", title),
        *(tag("p", _code(word), class_="soft") for word in words),
    )
    footer = tag("footer", f"Written by rgp {__version__}. This page needs no network and loads nothing.")
    return document(f"{title} · rgp", header, tag("main", *map(_section, sections)), footer)


def _section(section: Section) -> Html:
    figures = [_chart(panel) for panel in section.panels]
    numbers = range(1, len(section.headers)) if section.name.startswith(("table", "fig")) else ()
    return tag(
        "section",
        tag("div", NOT_COVERED, class_="stamp") if section.private else "",
        tag("h2", section.title),
        *(tag("p", _code(word)) for word in section.words),
        *([tag("div", *figures, class_="two")] if figures else []),
        table(section.headers, section.rows, numbers=numbers) if section.rows else "",
        class_="private" if section.private else None,
    )


def _chart(panel: Panel) -> Html:
    series = [Series(name, points, i % COLOURS) for i, (name, points) in enumerate(panel.lines.items())]
    chart = line_chart(f"{panel.title}: {panel.y_label}", series, x_label=panel.x_label, y_format=lambda v: f"{v:.4g}")
    key = tag("div", *(tag("span", tag("i", class_=f"s{s.colour}"), s.name) for s in series), class_="key")
    return tag("div", chart, key)


def _code(words: str) -> Html:
    """`these` as code."""
    return join(*(tag("code", part) if i % 2 else part for i, part in enumerate(words.split("`"))))
