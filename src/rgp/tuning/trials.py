"""The trials: secrets, until the best of them is released.

OUT/trials/             for the owner alone (mode 0700), removed when the search ends
    base.yaml           the settings that all trials share
    secret.json         32 random bytes, from which the number of trials, their settings and the noise of their scores follow
    scores.json         of the trials that are done
    trial-00000/        a run of `rgp train`; all but the best so far are removed as soon as they are beaten

What was drawn does not change when a search is interrupted and resumed: it is a function of the secret. A trial that was
interrupted goes on by the run's own checkpoint. If the record of its releases is then not exactly the one that was planned (a
crash can charge a step twice), the trial is begun again: nothing of it was released, so nothing of it was spent.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rgp.accounting import Event
from rgp.composition import merge
from rgp.errors import LedgerError
from rgp.files import NEW, PATIENCE, lock
from rgp.ledger import Ledger
from rgp.streams import SECRET_BYTES, Streams
from rgp.tuning import space
from rgp.tuning.law import Law
from rgp.tuning.scores import Score, noisy_count


class Drawn:
    """What a search draws from its secret: the number of trials, their settings, the noise on their scores."""

    def __init__(self, streams: Streams, law: Law, values: space.Space) -> None:
        self._streams, self._space = streams, values
        self.count = law.draw(streams.generator("sampling", 0))

    def settings(self, trial: int) -> dict[str, Any]:
        return space.draw(self._space, self._streams.generator("sampling", 1 + trial))

    def score(self, trial: int, count: float, score: Score) -> float:
        return noisy_count(count, score, self._streams.generator("noise", trial))

    def seed(self, trial: int) -> int | None:
        """Each trial's own, where a seed was given for the search; or else None: from the operating system."""
        if not self._streams.known:
            return None
        digest = hashlib.blake2b(trial.to_bytes(8, "big"), key=self._streams.secret, digest_size=7).digest()
        return int.from_bytes(digest, "big")


def best_of(scores: dict[int, float]) -> int | None:
    """The trial with the highest score; of equals the first, which is as good as drawing lots: they are exchangeable."""
    return max(sorted(scores), key=scores.__getitem__, default=None)


class Trials:
    """The secret folder of a search."""

    def __init__(self, out: Path) -> None:
        self.path = out / "trials"
        self.base = self.path / "base.yaml"
        self._secret, self._scores = self.path / "secret.json", self.path / "scores.json"

    def make(self) -> None:
        self.path.mkdir(mode=0o700)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One process at a time works on a search."""
        handle = os.open(self.path, os.O_RDONLY)
        try:
            if not lock(handle, patience=PATIENCE):
                raise ValueError(f"another process continues the search in {self.path.parent}; wait for it, or end it")
            yield
        finally:
            os.close(handle)

    def begin(self, seed: int | None) -> None:
        """Draw the secret, unless it is there."""
        if self._secret.exists():
            return
        before = {self.base.name, self._secret.name + NEW}  # the latter if it was killed while the secret was written
        if any(path.name not in before for path in self.path.iterdir()):
            raise ValueError(
                f"{self._secret} is missing, and {self.path} holds trials: which ones were drawn is not known any more. "
                "Remove the search's folder and begin again."
            )
        streams = Streams.from_system() if seed is None else Streams.from_seed(seed)
        self._write(self._secret, {"secret": streams.secret.hex(), "known": streams.known})

    def streams(self) -> Streams:
        found = json.loads(self._secret.read_text(encoding="utf-8"))
        secret = bytes.fromhex(found["secret"])
        assert len(secret) == SECRET_BYTES
        return Streams(secret, known=found["known"])

    def folder(self, trial: int) -> Path:
        return self.path / f"trial-{trial:05}"

    def scores(self) -> dict[int, float]:
        if not self._scores.exists():
            return {}
        return {int(k): v for k, v in json.loads(self._scores.read_text(encoding="utf-8")).items()}

    def add(self, trial: int, score: float) -> dict[int, float]:
        scores = {**self.scores(), trial: score}
        self._write(self._scores, {str(k): v for k, v in scores.items()})
        return scores

    def drop_beaten(self, scores: dict[int, float]) -> None:
        for trial in scores:
            if trial != best_of(scores):
                shutil.rmtree(self.folder(trial), ignore_errors=True)

    def remove(self) -> None:
        if self.path.exists():
            self._secret.unlink(missing_ok=True)  # first: what follows from it is then gone, even if the rest is not
            shutil.rmtree(self.path)

    def _write(self, path: Path, content: Any) -> None:
        from rgp.train.folder import RunFolder

        RunFolder(self.path).write_text(path, json.dumps(content) + "\n", mode=0o600)


def train_trial(run: Callable[[bool], Any], folder: Path, planned: tuple[Event, ...]) -> None:
    """`run(resume)` until the folder holds a run with exactly the releases that were planned."""
    from rgp.train.errors import RunFolderError

    begun = (folder / "config.yaml").exists()
    if folder.exists() and not begun:
        shutil.rmtree(folder)  # stopped before it began
    if begun:
        try:
            run(True)
            if released(folder) == merge(planned):
                return
        except RunFolderError:  # releases on record, and no checkpoint to go on from
            pass
        shutil.rmtree(folder)
    run(False)
    if (found := released(folder)) != merge(planned):
        raise LedgerError(
            f"a trial made other releases than were planned and paid for: {found} in place of {merge(planned)}. "
            "Nothing was released."
        )


def released(folder: Path) -> tuple[Event, ...]:
    return merge(Ledger.open(folder).events())
