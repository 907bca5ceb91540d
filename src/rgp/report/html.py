"""HTML in which everything is escaped unless it was made here."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


class Html(str):
    """Text that is HTML already. Only `tag`, `join` and constants of this package make it."""

    __slots__ = ()


def tag(name: str, *children: Any, **attributes: Any) -> Html:
    """`tag("td", value, class_="n")`. Children that are not Html are escaped; attributes that are None or False are left out."""
    pairs = []
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        pairs.append(f" {key}" if value is True else f' {key}="{escape(str(value))}"')
    return Html(f"<{name}{''.join(pairs)}>{join(*children)}</{name}>")


def join(*children: Any) -> Html:
    return Html("".join(c if isinstance(c, Html) else escape(str(c)) for c in children if c is not None and c != ""))


def table(
    headers: Sequence[str],
    rows: Sequence[Sequence[Any]],
    *,
    numbers: Sequence[int] | None = None,
    flagged: Sequence[int] = (),
) -> Html:
    """The first column names the rows. On a phone each row becomes a block with the headers as labels."""
    numbers = range(1, len(headers)) if numbers is None else numbers

    def kind(i: int) -> str | None:
        names = ["n"] if i in numbers else ["name"] if i == 0 else []
        return " ".join(names + (["flagged"] if i in flagged else [])) or None

    head = tag("tr", *(tag("th", h, class_=kind(i), scope="col") for i, h in enumerate(headers)))
    body = [
        tag(
            "tr",
            tag("th", row[0], class_="name", scope="row"),
            *(tag("td", cell, class_=kind(i), data_label=headers[i]) for i, cell in enumerate(row[1:], 1)),
        )
        for row in rows
    ]
    return tag("div", tag("table", tag("thead", head), tag("tbody", *body)), class_="table")


def document(title: str, *body: Any, listed: bool = True) -> Html:
    """A whole page that loads nothing. listed: whether search engines may list it."""
    head = tag(
        "head",
        Html('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'),
        "" if listed else Html('<meta name="robots" content="noindex">'),
        tag("title", title),
        Html(f"<style>{files('rgp.report').joinpath('style.css').read_text(encoding='utf-8')}</style>"),
    )
    return join(Html("<!doctype html>\n"), tag("html", head, tag("body", *body), lang="en"), Html("\n"))


def items(texts: Sequence[str]) -> list[Html]:
    return [tag("li", text) for text in texts]
