"""Distributed runs: one Poisson batch, one noise, one ledger, the same weights on every rank. gloo, 2 to 4 processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
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
from ranks import OPTIONS, SIZE, Data, Net, RankDied, Ranks, launch, parts, state_of, train
from rgp.distributed import find_ranks
from rgp.errors import RankError, UnsupportedError
from rgp.ledger import FILE, Ledger
from rgp.rules.derived import derived
from rgp.sampling import draw
from rgp.sharding import whole
from rgp.streams import Streams

pytestmark = pytest.mark.flaky(reruns=1, only_rerun=["RankDied"])  # for nothing else: see there


def close(a: dict[str, np.ndarray], b: dict[str, np.ndarray], tolerance: float = 1e-10) -> bool:
    return all(np.abs(a[name] - b[name]).max() <= tolerance for name in a)


def equal(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return all(np.array_equal(a[name], b[name]) for name in a)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / FILE).read_text().splitlines()][1:]


def whole_run(
    options: dict[str, Any], folder: Any = None, own_seed: bool = False, dropout: float = 0.0
) -> dict[str, Any]:
    """A whole run on this rank. `own_seed`: every rank begins with other weights."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    model, optimizer, data = parts(rank if own_seed else 0, dropout)
    run = rgp.privatize(model, optimizer, data, folder=folder, **{**OPTIONS, **options})
    with run:
        ran = train(run)
        return state_of(run, ran=ran, asked=data.asked, traffic=run.traffic)


def kept(work: Any, *args: Any, **options: Any) -> dict[str, Any]:
    """What one process finds; asked again, the same answer."""
    key = repr((work.__name__, args, sorted(options.items())))
    if key not in _kept:
        _kept[key] = launch(work, 1, *args, options)[0]
    return _kept[key]


_kept: dict[str, Any] = {}


def alone_with(**options: Any) -> dict[str, Any]:
    return kept(whole_run, **options)


def tower_alone(kind: str, **options: Any) -> dict[str, Any]:
    return kept(tower_run, False, kind, **options)


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
    options = {"batch_size": 1, "steps": 12, "microbatch_size": 1}
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


# ---------------------------------------------------------------------- checkpoints


def first_part(folder: Path, until: int, extra: int, options: dict[str, Any]) -> dict[str, Any]:
    """Save after `until` steps, take `extra` more, and stop as if the machine had crashed."""
    model, optimizer, data = parts()
    run = rgp.privatize(model, optimizer, data, folder=folder, **{**OPTIONS, "noise_multiplier": 1.0, **options})
    train(run, until=until)
    run.save(folder)
    if extra:
        train(run, until=until + extra)
    return state_of(run)


def second_part(folder: Path) -> dict[str, Any]:
    model, optimizer, data = parts(5)
    run = rgp.resume(folder, model, optimizer, data)
    resumed = run.step_index
    train(run)
    return state_of(run, resumed=resumed)


@pytest.mark.parametrize(("before", "after", "charged"), [(2, 2, 6), (2, 1, 8), (1, 2, 8)])
def test_resume_with_any_number_of_ranks(tmp_path, before, after, charged):
    """The same number repeats the two steps that were in flight; another one draws and charges them anew."""
    folder = tmp_path / "run"
    uninterrupted = launch(whole_run, before, {"noise_multiplier": 1.0})
    launch(first_part, before, folder, 3, 2, {})
    found = launch(second_part, after, folder)
    assert all(rank["resumed"] == 3 and rank["step"] == 6 for rank in found)
    assert all(equal(rank["weights"], found[0]["weights"]) for rank in found)
    recorded = lines(folder)
    assert len(recorded) == charged
    assert equal(uninterrupted[0]["weights"], found[0]["weights"]) == (before == after)
    attempts = {(line["step"], line["attempt"]) for line in recorded}
    assert len(attempts) == charged  # no noise twice
    if before != after:
        assert {(3, 0), (3, 1), (4, 0), (4, 1)} <= attempts


def test_a_repeated_sum_that_differs_is_discarded_on_all_ranks(tmp_path):
    folder = tmp_path / "run"
    launch(first_part, 2, folder, 3, 1, {})
    path = folder / FILE
    ledger = Ledger.open(folder)
    forged = [ledger.header, *({**r, "digest": "0" * 64} if r["step"] == 3 else r for r in ledger.records)]
    copy = Ledger({k: v for k, v in forged[0].items() if k not in ("hash", "previous", "ledger")})
    for record in forged[1:]:
        copy.append(**{k: v for k, v in record.items() if k not in ("hash", "previous")})
    path.write_bytes(copy.text())
    found = launch(second_part, 2, folder)
    assert all(rank["step"] == 6 and equal(rank["weights"], found[0]["weights"]) for rank in found)
    assert [(r["step"], r["attempt"]) for r in lines(folder)] == [
        (0, 0),
        (1, 0),
        (2, 0),
        (3, 0),
        (3, 1),
        (4, 0),
        (5, 0),
    ]


