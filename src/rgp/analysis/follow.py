"""A training, repeated from its settings and measured on the way. Nothing of it is released; the result is private.

At the beginning of every epoch, on one fixed batch and for every trained weight matrix W (p, d) with gradient G:
stable rank     |G|_F^2 / |G|_2^2
residual        |(I - U U^T) G (I - V V^T)|_F / |G|_F, for these subspaces (U, V) of rank r:
  self          of G itself: no subspace of rank r does better
  historical    of the gradient on the same batch one measurement earlier (equation 5 of the paper)
  update        of W_t - W_0, which is released: what RGP's history looks for
  carriers      L and R of the coming step, as the run itself will use them
  random        expected of random subspaces: the control
overlap         how much of G's principal subspaces L and R contain (mean squared cosine of the principal angles)
"""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rgp.analysis import NOT_PRIVATE, spectra
from rgp.run import Run
from rgp.train import setup
from rgp.train.config import Config
from rgp.train.folder import RunFolder
from rgp.train.progress import Silent
from rgp.train.runner import Session
from rgp.train.setup import Parts
from rgp.validate import check_count


def follow(
    settings: Config,
    *,
    rank: int = 8,
    batch: int = 500,
    steps: int | None = None,
    model_folder: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Train as `settings` say and measure. Without run.seed it is another training of the same kind, not the same one.

    rank: of the subspaces that gradients are projected on
    batch: examples of the fixed batch
    steps: stop after this many
    model_folder: a finished run's model/, to say whether this training gave the same weights
    """
    for name, value in (("rank", rank), ("batch", batch), *([("steps", steps)] if steps is not None else [])):
        check_count(f"--{name}", value)
    parts = setup.make(settings)
    every = max(1, round(len(parts.data.train) / settings.training.batch_size))
    last = parts.steps if steps is None else min(steps, parts.steps)
    with tempfile.TemporaryDirectory(prefix="rgp-analysis-") as scratch:
        session = Session(settings, parts, RunFolder(Path(scratch) / "run"), Silent(), began=time.monotonic())
        probe = Probe(parts, rank=rank, batch=batch, part=session.batch)
        with session.begin() as run:
            probe.measure(run)
            due, told = every, time.monotonic()
            for rows in run:
                logits, labels = setup.logits_and_labels(parts.model, rows, parts.device)
                taken = run.step(F.cross_entropy(logits, labels))
                if taken and (run.step_index >= due or run.step_index >= last or run.finished):
                    probe.measure(run)
                    due = run.step_index // every * every + every
                if run.step_index >= last:
                    break
                if time.monotonic() - told > 10:
                    say(f"step {run.step_index} of {last}")
                    told = time.monotonic()
            if probe.steps[-1] < run.step_index:  # empty draws at the very end
                probe.measure(run)
    complete = steps is None or steps >= parts.steps
    return {
        "warning": NOT_PRIVATE,
        "covered_by_guarantee": False,
        "config": settings.to_dict(),
        "dataset": settings.data.name,
        "model": settings.model.name,
        "method": settings.method.name,
        "rank": rank,
        "batch": len(probe.rows),
        "steps_per_epoch": every,
        "same_weights_as_run": same_weights(parts.model, model_folder) if complete else None,
        "steps": probe.steps,
        "epochs": [step / every for step in probe.steps],
        "matrices": list(probe.matrices.values()),
    }


class Probe:
    """The fixed batch, a twin of the model to take its gradients with, and the numbers so far."""

    def __init__(self, parts: Parts, *, rank: int, batch: int, part: int) -> None:
        self.parts, self.rank, self.part = parts, rank, part
        size = len(parts.data.train)
        chosen = np.random.Generator(np.random.PCG64(0)).permutation(size)[: min(batch, size)]
        self.rows = [parts.data.train[int(i)] for i in np.sort(chosen)]
        self.twin = copy.deepcopy(parts.model).eval()  # no dropout: the same weights give the same gradient
        self.initial = {name: p.detach().clone() for name, p in parts.model.named_parameters() if p.ndim > 1}
        self.earlier: dict[str, tuple[Tensor, Tensor]] = {}
        self.steps: list[int] = []
        self.matrices: dict[str, dict[str, Any]] = {}

    def measure(self, run: Run) -> None:
        """Measure before a step: its carriers are made from released state, and none of its examples has been drawn."""
        if not run.finished:
            run.begin_step()
        self.steps.append(run.step_index)
        weights = dict(self.parts.model.named_parameters())
        for name, gradient in self.gradients(run).items():
            G = gradient.flatten(1).double()
            if not bool(G.isfinite().all()):  # the training has diverged: nothing to measure
                G = torch.zeros_like(G)
            entry = run.plan[name]
            row = self.matrices.setdefault(name, self._row(name, G, entry.treatment, entry.rank))
            U, V = spectra.principal(G, self.rank)
            moved = (weights[name].detach() - self.initial[name]).flatten(1)
            found = row["residual"]
            row["stable_rank"].append(spectra.stable_rank(G))
            found["self"].append(spectra.residual(G, U, V))
            before = self.earlier.get(name)
            found["historical"].append(None if before is None else spectra.residual(G, *before))
            update = spectra.principal(moved, self.rank) if bool(moved.any() and moved.isfinite().all()) else None
            found["update"].append(None if update is None else spectra.residual(G, *update))
            self._carriers(row, run, name, G, U, V)
            self.earlier[name] = (U, V)

    def _row(self, name: str, G: Tensor, treatment: str, carried_rank: int) -> dict[str, Any]:
        (p, d), rank = G.shape, self.rank
        return {
            "name": name,
            "shape": [p, d],
            "treatment": treatment,
            "carrier_rank": carried_rank or None,
            "stable_rank": [],
            "residual": {
                **{kind: [] for kind in ("historical", "self", "update", "carriers")},
                "random": spectra.random_residual(p, d, rank),
            },
            "overlap": {
                "left": [],
                "right": [],
                "random_left": min(1.0, carried_rank / p) if carried_rank else None,
                "random_right": min(1.0, carried_rank / d) if carried_rank else None,
            },
            "cosines": {"left": [], "right": []},
        }

    def _carriers(self, row: dict[str, Any], run: Run, name: str, G: Tensor, U: Tensor, V: Tensor) -> None:
        left = right = missed = None
        if not run.finished and name in run.carriers:
            L, Rt = (carrier.double() for carrier in (run.carriers[name][0], run.carriers[name][1].T))
            left, right = spectra.cosines(U, L), spectra.cosines(V, Rt)
            # released dL reaches W as dL R, so the left side projects on the rows of R, and the right side on L
            method: Any = run.plan.method
            sides = method.sides_at(run.step_index)
            missed = spectra.residual(G, L if sides != "left" else None, Rt if sides != "right" else None)
        row["residual"]["carriers"].append(missed)
        for side, angles, space in (("left", left, U), ("right", right, V)):
            row["cosines"][side].append(angles)
            row["overlap"][side].append(None if angles is None else spectra.overlap(angles, space.shape[1]))

    def gradients(self, run: Run) -> dict[str, Tensor]:
        """Mean gradient over the fixed batch of every trained parameter with rows and columns; plain autograd."""
        self.twin.load_state_dict(self.parts.model.state_dict())
        trained = {entry.name for entry in run.plan.trained}
        wanted = {n: p.requires_grad_() for n, p in self.twin.named_parameters() if n in trained and p.ndim > 1}
        for name, p in self.twin.named_parameters():
            p.requires_grad_(name in wanted)
        totals = {name: torch.zeros_like(p) for name, p in wanted.items()}
        collate = self.parts.data.collate_fn or torch.utils.data.default_collate
        for start in range(0, len(self.rows), self.part):
            rows = collate(self.rows[start : start + self.part])
            logits, labels = setup.logits_and_labels(self.twin, rows, self.parts.device)
            loss = F.cross_entropy(logits, labels, reduction="sum") / len(self.rows)
            found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
            for total, gradient in zip(totals.values(), found, strict=True):
                if gradient is not None:
                    total += gradient
        return totals


def same_weights(model: nn.Module, folder: Path | None) -> bool | None:
    """Whether the run's published weights are these, to the bit; None if there are none."""
    if folder is None or not (folder / "model.safetensors").exists():
        return None
    from safetensors.torch import load_file

    published, state = load_file(str(folder / "model.safetensors")), model.state_dict()
    return all(name in state and torch.equal(state[name].cpu(), value) for name, value in published.items())
