"""Shadow models: the target's training, repeated on random halves of all its units. Each is a run of `rgp train`.

The pool (pool.py) is the target's training units, then its held-out ones. Shadows come in pairs: one half, then the other, so
every unit, with all its rows, is in half of the models. What is kept of a shadow is its confidence on every row, so an
interrupted attack can continue.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rgp.attacks.pool import Pool
from rgp.files import write_atomically
from rgp.torchstate import evaluating
from rgp.train import runner, setup
from rgp.train.config import Config
from rgp.train.progress import Progress, Silent
from rgp.train.setup import Parts
from rgp.train.weights import load_trained


def halves(pool: int, shadow: int, seed: int) -> np.ndarray:
    """Whether each unit of the pool is in a shadow's training data (pool,). Depends on the pair and the seed alone."""
    order = np.random.Generator(np.random.PCG64([seed, shadow // 2])).permutation(pool)
    inside: np.ndarray = np.zeros(pool, bool)
    inside[order[: pool // 2] if shadow % 2 == 0 else order[pool // 2 :]] = True
    return inside


def train_shadows(
    target: Config,
    pool: Pool,
    *,
    noise_multiplier: float | None,
    steps: int,
    shadows: int,
    seed: int,
    folder: Path,
    keep: bool,
    progress: Progress,
) -> tuple[np.ndarray, np.ndarray]:
    """(confidences (S, n), inside (S, n)) of the shadow models on n units, from the cache where they are in it."""
    inside = np.stack([halves(pool.size, shadow, seed) for shadow in range(shadows)])
    files = [folder / f"shadow-{seed}-{shadow:03}.npy" for shadow in range(shadows)]
    done = sum(file.exists() for file in files)
    progress.say(f"{shadows} shadow models" + (f", {done} of them done already" if done else ""))
    began, trained = time.monotonic(), 0
    found = []
    for shadow, file in enumerate(files):
        if not file.exists():
            config = shadow_config(
                target,
                units=int(inside[shadow].sum()),
                of=pool.trained,
                noise_multiplier=noise_multiplier,
                steps=steps,
                seed=(seed << 20) + shadow,
            )
            out = folder / file.stem
            values = _train_one(config, pool, inside[shadow], out)
            write_atomically(file, lambda new, values=values: _save(new, values))  # type: ignore[misc]
            if not keep:
                shutil.rmtree(out)
            trained += 1
            spent = time.monotonic() - began
            left = spent / trained * sum(not f.exists() for f in files)
            progress.say(f"shadow {shadow + 1} of {shadows} after {spent:.0f} s, about {left:.0f} s left")
        found.append(np.load(file))
        if found[-1].shape != pool.owner.shape:
            raise ValueError(
                f"{file} belongs to other data: it holds {len(found[-1])} rows, and there are {len(pool.owner)}. Remove it."
            )
    return np.stack([pool.mean(values) for values in found]), inside


def _save(path: Path, values: np.ndarray) -> None:
    with path.open("wb") as file:  # given a path, np.save would add an ending
        np.save(file, values)


def shadow_config(
    target: Config, *, units: int, of: int, noise_multiplier: float | None, steps: int, seed: int
) -> Config:
    """The target's training on another number of units: the same sampling rate, steps and noise."""
    training = target.training
    cap = None if training.max_batch is None else max(1, round(training.max_batch * units / of))
    return replace(
        target,
        training=replace(
            training,
            batch_size=max(1, round(training.batch_size * units / of)),
            steps=steps,
            epochs=None,
            max_batch=cap,
        ),
        budget=replace(target.budget, epsilon=None, delta=None, noise_multiplier=noise_multiplier),
        run=replace(target.run, seed=seed, secure_noise=False, eval_every=steps),
    )


def _train_one(config: Config, pool: Pool, inside: np.ndarray, out: Path) -> np.ndarray:
    data = pool.divided(inside)
    begun = (out / "config.yaml").exists()
    if out.exists() and not begun:
        shutil.rmtree(out)  # stopped before the run began
    runner.train(config, out, progress=Silent(), resume=begun, parts=setup.make(config, data))
    _, parts, _ = load_trained(out, data)  # what was published, not what was trained last: they may differ (ema)
    return confidences(parts.model, pool.rows(), parts, batch_size=config.training.microbatch_size or 32)


@torch.no_grad()
def confidences(model: nn.Module, dataset: Any, parts: Parts, *, batch_size: int) -> np.ndarray:
    """log(p / (1 - p)) of the right answer for every row, in float64: logits, so that nothing saturates."""
    lengths = torch.as_tensor(getattr(dataset, "lengths", [0] * len(dataset)))
    order = torch.argsort(lengths, descending=True, stable=True)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.Subset(dataset, order.tolist()), batch_size=batch_size, collate_fn=parts.data.collate_fn
    )
    found: list[Tensor] = []
    with evaluating(model):
        for batch in loader:
            logits, labels = setup.logits_and_labels(model, batch, parts.device)
            z = logits.double()
            if z.dim() == 3:  # a language model: p from the mean loss of the tokens
                loss = setup.losses(z, labels)
                found.append((-loss - torch.log(-torch.expm1(-loss))).cpu())
            else:
                rest = z.scatter(1, labels[:, None], -torch.inf).logsumexp(1)
                found.append((z.gather(1, labels[:, None])[:, 0] - rest).cpu())
    return torch.cat(found)[torch.argsort(order)].numpy()