def second_part_elsewhere(folder: Path, empty: Path) -> dict[str, Any]:
    """Ranks but the first see an empty folder: another machine's disk."""
    return second_part(folder if dist.get_rank() == 0 else empty)


def test_only_the_first_rank_needs_the_folder(tmp_path):
    launch(first_part, 2, tmp_path / "run", 3, 0, {})
    (tmp_path / "empty").mkdir()
    found = launch(second_part_elsewhere, 2, tmp_path / "run", tmp_path / "empty")
    assert equal(found[0]["weights"], found[1]["weights"]) and found[1]["resumed"] == 3
    assert list((tmp_path / "empty").iterdir()) == []


# ---------------------------------------------------------------------- faults


def dies(folder: Path, how: str) -> str:
    """The second rank comes to grief in its third step; what the others say."""
    model, optimizer, data = parts()
    run = rgp.privatize(model, optimizer, data, folder=folder, **{**OPTIONS, "noise_multiplier": 1.0})
    try:
        with run:
            for x, y in run:
                loss = nn.functional.cross_entropy(model(x), y)
                if run.ranks.rank == 1 and run.step_index == 2:
                    if how == "killed":
                        os.kill(os.getpid(), signal.SIGKILL)
                    if how == "stuck":
                        time.sleep(60)
                    if how == "raises":
                        raise ZeroDivisionError("the second rank's own trouble")
                if run.step(loss) and how == "differs" and run.ranks.rank == 1 and run.step_index == 2:
                    with torch.no_grad():
                        model.head.bias[0].mul_(1 + 1e-15)  # one bit
    except (RankError, ZeroDivisionError) as error:
        return f"{type(error).__name__} at step {run.step_index}: {error}"
    return "nothing"


@pytest.mark.parametrize("how", ["killed", "stuck", "raises", "differs"])
def test_a_rank_in_trouble_stops_all(tmp_path, how):
    began = time.monotonic()
    ranks = Ranks(dies, 3, (tmp_path / "run", how), 3.0 if how == "stuck" else 20.0)
    first, second, third = ranks.results(patience=0.1 if how == "stuck" else 30.0, first=30.0)
    assert time.monotonic() - began < 40
    for said in (first, third) if how != "stuck" else (first,):
        assert said.startswith("RankError at step 2")
        if how in ("killed", "stuck"):
            assert "lost the others while" in said and "rgp train --resume" in said
        elif how == "raises":
            assert "rank 1 of 3 left the run at step 2 (ZeroDivisionError: the second rank's own trouble)" in said
        else:
            assert "the weights of rank 1 are not those of rank 0 at step 2" in said
    if how == "raises":
        assert second.startswith("ZeroDivisionError at step 2")
    assert len(lines(tmp_path / "run")) == 2


def raises_once() -> dict[str, Any]:
    """One rank's dataset fails in the third step; its loop is started again, and the others wait."""
    model, optimizer, data = parts()
    run = rgp.privatize(model, optimizer, data, **OPTIONS)
    if run.ranks.rank == 1:
        kind, broken = type(data), []

        def get(self, i):
            if run.step_index == 2 and not broken:
                broken.append(i)
                raise OSError("not now")
            return Data.__getitem__(self, i)

        data.__class__ = type("Broken", (kind,), {"__getitem__": get})
    try:
        train(run)
    except OSError:
        train(run)
    return state_of(run)


def test_a_rank_may_repeat_its_share():
    alone = alone_with()
    for rank in launch(raises_once, 2):
        assert close(alone["weights"], rank["weights"])


def stop_in_turn(steps: int) -> dict[str, Any]:
    """The last rank alone wants to stop, in the middle of a logical batch; then all go on."""
    model, optimizer, data = parts()
    run = rgp.privatize(model, optimizer, data, **{**OPTIONS, "microbatch_size": 1})
    for x, y in run:
        run.step(nn.functional.cross_entropy(model(x), y))
        if run.step_index == steps and run.ranks.rank == run.ranks.size - 1:
            run.stop()
    stopped = run.step_index
    train(run)
    return state_of(run, stopped=stopped)


def test_stop_ends_the_loop_on_all_ranks_at_one_step():
    alone = alone_with()
    for size in (1, 3):
        found = launch(stop_in_turn, size, 3)
        assert {rank["stopped"] for rank in found} == {3}
        assert all(close(alone["weights"], rank["weights"]) for rank in found)


