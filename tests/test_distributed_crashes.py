"""Distributed runs that are stopped, crash or lose a rank, and go on from a checkpoint."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import rgp
from ranks import (
    OPTIONS,
    Data,
    Ranks,
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
from rgp.errors import RankError
from rgp.ledger import FILE, Ledger

pytestmark = pytest.mark.flaky(reruns=1, only_rerun=["RankDied"])  # for nothing else: see ranks.RankDied


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
