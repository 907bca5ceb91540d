"""Distributed runs: one Poisson batch, one noise, one ledger, the same weights on every rank. gloo, 2 to 4 processes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from scipy import stats
from torch import nn

import rgp
from ranks import (
    OPTIONS,
    SIZE,
    Data,
    Net,
    RankDied,
    alone_with,
    close,
    equal,
    launch,
    lines,
    parts,
    state_of,
    train,
    whole_run,
)
from rgp.distributed import find_ranks
from rgp.errors import UnsupportedError
from rgp.sampling import draw
from rgp.streams import Streams

pytestmark = pytest.mark.flaky(reruns=1, only_rerun=["RankDied"])  # for nothing else: see ranks.RankDied


# ---------------------------------------------------------------------- one run on several ranks


@pytest.mark.parametrize(
    ("sigma", "method"),
    [(0.0, rgp.RGP(rank=2)), (0.7, rgp.RGP(rank=2)), (0.0, rgp.DPSGD())],
    ids=["rgp", "noise", "dpsgd"],
)
def test_the_number_of_ranks_does_not_matter(sigma, method, tmp_path):
    """Also with noise: it comes from one stream. Weights that differ at the start are those of the first rank."""
    options = {"noise_multiplier": sigma, "method": method}
    alone = alone_with(**options)
    initial = {n: w.numpy() for n, w in Net().state_dict().items()}
    assert not close(alone["weights"], initial, 1e-2)
    for size in (2, 3) if sigma else (2,):
        found = launch(whole_run, size, options, tmp_path / str(size), True)
        assert close(alone["weights"], found[0]["weights"])
        for other in found[1:]:
            assert equal(found[0]["weights"], other["weights"])
            assert other["head"] == found[0]["head"]
        assert [r["processes"] for r in found[0]["records"]] == [size] * OPTIONS["steps"]


def test_correlated_noise_is_the_first_ranks_alone(tmp_path):
    """Its past is kept there and nowhere else, also when carriers turn, and comes back when the run is resumed. The optimizer's
    state is thin, and the same on every rank."""
    options = {"noise_multiplier": 0.7, "method": rgp.RGP(rank=2, keep=2, state="thin"), "bands": 3}
    alone = alone_with(**options)
    assert not close(alone["weights"], alone_with(**{**options, "bands": 1})["weights"], 1e-2)
    found = launch(whole_run, 2, options, tmp_path / "run")
    assert close(alone["weights"], found[0]["weights"])
    assert equal(found[0]["weights"], found[1]["weights"])
    assert [r["group"] for r in found[1]["records"]] == [0, 1, 2, 0, 1, 2]
    chains = launch(chain_lengths, 2, options, tmp_path / "saved")
    assert chains == [(2, 2), (0, 0)]


def chain_lengths(options: dict[str, Any], folder: Path) -> tuple[int, int]:
    model, optimizer, data = parts()
    run = rgp.privatize(model, optimizer, data, folder=folder, **{**OPTIONS, **options})
    train(run, until=4)
    run.save(folder)
    run.ranks.from_first(lambda: None)
    before = run.releases.chain.length
    run.ledger.close()
    model, optimizer, data = parts()
    return before, rgp.resume(folder, model, optimizer, data).releases.chain.length


def public_run() -> dict[str, Any]:
    model, optimizer, data = parts()
    loss = rgp.without_labels(lambda: model(data.x[:6]))
    options = {**OPTIONS, "method": rgp.RGP(rank=2, source="public"), "public_loss": loss}
    with rgp.privatize(model, optimizer, data, **options) as run:
        train(run)
        return state_of(run)


def test_carriers_from_public_inputs_are_the_same_on_every_rank():
    alone = launch(public_run, 1)[0]
    found = launch(public_run, 2)
    assert equal(found[0]["weights"], found[1]["weights"])
    assert close(alone["weights"], found[0]["weights"])


def test_every_example_is_on_one_rank_and_empty_shares_stay_in_step(tmp_path):
    """Batches of about one example on three ranks: most shares are empty, and some draws."""
    options = {"batch_size": 1, "steps": 12, "microbatch_size": 1, "probe": False}
    alone = alone_with(**options)
    found = launch(whole_run, 3, options, tmp_path / "run")
    drawn = [draw(Streams.from_seed(OPTIONS["seed"]), t, SIZE, 1 / SIZE).tolist() for t in range(12)]
    assert [] in drawn and max(map(len, drawn)) > 1
    for t, indices in enumerate(drawn):
        here = [rank for rank in found if t in rank["ran"]]
        assert len(here) == min(3, len(indices))
    assert sorted(i for rank in found for i in rank["asked"]) == sorted(i for indices in drawn for i in indices)
    assert all(rank["step"] == 12 and equal(rank["weights"], found[0]["weights"]) for rank in found)
    assert close(alone["weights"], found[0]["weights"])
    # one ledger, on the first rank's disk
    assert [rank["path"] is not None for rank in found] == [True, False, False]
    assert [line["step"] for line in lines(tmp_path / "run")] == list(range(12))


def test_dropout_differs_between_ranks_and_weights_do_not():
    alone = launch(whole_run, 1, {}, None, False, 0.5)[0]
    found = launch(whole_run, 2, {}, None, False, 0.5)
    assert equal(found[0]["weights"], found[1]["weights"])
    assert not close(alone["weights"], found[0]["weights"], 1e-3)
    seeds = [Streams(bytes(32), known=False, rank=rank).torch_seed(3, 1) for rank in (0, 1)]
    assert seeds[0] != seeds[1]


def nan_run() -> dict[str, Any]:
    model, optimizer, data = parts()
    data.x[::2] = float("nan")
    frozen_out = nn.Linear(2, 2).double()
    model.extra = frozen_out  # never used
    optimizer.add_param_group({"params": list(frozen_out.parameters())})
    run = rgp.privatize(model, optimizer, data, **{**OPTIONS, "batch_size": SIZE, "steps": 1}, probe=False)
    train(run)
    return state_of(run)


def test_counts_are_sums_over_ranks():
    for rank in launch(nan_run, 2):
        assert rank["bad"] == SIZE // 2
        assert rank["never_used"] == ("extra.weight", "extra.bias")


# ---------------------------------------------------------------------- noise


class Wide(nn.Module):
    """Parameters of a few thousand entries that no example moves."""

    def __init__(self) -> None:
        super().__init__()
        self.carried, self.exact = nn.Linear(120, 100, bias=False), nn.Linear(100, 100, bias=False)

    def forward(self, x):
        return self.exact(self.carried(x))


def noise_of_run(secure: bool) -> list[dict[str, np.ndarray]]:
    model = Wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    data = [torch.zeros(120)] * SIZE
    method = rgp.RGP(rank=8, overrides={"exact*": "exact", "carried*": "carried"})
    options = {"batch_size": 10, "steps": 3, "noise_multiplier": 2.0, "clip": 0.5, "secure_noise": secure}
    run = rgp.privatize(model, optimizer, data, method=method, probe=False, **options)
    moved, before = [], {n: p.detach().clone() for n, p in model.named_parameters()}
    for x in run:
        if run.step(model(x).square().sum()):
            now = {n: p.detach().clone() for n, p in model.named_parameters()}
            moved.append({n: (10 * (before[n] - now[n]) / (2.0 * 0.5)).double().flatten().numpy() for n in now})
            before = now
    return moved


@pytest.mark.parametrize("secure", [False, True], ids=["philox", "secure"])
def test_noise_is_added_once(secure):
    """With two noises the standard deviation would be sqrt 2; and steps and parameters have noise of their own."""
    if secure:
        pytest.importorskip("randomgen")
    found = launch(noise_of_run, 3, secure)
    steps = found[0]
    assert len(steps) == 3
    for other in found[1:]:
        assert all(equal(a, b) for a, b in zip(steps, other, strict=True))
    for step in steps:
        assert stats.kstest(step["exact.weight"], "norm").pvalue > 1e-5
        assert stats.kstest(step["exact.weight"] / 2**0.5, "norm").pvalue < 1e-12
        # the rebuilt noise of a carried matrix has the energy r (p + d - r)
        energy = np.square(step["carried.weight"]).sum() / (8 * (100 + 120 - 8))
        assert abs(energy - 1) < 0.2
    for a, b in ((steps[0], steps[1]), (steps[1], steps[2])):
        assert abs(np.corrcoef(a["exact.weight"], b["exact.weight"])[0, 1]) < 0.05
    n = 10_000
    assert abs(np.corrcoef(steps[0]["exact.weight"][:n], steps[0]["carried.weight"][:n])[0, 1]) < 0.05


# ---------------------------------------------------------------------- the ledger comes first


class Noting(torch.optim.SGD):
    """Looks at the first rank's ledger when it steps."""

    folder: Path
    seen: list[int]

    def step(self, closure=None):
        self.seen.append(len(lines(self.folder)))
        return super().step(closure)