# ---------------------------------------------------------------------- what must agree, and what is refused


REFUSALS = {
    "noise": "ValueError: sigmas is (0.5, ",
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


# ---------------------------------------------------------------------- the command


def torchrun(*args: str, ranks: int = 2) -> subprocess.Popen:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "-m", "rgp", "train"]
    return subprocess.Popen([*command, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


COMMAND = ("--preset", "digits-rgp", "--set", "training.epochs=null", "--set", "budget.noise_multiplier=1")


def test_torchrun_trains(tmp_path):
    pytest.importorskip("sklearn")
    out = tmp_path / "run"
    process = torchrun(*COMMAND, "--set", "training.steps=4", "--out", str(out), "--json")
    try:
        stdout, stderr = process.communicate(timeout=300)
    finally:
        process.kill()  # if it hangs
    assert process.returncode == 0, stderr
    summary = json.loads(stdout)
    assert summary["ranks"] == 2 and summary["finished"] and summary["steps"] == 4 == summary["releases"]
    assert 0 < 5 * summary["bytes_per_step"] < summary["plain_bytes_per_step"]
    assert stderr.count("step 4/4") == 1
    assert (out / "model" / "model.safetensors").exists() and (out / "report.html").exists()
    assert {line["processes"] for line in lines(out)} == {2}
    assert not (out / "secret.json").exists()


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
            "proved": not run._step.vetting.model_open,
        }


SHARDED = {"overrides": {"wide*": "exact"}, "rank": 2}


@pytest.mark.parametrize(
    ("size", "kind", "options"),
    [
        (2, "sgd", {"method": rgp.RGP(**SHARDED)}),
        (3, "adam", {"method": rgp.RGP(**SHARDED), "noise_multiplier": 0.5, "batch_size": 2, "microbatch_size": 1}),
        (2, "sgd", {"method": rgp.DPSGD(), "clip": 0.2}),
    ],
    ids=["rgp", "noise-and-fillers", "dpsgd"],
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


# ---------------------------------------------------------------------- PrivateTrainer


def own_collectives() -> dict[str, Any]:
    """A loop with a collective of its own in every pass, on batches so small that most shares are empty."""
    model, optimizer, data = parts()
    run = rgp.privatize(model, optimizer, data, **{**OPTIONS, "batch_size": 2, "microbatch_size": 1, "steps": 12})
    run.same_passes = True
    passes = torch.zeros(1)
    for x, y in run:
        run.step(nn.functional.cross_entropy(model(x), y))
        seen = torch.ones(1)
        dist.all_reduce(seen)
        passes += seen
    return state_of(run, passes=passes.item())


def test_a_loop_may_use_collectives_of_its_own():
    alone = alone_with(batch_size=2, microbatch_size=1, steps=12)
    found = launch(own_collectives, 3)
    assert all(close(alone["weights"], rank["weights"]) for rank in found)
    assert len({rank["passes"] for rank in found}) == 1 and found[0]["passes"] % 3 == 0


def trainer_run(folder: Path) -> dict[str, Any]:
    """PrivateTrainer as torchrun or accelerate launch would start it: evaluation after every step, a checkpoint."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    if size > 1:
        rank = str(dist.get_rank())
        os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(size), "ACCELERATE_USE_CPU": "true"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    from rgp.integrations.transformers import PrivateTrainer
    from test_integrations import arguments, collate, make_bert, make_rows, privacy

    more = {"ddp_backend": "gloo"} if size > 1 else {}
    options = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 2,
        "max_steps": 4,
        **more,
    }
    trainer = PrivateTrainer(
        make_bert(torch.float64),
        arguments(folder, per_device_train_batch_size=2, **options),
        train_dataset=make_rows(),
        eval_dataset=make_rows(7, seed=1),
        data_collator=collate,
        privacy=privacy(noise_multiplier=0.7, batch_size=2, noise_seed=5),
    )
    assert trainer.args.world_size == size
    trainer.train()
    weights = {name: p.detach().numpy().copy() for name, p in trainer.model.state_dict().items()}
    losses = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
    return {"weights": weights, "epsilon": trainer.epsilon(), "losses": losses}


@pytest.mark.slow  # for what three processes import
def test_private_trainer(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    (alone,) = launch(trainer_run, 1, tmp_path / "one")
    found = launch(trainer_run, 2, tmp_path / "two")
    for rank in found:
        assert close(alone["weights"], rank["weights"], 1e-8)
        assert rank["epsilon"] == alone["epsilon"] and len(rank["losses"]) == 4
    assert len(lines(tmp_path / "two" / "_privacy")) == 4
    assert (tmp_path / "two" / "checkpoint-4" / "model.safetensors").exists()
