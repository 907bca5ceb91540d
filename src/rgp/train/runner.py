"""One run: config -> a trained model in a run's folder. It can be interrupted at any moment and resumed.

settings checked -> folder free -> data, model -> rgp.privatize -> steps, evaluations, checkpoints -> model/, card, report
"""

from __future__ import annotations

import signal
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import rgp
from rgp import checkpoint
from rgp.agreement import first_then_others
from rgp.bench.measure import MemoryMeter
from rgp.cards import EpsilonSoFar
from rgp.cards.content import unit_of
from rgp.distributed import Ranks
from rgp.ledger import Ledger
from rgp.run import Run
from rgp.train import config, setup
from rgp.train.card import card_of
from rgp.train.config import Config, ConfigError
from rgp.train.errors import Interrupted, RunFolderError
from rgp.train.folder import DetachedRunFolder, RunFolder
from rgp.train.meters import Clock, Signals, TrainingStatistics
from rgp.train.progress import Board, Progress
from rgp.train.setup import Parts
from rgp.train.summary import plan_rows, summarize
from rgp.train.weights import publish
from rgp.workload import rate_words


def train(
    settings: Config,
    out: Path,
    *,
    progress: Progress,
    resume: bool = False,
    diagnostics: bool = False,
    tensorboard: bool = False,
    parts: Parts | None = None,
    ranks: Ranks | None = None,
) -> dict[str, Any]:
    """Train into a new folder, or resume the run that is in it. Returns the content of its summary.json.

    parts: made already, by setup.make with the same settings and other rows (rgp.attacks.shadows).
    With several ranks, only the first reads and writes the folder, evaluates and reports progress.
    """
    if tensorboard:
        Board.needed()
    ranks = Ranks() if ranks is None else ranks
    folder = RunFolder(out) if ranks.first else DetachedRunFolder(out)
    where = ranks.from_first(lambda: look(folder, resume))
    if where == "finished":
        progress.say(f"{out} is already finished; nothing was done")
        return folder.read_json(folder.summary) if ranks.first else {}
    began = time.monotonic()
    parts = first_then_others(ranks, lambda: setup.make(settings)) if parts is None else parts
    session = Session(settings, parts, folder, progress, began=began, diagnostics=diagnostics)
    run = session.resume() if where == "checkpoint" else session.begin(again=resume)
    with run:
        board = Board(out, run.step_index) if tensorboard and ranks.first else None
        try:
            session.train(run, board)
        finally:
            progress.stop()
            if board is not None:
                board.close()
        return session.finish(run)


def look(folder: RunFolder, resume: bool) -> str:
    """What there is to do: "finished" (nothing), "checkpoint" (resume from it), "begin"."""
    if not resume:
        folder.check_free()
        return "begin"
    folder.check_resumable()
    if folder.finished:
        return "finished"
    return "checkpoint" if folder.latest.exists() else "begin"