def noting_run(folder: Path) -> list[int]:
    model = Net()
    optimizer = Noting(model.parameters(), lr=0.1)
    optimizer.folder, optimizer.seen = folder, []
    run = rgp.privatize(model, optimizer, Data(), folder=folder, **{**OPTIONS, "noise_multiplier": 1.0})
    append = run.ledger.append

    def slow(**record: Any) -> None:
        if run.ranks.first:
            time.sleep(0.05)
        append(**record)

    run.ledger.append = slow  # type: ignore[method-assign]
    train(run)
    return optimizer.seen


def test_no_rank_steps_before_the_line_is_on_disk(tmp_path):
    for seen in launch(noting_run, 2, tmp_path / "run"):
        assert all(count >= step + 1 for step, count in enumerate(seen)) and len(seen) == OPTIONS["steps"]


def full_disk(folder: Path) -> dict[str, Any]:
    """The third line cannot be written; then it can."""
    model, optimizer, data = parts()
    run = rgp.privatize(model, optimizer, data, folder=folder, **{**OPTIONS, "noise_multiplier": 1.0})
    put = run.ledger._put

    def fail(line: bytes) -> None:
        if run.ledger.count == 2:
            raise rgp.LedgerError("a release could not be recorded: no space")
        put(line)

    if run.ranks.first:
        run.ledger._put = fail  # type: ignore[method-assign]
    said = ""
    try:
        train(run)
    except rgp.LedgerError as error:
        said = str(error)
    stopped = run.step_index
    run.ledger._put = put  # type: ignore[method-assign]
    train(run)
    return state_of(run, said=said, stopped=stopped)


