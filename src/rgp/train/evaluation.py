"""A trained run, measured: held-out accuracy and loss, and epsilon from the ledger."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from rgp import accounting
from rgp.errors import LedgerError
from rgp.ledger import Ledger
from rgp.rounding import finite
from rgp.train.folder import RunFolder
from rgp.train.setup import example_losses, scores
from rgp.train.weights import load_trained


def evaluate_run(out: Path) -> dict[str, Any]:
    settings, parts, source = load_trained(out, search=True)
    batch = settings.training.microbatch_size or 32

    def measure(dataset: Any) -> tuple[Tensor, Tensor]:
        return example_losses(
            parts.model, dataset, collate_fn=parts.data.collate_fn, device=parts.device, batch_size=batch
        )

    losses, right = measure(parts.data.test)
    found = scores(losses, right, parts.data.test, settings)
    for name, test in parts.data.more_tests.items():
        found[f"accuracy_{name}"] = scores(*measure(test), test, settings)["accuracy"]
    ledger = Ledger.open(out)
    delta, accountant = ledger.header["delta"], ledger.header["accountant"]
    spent = finite(accounting.epsilon(ledger.events(), delta=delta, accountant=accountant))
    folder = RunFolder(out)
    publishable = parts.published_test
    if searched := folder.search.exists():
        spent = _epsilon_of_search(folder, spent)
        score = folder.read_json(folder.search)["score"]
        publishable &= (score["kind"], score["where"]) != ("private", "held-out")  # which the search protects
    private = spent is not None
    return {
        "run": str(out),
        "weights": source,
        **found,
        "loss": losses.mean().item(),
        "rows": len(right),
        "accuracy_is_publishable": publishable,
        "epsilon": spent,
        "delta": delta if private else None,
        "accountant": accountant if private else None,
        "releases": ledger.count,
        **({"search": True} if searched else {}),
    }


def _epsilon_of_search(folder: RunFolder, trial: float | None) -> float:
    """The promise of a search, which the releases of its best run alone cannot add up to."""
    promised = folder.read_json(folder.search)["epsilon"]
    if trial is None or trial > promised:
        raise LedgerError(
            f"the ledger of the best run in {folder.path} adds up to epsilon {trial}, more than the {promised:.4f} of the search"
        )
    return float(promised)
