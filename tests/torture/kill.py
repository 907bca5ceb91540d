"""Kill a training process with SIGKILL at random moments, resume it each time, and see what the ledger knows.

    python tests/torture/kill.py --kills 50
    python tests/torture/kill.py --kills 50 --bands 3

Plain runs resume as they were started. Shown for them: the final weights are those of a run that was never killed, to
the bit, and no release was charged twice. Mixed runs resume with other micro-batches now and then, and find half a line
at the end of their ledger as if the power had failed. Shown for both, after every kill: whatever the optimizer applied
is in the ledger, no noise was used on two sums, and epsilon is the accountant's for the ledger's lines.

The child writes a marker to a file of its own, and syncs it, after every optimizer step: what was applied is known from
there and not from the library.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import shutil
import sys
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path
from typing import TextIO

import dp_accounting
import torch
from dp_accounting.pld import PLDAccountant
from lives import life
from safetensors.torch import load_file
from torch import Tensor, nn

import rgp
from rgp import accounting
from rgp.checkpoint import resume
from rgp.ledger import Ledger

BANDS = int(os.environ.get("TORTURE_BANDS", "1"))
STEPS = int(os.environ.get("TORTURE_STEPS", "120"))
SAVE_EVERY, SIZE, BATCH, SIGMA = 3, 64, 16, 1.0
MICROBATCH, OTHER_MICROBATCH = 6, 5


# ---------------------------------------------------------------------- the process that is killed


def parts():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Dropout(0.2), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    x = torch.randn(SIZE, 8)
    return model, optimizer, [(x[i], i % 3) for i in range(SIZE)], scheduler


def begin(folder: Path | None):
    model, optimizer, data, scheduler = parts()
    return rgp.privatize(
        model,
        optimizer,
        data,
        scheduler=scheduler,
        method=rgp.RGP(rank=2, keep=1 if BANDS == 1 else 4),
        bands=BANDS,
        noise_multiplier=SIGMA,
        batch_size=BATCH,
        microbatch_size=MICROBATCH,
        steps=STEPS,
        seed=0,
        folder=folder,
    )


def train(run, *, save_in: Path | None = None, until: int = STEPS) -> None:
    for x, y in run:
        ended = run.step(nn.functional.cross_entropy(run.model(x), y))
        if ended and save_in is not None and run.step_index % SAVE_EVERY == 0:
            run.save(save_in)
        if run.step_index == until:
            break


def child(folder: Path, microbatch: int, out: TextIO) -> None:
    if (folder / "latest").exists():
        model, optimizer, data, scheduler = parts()
        warnings.simplefilter("ignore")
        run = resume(folder, model, optimizer, data, scheduler=scheduler, microbatch_size=microbatch)
    else:
        shutil.rmtree(folder, ignore_errors=True)  # killed before its first checkpoint, when nothing was released
        run = begin(folder)
        run.save(folder)
    markers = os.open(folder / "applied", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def applied(*_: object) -> None:
        record = next(r for r in run.ledger.of_step(run.step_index) if r["attempt"] == run.releases.attempt)
        os.write(markers, f"{record['step']} {record['attempt']} {record['digest']}\n".encode())
        os.fsync(markers)

    run.optimizer.register_step_post_hook(applied)
    print("ready", file=out, flush=True)
    train(run, save_in=folder)
    run.save(folder)
    run.close()
    print("finished", file=out, flush=True)


# ---------------------------------------------------------------------- the one who kills


def look(folder: Path) -> dict[str, int]:
    """The ledger against what the optimizer is known to have applied; raises where they do not fit."""
    ledger = Ledger.open(folder)
    path = folder / "applied"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []  # what follows the last newline was not synced
    releases = {tuple(line.split()) for line in lines}
    draws = {(step, attempt) for step, attempt, _ in releases}
    recorded = {(str(r["step"]), str(r["attempt"]), str(r["digest"])) for r in ledger.records}
    assert len(draws) == len(releases), "one noise was used on two sums"
    assert releases <= recorded, f"applied, but not in the ledger: {releases - recorded}"
    assert ledger.count >= len(releases)
    torn = sum(bool(r.get("torn")) for r in ledger.records) + (ledger.repaired is not None)
    return {"ledger": ledger.count, "released": len(releases), "applied": len(lines), "torn": torn}


def check_epsilon(folder: Path) -> float:
    """The run's epsilon against dp-accounting itself, told the number of lines; with bands, those of the busiest group.

    A torn line says no group, and counts for each.
    """
    ledger = Ledger.open(folder)
    found = accounting.epsilon(ledger.events(), delta=1e-5)
    turns = [0] * BANDS
    for record in ledger.records:
        for group in range(BANDS):
            turns[group] += record["step"] is None or record["step"] % BANDS == group
    bare = PLDAccountant()
    event = dp_accounting.PoissonSampledDpEvent(BANDS * BATCH / SIZE, dp_accounting.GaussianDpEvent(SIGMA))
    bare.compose(event, max(turns))
    expected = bare.get_epsilon(1e-5)
    assert abs(found / expected - 1) < 1e-3, (found, expected)
    return found


def weights_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / (folder / "latest").read_text().strip() / "model.safetensors")


def main(kills: int, seed: int, longest: float) -> dict[str, object]:
    rng = random.Random(seed)
    start = time.monotonic()
    total = {"kills": 0, "runs": 0, "identical": 0, "releases repeated for free": 0, "charged again": 0, "torn": 0}
    with tempfile.TemporaryDirectory() as root:
        assert life(partial(child, Path(root) / "uninterrupted", MICROBATCH), None)
        truth = weights_of(Path(root) / "uninterrupted")
        while total["kills"] < kills:
            mixed = total["runs"] % 2 == 1
            folder = Path(root) / f"run{total['runs']}"
            finished, sizes = False, set()
            while not finished:
                last = total["kills"] >= kills
                microbatch = rng.choice([MICROBATCH, OTHER_MICROBATCH]) if mixed else MICROBATCH
                sizes.add(microbatch)
                finished = life(partial(child, folder, microbatch), None if last else rng.uniform(0, longest))
                total["kills"] += not finished
                if not (folder / "ledger.jsonl").exists():
                    continue
                if mixed and not finished and rng.random() < 0.2 and (folder / "latest").exists():
                    with open(folder / "ledger.jsonl", "ab") as file:
                        file.write(b'{"C": 1.0, "att'[: rng.randint(1, 15)])
                seen = look(folder)
                print(f"kill {total['kills']:3d}  {'mixed' if mixed else 'plain'}  {seen}", file=sys.stderr, flush=True)
            epsilon = check_epsilon(folder)
            ended = weights_of(folder)
            same = all(torch.equal(v, ended[k]) for k, v in truth.items())
            if seen["ledger"] == STEPS:  # nothing was drawn again: other micro-batches may only have rounded otherwise
                assert same or sizes != {MICROBATCH}, "no new charge was needed, and the weights differ"
                for k, v in truth.items():
                    torch.testing.assert_close(
                        ended[k], v, rtol=1e-3, atol=1e-4, msg="no new charge, and other weights"
                    )
            assert mixed or seen["ledger"] == STEPS, "a plain run was charged twice"
            assert not (folder / "secret.json").exists(), "the secret outlived the run"
            assert not list(folder.glob("past-noise*")), "past noise outlived the run"
            total["runs"] += 1
            total["identical"] += same
            total["releases repeated for free"] += seen["applied"] - seen["released"]
            total["charged again"] += seen["ledger"] - STEPS
            total["torn"] += seen["torn"]
            print(f"run {total['runs']} ended: epsilon {epsilon:.4f}, {seen}, {same=}", file=sys.stderr, flush=True)
    return {**total, "seconds": round(time.monotonic() - start)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--longest", type=float, default=1.0, help="seconds of training before a kill, at most")
    parser.add_argument("--bands", type=int, default=BANDS, help="steps over which noise is correlated, up to 4")
    options = parser.parse_args()
    BANDS = options.bands
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    parts()  # imports what an optimizer needs
    print(json.dumps(main(options.kills, options.seed, options.longest)))