def test_a_line_that_cannot_be_written_stops_all_ranks(tmp_path):
    alone = alone_with(noise_multiplier=1.0)
    found = launch(full_disk, 2, tmp_path / "run")
    for rank in found:
        assert "no space" in rank["said"] and rank["stopped"] == 2
        assert equal(rank["weights"], found[0]["weights"])
    assert close(alone["weights"], found[0]["weights"])


# ---------------------------------------------------------------------- what must agree, and what is refused


REFUSALS = {
    "noise": "ValueError: sigmas is [[0.5, ",
    "optimizer": "ValueError: the optimizer's settings is ",
    "data": "ValueError: dataset_size is 41 on rank 1, and 40 on rank 0",
    "model": "ValueError: the model's 'head.weight' is ([4, 12], 'torch.float64') on rank 1, and ([3, 12]",
    "ddp": "UnsupportedError: the model is wrapped in DistributedDataParallel",
}


def refusals() -> dict[str, str]:
    return {what: refusal(what) for what in REFUSALS}


def refusal(what: str) -> str:
    rank = dist.get_rank()
    model, optimizer, data = parts()
    options = dict(OPTIONS)
    if what == "noise" and rank == 1:
        options["noise_multiplier"] = 0.5
    if what == "optimizer" and rank == 1:
        optimizer.param_groups[0]["lr"] = 0.25
    if what == "data" and rank == 1:
        data = Data(SIZE + 1)
    if what == "model" and rank == 1:
        model.head = nn.Linear(12, 4).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    wrapped: nn.Module = model
    if what == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(model)
    try:
        rgp.privatize(wrapped, optimizer, data, **options)
    except (ValueError, UnsupportedError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_what_ranks_must_have_in_common():
    for said in launch(refusals, 2):
        for what, words in REFUSALS.items():
            assert said[what].startswith(words), what


def groups_of_one() -> dict[str, Any]:
    """Each process its own run: a group for each."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    model, optimizer, data = parts(dist.get_rank())
    run = rgp.privatize(model, optimizer, data, process_group=groups[dist.get_rank()], **OPTIONS)
    train(run)
    return state_of(run)


def test_a_process_group_of_ones_own():
    a, b = launch(groups_of_one, 2)
    assert not close(a["weights"], b["weights"], 1e-3)
    assert find_ranks().size == 1


def test_traffic_is_that_of_thin_gradients():
    model = Wide()
    found = launch(traffic_of, 2)
    carried, exact = 8 * (100 + 120), 100 * 100
    payload = 2 * 4 * (carried + exact)
    for traffic in found:
        assert payload <= traffic.bytes_per_step < payload + 2 * 4 * 256 + 4096  # whole blocks; notes
        assert traffic.plain_bytes_per_step == 2 * 4 * sum(p.numel() for p in model.parameters())
        assert traffic.ranks == 2 and traffic.saved == traffic.plain_bytes_per_step / traffic.bytes_per_step


def traffic_of() -> Any:
    model = Wide()
    method = rgp.RGP(rank=8, overrides={"exact*": "exact", "carried*": "carried"})
    options = {"batch_size": 10, "steps": 2, "noise_multiplier": 1.0, "method": method}
    run = rgp.privatize(
        model, torch.optim.SGD(model.parameters(), lr=1.0), [torch.randn(120)] * SIZE, probe=False, **options
    )
    for x in run:
        run.step(model(x).square().sum())
    return run.traffic


# ---------------------------------------------------------------------- the tests' own processes


def crashes_on_the_second_rank() -> str:
    if dist.get_rank() == 1:
        os.abort()
    dist.barrier()
    return "not reached"


def test_a_crash_in_a_rank_is_told_with_its_trace():
    with pytest.warns(UserWarning, match="crashes_on_the_second_rank"), pytest.raises(RankDied) as told:
        launch(crashes_on_the_second_rank, 2)
    assert f"rank 1 ended with exit code {-signal.SIGABRT}" in str(told.value)
    assert "in crashes_on_the_second_rank" in str(told.value) and "rank 0" not in str(told.value)
