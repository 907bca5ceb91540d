"""The best trial -> what is released: its model with a card whose epsilon is the search's, its settings, a page.

model/         weights and privacy card
best.yaml      the settings of the best run, with its noise
ledger.jsonl   the releases of its training. Their sum is the trial's epsilon, NOT what is promised: that covers the search
tune.json      the search: law, score, space, epsilon; the best settings and their score
report.html    for people
"""

from __future__ import annotations

import os
import shutil
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rgp.cards import card_text
from rgp.report.search import search_page
from rgp.train.folder import RunFolder
from rgp.tuning import accounting as search
from rgp.tuning.plan import Plan
from rgp.tuning.scores import share

TUNED = "settings that were chosen by looking at results on the private data"
COVERED = (
    "settings that were chosen by looking at results on the private data before this search, or after it: those that the search "
    "itself tried are covered"
)


def release(out: Path, plan: Plan, trial: Path, settings: dict[str, Any], score: float) -> dict[str, Any]:
    """Put the best trial in OUT; what is returned says so, and is the last to be written. Doing it twice changes nothing."""
    folder = RunFolder(out)
    draft = out / "model.draft"
    shutil.rmtree(draft, ignore_errors=True)
    shutil.copytree(trial / "model", draft, copy_function=shutil.copyfile)  # not its time, which tells which one it was
    draft.chmod(0o755)
    card = search_card(folder.read_json(draft / "privacy_card.json"), plan)
    folder.write_json(draft / "privacy_card.json", card)
    folder.write_text(draft / "privacy_card.md", card_text(card) + card_words(plan))
    shutil.rmtree(folder.model, ignore_errors=True)
    os.replace(draft, folder.model)
    for source, copy in (("config.yaml", "best.yaml"), ("ledger.jsonl", "ledger.jsonl")):
        folder.write_text(out / copy, (trial / source).read_text(encoding="utf-8"))
    return finish(out, plan, {"settings": settings, "score": share(score, plan.score)}, card)


def finish(out: Path, plan: Plan, best: dict[str, Any] | None, card: dict[str, Any] | None = None) -> dict[str, Any]:
    """report.html, then tune.json, which says that all is done. best: None if there was no trial."""
    folder = RunFolder(out)
    result = {**plan.to_dict(), "finished": True, "best": best}
    folder.write_text(folder.report, search_page(result, card, out.resolve().name))
    folder.write_json(out / "tune.json", result)
    return result


def search_card(card: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """A trial's card as the search's: nothing on it may be the trial's own guarantee."""
    unit = card["unit"]
    if plan.score.protects_held_out:
        card = {
            name: value for name, value in card.items() if not (name == "perplexity" or name.startswith("accuracy"))
        }
        unit += f", or one of the held-out {plan.unit}s that the trials were scored on"
    made = {
        **card,
        "epsilon": plan.epsilon,
        "delta": plan.delta,
        "accountant": plan.accountant,
        "unit": unit,
        "made": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "not_covered": [COVERED if item == TUNED else item for item in card["not_covered"]],
        "search": {
            "trials": {"law": plan.law.name, "mean": plan.law.mean},
            "score": plan.score.to_dict(),
            "space": plan.space,
        },
    }
    made.pop("attack_bound", None)
    profile = search.search_profile(plan.trials(), plan.law, delta=plan.delta, accountant=plan.accountant)
    if profile is not None:
        made["attack_bound"] = {"false_positive_rate": 0.01, "true_positive_rate": profile.true_positive_rate(0.01)}
    return made


def card_words(plan: Plan) -> str:
    tried = "; ".join(f"{key}: {', '.join(map(str, values))}" for key, values in plan.space.items())
    return (
        "\nThe epsilon above covers a search for the settings, of which this is the best run:\n\n"
        f"- settings that were drawn from: {tried}\n"
        f"- number of trials: random and secret, {plan.law.words}\n"
        f"- score: {plan.score.words}\n"
    )
