"""Earlier releases of the same data: models and their parameters remember the runs that trained them; ledgers can be added up.

Training "a little longer" with a second `privatize` is a second release of the same people. Each ledger knows its own run, so
the second has to be told about the first: `privatize(..., after=LEDGER)` includes its releases.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from typing import Any

from torch import Tensor, nn

from rgp.accounting import Event
from rgp.errors import WrongUseError
from rgp.ledger import Ledger
from rgp.units import Unit, unit_from_json

_runs: dict[int, tuple[weakref.ref[Any], list[tuple[Ledger, int]]]] = {}  # by id(model or parameter), while it lives
_noticed: list[list[Ledger]] = []


def remember(model: nn.Module, trained: Iterable[Tensor], ledger: Ledger, dataset: Any) -> None:
    """Note that a run over this dataset trains these parameters of the model from now on."""
    for one in (model, *trained):
        key = id(one)
        if key not in _runs:
            _runs[key] = weakref.ref(one, lambda _, key=key: _runs.pop(key, None)), []  # type: ignore[misc]
        _runs[key][1].append((ledger, id(dataset)))
    for found in _noticed:
        found.append(ledger)


def runs_of(model: nn.Module) -> list[tuple[Ledger, int]]:
    """(ledger, id of the dataset) of the runs of this process that trained this model, or a part of it in another one."""
    known = (_runs[id(one)][1] for one in (model, *model.parameters()) if id(one) in _runs)
    return list({id(ledger): (ledger, data) for runs in known for ledger, data in runs}.values())


@contextmanager
def noticing() -> Iterator[list[Ledger]]:
    """The ledgers of the runs that are made or resumed inside, whoever makes them."""
    found: list[Ledger] = []
    _noticed.append(found)
    try:
        yield found
    finally:
        _noticed[:] = [other for other in _noticed if other is not found]


def check_all_named(model: nn.Module, dataset: Any, size: int, earlier: Sequence[Earlier]) -> None:
    """Refuse a model that a run of this process has trained on the same data, unless it is among the earlier ones as it stands
    now; warn if the data look different."""
    named = Counter(head for run in earlier for head in run.heads)  # two runs with one seed may have equal heads
    for ledger, data in runs_of(model):
        if not ledger.count:
            continue
        if named[ledger.head]:
            named[ledger.head] -= 1
            continue
        before = ledger.header["dataset_size"]
        over = f"{before} {_units(ledger)}"
        if data == id(dataset) or before == size:
            raise WrongUseError(
                f"this model, or a part of it, was trained by an earlier run of this process, with {ledger.count} releases over "
                f"{over}: an epsilon that leaves them out would be too small. Give after=run.ledger (or after=FOLDER) of the "
                "earlier run, or a list of them all, and epsilon counts them; or after=() if their rows have nobody in common. "
                "To start anew, make a new model."
            )
        warnings.warn(
            f"this model, or a part of it, was trained by an earlier run of this process, over {over}. If they have people in "
            "common with this run's, epsilon has to count both: after=run.ledger. If not, say so: after=()."
        )


@dataclass(frozen=True)
class Earlier:
    """An earlier run's releases, and the heads of its ledger and of those that it counts itself."""

    heads: tuple[str, ...]
    events: tuple[Event, ...]

    def to_json(self) -> dict[str, Any]:
        return {"heads": list(self.heads), "events": [astuple(event) for event in self.events]}


def earlier_runs(after: Any, unit: Unit | None = None) -> list[Earlier]:
    """The runs that `after` names: ledgers, runs or folders, one or several. One that is given twice counts twice.

    unit: what this run protects. Epsilons for different units do not add up: a run that protects rows promises persons less,
    and one that protects persons, added or removed as a whole, says nothing about one row of theirs.
    """
    if after is None:
        return []
    several = after if isinstance(after, (list, tuple, set)) else [after]
    found = []
    for ledger in map(_ledger, several):
        _check_unit(ledger, unit)
        counted = [head for run in ledger.header.get("after", ()) for head in run.get("heads", ())]
        found.append(Earlier((ledger.head, *counted), tuple(ledger.events())))
    return found


def _check_unit(ledger: Ledger, unit: Unit | None) -> None:
    before = unit_from_json(ledger.header.get("unit"), ledger.header["dataset_size"])
    if unit is None or (before.noun, before.column) == (unit.noun, unit.column):
        return
    raise ValueError(
        f"after names a run that protects {before.describe()}, and this one protects {unit.describe()}: their epsilons "
        "are about different neighbours, and do not add up. Train both with the same units."
    )


def _units(ledger: Ledger) -> str:
    return unit_from_json(ledger.header.get("unit"), ledger.header["dataset_size"]).noun + "s"


def _ledger(given: Any) -> Ledger:
    if isinstance(given, Ledger):
        return given
    if isinstance(given, (str, os.PathLike)):
        return Ledger.open(given)
    if isinstance(found := getattr(given, "ledger", None), Ledger):
        return found
    raise TypeError(f"after must be a ledger, a run, a run's folder, or a list of them; got {given!r}")
