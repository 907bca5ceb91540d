"""Kill `rgp tune` with SIGKILL at random moments, resume it each time, and see that it stays one search.

    python tests/torture/kill_tune.py --kills 40
    python tests/torture/kill_tune.py --kills 150 --sweep
    python tests/torture/kill_tune.py --kills 40 --bands 3      with correlated noise

Half of the kills come after a random time, half at a random one of the search's file operations, which are where a crash
can hurt; --sweep kills at every single one of them while a search begins, and while it releases. Every other search has a
seed, and must end with what an uninterrupted one from the same seed released: settings, score, epsilon and weights, to the
bit. The others draw their secret from the operating system, as people's searches do.

Shown after every kill: the trials are for the owner alone; nothing but the plan is published before the end; the secret, and
with it the number of trials and their settings, is the one that was first drawn; a score that was written stays as it is; a
trial that has released anything is not begun again, and no noise was used on two sums. Shown at the end: as many trials were
scored as the secret says, each of them once; what is released is the best of them, with exactly the planned number of
releases on record, with the epsilon that dp-accounting computes, and with nothing of the others.

The child writes a marker to a file of its own, and syncs it, for every score: what was scored is known from there.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import signal
import stat
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch
from dp_accounting import NeighboringRelation, dp_event
from dp_accounting.rdp import RdpAccountant
from lives import life
from safetensors.torch import load_file
from typer.testing import CliRunner

from rgp import cli
from rgp.ledger import Ledger
from rgp.streams import Streams
from rgp.train import setup
from rgp.tuning import running
from rgp.tuning.law import Law
from rgp.tuning.trials import Drawn, Trials

STEPS = int(os.environ.get("TORTURE_STEPS", "12"))
MEAN, BATCH, ROWS, TRIALS = 3.0, 40, 1438, 4
BANDS = 1
RATES = {"optimizer.lr": [0.1, 0.2, 0.4, 0.8]}
SETTINGS = (
    *("model.name=mlp", "model.width=16", f"training.steps={STEPS}", f"training.batch_size={BATCH}"),
    *("training.microbatch_size=32", "run.eval_every=4", "run.threads=1", "run.checkpoint_seconds=0.05"),
    "budget.accountant=rdp",
)
RELEASED = {
    *("tune.json", "report.html", "best.yaml", "ledger.jsonl", "model/model.safetensors", "model/model.json"),
    *("model/privacy_card.json", "model/privacy_card.md"),
}
CHANGES_FILES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod", "shutil.copyfile")


# ---------------------------------------------------------------------- the process that is killed


def begin(out: Path, seed: int | None) -> list[str]:
    (out.parent / "space.yaml").write_text(json.dumps(RATES))
    words = ["tune", "--preset", "digits-rgp", "--space", out.parent / "space.yaml", "--epsilon", 6, "--trials", MEAN]
    sets = [*SETTINGS, f"training.bands={BANDS}", *([] if seed is None else [f"run.seed={seed}"])]
    return [*map(str, words), *(word for change in sets for word in ("--set", change)), "--out", str(out)]


def child(out: Path, words: Sequence[str], operation: int | None, pipe: TextIO) -> None:
    """operation: the number of the file operation before which the process kills itself."""
    markers = os.open(out.with_suffix(".scored"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    add = Trials.add

    def marked(self: Trials, trial: int, score: float) -> dict[int, float]:
        os.write(markers, f"{trial} {score!r}\n".encode())
        os.fsync(markers)
        return add(self, trial, score)

    Trials.add = marked  # type: ignore[method-assign]
    warnings.simplefilter("ignore")
    left = operation

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        written = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if (written or event in CHANGES_FILES) and left is not None:
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    print("ready", file=pipe, flush=True)
    if operation is not None:
        sys.addaudithook(count)
    result = CliRunner().invoke(cli.app, list(words))
    if result.exit_code:
        raise RuntimeError(result.output) from result.exception
    left = None
    print("finished", file=pipe, flush=True)


# ---------------------------------------------------------------------- the one who kills


def files(path: Path) -> set[str]:
    return {str(p.relative_to(path)) for p in path.rglob("*") if p.is_file()}


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


class Search:
    """What is known of one search from the outside, life by life."""

    def __init__(self, out: Path, seed: int | None) -> None:
        self.out, self.seed, self.trials = out, seed, Trials(out)
        self.secret: str | None = None
        self.scores: dict[int, float] = {}
        self.runs: dict[int, str] = {}  # trial -> the run that has made releases, as its ledger calls it
        self.noise: dict[tuple[int, int, int], str] = {}  # trial, step, attempt -> the sum that it was used on
        self.begun_again = 0  # from scratch, before there was a search to resume
        self._swept = {"begins": 0, "ends": 0}

    def words(self) -> list[str]:
        if (self.out / "tune.json").exists():
            return ["tune", "--resume", "--out", str(self.out)]
        self.begun_again += self.out.exists()
        return begin(self.out, self.seed)

    @property
    def drawn(self) -> Drawn:
        assert self.secret is not None
        return Drawn(Streams(bytes.fromhex(self.secret), known=True), Law.named("geometric", MEAN), RATES)

    def sweep(self) -> int | None:
        """The next file operation of the beginning, or of the end; None in between."""
        finished = (self.out / "tune.json").exists() and json.loads((self.out / "tune.json").read_text())["finished"]
        done = finished or (self.secret is not None and len(self.scores) == self.drawn.count)
        if self.secret is not None and not done:
            return None
        window = "ends" if done else "begins"
        self._swept[window] += 1
        return self._swept[window] - 1

    def look(self) -> None:
        """After a kill. Raises where something is not as it must be."""
        out, path = self.out, self.trials.path
        if not out.exists():
            return
        assert mode(out) == 0o700
        told = json.loads((out / "tune.json").read_text()) if (out / "tune.json").exists() else None
        assert told is None or told["finished"] or told["best"] is None
        outside = {name for name in files(out) if not name.startswith("trials/")}
        allowed = RELEASED | {f"{name}.new" for name in RELEASED}
        assert {name.replace("model.draft/", "model/") for name in outside} <= allowed, outside
        if not path.exists():
            return
        assert mode(path) == 0o700, "the trials are open to others"
        for name in ("secret.json", "scores.json", "secret.json.new", "scores.json.new"):
            assert not (path / name).exists() or mode(path / name) == 0o600, name
        if told is not None and told["finished"]:
            return  # it was tidying up
        if (path / "secret.json").exists():
            found = json.loads((path / "secret.json").read_text())["secret"]
            assert self.secret in (None, found), "the number of trials was drawn again"
            self.secret = found
        else:
            assert self.secret is None, "the secret is lost"
        scores = self.trials.scores()
        assert self.scores.items() <= scores.items(), "a score has changed"
        self.scores = scores
        for folder in path.glob("trial-*"):
            number = int(folder.name[-5:])
            assert number < self.drawn.count
            if not (folder / "ledger.jsonl").exists():
                continue
            ledger = Ledger.open(folder)
            if ledger.count:
                name = json.dumps(ledger.header, sort_keys=True)
                assert self.runs.setdefault(number, name) == name, "a trial was begun again after it had released"
            assert ledger.count <= STEPS, "a step was charged twice"
            for record in ledger.records:
                assert not record.get("torn")
                key = (number, record["step"], record["attempt"])
                assert self.noise.setdefault(key, record["digest"]) == record["digest"], "one noise, two sums"

    def end(self) -> dict[str, Any]:
        """After the last life. Returns what was released."""
        out = self.out
        assert files(out) == RELEASED and not self.trials.path.exists()
        lines = [line.split() for line in out.with_suffix(".scored").read_text().split("\n")[:-1]]
        scored = {int(trial): float(score) for trial, score in lines}
        assert {(int(trial), float(score)) for trial, score in lines} == set(scored.items()), "a score was drawn again"
        assert self.scores.items() <= scored.items()
        result = json.loads((out / "tune.json").read_text())
        assert result["finished"] and result["trials"] == {"law": "geometric", "mean": MEAN, "chance_of_none": 0.0}
        if self.secret is not None:  # it was seen
            assert set(scored) == set(range(self.drawn.count)), "not as many trials as were drawn"
            best = max(sorted(scored), key=scored.__getitem__)
            assert result["best"]["settings"] == self.drawn.settings(best)
            assert result["best"]["score"] == min(1.0, max(0.0, scored[best] / result["score"]["rows"]))
        ledger = Ledger.open(out)
        assert ledger.count == STEPS, "a step was charged twice"
        (event,) = ledger.events()
        assert abs(result["epsilon"] / independent(event.noise_multiplier, result["score"]["noise"]) - 1) < 1e-9
        published = b"\n".join(path.read_bytes() for path in out.rglob("*") if path.is_file())
        lost = sorted(scored.values())[:-1]
        for score in lost:
            share = score / result["score"]["rows"]
            assert repr(score).encode() not in published and repr(share).encode() not in published, "a losing score"
        assert b"trial-0" not in published
        assert self.secret is None or self.secret.encode() not in published, "the secret"
        return {
            "result": result,
            "weights": load_file(out / "model" / "model.safetensors"),
            "ledger": [(r["step"], r["attempt"], r["digest"]) for r in ledger.records],
        }


def independent(sigma: float, noise: float) -> float:
    """The search's epsilon by dp-accounting itself."""
    step = dp_event.PoissonSampledDpEvent(BANDS * BATCH / ROWS, dp_event.GaussianDpEvent(sigma))
    turns = dp_event.SelfComposedDpEvent(step, -(-STEPS // BANDS))
    trial = dp_event.ComposedDpEvent([turns, dp_event.GaussianDpEvent(noise)])
    accountant = RdpAccountant(None, NeighboringRelation.ADD_OR_REMOVE_ONE)
    accountant.compose(dp_event.RepeatAndSelectDpEvent(trial, MEAN, 1))
    return accountant.get_epsilon(1e-5)


def seed_with(count: int, start: int) -> int:
    law, seed = Law.named("geometric", MEAN), start
    while Drawn(Streams.from_seed(seed), law, RATES).count != count:
        seed += 1
    return seed


def main(kills: int, seed: int, longest: float, sweep: bool) -> dict[str, object]:
    rng = random.Random(seed)
    start = time.monotonic()
    total = {"kills": 0, "searches": 0, "seeded, and identical": 0, "trials": 0, "begun again before a trial": 0}
    with tempfile.TemporaryDirectory() as root:
        known = seed_with(TRIALS, 1000 * seed)
        whole = Search(Path(root) / "whole" / "out", known)
        whole.out.parent.mkdir()
        assert life(partial(child, whole.out, whole.words(), None), None)
        truth = whole.end()
        while total["kills"] < kills:
            seeded = total["searches"] % 2 == 0
            search = Search(Path(root) / str(total["searches"]) / "out", known if seeded else None)
            search.out.parent.mkdir()
            finished = False
            while not finished:
                delay = operation = None
                if total["kills"] < kills:
                    operation = search.sweep() if sweep else None
                    if operation is None and rng.random() < 0.5:
                        delay = rng.uniform(0, longest)
                    elif operation is None:
                        operation = int(10 ** rng.uniform(0, 2.5))
                finished = life(partial(child, search.out, search.words(), operation), delay)
                total["kills"] += not finished
                search.look()
                moment = f"after {delay:.2f} s" if delay is not None else f"at file operation {operation}"
                said = "finished" if finished else f"kill {total['kills']:3d}, {moment}"
                print(f"{said}: {len(search.scores)} trials scored", file=sys.stderr, flush=True)
            ended = search.end()
            total["searches"] += 1
            total["trials"] += len({line.split()[0] for line in search.out.with_suffix(".scored").open()})
            total["begun again before a trial"] += search.begun_again
            if seeded:
                assert ended["result"] == truth["result"] and ended["ledger"] == truth["ledger"]
                assert all(torch.equal(v, ended["weights"][k]) for k, v in truth["weights"].items())
                total["seeded, and identical"] += 1
    return {**total, "seconds": round(time.monotonic() - start)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--longest", type=float, default=2.0, help="seconds before a kill, at most")
    parser.add_argument("--sweep", action="store_true", help="at every file operation of the beginning and the end")
    parser.add_argument("--bands", type=int, default=1, help="steps over which noise is correlated")
    options = parser.parse_args()
    BANDS = options.bands
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    setup.make(running.configs.load(preset="digits-rgp", changes=["run.threads=1"]))  # imports what a search needs
    print(json.dumps(main(options.kills, options.seed, options.longest, options.sweep)))
