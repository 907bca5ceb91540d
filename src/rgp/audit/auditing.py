"""One audit: a config -> a training run with canaries through the real engine -> a lower bound beside the proven epsilon.

The audit's run is separate, in its own folder with its own ledger. A white-box audit takes no real rows unless asked to:
its canaries bring their own gradients, so it reads nothing private, costs nothing, and its result may be published.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rgp import accounting
from rgp.audit.bounds import lower_bounds
from rgp.audit.canaries import CanaryObserver, Coins, WithCanaries, blank, made_input
from rgp.cards import EpsilonSoFar
from rgp.members import Members
from rgp.noise import NoiseSource
from rgp.rounding import finite
from rgp.run import Run
from rgp.train import runner, setup
from rgp.train.config import Config
from rgp.train.folder import RunFolder
from rgp.train.progress import Progress
from rgp.train.setup import Parts

TOKENS = 32
KINDS = ("white-box", "black-box")
BOUND = "f-dp"  # the one that counts; chosen here and not by its result


@dataclass(frozen=True, kw_only=True)
class AuditSettings:
    """How to audit.

    canaries: M, each included with probability 1/2
    kind: white-box (gradient vectors, every release is seen) or black-box (inputs, only losses are seen)
    steps: of the audit's run; None: as many as the config says
    rows: real training rows to train on besides; None: none for white-box, all for black-box
    sampling_rate: q; None: the config's
    confidence: with which the lower bound holds
    guesses: number of canaries guessed about; None: the best of several, at a level corrected for the choice
    canary_norm: of a white-box canary, in multiples of C; above 1 it has to be clipped, so clipping is audited too
    seed: of coins and canaries
    weaken_noise: factor on the noise that is really added while the ledger says otherwise, to show what an audit finds
    """

    canaries: int = 1000
    kind: str = "white-box"
    steps: int | None = None
    rows: int | None = None
    sampling_rate: float | None = None
    confidence: float = 0.95
    guesses: int | None = None
    canary_norm: float = 1.0
    seed: int | None = None
    weaken_noise: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"--kind {self.kind} must be one of {', '.join(KINDS)}.")
        if self.canaries < 2:
            raise ValueError(f"--canaries {self.canaries} must be 2 or more; a few hundred say something.")
        if self.rows is not None and self.rows < 0:
            raise ValueError(f"--rows {self.rows} must be 0 or more.")
        if self.sampling_rate is not None and not 0 < self.sampling_rate <= 1:
            raise ValueError(f"--sampling-rate {self.sampling_rate} must be above 0 and at most 1.")
        if self.guesses is not None and not 1 <= self.guesses <= self.canaries:
            raise ValueError(f"--guesses {self.guesses} must be from 1 to --canaries {self.canaries}.")
        if not 0.5 <= self.confidence < 1:
            raise ValueError(f"--confidence {self.confidence} must be at least 0.5 and below 1, such as 0.95.")
        if not 0 < self.canary_norm < 1e6:
            raise ValueError(f"--canary-norm {self.canary_norm} must be positive: it is a multiple of the clip norm C.")
        if not 0 <= self.weaken_noise <= 1:
            raise ValueError(f"--weaken-noise {self.weaken_noise} must be from 0 to 1.")


class WeakerNoise:
    """A broken noise source, to show that audits find it: adds a fraction of what the ledger says."""

    def __init__(self, source: NoiseSource, factor: float) -> None:
        self._source, self._factor = source, factor
        self.name, self.replayable = source.name, source.replayable

    def add(self, total: Tensor, *, std: float, step: int, attempt: int) -> None:
        self._source.add(total, std=std * self._factor, step=step, attempt=attempt)


def audit(config: Config, settings: AuditSettings, out: Path, *, progress: Progress) -> dict[str, Any]:
    """Train with canaries into the new folder `out`; returns what its audit.json holds."""
    began = time.monotonic()
    if not config.private:
        raise ValueError("method.name = nonprivate promises nothing, so there is nothing to audit.")
    if settings.kind == "white-box" and config.method.sides == "alternate":
        raise ValueError(
            "method.sides = alternate: the released coordinates change from step to step, so no fixed vector is a canary in "
            "all of them. Audit with --set method.sides=both, left or right, or --kind black-box."
        )
    folder = RunFolder(out)
    folder.check_free()
    if settings.steps is not None:
        config = replace(config, training=replace(config.training, steps=settings.steps, epochs=None))
    parts = setup.make(config)
    rng = np.random.default_rng(settings.seed)
    coins = Coins(settings.canaries, rng)
    real = _real_rows(parts, settings, rng)
    length = min(TOKENS, parts.data.shape[0])  # of texts; a fixed number, so that nothing of a real row is in a canary
    nothing = blank(parts.data.train[0], length)
    inputs: list[Any] = []
    if settings.kind == "black-box":
        vocabulary = None if parts.tokenizer is None else len(parts.tokenizer)
        inputs = [made_input(nothing, parts.data.classes, rng, vocabulary) for _ in range(len(coins))]
    items = [inputs[k] if inputs and coins.included[k] else nothing for k in range(len(coins))]
    members, first = parts.data.members, len(real)
    if members is not None:  # a canary is a person, with as many rows as a step uses
        most = members.unit.rows_per_unit
        ids = [("real", int(unit)) for unit in members.of_rows[real]]
        first, items = len(set(ids)), [item for item in items for _ in range(most)]
        ids += [("canary", k) for k in range(len(coins)) for _ in range(most)]
        members = Members(
            ids, rows_per_unit=most, noun=members.unit.noun, column=members.unit.column, row=members.unit.row
        )
    data = WithCanaries(torch.utils.data.Subset(parts.data.train, real), items)
    config = _resized(config, parts, settings, len(data) if members is None else members.unit.size)
    parts = replace(parts, data=replace(parts.data, train=data, members=members))

    def losses() -> np.ndarray:
        found, _ = setup.example_losses(
            parts.model, inputs, collate_fn=parts.data.collate_fn, device=parts.device, batch_size=session.batch
        )
        return found.double().numpy()

    session = runner.Session(config, parts, folder, progress, began=began)
    with session.begin() as run:
        norm = settings.canary_norm if settings.kind == "white-box" else None
        observer = CanaryObserver(run, coins, first, norm=norm, rng=rng)
        if settings.weaken_noise != 1:
            run.releases.source = WeakerNoise(run.releases.source, settings.weaken_noise)
        before = losses() if inputs else 0.0
        _train(run, parts, progress)
        scores = before - losses() if inputs else observer.scores
        result = _result(config, settings, run, coins, scores, private_rows=len(real))
    result |= {"folder": str(out), "seconds": time.monotonic() - began}
    folder.write_json(out / "audit.json", result)
    return result


def _real_rows(parts: Parts, settings: AuditSettings, rng: np.random.Generator) -> list[int]:
    there = len(parts.data.train)
    rows = settings.rows
    if rows is None:
        rows = 0 if settings.kind == "white-box" else there
    if rows > there:
        raise ValueError(f"--rows {rows} must be at most {there}, the number of training rows.")
    return np.sort(rng.permutation(there)[:rows]).tolist()


def _resized(config: Config, parts: Parts, settings: AuditSettings, size: int) -> Config:
    """The same sampling rate and delta for another number of units."""
    before, training, budget = setup.count_units(parts.data), config.training, config.budget
    rate = training.batch_size / before if settings.sampling_rate is None else settings.sampling_rate
    cap = None if training.max_batch is None else max(1, round(training.max_batch * size / before))
    delta = budget.delta if budget.delta is not None else accounting.default_delta(before)
    if delta * size >= 1:
        delta = accounting.default_delta(size)
    return replace(
        config,
        training=replace(training, batch_size=max(1, round(rate * size)), max_batch=cap),
        budget=replace(budget, delta=delta),
    )


def _train(run: Run, parts: Parts, progress: Progress) -> None:
    """The loop of `rgp train`, without evaluations and checkpoints."""
    curve = EpsilonSoFar(run)
    progress.start("audit", 0, run.mechanism.steps)
    done = examples = 0
    try:
        for batch in run:
            logits, labels = setup.logits_and_labels(parts.model, batch, parts.device)
            run.step(setup.losses(logits, labels).mean())
            examples += len(labels)
            if run.step_index > done:
                done = run.step_index
                progress.step(done, epsilon=curve.after(run), examples=examples)
                examples = 0
    finally:
        progress.stop()


def _result(
    config: Config, settings: AuditSettings, run: Run, coins: Coins, scores: np.ndarray, *, private_rows: int
) -> dict[str, Any]:
    proven, delta = run.epsilon(), run.mechanism.delta
    bounds = lower_bounds(
        scores,
        coins.included,
        run.ledger.events(),
        delta=delta,
        confidence=settings.confidence,
        guesses=settings.guesses,
    )
    best = bounds[BOUND]
    return {
        "epsilon_lower": best.epsilon,
        "epsilon_proven": finite(proven),
        "delta": delta,
        "broken": best.epsilon > proven,
        "confidence": settings.confidence,
        "canaries": settings.canaries,
        "included": int(coins.included.sum()),
        "guesses": best.guessed.guesses,
        "correct": best.guessed.correct,
        "correction": "none: the number of guesses was given"
        if settings.guesses
        else "Bonferroni over numbers of guesses",
        "kind": settings.kind,
        "bound": BOUND,
        "bounds": {name: bound.epsilon for name, bound in bounds.items()},
        "method": config.method.name,
        "noise_multiplier": run.noise_multiplier,
        "sampling_rate": run.mechanism.rate(0),
        "steps": run.step_index,
        "rows": run.mechanism.dataset_size,
        "unit": run.mechanism.unit.describe(),
        "private_rows": private_rows,
        "canary_norm": settings.canary_norm if settings.kind == "white-box" else None,
        "weakened_noise": settings.weaken_noise if settings.weaken_noise != 1 else None,
        "ledger_head": run.ledger.head,
    }
