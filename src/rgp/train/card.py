"""The privacy card of a run of `rgp train`, in its model/; audits and attacks add to it later."""

from __future__ import annotations

from typing import Any

from rgp.cards import card_text, make_card
from rgp.files import bare_name
from rgp.models.public_text import TEXTS
from rgp.run import Run
from rgp.train.config import Config
from rgp.train.folder import RunFolder
from rgp.train.setup import Parts


def card_of(config: Config, parts: Parts, run: Run, summary: dict[str, Any]) -> dict[str, Any]:
    """What goes into model/: the run's card, with accuracies that were measured on a published test split."""
    card = make_card(
        run,
        method=summary["method"],
        row=parts.data.row,
        dataset=summary["dataset"],
        model=summary["model"],
        seed_known=config.run.seed is not None,
        secure_noise=config.run.secure_noise,
        preprocessing={**(getattr(parts.data, "public_constants", None) or {}), **_public_inputs(config)},
    )
    if summary["accuracy_is_publishable"]:
        for name in summary:  # on a published test split, which needs no protection
            if name == "perplexity" or (name.startswith("accuracy") and name != "accuracy_is_publishable"):
                card[name] = summary[name]
    return card


def _public_inputs(config: Config) -> dict[str, str]:
    """What the run took to be public besides its constants. Whether a file is public, only the user knows."""
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


AUDITED = (
    *("epsilon_lower", "epsilon_proven", "delta", "confidence", "kind", "bound", "canaries", "steps", "sampling_rate"),
    *("noise_multiplier", "ledger_head"),
)


def record_audit(folder: RunFolder, result: dict[str, Any]) -> None:
    """Write audit.json, and put the result on the card unless private rows took part in the audit."""
    folder.write_json(folder.path / "audit.json", result)
    if not result["private_rows"]:
        _amend(folder, "audit", {name: result[name] for name in AUDITED})


def record_attack(folder: RunFolder) -> None:
    """Note on the card that an attack was run, and nothing about its results."""
    _amend(folder, "attack_run", True)


def _amend(folder: RunFolder, name: str, value: Any) -> None:
    path = folder.model / "privacy_card.json"
    if path.exists():
        card = {**folder.read_json(path), name: value}
        folder.write_json(path, card)
        folder.write_text(folder.model / "privacy_card.md", card_text(card))