class Session:
    """The state of one process's work on a run."""

    def __init__(
        self,
        settings: Config,
        parts: Parts,
        folder: RunFolder,
        progress: Progress,
        *,
        began: float,
        diagnostics: bool = False,
    ) -> None:
        self.config, self.parts, self.folder, self.progress = settings, parts, folder, progress
        self.began, self.diagnostics = began, diagnostics
        self.batch = settings.training.microbatch_size or min(settings.training.batch_size, 32)
        self.eval_every = settings.run.eval_every or max(1, round(parts.steps / 20))
        self.accuracy: float | None = None
        self.scores: dict[str, float] = {}  # accuracy and others: perplexity, accuracy on further test sets
        self.peak: int | None = None
        self.before = Clock()  # what earlier processes spent on this run
        self.step_seconds = 0.0

    @property
    def wall_seconds(self) -> float:
        return self.before.wall + time.monotonic() - self.began

    # ------------------------------------------------------------------ beginning

    def begin(self, *, again: bool = False) -> Run:
        """A new run. again: one was begun in this folder before, and stopped before its first checkpoint."""
        settings, parts, folder = self.config, self.parts, self.folder
        if again and not isinstance(folder, DetachedRunFolder):
            remove_empty_ledger(folder)
        budget = None
        if settings.budget.epsilon is not None:
            budget = rgp.Budget(settings.budget.epsilon, settings.budget.delta, accountant=settings.budget.accountant)
        noise = (settings.budget.noise_multiplier if settings.private else 0.0) if budget is None else None
        parts.model.train()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="noise correlated over")  # said below, with everything else
            run = rgp.privatize(
                parts.model,
                parts.optimizer,
                parts.data.train,
                batch_size=settings.training.batch_size,
                method=parts.method,
                budget=budget,
                noise_multiplier=noise,
                delta=None if budget is not None else settings.budget.delta,
                steps=parts.steps,
                clip=setup.make_clip(settings.training),
                views=settings.training.views,
                augment=setup.make_augment(settings.training),
                ema=settings.training.ema,
                microbatch_size=self.batch,
                max_batch=settings.training.max_batch,
                bands=settings.training.bands,
                collate_fn=parts.data.collate_fn,
                scheduler=parts.scheduler,
                seed=settings.run.seed,
                secure_noise=settings.run.secure_noise,
                folder=folder.path,
                workers=settings.run.workers,
                pin_memory=parts.device.type == "cuda",
                lengths=getattr(parts.data.train, "lengths", None),
                units=parts.data.members,
                public_loss=parts.public_loss,
            )
        folder.write_text(folder.config, settings.to_yaml())
        folder.write_json(folder.plan, plan_rows(run))
        self.progress.say(self._first_words(run))
        return run

    def resume(self) -> Run:
        parts, folder = self.parts, self.folder
        parts.model.train()
        run = checkpoint.resume(
            folder.path,
            parts.model,
            parts.optimizer,
            parts.data.train,
            collate_fn=parts.data.collate_fn,
            scheduler=parts.scheduler,
            microbatch_size=self.batch,
            workers=self.config.run.workers,
            pin_memory=parts.device.type == "cuda",
            lengths=getattr(parts.data.train, "lengths", None),
            units=parts.data.members,
            augment=setup.make_augment(self.config.training),
            public_loss=parts.public_loss,
            method=parts.method,
            batch_size=self.config.training.batch_size,
        )
        folder.rewind(run.step_index)
        for row in folder.rows(folder.metrics) + folder.rows(folder.private):
            self.before = self.before.later(row)
            self.accuracy = row.get("accuracy", self.accuracy)
            self.scores |= {k: v for k, v in row.items() if k.startswith("accuracy") or k == "perplexity"}
        self.progress.say(f"resuming {folder.path} after step {run.step_index} of {run.mechanism.steps}")
        return run

    def _first_words(self, run: Run) -> str:
        plan, settings = run.plan, run.mechanism
        trained = sum(e.size for e in plan.trained)
        say_noise = settings.bands > 1 or self.config.training.bands == "auto"
        words = f"{self.parts.data.description}\n{self.config.model.name}: {trained:,} trained parameters"
        if not self.config.private:
            return f"{words}\nNOT PRIVATE: no noise"
        return (
            f"{words}, noise in {plan.noise_dimensions:,} dimensions\n"
            f"{self.config.method.name}: sampling rate {settings.rate(0):.4g}, noise multiplier "
            f"{run.noise_multiplier:g}, clip {settings.clip.first:g}, delta {settings.delta:g}\n"
            + (f"{settings.noise_words()}{rate_words(settings, self.parts.optimizer)}\n" if say_noise else "")
            + f"privacy unit: {unit_of(run, self.parts.data.row)}"
        )

    # ------------------------------------------------------------------ the loop

    def train(self, run: Run, board: Board | None = None) -> None:
        """Take all steps that are left. Raises Interrupted, once the run is saved, if it was asked to stop."""
        parts, progress, model = self.parts, self.progress, self.parts.model
        curve = EpsilonSoFar(run) if self.config.private and run.ranks.first else None
        meter = MemoryMeter("cuda" if parts.device.type == "cuda" else "cpu")
        run.save(self.folder.path)
        correlated = f", noise over {run.mechanism.bands} steps" if run.mechanism.bands > 1 else ""
        progress.start(self.config.method.name + correlated, run.step_index, run.mechanism.steps)
        if self.accuracy is not None:
            progress.accuracy(self.accuracy)
        seen = TrainingStatistics(self.diagnostics)
        began = saved = time.monotonic()
        done, paused = run.step_index, 0.0  # paused: seconds spent on evaluations and checkpoints
        try:
            with Signals() as signals:
                for batch in run:
                    with setup.autocast(self.config.training, parts.device):
                        logits, labels = setup.logits_and_labels(model, batch, parts.device)
                        loss = setup.losses(logits, labels).mean()
                    run.step(loss)
                    if not run.rehearsing:
                        seen.add(loss, len(labels), run)
                    if run.step_index > done:
                        now = time.monotonic()
                        due = run.step_index // self.eval_every > done // self.eval_every or run.finished
                        done = run.step_index
                        self.step_seconds = now - began - paused
                        epsilon = None if curve is None else curve.after(run)
                        if due:
                            self.evaluate(run, seen, epsilon, board)
                        progress.step(done, epsilon=epsilon, examples=seen.examples * run.ranks.size)
                        seen.examples = 0
                        if now - saved >= self.config.run.checkpoint_seconds and not run.finished:
                            run.save(self.folder.path)
                            saved = time.monotonic()
                        paused += time.monotonic() - now
                    if signals.number is not None:
                        run.stop()  # on all ranks
            if run.step_index > done:  # empty draws at the very end
                self.evaluate(run, seen, None if curve is None else curve.after(run), board)
        finally:
            self.peak = meter.peak_bytes()
        run.save(self.folder.path)
        if not run.finished:
            progress.stop()
            self.folder.write_json(self.folder.summary, self.summarize(run))
            number = signals.number or signal.SIGINT  # of another rank
            raise Interrupted(self.folder.path, run.step_index, run.mechanism.steps, number)

    def evaluate(self, run: Run, seen: TrainingStatistics, epsilon: float | None, board: Board | None) -> None:
        """Measure accuracy on held-out rows: for metrics.jsonl if they are a published test split, else private.jsonl."""
        if not run.ranks.first:
            return
        data = self.parts.data
        with run.averaged():
            found = setup.scores(*self.losses(data.test), data.test, self.config)
            if run.finished:
                for name, test in data.more_tests.items():
                    found[f"accuracy_{name}"] = setup.scores(*self.losses(test), test, self.config)["accuracy"]
        self.accuracy, self.scores = found["accuracy"], found
        self.progress.accuracy(self.accuracy)
        at = {"step": run.step_index}
        public: dict[str, Any] = {**at, "epsilon": epsilon, "seconds": self.wall_seconds}
        private: dict[str, Any] = {**at, **seen.take()}
        (public if self.parts.published_test else private).update(found)
        public["step_seconds"] = self.before.steps + self.step_seconds
        for path, row in ((self.folder.metrics, public), (self.folder.private, private)):
            self.folder.append(path, row)
            if board is not None:
                board.add(row, public=path == self.folder.metrics)

    def losses(self, dataset: Any) -> tuple[torch.Tensor, torch.Tensor]:
        parts = self.parts
        return setup.example_losses(
            parts.model, dataset, collate_fn=parts.data.collate_fn, device=parts.device, batch_size=self.batch
        )

    # ------------------------------------------------------------------ the end

    def summarize(self, run: Run) -> dict[str, Any]:
        earlier = self.folder.read_json(self.folder.summary) if self.folder.summary.exists() else {}
        peaks = [peak for peak in (self.peak, earlier.get("peak_memory_bytes")) if peak is not None]
        return summarize(
            self.config,
            self.parts,
            run,
            scores=self.scores,
            wall_seconds=self.wall_seconds,
            step_seconds=self.before.steps + self.step_seconds,
            peak_memory_bytes=max(peaks, default=None),
        )

    def finish(self, run: Run) -> dict[str, Any]:
        """Write model/ with its card, then summary.json, which says that all is done, then the report."""
        if not run.ranks.first:
            return {}
        if self.accuracy is None:
            self.evaluate(run, TrainingStatistics(False), None, None)
        summary = self.summarize(run)
        with run.averaged():
            publish(self.folder, self.config, self.parts, card_of(self.config, self.parts, run, summary))
        self.folder.write_json(self.folder.summary, summary)
        write_report([self.folder.path], self.folder.report, self.progress.say)
        return summary


