"""Weights that fully_shard has sharded train as whole ones do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import rgp
from ranks import (
    OPTIONS,
    SIZE,
    Data,
    close,
    equal,
    kept,
    launch,
    train,
)
from rgp.errors import UnsupportedError
from rgp.rules.derived import derived
from rgp.sharding import whole

pytestmark = pytest.mark.flaky(reruns=1, only_rerun=["RankDied"])  # for nothing else: see ranks.RankDied


def tower_alone(kind: str, **options: Any) -> dict[str, Any]:
    return kept(tower_run, False, kind, **options)


# ---------------------------------------------------------------------- sharded weights


class Tower(nn.Module):
    """Linear layers, carried and exact; one with rows that two ranks cannot share evenly."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 12), nn.Tanh())
        self.wide, self.head = nn.Linear(12, 8, bias=False), nn.Linear(8, 3)
        self.double()
        with torch.no_grad():
            for tensor in self.state_dict().values():
                tensor.copy_(torch.randn(tensor.shape, generator=generator) / 3)

    def forward(self, x):
        return self.head(torch.tanh(self.wide(self.layers(x))))


def tower(sharded: bool, kind: str = "sgd", frozen: bool = False) -> tuple[nn.Module, torch.optim.Optimizer, Data]:
    from torch.distributed.fsdp import fully_shard

    model = Tower()
    if sharded:
        for layer in (model.layers[0], model.layers[2], model.wide):
            fully_shard(layer)
        fully_shard(model)
    if kind == "adam":
        return model, torch.optim.AdamW(model.parameters(), lr=0.02), Data()
    return model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, weight_decay=0.01), Data()


def whole_weights(model: nn.Module) -> dict[str, np.ndarray]:
    return {name: whole(p.detach()).numpy().copy() for name, p in model.state_dict().items()}


def tower_run(sharded: bool, kind: str, options: dict[str, Any]) -> dict[str, Any]:
    model, optimizer, data = tower(sharded, kind)
    run = rgp.privatize(model, optimizer, data, **{**OPTIONS, **options})
    with run:
        ran = []
        for x, y in run:
            ran.append(run.step_index)
            run.step(nn.functional.cross_entropy(model(x), y))
            with torch.no_grad():  # an evaluation, which leaves some weights whole
                model(data.x[:2])
        weights = whole_weights(model)
        local = {n: type(p).__name__ for n, p in model.named_parameters()}
        return {
            "weights": weights,
            "ran": ran,
            "kinds": local,
            "initial": len(run.initial),
            "proved": not run._loop.rehearsal.is_due(0),
        }


SHARDED = {"overrides": {"wide*": "exact"}, "rank": 2}


PERSONS = [f"person {i // 3}" for i in range(SIZE)]  # three rows each


@pytest.mark.parametrize(
    ("size", "kind", "options"),
    [
        (2, "sgd", {"method": rgp.RGP(**SHARDED)}),
        (3, "adam", {"method": rgp.RGP(**SHARDED), "noise_multiplier": 0.5, "batch_size": 2, "microbatch_size": 1}),
        (2, "sgd", {"method": rgp.DPSGD(), "clip": 0.2}),
        (2, "sgd", {"method": rgp.RGP(**SHARDED, keep=2), "noise_multiplier": 0.5, "bands": 3}),
        (2, "adam", {"method": rgp.RGP(**SHARDED, state="thin", keep=2), "noise_multiplier": 0.5}),
        (2, "sgd", {"method": rgp.RGP(**SHARDED), "units": PERSONS, "rows_per_unit": 2, "batch_size": 4}),
    ],
    ids=["rgp", "noise-and-fillers", "dpsgd", "correlated", "thin", "persons"],
)
def test_sharded_weights_train_as_whole_ones_do(size, kind, options):
    """fully_shard on 2 and 3 ranks against one process with the whole model, of which exactness is tested elsewhere."""
    alone = tower_alone(kind, **options)
    found = launch(tower_run, size, True, kind, options)
    for rank in found:
        assert set(rank["kinds"].values()) == {"DTensor"}
        assert close(alone["weights"], rank["weights"])
        assert rank["ran"] == found[0]["ran"], "all ranks make the same passes"
    assert not close(alone["weights"], {n: w.numpy() for n, w in Tower().state_dict().items()}, 1e-2)
    if options.get("microbatch_size") != 1:
        assert all(rank["proved"] for rank in found)


