"""The promise: one line of the ledger is one release, and no noise is used on two sums, whatever happens to a run.

A run is trained, saved, killed and resumed in a random order, with other data, other micro-batches, a lost secret, lost past
noise, a torn line, or the folder as it was before; every noisy sum that is let out is written down and compared at the end.
"""

from __future__ import annotations

import hashlib
import random
import warnings

import pytest
import torch

import rgp
from resuming import STEPS, Tied, again, data, same, start, train, weights
from rgp.ledger import FILE
from rgp.release import Releases

OPTIONS = {"net": Tied, "optimizer": "momentum"}


class Watch:
    """Everything that any life of a run lets out."""

    def __init__(self, monkeypatch) -> None:
        # (secret, step, attempt) -> digest of the noisy sum, noise, what it takes back
        self.sums, self.noise, self.takes = {}, {}, {}
        add, publish = Releases._add_noise, Releases._publish

        def adding(releases, step, clipped):
            self.before = clipped.total.clone()
            noisy = add(releases, step, clipped)
            self.added = (noisy - self.before) / clipped.sensitivity
            return noisy

        def publishing(releases, step, clipped, bound):
            past = [w.clone() for w in releases.chain.secrets()]
            digest, accepted = publish(releases, step, clipped, bound)
            if accepted:
                self.note(releases, step, clipped.total, past)
            return digest, accepted

        monkeypatch.setattr(Releases, "_add_noise", adding)
        monkeypatch.setattr(Releases, "_publish", publishing)

    def note(self, releases, step, noisy, past) -> None:
        key = (releases.secret, step, releases.attempt)
        digest = hashlib.sha256(noisy.numpy().data).hexdigest()
        assert self.sums.setdefault(key, digest) == digest, "one noise, two sums"
        (line,) = [r for r in releases.ledger.of_step(step) if r["attempt"] == releases.attempt]
        assert line["digest"] == digest, "the record is of another release"
        self.noise[key] = self.added
        if releases.chain.bands > 1:
            self.takes[key] = past if releases.chain.length > 1 else []  # 1: a new chain, which takes nothing back

    def check(self, coefficients) -> None:
        """What is taken back is noise that was let out, and nothing is taken back by two releases at the same distance."""
        if len(coefficients) == 1:
            return
        used = {}
        for key, past in self.takes.items():
            for lag, w in enumerate(past, 1):
                (of,) = [k for k, v in self.noise.items() if torch.allclose(v, w, rtol=1e-3, atol=1e-4)]
                assert of[1] == key[1] - lag
                assert used.setdefault((of, lag), key) == key, "two releases take the same noise back"


def live(folder, rng: random.Random, watch: Watch, **options) -> None:
    """A run with up to eight lives, to its end."""

    def named(run):
        run.releases.secret = run.secret_state()["secret"]
        return run

    run = named(start(folder, steps=STEPS, **OPTIONS, **options))
    run.save(folder)
    changed = False
    for _ in range(rng.randrange(2, 8)):
        before = None
        for _ in range(rng.randrange(1, 4)):
            if rng.random() < 0.5:
                run.save(folder)
            if run.step_index < STEPS - 1:
                train(run, rng.randrange(run.step_index, STEPS), part=rng.choice([None, 1]))
            before = weights(run), run.step_index
        run.ledger.close()
        happens = rng.choice(["nothing", "nothing", "nothing", "data", "microbatch", "secret", "past noise", "torn"])
        if happens == "secret":
            (folder / "secret.json").unlink()
        if happens == "past noise":
            for file in folder.glob("past-noise*"):
                file.unlink()
        if happens == "torn":
            with open(folder / FILE, "ab") as file:
                file.write(b'{"C": 1.0, "att')
        lines = (folder / FILE).read_bytes()
        change = {
            "data": {"dataset": data(seed=rng.randrange(9))},
            "microbatch": {"microbatch_size": rng.choice([4, 5])},
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run = named(again(folder, **OPTIONS, **change.get(happens, {})))
        assert (folder / FILE).read_bytes().startswith(lines.rpartition(b"\n")[0])
        if happens == "nothing" and not changed and run.step_index < before[1]:
            count = run.ledger.count
            if rng.random() < 0.5:
                run.save(folder)  # before anything was repeated
            train(run, before[1])
            assert same(weights(run), before[0]) and run.ledger.count == count, "charged again for nothing"
        changed = changed or happens != "nothing"
    train(run) if not run.finished else None
    watch.check(run.mechanism.coefficients)
    lines = [r for r in run.ledger.records if not r.get("torn")]
    assert len({(r["step"], r["attempt"]) for r in lines}) == len(lines)
    assert len(watch.sums) == len(lines), "a release that is not on record, or the other way round"
    run.close()


@pytest.mark.parametrize("bands", [1, 3])
def test_whatever_happens_one_line_is_one_release(tmp_path, monkeypatch, bands):
    for seed in range(12):
        with monkeypatch.context() as patch:
            live(tmp_path / str(seed), random.Random(seed), Watch(patch), method=rgp.DPSGD(), bands=bands)
