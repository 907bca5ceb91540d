"""What a run proved, for whoever gets the model: summary.json, and the privacy card in model/.

The card holds nothing that was computed from private data without noise.
"""

from __future__ import annotations

import math
import platform
import re
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

import torch

from rgp import accounting
from rgp._version import __version__
from rgp.data.spec import bare_name
from rgp.models.public_text import TEXTS
from rgp.rounding import round_down, round_up
from rgp.run import Run
from rgp.train.config import Config
from rgp.train.folder import RunFolder
from rgp.train.setup import Parts
from rgp.units import Persons, Rows

NOT_COVERED = [
    "several rows of one person: k rows are protected by no more than k times epsilon",
    "the number of training rows, and the names and number of classes, which count as public",
    "settings that were chosen by looking at results on the private data",
    "training loss, gradient norms, accuracy on private rows and other diagnostics: none of them is in this folder",
    "what the initial weights were trained on before this run",
    "what can be inferred about a person without their row: that the training found a general truth",
]
NEIGHBOURS = "add-or-remove-one"
ACCOUNTANTS = {"pld": "privacy loss distributions (PLD)", "rdp": "Rényi divergences (RDP)", None: "none"}


def summarize(
    config: Config,
    parts: Parts,
    run: Run,
    *,
    scores: dict[str, float],
    wall_seconds: float,
    step_seconds: float,
    peak_memory_bytes: int | None,
) -> dict[str, Any]:
    """The content of summary.json. `epsilon` is null where nothing is protected, never Infinity."""
    settings, private = run.mechanism, config.private
    spent = run.epsilon() if private else math.inf
    return {
        "method": config.method.name,
        "dataset": config.data.name,
        "model": config.model.name,
        "accuracy": scores.get("accuracy"),
        **{name: value for name, value in scores.items() if name != "accuracy"},
        "accuracy_is_publishable": parts.published_test,
        "epsilon": spent if math.isfinite(spent) else None,
        "delta": settings.delta if private else None,
        "accountant": settings.accountant if private else None,
        "noise_multiplier": run.noise_multiplier if private else None,
        "clip": settings.clip.first,
        "steps": run.step_index,
        "batch_size": settings.batch_size(0),
        "sampling_rate": settings.rate(0),
        "seed": config.run.seed,
        "wall_seconds": wall_seconds,
        "step_seconds": step_seconds,
        "peak_memory_bytes": peak_memory_bytes,
        "parameters": sum(e.size for e in run.plan),
        "trained_parameters": sum(e.size for e in run.plan.trained),
        "noise_dimensions": run.plan.noise_dimensions if private else 0,
        "finished": run.finished,
        "planned_steps": settings.steps,
        **_counts(run),
        # a person more brings all their rows: of persons, no number of rows is public
        "held_out_rows": len(parts.data.test) if isinstance(settings.unit, Rows) else None,
        "unit": unit_words(run, parts.data.unit),
        "secure_noise": config.run.secure_noise,
        "releases": run.ledger.count,
        "ledger_head": run.ledger.head,
        "device": str(parts.device),
        "threads": torch.get_num_threads(),
        "ranks": run.ranks.size,
        "bytes_per_step": run.traffic.bytes_per_step,
        "plain_bytes_per_step": run.traffic.plain_bytes_per_step,
        "version": __version__,
    }


def plan_rows(run: Run) -> list[dict[str, Any]]:
    return [
        {
            "name": e.name,
            "shape": list(e.shape),
            "treatment": e.treatment,
            "rank": e.rank,
            "noise_dimensions": e.noise_dimensions,
            "why": e.why,
        }
        for e in run.plan
    ]


