"""`rgp train` under torchrun, PrivateTrainer, and loops with collectives of their own, on several ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import rgp
from ranks import (
    OPTIONS,
    alone_with,
    close,
    launch,
    lines,
    parts,
    state_of,
)

pytestmark = pytest.mark.flaky(reruns=1, only_rerun=["RankDied"])  # for nothing else: see ranks.RankDied


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
    from tiny_trainer import arguments, collate, make_bert, make_rows, privacy

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