def sharded_part(folder: Path, until: int, extra: int) -> dict[str, Any]:
    model, optimizer, data = tower(True, "adam")
    options = {**OPTIONS, "method": rgp.RGP(**SHARDED), "noise_multiplier": 1.0}
    run = rgp.privatize(model, optimizer, data, folder=folder, **options)
    train(run, until=until)
    run.save(folder)
    if extra:
        train(run, until=until + extra)
    return {"weights": whole_weights(model)}


def sharded_rest(folder: Path, sharded: bool) -> dict[str, Any]:
    model, optimizer, data = tower(sharded, "adam")
    run = rgp.resume(folder, model, optimizer, data)
    resumed = run.step_index
    train(run)
    return {"weights": whole_weights(model), "resumed": resumed, "lines": run.ledger.count}


@pytest.fixture(scope="module")
def uninterrupted():
    return launch(tower_run, 2, True, "adam", {"method": rgp.RGP(**SHARDED), "noise_multiplier": 1.0})[0]


@pytest.mark.parametrize(("size", "sharded", "charged"), [(2, True, 6), (1, False, 7)], ids=["sharded", "whole"])
def test_sharded_checkpoints(tmp_path, uninterrupted, size, sharded, charged):
    """Resumed by as many ranks, a run repeats the step in flight to the bit; also one process with whole weights can go on."""
    launch(sharded_part, 2, tmp_path / "run", 3, 1)
    for rank in launch(sharded_rest, size, tmp_path / "run", sharded):
        assert rank["resumed"] == 3 and rank["lines"] == charged
        assert equal(uninterrupted["weights"], rank["weights"]) == (size == 2)


def sharded_refusal(what: str) -> str:
    model, optimizer, data = tower(True)
    more = (
        {"ema": 0.9} if what == "ema" else {"method": rgp.RGP(source="public"), "public_loss": lambda: torch.zeros(())}
    )
    try:
        rgp.privatize(model, optimizer, data, **{**OPTIONS, **more})
    except UnsupportedError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("what", ["ema", "public loss"])
def test_what_sharded_weights_cannot_do(what):
    for said in launch(sharded_refusal, 2, what):
        assert said.startswith(f"{what} cannot be used with weights that fully_shard has sharded")


def sharded_derived() -> tuple[str, int]:
    model, optimizer, data = tower(True)
    model.wide.forward = lambda x: nn.functional.linear(x, derived(model.wide.weight, torch.tanh), model.wide.bias)
    run = rgp.privatize(model, optimizer, data, **{**OPTIONS, "method": rgp.RGP(**SHARDED)})
    try:
        for x, y in run:
            run.step(nn.functional.cross_entropy(model(x), y))
    except UnsupportedError as error:
        return str(error), run.ledger.count
    return "nothing", run.ledger.count


def test_derived_weights_are_refused_when_sharded_and_nothing_is_released():
    for said, releases in launch(sharded_derived, 2):
        assert "'wide.weight': derived weights cannot be used" in said
        assert releases == 0


def sharded_stop() -> tuple[int, dict[str, Any]]:
    """One rank wants to stop in the middle of a logical batch; then all go on."""
    model, optimizer, data = tower(True)
    run = rgp.privatize(model, optimizer, data, **{**OPTIONS, "method": rgp.RGP(**SHARDED), "microbatch_size": 1})
    for x, y in run:
        run.step(nn.functional.cross_entropy(model(x), y))
        if run.step_index == 2 and run.ranks.rank == 1:
            run.stop()
    stopped = run.step_index
    train(run)
    return stopped, whole_weights(model)


def test_sharded_runs_stop_together():
    alone = tower_alone("sgd", method=rgp.RGP(**SHARDED))
    for stopped, weights in launch(sharded_stop, 2):
        assert stopped == 2 and close(alone["weights"], weights)
