"""The page about a search: all of it may be published, because it contains nothing about the trials that were not the best."""

from __future__ import annotations

import math
from importlib.resources import files
from typing import Any

from rgp._version import __version__
from rgp.report.html import Html, items, join, table, tag
from rgp.rounding import round_up
from rgp.tuning.plan import Plan

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def search_page(plan: Plan, best: dict[str, Any] | None, card: dict[str, Any] | None, name: str) -> Html:
    title = f"{name}: a private search"
    head = tag(
        "head",
        Html('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'),
        Html('<meta name="robots" content="noindex">'),
        tag("title", f"{title} · rgp report"),
        Html(f"<style>{files('rgp.report').joinpath('style.css').read_text(encoding='utf-8')}</style>"),
    )
    header = tag("header", tag("div", "Private tuning report", class_="eyebrow"), tag("h1", name))
    main = tag("main", _tiles(plan, best), _promise(plan, card), _best(best), _search(plan), _not_covered(card))
    footer = tag(
        "footer",
        f"Written by rgp {__version__}. This page may be published: it says nothing about the trials that were not the best, not "
        "even how many there were. It needs no network and loads nothing.",
    )
    return join(Html("<!doctype html>\n"), tag("html", head, tag("body", header, main, footer), lang="en"), Html("\n"))


def _tiles(plan: Plan, best: dict[str, Any] | None) -> Html:
    noisy = " with noise" if plan.score.kind == "private" else ""
    tiles = [
        ("Privacy spent, ε", round_up(plan.epsilon), f"at δ = {plan.delta:g}, by the whole search", "tile main"),
        (
            "Score of the best",
            "–" if best is None else f"{best['score']:.1%}",
            f"of {plan.score.rows:,} {plan.score.kind} rows{noisy}",
            "tile",
        ),
        ("Noise", f"{plan.cost:.2f} ×", "that of one run with the same ε and no tuning", "tile"),
    ]
    return tag(
        "div",
        *(
            tag(
                "div",
                tag("div", label, class_="label"),
                tag("div", value, class_="value"),
                tag("div", more, class_="more"),
                class_=kind,
            )
            for label, value, more, kind in tiles
        ),
        class_="tiles",
    )


def _promise(plan: Plan, card: dict[str, Any] | None) -> Html:
    epsilon = round_up(plan.epsilon)
    text = (
        f"Whether any one row was used or not, no outcome of this search (the model, its settings, its score) becomes more than "
        f"e^{epsilon} = {math.exp(float(epsilon)):,.1f} times as likely, except with probability {plan.delta:g}. Choosing the "
        "settings is part of that: every trial, and the score of every trial, is paid for."
    )
    bound = None if card is None else card.get("attack_bound")
    more = None
    if bound is not None:
        rate = math.ceil(bound["true_positive_rate"] * 1e4) / 100
        more = tag(
            "p",
            "An attacker who knows everything but whether a row was used, and may be wrong about 1% of the unused rows, "
            f"recognises at most {rate:.2f}% of the used ones.",
        )
    return tag("section", tag("h2", "What is promised"), tag("p", text), more)


def _best(best: dict[str, Any] | None) -> Html:
    if best is None:
        return tag("section", tag("h2", "The best"), tag("p", "The law drew no trial at all. Nothing was released."))
    rows = [(key, str(value)) for key, value in best["settings"].items()]
    return tag("section", tag("h2", "The best"), table(("setting", "value"), rows))


def _search(plan: Plan) -> Html:
    rows = [(key, ", ".join(map(str, values))) for key, values in plan.space.items()]
    text = (
        f"Each trial had settings drawn at random from this table, noise of its own, and a score: {plan.score.words}. How many "
        f"trials there were is random and secret; its law was fixed beforehand: {plan.law.words}."
    )
    return tag(
        "section", tag("h2", "What was searched"), tag("p", text), table(("setting", "values"), rows, numbers=())
    )


def _not_covered(card: dict[str, Any] | None) -> Html | None:
    if card is None:
        return None
    return tag("section", tag("h2", "What is not covered"), tag("ul", *items(card["not_covered"])))