def resumed_config(out: Path, given: Config | None, ranks: Ranks | None = None) -> Config:
    """The config of the run in `out`; if another one was given as well, it must be the same."""
    folder, ranks = RunFolder(out), Ranks() if ranks is None else ranks
    ranks.from_first(folder.check_resumable)
    if ranks.size == 1:
        saved = config.load(folder.config)
    else:
        with tempfile.TemporaryDirectory() as copy:
            path = Path(copy) / folder.config.name
            path.write_bytes(ranks.read(folder.config) or b"")
            saved = config.load(path)
    if given is not None and given != saved:
        old, new = saved.to_dict(), given.to_dict()
        raise ConfigError(
            [
                f"{section}.{name} = {new[section][name]}: the run in {out} has {value}, and a run cannot change"
                for section, keys in old.items()
                for name, value in keys.items()
                if new[section][name] != value
            ]
        )
    return saved


def remove_empty_ledger(folder: RunFolder) -> None:
    """Clear away a run that was stopped before its first checkpoint; refused if anything was released."""
    if folder.ledger.exists():
        if Ledger.open(folder.path).count:
            raise RunFolderError(
                f"{folder.path} has releases on record and no checkpoint to resume from. Start again in another "
                "folder; those releases were made, and count against the same data."
            )
        folder.ledger.unlink()


def write_report(folders: list[Path], out: Path, say: Callable[[str], None]) -> Path | None:
    """Write the report. It can be written again at any time, so no run fails because of it."""
    try:
        from rgp.report import write

        return write(folders, out)
    except Exception as error:
        say(f"the report could not be written ({type(error).__name__}: {error}); try again: rgp report {folders[0]}")
        return None
