"""What was released of the same data before: a model remembers the runs that trained it, and ledgers can be added up.

Training "a little longer" with a second `privatize` is a second release of the same people. Each ledger knows its own run, so
the two have to be told of each other: `privatize(..., after=LEDGER)` counts earlier releases in.
"""

from __future__ import annotations

import os
import warnings
import weakref
from typing import Any

from torch import nn

from rgp.accounting import Event
from rgp.errors import WrongUseError
from rgp.ledger import Ledger
from rgp.units import Unit, unit_from_json

_runs: weakref.WeakKeyDictionary[nn.Module, list[tuple[Ledger, int]]] = weakref.WeakKeyDictionary()


def remember(model: nn.Module, ledger: Ledger, dataset: Any) -> None:
    """Note that a run over this dataset trains the model from now on."""
    _runs.setdefault(model, []).append((ledger, id(dataset)))


def check_first(model: nn.Module, dataset: Any, size: int) -> None:
    """Refuse a model that an earlier run of this process has trained on the same data; warn if the data look different."""
    for ledger, data in _runs.get(model, ()):
        if not ledger.count:
            continue
        before = ledger.header["dataset_size"]
        over = f"{before} {_units(ledger)}"
        if data == id(dataset) or before == size:
            raise WrongUseError(
                f"this model was trained by an earlier run of this process, with {ledger.count} releases over {over}: an "
                "epsilon for the new run alone would be too small. Give after=run.ledger (or after=FOLDER) of the earlier run, "
                "and epsilon counts both; or after=() if their rows have nobody in common. To start anew, make a new model."
            )
        warnings.warn(
            f"this model was trained by an earlier run of this process, over {over}. If they have people in common with "
            "this run's, epsilon has to count both: after=run.ledger. If not, say so: after=()."
        )


def earlier_events(after: Any, unit: Unit | None = None) -> list[tuple[str, list[Event]]]:
    """(head of the ledger, its events) of each run that `after` names: ledgers, runs or folders, one or several.

    unit: what this run protects. Epsilons for different units do not add up: a run that protects rows promises persons less,
    and one that protects persons, added or removed as a whole, says nothing of one row of theirs.
    """
    if after is None:
        return []
    several = after if isinstance(after, (list, tuple, set)) else [after]
    ledgers = [_ledger(given) for given in several]
    for ledger in ledgers:
        before = unit_from_json(ledger.header.get("unit"), ledger.header["dataset_size"])
        if unit is not None and (before.short, getattr(before, "column", None)) != (
            unit.short,
            getattr(unit, "column", None),
        ):
            raise ValueError(
                f"after names a run that protects {before.describe()}, and this one protects {unit.describe()}: their epsilons "
                "are about different neighbours, and do not add up. Train both with the same units."
            )
    return [(ledger.head, ledger.events()) for ledger in ledgers]


def _units(ledger: Ledger) -> str:
    return unit_from_json(ledger.header.get("unit"), ledger.header["dataset_size"]).short + "s"


def _ledger(given: Any) -> Ledger:
    if isinstance(given, Ledger):
        return given
    if isinstance(given, (str, os.PathLike)):
        return Ledger.open(given)
    if isinstance(found := getattr(given, "ledger", None), Ledger):
        return found
    raise TypeError(f"after must be a ledger, a run, a run's folder, or a list of them; got {given!r}")
