"""The privacy card as Markdown, for people."""

from __future__ import annotations

import math
import re
from typing import Any

from rgp.accountants import accountant_label
from rgp.rounding import percent_up, round_down, round_up


def card_text(card: dict[str, Any]) -> str:
    lines, noun = ["# Privacy card", ""], card.get("unit_noun", "row")
    if not card["private"]:
        lines += [
            "**This model is NOT private.** It was trained without noise: it may reproduce rows of its training data,",
            "and anyone who has it may be able to tell whose rows were used.",
            "",
        ]
    else:
        epsilon, delta = round_up(card["epsilon"]), card["delta"]
        lines += [
            f"**Proven: ({epsilon}, {delta:g})-differential privacy** for {card['unit']}.",
            "",
            f"Whether {short_unit(card['unit'])} was used or not, no outcome of this training, including the weights here,",
            f"becomes more than e^{epsilon} = {_big(math.exp(float(epsilon)))} times as likely, except with probability "
            f"{delta:g}.",
        ]
        if "attack_bound" in card:
            share = percent_up(card["attack_bound"]["true_positive_rate"])
            lines.append(
                f"An attacker who knows everything but whether a {noun} was used, and may be wrong about 1% of the unused\n"
                f"{noun}s, recognises at most {share} of the used ones."
            )
        lines.append("")
    if card["seed_known"]:
        lines += [
            "**A seed was given for this run.** The guarantee does not hold against anyone who knows or guesses it.",
            "",
        ]
    sampling, units = card["sampling"], card.get("training_units") or card["training_rows"]
    facts = [
        ("protected", card["unit"]),
        ("neighbouring data sets", f"{short_unit(card['unit'])} is added or removed"),
        ("accountant", accountant_label(card["accountant"])),
        (
            "sampling",
            _sampling_text(sampling, noun)
            + ("" if sampling["max_batch"] is None else f"; at most {sampling['max_batch']} {noun}s"),
        ),
        ("noise", _or_none(card["noise_multiplier"], "{:g} times the clipping norm, on every released sum")),
        ("kind of noise", card.get("noise") or "independent noise"),
        ("clipping norm", _or_none(card["clip"], "{:g}")),
        ("method", card["method"]),
        ("random numbers", _randomness(card)),
        ("audit", audit_text(card.get("audit"))),
        ("membership attack", "was run; its results are private" if card.get("attack_run") else "was not run"),
        (
            "data",
            f"{card['dataset']}, {units:,} training {noun}s (this number counts as public)",
        ),
        ("model", f"{card['model']}, {card['parameters']:,} parameters"),
        ("record", f"{card['ledger']['releases']} releases, ledger head `{card['ledger']['head']}`"),
        ("code", f"rgp {card['code']['rgp']}, torch {card['code']['torch']}, Python {card['code']['python']}"),
        ("made", card["made"]),
    ]
    if "accuracy" in card and card["accuracy"] is not None:
        facts.insert(-3, ("accuracy", f"{card['accuracy']:.4f} on the published test split"))
        for name in card:
            if name == "perplexity" or name.startswith("accuracy_"):
                facts.insert(-3, (name.replace("_", ", "), f"{card[name]:.4f} on the published test split"))
    lines += ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts), ""]
    if card["preprocessing"]:
        lines += ["Preprocessing used fixed, public constants only:", ""]
        lines += [*(f"- {name}: {value}" for name, value in card["preprocessing"].items()), ""]
    if card["private"]:
        lines += ["Not covered by the guarantee:", "", *(f"- {item}" for item in card["not_covered"]), ""]
    return "\n".join(lines)


def _sampling_text(sampling: dict[str, Any], noun: str) -> str:
    steps, groups = sampling["steps"], sampling.get("groups", 1)
    if groups == 1:
        return f"Poisson: each {noun} on its own with probability {sampling['rate']:.6g}, in all {steps} steps"
    return (
        f"{noun}s are dealt into {groups} groups at random, which take turns in {steps} steps; Poisson: each {noun} of the "
        f"group on its own with probability {sampling['rate']:.6g}"
    )


def audit_text(audit: dict[str, Any] | None) -> str:
    if audit is None:
        return "none was run"
    return (
        f"epsilon is at least {round_down(audit['epsilon_lower'])} with {audit['confidence']:.0%} confidence: {audit['kind']}, "
        f"{audit['canaries']:,} canaries in a run of its own with {audit['steps']} steps, in which at most "
        f"{round_up(audit['epsilon_proven'])} was proven"
    )


def short_unit(unit: str) -> str:
    """The words 'one row' of 'one row of the dataset', 'one person' of 'one person (column who), at most 8 rows in a step'."""
    return re.split(r" of | \(|, ", unit)[0]


def _big(value: float) -> str:
    """Three digits or whole numbers, rounded up."""
    if 100 <= value < 1e7:
        return f"{math.ceil(value):,}"
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return f"{math.ceil(value / unit - 1e-9) * unit:.3g}"


def _or_none(value: Any, words: str) -> str:
    return "none" if value is None else words.format(value)


def _randomness(card: dict[str, Any]) -> str:
    if card["seed_known"]:
        return "from a seed that was given"
    source = "a cryptographic generator" if card["secure_noise"] else "numpy's Philox"
    return f"{source}, keyed with 256 secret bits from the operating system"