def make_card(config: Config, parts: Parts, run: Run, summary: dict[str, Any]) -> dict[str, Any]:
    card = card_of(
        run,
        method=summary["method"],
        unit=parts.data.unit,
        dataset=summary["dataset"],
        model=summary["model"],
        seed_known=config.run.seed is not None,
        secure_noise=config.run.secure_noise,
        preprocessing={**(getattr(parts.data, "public_constants", None) or {}), **_public_inputs(config)},
    )
    if summary["accuracy_is_publishable"]:
        for name in summary:  # on a published test split, which nobody asked to protect
            if name == "perplexity" or (name.startswith("accuracy") and name != "accuracy_is_publishable"):
                card[name] = summary[name]
    return card


def _public_inputs(config: Config) -> dict[str, str]:
    """What the run took to be public besides its constants. Of a file, nobody can know but the user."""
    used = {
        "centre of the features": None if config.model.centre == "none" else config.model.centre,
        "inputs whose logits the carriers follow": config.method.public,
    }
    texts = config.model.label_texts
    said = {} if texts is None else {"texts that the head starts from": "; ".join(texts)}
    own = {"noise": "random inputs", **{name: f"the sentences {name} that come with rgp" for name in TEXTS}}
    named = {
        what: own.get(name, f"{bare_name(name)}, which the user says is public") for what, name in used.items() if name
    }
    return {**named, **said}


