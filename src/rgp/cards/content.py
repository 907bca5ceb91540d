"""The privacy card of a run: what was proven about it, and what was not.

It holds nothing that was computed from private data without noise, and says about the privacy unit only what the run's
mechanism says: what the sampler drew is what is protected.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

import torch

from rgp import accounting
from rgp._version import __version__
from rgp.accountants import find_accountant
from rgp.files import bare_name
from rgp.run import Run

NOT_COVERED = [  # whatever the unit is
    "settings that were chosen by looking at results on the private data",
    "training loss, gradient norms, accuracy on private rows and other diagnostics: none of them is in this folder",
    "what the initial weights were trained on before this run",
    "what can be inferred about a person without their row: that the training found a general truth",
]
NEIGHBOURS = "add-or-remove-one"


def unit_of(run: Run, row: str = "") -> str:
    """What the guarantee protects, from the mechanism. row: what a row of this dataset is, if that is known."""
    return run.mechanism.unit.describe(row)


def counts(run: Run) -> dict[str, Any]:
    """How many units there were, which is public; the number of rows only where rows are the units."""
    unit = run.mechanism.unit
    return {"training_rows": unit.rows, "training_units": unit.size, "unit_noun": unit.noun}


def make_card(
    run: Run,
    *,
    method: str,
    dataset: str,
    model: str,
    seed_known: bool,
    secure_noise: bool,
    row: str = "",
    preprocessing: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The card of any run, with names for what it was about."""
    mechanism, spent = run.mechanism, run.epsilon()
    private = math.isfinite(spent)
    card: dict[str, Any] = {
        "private": private,
        "epsilon": spent if private else None,
        "delta": mechanism.delta if private else None,
        "accountant": mechanism.accountant if private else None,
        "unit": unit_of(run, row),
        "neighbours": NEIGHBOURS,
        "sampling": {
            "kind": mechanism.sampling.words,
            "groups": mechanism.sampling.groups,
            "rate": mechanism.rate(0),
            "expected_batch_size": mechanism.batch_size(0),
            "max_batch": mechanism.sampling.max_batch,
            "steps": run.step_index,
        },
        "method": method,
        "noise_multiplier": run.noise_multiplier if private else None,
        "noise": mechanism.noise_words() if private else None,
        "clip": mechanism.clip.first,
        "seed_known": seed_known,
        "secure_noise": secure_noise,
        "dataset": bare_name(dataset),
        **counts(run),
        "model": bare_name(model),
        "parameters": sum(e.size for e in run.plan),
        "preprocessing": {str(k): _plain(v) for k, v in (preprocessing or {}).items()},
        "not_covered": [*mechanism.unit.not_covered(), *NOT_COVERED],
        "audit": None,  # filled in by `rgp audit --run`
        "attack_run": False,  # whether `rgp attack` was run; its results are about private rows, and never on the card
        "ledger": {"releases": run.ledger.count, "head": run.ledger.head},
        "code": {"rgp": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "made": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    if private and find_accountant(mechanism.accountant).profile is not None:
        meaning = accounting.meaning(run.ledger.events(), delta=mechanism.delta, accountant=mechanism.accountant)
        card["attack_bound"] = {"false_positive_rate": 0.01, "true_positive_rate": meaning.tpr_at_1_percent}
    return card


def _plain(value: Any) -> Any:
    return value if isinstance(value, (str, int, float, bool, list, dict, type(None))) else str(value)
