"""One sheet for the person who signs: what they promise, what was checked, what to ask, and a line for their name."""

from __future__ import annotations

from rgp.report import words
from rgp.report.html import Html, items, tag
from rgp.report.runs import RecordedRun


def signing_sheet(run: RecordedRun) -> Html:
    """For a lawyer or a product manager; fits on one printed page. Empty for a run that promises nothing."""
    spent, delta = run.epsilon, run.number("delta")
    if spent is None or delta is None:
        return Html("")
    noun = words.noun(run)
    return tag(
        "section",
        tag("h2", "For the person who signs"),
        tag(
            "p",
            tag("strong", "What you promise. "),
            f"Whether any one {noun} was in the training data or not, the published model would be almost the same. ",
            _how_much(run, noun),
            f" This is proven, for every attack, known or not; it may fail altogether with a probability of "
            f"{words.odds(delta)}. Experts write it as ε = {words.epsilon_text(spent)} at δ = {words.small(delta)}, and would "
            f"call it {words.strength(spent)}.",
        ),
        tag(
            "div",
            tag("div", tag("h3", "What the record says"), tag("ul", *items(_record(run)))),
            tag("div", tag("h3", "Ask before you sign"), tag("ul", *items(_questions(run, noun)), class_="ask")),
            class_="two",
        ),
        tag(
            "p",
            "This is not legal advice. Whether the model counts as anonymous under a law is for you to judge: the promise is "
            "evidence for that, and it does not guard the data, the machines or the logs of the training.",
            class_="note",
        ),
        tag("div", *(tag("div", label) for label in ("Name", "Date", "Signature")), class_="sign"),
        class_="signing",
    )


def _how_much(run: RecordedRun, noun: str) -> str:
    if run.meaning is None:
        return ""
    found = words.ceiling(run.meaning.tpr_at_1_percent)
    return (
        f"Somebody who has the model, and who may wrongly accuse 1 in 100 of the {noun}s that were not used, finds at most "
        f"{found} of those that were; by luck alone it would be 1%."
    )


def _record(run: RecordedRun) -> list[str]:
    """Sentences that can be read off the run's files."""
    units, noun = words.units(run), words.noun(run)
    said = [f"Protected is {run.text('unit') or f'one {noun}'}" + (f", out of {words.whole(units)}." if units else ".")]
    if run.problems:
        said.append(
            "Something does not add up: see “This needs your attention”. Do not sign before that is cleared up."
        )
    else:
        said.append("Every release is on record, the record is complete, and it adds up to the ε above.")
    if run.summary.get("finished") is False:
        said.append("The training was stopped early; ε is what it had spent by then.")
    if run.summary.get("seed") is not None:
        said.append(
            "A seed was set by hand: whoever knows it can undo the protection. That is for trials, not for release."
        )
    else:
        said.append("The random numbers came from the operating system; nobody has seen them.")
    said.append(
        "An audit was run; its result is below." if run.audit else "No audit was run: the promise rests on the proof."
    )
    if not run.publishable_accuracy:
        said.append("The accuracy shown was measured on private data. It may not be published.")
    return said


def _questions(run: RecordedRun, noun: str) -> list[str]:
    """What no file can answer."""
    whose = (
        "Is one row one person? Whoever has several rows is protected less."
        if noun == "row"
        else f"Are the ids right? A {noun} with two ids is protected less."
    )
    return [
        whose,
        "Were other models or statistics made from the same people? Their ε adds to this one.",
        "Were settings chosen by looking at this data? If so, does ε cover the search?",
        "What was treated as public, such as initial weights and constants, and is it?",
        "Will the folder model/ be published, and nothing else of the run? Not this report either.",
        "Who keeps the record (ledger.jsonl), and for how long?",
    ]