def card_of(
    run: Run,
    *,
    method: str,
    unit: str,
    dataset: str,
    model: str,
    seed_known: bool,
    secure_noise: bool,
    preprocessing: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The card of any run, with names for what it was about."""
    settings, spent = run.mechanism, run.epsilon()
    private = math.isfinite(spent)
    card: dict[str, Any] = {
        "private": private,
        "epsilon": spent if private else None,
        "delta": settings.delta if private else None,
        "accountant": settings.accountant if private else None,
        "unit": unit_words(run, unit),
        "neighbours": NEIGHBOURS,
        "sampling": {
            "kind": "Poisson",
            "rate": settings.rate(0),
            "expected_batch_size": settings.batch_size(0),
            "max_batch": settings.sampling.max_batch,
            "steps": run.step_index,
        },
        "method": method,
        "noise_multiplier": run.noise_multiplier if private else None,
        "clip": settings.clip.first,
        "seed_known": seed_known,
        "secure_noise": secure_noise,
        "dataset": bare_name(dataset),
        **_counts(run),
        "model": bare_name(model),
        "parameters": sum(e.size for e in run.plan),
        "preprocessing": {str(k): _plain(v) for k, v in (preprocessing or {}).items()},
        "not_covered": NOT_COVERED if isinstance(settings.unit, Rows) else persons_not_covered(settings.unit),
        "audit": None,  # filled in by `rgp audit --run`
        "attack_run": False,  # whether `rgp attack` was; its results are about private rows, and never here
        "ledger": {"releases": run.ledger.count, "head": run.ledger.head},
        "code": {"rgp": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "made": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    if private and settings.accountant == "pld":
        meaning = accounting.meaning(run.ledger.events(), delta=settings.delta)
        card["attack_bound"] = {"false_positive_rate": 0.01, "true_positive_rate": meaning.tpr_at_1_percent}
    return card


def card_text(card: dict[str, Any]) -> str:
    """The card as Markdown, for people."""
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
            f"Whether any {short_unit(card['unit'])} was used or not, no outcome of this training, the weights here included,",
            f"becomes more than e^{epsilon} = {_big(math.exp(float(epsilon)))} times as likely, except with probability "
            f"{delta:g}.",
        ]
        if "attack_bound" in card:
            rate = math.ceil(card["attack_bound"]["true_positive_rate"] * 1e4) / 100
            lines.append(
                f"An attacker who knows everything but whether a {noun} was used, and may be wrong about 1% of the unused\n"
                f"{noun}s, recognises at most {rate:.2f}% of the used ones."
            )
        lines.append("")
    if card["seed_known"]:
        lines += [
            "**A seed was given for this run.** The guarantee does not hold against anyone who knows or guesses it.",
            "",
        ]
    sampling = card["sampling"]
    facts = [
        ("protected", card["unit"]),
        ("neighbouring data sets", f"{short_unit(card['unit'])} is added or removed"),
        ("accountant", ACCOUNTANTS[card["accountant"]]),
        (
            "sampling",
            f"Poisson: each {noun} on its own with probability {sampling['rate']:.6g}, in all {sampling['steps']} steps"
            + ("" if sampling["max_batch"] is None else f"; at most {sampling['max_batch']} {noun}s"),
        ),
        ("noise", _or_none(card["noise_multiplier"], "{:g} times the clipping norm, on every released sum")),
        ("clipping norm", _or_none(card["clip"], "{:g}")),
        ("method", card["method"]),
        ("random numbers", _randomness(card)),
        ("audit", audit_text(card.get("audit"))),
        ("membership attack", "was run; its results are private" if card.get("attack_run") else "was not run"),
        (
            "data",
            f"{card['dataset']}, {card.get('training_units') or card['training_rows']:,} training {noun}s (this number counts as "
            "public)",
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


def audit_text(audit: dict[str, Any] | None) -> str:
    if audit is None:
        return "none was run"
    return (
        f"epsilon is at least {round_down(audit['epsilon_lower'])} with {audit['confidence']:.0%} confidence: {audit['kind']}, "
        f"{audit['canaries']:,} canaries in a run of its own with {audit['steps']} steps, in which at most "
        f"{round_up(audit['epsilon_proven'])} was proven"
    )


AUDITED = (
    *("epsilon_lower", "epsilon_proven", "delta", "confidence", "kind", "bound", "canaries", "steps", "sampling_rate"),
    *("noise_multiplier", "ledger_head"),
)


def record_audit(folder: RunFolder, result: dict[str, Any]) -> None:
    """audit.json of a run; and on its card, unless private rows took part in the audit."""
    folder.write_json(folder.path / "audit.json", result)
    if not result["private_rows"]:
        _amend(folder, "audit", {name: result[name] for name in AUDITED})


def record_attack(folder: RunFolder) -> None:
    """That an attack was run, and nothing of what came out."""
    _amend(folder, "attack_run", True)


def _amend(folder: RunFolder, name: str, value: Any) -> None:
    path = folder.model / "privacy_card.json"
    if path.exists():
        card = {**folder.read_json(path), name: value}
        folder.write_json(path, card)
        folder.write_text(folder.model / "privacy_card.md", card_text(card))


def short_unit(unit: str) -> str:
    """The words 'one row' of 'one row of the training data', 'one person' of 'one person (column who), at most 8 rows'."""
    return re.split(r" of | \(|, ", unit)[0]


def unit_words(run: Run, rows: str) -> str:
    """What one unit is, because the sampler did it; `rows`: what a row of these data is, where a unit is a row."""
    unit = run.mechanism.unit
    return rows if isinstance(unit, Rows) else unit.describe()


def _counts(run: Run) -> dict[str, Any]:
    """How many units there were, which is public; of rows only where they are the units."""
    unit = run.mechanism.unit
    rows = unit.size if isinstance(unit, Rows) else None
    return {"training_rows": rows, "training_units": unit.size, "unit_noun": unit.short}


def persons_not_covered(unit: Persons) -> list[str]:
    """With units of several rows, what a person has many of is covered; who counts as one person is not checked."""
    return [
        f"one {unit.noun} under several ids: ids are taken as they are, and each is protected on its own",
        f"what {unit.noun}s have in common, such as a household: each is protected on its own",
        f"the number of training {unit.noun}s, and the names and number of classes, which count as public",
        *NOT_COVERED[2:],
    ]


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
    return f"{source}, keyed with 256 bits from the operating system that nobody has seen"


def _plain(value: Any) -> Any:
    return value if isinstance(value, (str, int, float, bool, list, dict, type(None))) else str(value)
