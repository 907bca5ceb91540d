"""What was trained how, what it cost, and the settings of one run."""

from __future__ import annotations

from math import prod
from typing import Any

from rgp.naming import label
from rgp.report import words
from rgp.report.html import Html, join, table, tag
from rgp.report.runs import RecordedRun
from rgp.rounding import finite, round_down


def details(run: RecordedRun, *, heading: str = "h2") -> Html:
    return join(_plan(run, heading), _settings(run, heading))


def _plan(run: RecordedRun, heading: str = "h2") -> Html:
    if not run.plan:
        return Html("")
    sizes = {"carried": 0, "exact": 0, "frozen": 0}
    noise = 0.0
    for row in run.plan:
        treatment = str(row.get("treatment"))
        sizes[treatment] = sizes.get(treatment, 0) + _size(row)
        noise += finite(row.get("noise_dimensions")) or 0
    total = sum(sizes.values()) or 1
    meanings = {
        "carried": "moved along thin carriers of low rank",
        "exact": "moved entry by entry",
        "frozen": "not trained",
    }
    bar = tag(
        "div",
        *(
            tag("span", class_=name, style=f"width:{100 * sizes[name] / total:.2f}%")
            for name in meanings
            if sizes[name]
        ),
        class_="shares",
        role="img",
        aria_label=", ".join(f"{sizes[name]:,} parameters {name}" for name in meanings),
    )
    key = tag(
        "div",
        *(
            tag("span", tag("i", class_=name), f"{sizes[name]:,} {name}: {what}")
            for name, what in meanings.items()
            if sizes[name]
        ),
        class_="key",
    )
    trained = sizes["carried"] + sizes["exact"]
    noised = ""
    if run.epsilon is not None and noise and trained:
        noised = f"Noise reaches {words.whole(noise)} dimensions of the {trained:,} trained parameters" + (
            f", {trained / noise:.1f} times fewer than in DP-SGD." if trained > noise * 1.05 else "."
        )
    rows = [
        (
            tag("code", str(row.get("name", ""))),
            " × ".join(str(n) for n in row["shape"]) if isinstance(row.get("shape"), list) and row["shape"] else "1",
            str(row.get("treatment", "")),
            str(row.get("rank") or ""),
            words.whole(finite(row.get("noise_dimensions"))),
            str(row.get("why") or ""),
        )
        for row in run.plan
    ]
    listed = table(("parameter", "shape", "treatment", "rank", "noise dimensions", "why"), rows, numbers=(3, 4))
    return tag(
        "section",
        tag(heading, "What was trained, and how"),
        tag("p", noised) if noised else "",
        bar,
        key,
        tag("details", tag("summary", f"All {len(run.plan)} parameters"), listed),
    )


def _settings(run: RecordedRun, heading: str = "h2") -> Html:
    rate, planned, steps = run.number("sampling_rate"), run.number("planned_steps"), run.number("steps")
    facts = [
        ("method", method_name(run)),
        ("noise multiplier σ", words.plain(run.number("noise_multiplier"))),
        ("clipping norm C", words.plain(run.number("clip"))),
        ("expected batch size", words.whole(run.number("batch_size"))),
        ("sampling rate q (Poisson)", f"{rate:.5g}" if rate is not None else "–"),
        ("noise", run.text("noise") or "–"),
        ("steps", words.whole(steps) + (f" of {words.whole(planned)}" if planned and planned != steps else "")),
        ("accountant", run.text("accountant").upper() or "–"),
        ("parameters", words.whole(run.number("parameters"))),
        ("noise dimensions", words.whole(run.number("noise_dimensions"))),
        ("time in all", words.seconds(run.number("wall_seconds"))),
        ("time per step", _per_step(run)),
        ("peak memory", words.size(run.number("peak_memory_bytes"))),
        ("seed", run.text("seed") or "from the operating system"),
        *_promise_facts(run),
    ]
    pairs = [tag("div", tag("dt", name), tag("dd", value)) for name, value in facts if value != "–"]
    return tag("section", tag(heading, "Cost and settings"), tag("dl", *pairs, class_="facts"))


def _promise_facts(run: RecordedRun) -> list[tuple[str, str]]:
    """What the privacy card says besides, so that the page and the card can be compared."""
    head = run.text("ledger_head")
    return [
        ("privacy unit", run.text("unit") or "one row" if run.epsilon is not None else "–"),
        ("neighbouring data sets", "one such unit added or removed" if run.epsilon is not None else "–"),
        ("audited lower bound on ε", _audit(run)),
        ("membership attack", "was run" if run.attack else "was not run"),
        ("ledger head", f"{head[:16]}…" if head else "–"),
        ("rgp", run.text("version") or "–"),
    ]


def _audit(run: RecordedRun) -> str:
    audit = run.audit
    if audit is None:
        return "none was run" if run.epsilon is not None else "–"
    low, proven, sure = (finite(audit.get(key)) for key in ("epsilon_lower", "epsilon_proven", "confidence"))
    if low is None or proven is None or sure is None:
        return "–"
    return f"{round_down(low, 2)} at {sure:.0%} confidence ({audit.get('kind')}; {words.epsilon_text(proven)} was proven there)"


def method_name(run: RecordedRun) -> str:
    return label(run.text("method")) or "training"


def _per_step(run: RecordedRun) -> str:
    total, steps = run.number("step_seconds") or run.number("wall_seconds"), run.number("steps")
    if total is None or not steps:
        return "–"
    return f"{1000 * total / steps:.0f} ms" if total / steps < 1 else f"{total / steps:.2f} s"


def _size(row: dict[str, Any]) -> int:
    shape = row.get("shape")
    return prod(int(n) for n in shape if finite(n) is not None) if isinstance(shape, list) else 0
