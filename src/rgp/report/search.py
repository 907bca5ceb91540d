"""The page about a search (rgp tune): all of it may be published, because it is made of published files and nothing else.

found: what tune.json holds. card: the best model's privacy card, or None if there was no trial.
"""

from __future__ import annotations

import math
from importlib.resources import files
from typing import Any

from rgp._version import __version__
from rgp.report.html import Html, items, join, table, tag
from rgp.rounding import round_up

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


Found = dict[str, Any]


def search_page(found: Found, card: Found | None, name: str) -> Html:
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
    main = tag("main", _tiles(found), _promise(found, card), _best(found["best"]), _search(found), _not_covered(card))
    footer = tag(
        "footer",
        f"Written by rgp {__version__}. This page may be published: it says nothing about the trials that were not the best, not "
        "even how many there were. It needs no network and loads nothing.",
    )
    return join(Html("<!doctype html>\n"), tag("html", head, tag("body", header, main, footer), lang="en"), Html("\n"))


def _tiles(found: Found) -> Html:
    best, score = found["best"], found["score"]
    noisy = " with noise" if score["kind"] == "private" else ""
    tiles = [
        (
            "Privacy spent, ε",
            round_up(found["epsilon"]),
            f"at δ = {found['delta']:g}, by the whole search",
            "tile main",
        ),
        (
            "Score of the best",
            "–" if best is None else f"{best['score']:.1%}",
            f"of {score['rows']:,} {score['kind']} {score['unit']}s{noisy}",
            "tile",
        ),
        ("Noise", f"{found['noise_ratio']:.2f} ×", "that of one run with the same ε and no tuning", "tile"),
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


def _promise(found: Found, card: Found | None) -> Html:
    epsilon = round_up(found["epsilon"])
    unit = found["unit"]
    text = (
        f"Whether any one {unit} was used or not, no outcome of this search (the model, its settings, its score) becomes more "
        f"than e^{epsilon} = {math.exp(float(epsilon)):,.1f} times as likely, except with probability "
        f"{found['delta']:g}. Choosing the settings is part of that: every trial, and the score of every trial, is paid for."
    )
    bound = None if card is None else card.get("attack_bound")
    more = None
    if bound is not None:
        rate = math.ceil(bound["true_positive_rate"] * 1e4) / 100
        more = tag(
            "p",
            f"An attacker who knows everything but whether a {unit} was used, and may be wrong about 1% of the unused {unit}s, "
            f"recognises at most {rate:.2f}% of the used ones.",
        )
    return tag("section", tag("h2", "What is promised"), tag("p", text), more)


def _best(best: Found | None) -> Html:
    if best is None:
        return tag("section", tag("h2", "The best"), tag("p", "The law drew no trial at all. Nothing was released."))
    rows = [(key, str(value)) for key, value in best["settings"].items()]
    return tag("section", tag("h2", "The best"), table(("setting", "value"), rows))


def _search(found: Found) -> Html:
    rows = [(key, ", ".join(map(str, values))) for key, values in found["space"].items()]
    words = found["words"]
    text = (
        f"Each trial had settings drawn at random from this table, noise of its own, and a score: {words['score']}. How many "
        f"trials there were is random and secret; its law was fixed beforehand: {words['law']}."
    )
    return tag(
        "section", tag("h2", "What was searched"), tag("p", text), table(("setting", "values"), rows, numbers=())
    )


def _not_covered(card: Found | None) -> Html | None:
    if card is None:
        return None
    return tag("section", tag("h2", "What is not covered"), tag("ul", *items(card["not_covered"])))
