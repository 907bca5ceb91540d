"""Whether what `resume` was given is the run that was saved: method, model, optimizer, dataset and its units, ledger.

A checkpoint keeps a description of each; whatever differs is named in the error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from rgp.ledger import Ledger
from rgp.mechanism import Mechanism
from rgp.members import Members, as_members
from rgp.methods import Method
from rgp.naming import method_from_json
from rgp.sampling import check_dataset
from rgp.units import Unit


def find_method(saved: Mapping[str, Any], given: Method | None) -> Method:
    """The saved run's method; if one is given, it must be the same."""
    if given is None:
        return method_from_json(saved)
    now = given.to_json()
    if now["name"] != saved["name"]:
        raise ValueError(f"not the run that was saved: method is {now['name']}, and was {saved['name']}")
    defaults = type(given)().to_json()["fields"]  # what an older version did not know had its default
    both = [(k, v, saved["fields"].get(k, defaults[k])) for k, v in now["fields"].items()]
    different = [f"method's {k} is {v!r}, and was {before!r}" for k, v, before in both if v != before]
    if different:
        raise ValueError(f"not the run that was saved: {'; '.join(different)}")
    return given


def find_members(units: Any, unit: Unit, dataset: Any) -> Members | None:
    """The rows of the saved run's units. The number of units is checked here; which rows are theirs, once the secret is read."""
    if unit.rows is not None:
        if units is not None:
            raise ValueError("not the run that was saved: it has no units, each row counts on its own; leave units out")
        return None
    if units is None:
        raise ValueError(f"the run protects {unit.describe()}: give units, as before")
    members = as_members(units, None if isinstance(units, Members) else unit.rows_per_unit)
    assert members is not None
    members.check(check_dataset(dataset))
    if (members.unit.size, members.unit.rows_per_unit) != (unit.size, unit.rows_per_unit):
        raise ValueError(
            f"not the run that was saved: there are {members.unit.size} units of at most {members.unit.rows_per_unit} rows, and "
            f"there were {unit.size} of at most {unit.rows_per_unit}"
        )
    return members


def check_same_run(
    state: Mapping[str, Any],
    mechanism: Mechanism,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    dataset: Any,
    batch_size: int | Callable[[int], int] | None,
) -> None:
    """Refuse with everything that differs from the saved run."""
    sizes = [batch_size(t) if callable(batch_size) else batch_size for t in range(mechanism.steps)]
    pairs: list[tuple[str, Any, Any]] = [
        ("dataset size", check_dataset(dataset), mechanism.unit.rows or len(dataset)),
        *[(f"batch_size at step {t}", now, mechanism.batch_size(t)) for t, now in enumerate(sizes) if now is not None],
        ("optimizer", type(optimizer).__name__, state["optimizer"]["class"]),
        ("scheduler", scheduler and type(scheduler).__name__, state["scheduler"] and state["scheduler"]["class"]),
    ]
    there, here = state["model"], describe_model(model)
    for name in [*there, *(n for n in here if n not in there)]:
        pairs.append((f"model's {name!r}", here.get(name, "missing"), there.get(name, "missing")))
    different = [f"{what} is {now}, and was {before}" for what, now, before in pairs if now != before]
    if not different and group_names(optimizer, model) != state["optimizer"]["groups"]:
        different = ["the optimizer's parameter groups hold other parameters, or in another order"]
    if different:
        more = f" (and {len(different) - 4} more)" if len(different) > 4 else ""
        raise ValueError(f"not the run that was saved: {'; '.join(different[:4])}{more}")


def check_header(ledger: Ledger, mechanism: Mechanism) -> None:
    """Refuse a ledger whose first line describes other settings than the checkpoint."""
    for key, value in mechanism.header().items():
        if key != "version" and _without_version(ledger.header.get(key)) != _without_version(value):
            raise ValueError(
                f"not the run that was saved: the checkpoint has {key} {value}, and the ledger {ledger.header.get(key)}"
            )


def _without_version(value: Any) -> Any:
    return {k: v for k, v in value.items() if k != "version"} if isinstance(value, dict) else value


def describe_model(model: nn.Module) -> dict[str, str]:
    """Name -> shape, kind of number, and the name it is tied to."""
    first: dict[int, str] = {}
    found = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        tied = first.setdefault(id(parameter), name)
        kind = str(parameter.dtype).removeprefix("torch.")
        found[name] = f"{list(parameter.shape)} {kind}" + ("" if tied == name else f" tied to {tied}")
    return found


def group_names(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[list[str]]:
    names = {id(p): n for n, p in model.named_parameters()}
    return [[names.get(id(p), "?") for p in group["params"]] for group in optimizer.param_groups]
