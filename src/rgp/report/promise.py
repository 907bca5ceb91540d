"""What a guarantee means, in words anyone can follow, with this run's numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rgp.report import words
from rgp.report.html import Html, items, table, tag
from rgp.report.runs import RecordedRun

_ATTACKER = (
    "Somebody wants to find out whether one particular row was in the training data. They get the trained model. "
    "Suppose they also know every setting, every model on the way, and all the other rows. "
    "Then this is the best that any attack can do, even one that nobody has thought of yet:"
)


def promise(run: RecordedRun) -> Html:
    spent, delta = run.epsilon, run.number("delta")
    if spent is None or delta is None:
        return tag(
            "section",
            tag("h2", "This run promises nothing"),
            tag(
                "p",
                "It was trained without noise. Whoever sees the model may be able to tell which rows it was trained "
                "on, or to get parts of them back. Use it to compare with; do not publish it if the data are private.",
            ),
            class_="alert",
        )
    parts: list[Any] = [tag("h2", "What this run promises")]
    if run.meaning is not None:
        parts += [tag("p", _ATTACKER), _meters(run)]
    parts.append(
        tag(
            "p",
            tag("strong", f"In symbols: ε = {words.epsilon_text(spent)} at δ = {words.small(delta)}. "),
            "With that row or without it, no outcome of the training is more than e",
            tag("sup", "ε"),
            f" ≈ {words.factor(spent)} times as likely, except with probability δ, {words.odds(delta)}. "
            f"By a common rule of thumb ε up to 1 is strong, up to 10 moderate, and above that weak: this is ",
            tag("strong", words.strength(spent)),
            ". The figures above follow from the whole record of the run and say more than ε alone."
            if run.meaning is not None
            else ".",
            class_="symbols",
        )
    )
    parts.append(tag("div", _protected(run), _not_covered(run), class_="two"))
    return tag("section", *parts)


def _meters(run: RecordedRun) -> Html:
    assert run.meaning is not None
    means = run.meaning
    guess = "They guess “it was used” or “it was not”; a coin would be right half of the time"
    point = "They point out rows that were used, and are wrong about 1 in 100 of the others"
    rows = [
        (guess, 0.5, words.coin(means.mu), "right at most"),
        (point, 0.01, means.tpr_at_1_percent, "find at most"),
        ("The same, and wrong about 1 in 1,000 of the others", 0.001, means.tpr_at_0_1_percent, "find at most"),
    ]
    meters = [
        tag(
            "div",
            tag("div", claim),
            tag("div", f"{verb} {words.ceiling(most)}", class_="most"),
            tag(
                "div",
                tag("span", class_="gain", style=f"width:{min(100.0, 100 * most):.2f}%"),
                tag("span", class_="luck", style=f"width:{100 * luck:.2f}%"),
                class_="track",
                role="img",
                aria_label=f"By luck alone {words.ceiling(luck)}, with the model at most {words.ceiling(most)}",
            ),
            class_="meter",
        )
        for claim, luck, most, verb in rows
    ]
    key = tag(
        "div",
        tag("span", tag("i", class_="luck"), "by luck alone, without the model"),
        tag("span", tag("i", class_="gain"), "the most that the model can add"),
        class_="key",
    )
    return tag("div", *meters, key, class_="meters")


def _protected(run: RecordedRun) -> Html:
    units, noun = words.units(run), words.noun(run)
    count = f"each of the {words.whole(units)} training {noun}s" if units else f"each training {noun}"
    if noun != "row":
        return tag(
            "div",
            tag("h3", "Who is protected"),
            tag(
                "p",
                f"{run.text('unit').capitalize()}: {count}, with all their rows, against everyone who sees the model. Whoever "
                "has several ids in the data is protected less.",
            ),
        )
    return tag(
        "div",
        tag("h3", "Who is protected"),
        tag(
            "p",
            f"One row: {count}, by itself, against everyone who sees the model. A person with one row is protected as "
            "stated. A person with several rows is protected less: for k rows, ε is up to k times as large, "
            "and δ grows by more than that.",
        ),
    )


def _not_covered(run: RecordedRun) -> Html:
    gaps = [
        "What is true with or without a row. If the model learns that smokers fall ill more often, it says so about "
        "every smoker.",
        "Several rows of one person, family or document, taken together.",
        "How many training rows there were: that number counts as public.",
        "Settings chosen by trying them on the private data, and other models trained on the same rows: "
        "their ε adds to this one.",
        "What the initial weights were trained on before.",
        "Everything in the sections marked “do not publish”.",
    ]
    if run.summary.get("seed") is not None:
        gaps.insert(
            0, "Anyone who knows the seed of this run: it was set by hand, and the noise can be computed from it."
        )
    return tag("div", tag("h3", "What is not covered"), tag("ul", *items(gaps)))


def promises(runs: Sequence[RecordedRun]) -> Html:
    rows = [
        (
            run.name,
            words.epsilon_text(run.epsilon),
            words.small(run.number("delta") or 1.0),
            words.ceiling(words.coin(run.meaning.mu)) if run.meaning else "–",
            words.ceiling(run.meaning.tpr_at_1_percent) if run.meaning else "–",
            words.ceiling(run.meaning.tpr_at_0_1_percent) if run.meaning else "–",
        )
        for run in runs
    ]
    total = sum(run.epsilon or 0 for run in runs)
    deltas = sum(run.number("delta") or 0 for run in runs)
    together = ""
    if len(runs) > 1 and len({run.text("dataset") for run in runs}) == 1:
        together = tag(
            "p",
            f"These are promises for each model alone. If all of these {len(runs)} models are published, and they were "
            f"trained on the same rows, what is promised is ε = {words.epsilon_text(total)} at δ = {words.small(deltas)}.",
        )
    return tag(
        "section",
        tag("h2", "What the private runs promise"),
        tag("p", _ATTACKER),
        table(
            (
                "run",
                "ε",
                "δ",
                "guesses “used or not” right at most (a coin: 50%)",
                "finds at most, wrong about 1 in 100 (luck: 1%)",
                "finds at most, wrong about 1 in 1,000 (luck: 0.1%)",
            ),
            rows,
            numbers=(1, 2, 3, 4, 5),
        ),
        tag("div", style="height:16px"),
        together,
        tag("div", _protected(runs[0]), _not_covered(runs[0]), class_="two"),
    )
