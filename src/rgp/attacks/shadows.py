"""Shadow models: the target's training, repeated on random halves of all its rows. Each is a run of `rgp train`.

The pool is the target's training rows, then its held-out rows. Shadows come in pairs: one half, then the other, so every row
is in half of the models. What is kept of a shadow is its confidence on every row, so an interrupted attack can continue.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rgp.files import write_atomically
from rgp.torchstate import evaluating
from rgp.train import runner, setup
from rgp.train.config import Config
from rgp.train.progress import Progress, Silent
from rgp.train.setup import Parts
from rgp.train.weights import load_trained


def take(dataset: Any, indices: list[int]) -> list[Any]:
    """Many rows at once, where the data set has a faster way to get them."""
    many = getattr(dataset, "__getitems__", None)
    return many(indices) if callable(many) and indices else [dataset[i] for i in indices]


class PooledRows:
    """Some rows of two data sets, one after the other."""

    def __init__(self, train: Any, test: Any, indices: Sequence[int]) -> None:
        self._train, self._test, self._indices = train, test, indices
        if hasattr(train, "lengths") and hasattr(test, "lengths"):
            joined = [*train.lengths, *test.lengths]
            self.lengths = [joined[i] for i in indices]

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        at, size = [self._indices[i] for i in indices], len(self._train)
        trained = iter(take(self._train, [i for i in at if i < size]))
        tested = iter(take(self._test, [i - size for i in at if i >= size]))
        return [next(trained) if i < size else next(tested) for i in at]


def halves(pool: int, shadow: int, seed: int) -> np.ndarray:
    """Whether each row of the pool is in a shadow's training data (pool,). Depends on the pair and the seed alone."""
    order = np.random.Generator(np.random.PCG64([seed, shadow // 2])).permutation(pool)
    inside: np.ndarray = np.zeros(pool, bool)
    inside[order[: pool // 2] if shadow % 2 == 0 else order[pool // 2 :]] = True
    return inside


def train_shadows(
    target: Config,
    data: Any,
    *,
    noise_multiplier: float | None,
    steps: int,
    shadows: int,
    seed: int,
    folder: Path,
    keep: bool,
    progress: Progress,
) -> tuple[np.ndarray, np.ndarray]:
    """(confidences (S, n), inside (S, n)) of the shadow models, from the cache where they are in it."""
    pool = len(data.train) + len(data.test)
    inside = np.stack([halves(pool, shadow, seed) for shadow in range(shadows)])
    files = [folder / f"shadow-{seed}-{shadow:03}.npy" for shadow in range(shadows)]
    done = sum(file.exists() for file in files)
    progress.say(f"{shadows} shadow models" + (f", {done} of them done already" if done else ""))
    began, trained = time.monotonic(), 0
    found = []
    for shadow, file in enumerate(files):
        if not file.exists():
            config = shadow_config(
                target,
                rows=int(inside[shadow].sum()),
                of=len(data.train),
                noise_multiplier=noise_multiplier,
                steps=steps,
                seed=(seed << 20) + shadow,
            )
            out = folder / file.stem
            values = _train_one(config, data, inside[shadow], out)
            write_atomically(file, lambda new, values=values: _save(new, values))  # type: ignore[misc]
            if not keep:
                shutil.rmtree(out)
            trained += 1
            spent = time.monotonic() - began
            left = spent / trained * sum(not f.exists() for f in files)
            progress.say(f"shadow {shadow + 1} of {shadows} after {spent:.0f} s, about {left:.0f} s left")
        found.append(np.load(file))
        if found[-1].shape != (pool,):
            raise ValueError(
                f"{file} belongs to other data: it holds {len(found[-1])} rows, and there are {pool}. Remove it."
            )
    return np.stack(found), inside


def _save(path: Path, values: np.ndarray) -> None:
    with path.open("wb") as file:  # given a path, np.save would add an ending
        np.save(file, values)


def shadow_config(
    target: Config, *, rows: int, of: int, noise_multiplier: float | None, steps: int, seed: int
) -> Config:
    """The target's training on another number of rows: the same sampling rate, steps and noise."""
    training = target.training
    cap = None if training.max_batch is None else max(1, round(training.max_batch * rows / of))
    return replace(
        target,
        training=replace(
            training, batch_size=max(1, round(training.batch_size * rows / of)), steps=steps, epochs=None, max_batch=cap
        ),
        budget=replace(target.budget, epsilon=None, delta=None, noise_multiplier=noise_multiplier),
        run=replace(target.run, seed=seed, secure_noise=False, eval_every=steps),
    )


def _train_one(config: Config, pool: Any, inside: np.ndarray, out: Path) -> np.ndarray:
    def rows(chosen: np.ndarray) -> PooledRows:
        return PooledRows(pool.train, pool.test, np.flatnonzero(chosen).tolist())

    data = replace(pool, train=rows(inside), test=rows(~inside), more_tests={})
    begun = (out / "config.yaml").exists()
    if out.exists() and not begun:
        shutil.rmtree(out)  # stopped before the run began
    runner.train(config, out, progress=Silent(), resume=begun, parts=setup.make(config, data))
    _, parts, _ = load_trained(out, data)  # what was published, not what was trained last: they may differ (ema)
    everyone = rows(np.ones_like(inside))
    return confidences(parts.model, everyone, parts, batch_size=config.training.microbatch_size or 32)


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
