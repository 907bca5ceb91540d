"""Canaries: what is put into the training data by the toss of a coin, and how it is recognised afterwards.

All M canaries are rows of the audit's data set, after the real ones, so N, the sampling rate and the divisor do not reveal
how the coins fell. A canary that was left out contributes exactly zero, which is what a row that is not there contributes.
Where units are persons (data.units), a canary is a person, with as many rows as a step uses, and so are the words below.

White-box   a canary is a vector of norm C in the released coordinates, which replaces its row's gradient after capture
            and before clipping. Its score is the sum over the steps of its inner product with the noisy release.
Black-box   a canary is an input of its own: a noise image, or a text of random tokens, with a random label. Its score is
            by how much its loss fell during training.

Shapes: M canaries, D released coordinates, w = D // M of them per canary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rgp.attacks.pool import take
from rgp.clipping import Gradients
from rgp.observing import Observer
from rgp.run import Run
from rgp.slots import DeferredSlot


class Coins:
    """Which of M canaries are included, each with probability 1/2."""

    def __init__(self, canaries: int, rng: np.random.Generator) -> None:
        self.included = rng.random(canaries) < 0.5

    def __len__(self) -> int:
        return len(self.included)


class WithCanaries:
    """The rows `real`, then one row per canary."""

    def __init__(self, real: Sequence[Any], canaries: Sequence[Any]) -> None:
        self.real, self.canaries = real, canaries

    def __len__(self) -> int:
        return len(self.real) + len(self.canaries)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        size = len(self.real)
        real = iter(take(self.real, [i for i in indices if i < size]))
        return [next(real) if i < size else self.canaries[i - size] for i in indices]


def blank(item: Any, length: int) -> Any:
    """An input like `item` that says nothing: zeros. Texts get `length` tokens, whatever the item's own length."""
    if isinstance(item, Mapping):
        made = {}
        for name, value in item.items():
            # without any token to attend to, softmax would give NaN
            fill = 1 if name == "attention_mask" else 0
            made[name] = torch.full((length,) if value.dim() else (), fill, dtype=value.dtype)
        return made
    x, y = item
    return torch.zeros_like(x), _like(y, 0)


def made_input(empty: Any, classes: int, rng: np.random.Generator, vocabulary: int | None) -> Any:
    """An input that occurs nowhere else, shaped like a blank one: noise, or random tokens, with a random label."""
    label = int(rng.integers(classes))
    if isinstance(empty, Mapping):
        ids, old = empty["input_ids"], empty["labels"]
        assert vocabulary is not None
        tokens = torch.as_tensor(rng.integers(vocabulary, size=len(ids)), dtype=ids.dtype)
        return {**empty, "input_ids": tokens, "labels": tokens.clone() if old.dim() else _like(old, label)}
    x, y = empty
    noise = torch.from_numpy(rng.standard_normal(tuple(x.shape), dtype=np.float32)).to(x.dtype)
    return noise, _like(y, label)


def _like(old: Any, value: int) -> Any:
    return torch.full_like(old, value) if isinstance(old, Tensor) else type(old)(value)


class CanaryObserver(Observer):
    """Before clipping, leaves out the canaries that the coins left out; after the noise, keeps the scores of vectors."""

    def __init__(self, run: Run, coins: Coins, first: int, *, norm: float | None, rng: np.random.Generator) -> None:
        """first: the index of the first canary among the rows. norm: of the vectors, in multiples of C; None: no vectors."""
        self.run, self.coins, self.first, self.norm = run, coins, first, norm
        norms = run.mechanism.bound(0).norms
        if norm is not None and norms is not None and len(norms) > 1:
            raise ValueError(
                "training.clip has groups: a canary of norm C would be clipped in each of them; audit with one C."
            )
        if run.ranks.size > 1:
            raise ValueError(f"an audit runs in one process; this one has {run.ranks.size} ranks.")
        self._products: dict[int, np.ndarray] = {}  # step -> what its release holds of every canary
        self._rng = rng
        self._where: dict[str, slice] | None = None
        run.observe(self)

    # ------------------------------------------------------------------ before clipping

    @torch.no_grad()
    def before_clipping(self, gradients: Gradients, indices: list[int]) -> None:
        rows = gradients.rows()
        canaries = [(i, index - self.first) for i, index in enumerate(indices) if index >= self.first]
        if not canaries:
            return
        mask = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
        if self.norm is None:
            mask[[i for i, k in canaries if not self.coins.included[k]]] = True
        else:
            mask[[i for i, _ in canaries]] = True
        for slot in gradients.slots:
            if isinstance(slot, DeferredSlot):
                if bool(mask.any()):
                    slot.drop(mask)
            elif not slot.filled:
                rows[:, gradients.where[slot.entry.name]] = 0
                slot.filled = True
        rows[mask] = 0
        if self.norm is None:
            return
        self._lay_out(gradients, rows)
        inside = [(i, k) for i, k in canaries if self.coins.included[k]]
        if not inside:
            return
        at = torch.tensor([i for i, _ in inside], device=rows.device)
        chosen = torch.tensor([k for _, k in inside], device=rows.device)
        clip = self.run.clip_norm
        assert clip is not None
        values = self._signs[chosen] * (self.norm * clip / self._width**0.5)
        places = self._places[chosen]
        here = places < rows.shape[1]  # the columns past the buffer belong to deferred slots
        if bool(here.all()):
            rows[at[:, None], places] = values.to(rows.dtype)
            return
        rows[at[:, None].expand_as(places)[here], places[here]] = values[here].to(rows.dtype)
        for slot in gradients.slots:
            if isinstance(slot, DeferredSlot):
                columns = gradients.where[slot.entry.name]
                mine = (places >= columns.start) & (places < columns.stop)
                part = rows.new_zeros(len(rows), slot.entry.size)
                part[at[:, None].expand_as(places)[mine], places[mine] - columns.start] = (
                    values[mine].to(rows.dtype) / slot.entry.scale
                )
                slot.add_dense(part.view(len(rows), *slot.entry.shape))

    def _lay_out(self, gradients: Gradients, rows: Tensor) -> None:
        """Random coordinates with random signs, no coordinate twice: the canaries are orthogonal to each other."""
        if self._where is not None:
            if gradients.where != self._where:
                raise ValueError(
                    "the released coordinates changed from one step to the next (sides: alternate), so no fixed vector is a "
                    "canary in all of them; audit with method.sides=both, left or right."
                )
            return
        self._where = dict(gradients.where)
        coordinates = np.concatenate([np.arange(c.start, c.stop) for c in gradients.where.values()])
        count = len(self.coins)
        self._width = len(coordinates) // count
        if self._width < 1:
            raise ValueError(
                f"--canaries {count} is more than the {len(coordinates)} released coordinates of this model and method: "
                "orthogonal canaries need one each. Take fewer of them, a larger rank or a larger model."
            )
        places = self._rng.permutation(coordinates)[: count * self._width].reshape(count, self._width)
        signs = self._rng.integers(0, 2, size=places.shape) * 2.0 - 1.0
        self._places = torch.from_numpy(places).to(rows.device)
        self._signs = torch.from_numpy(signs.astype(np.float32)).to(rows.device)

    # ------------------------------------------------------------------ after the noise

    @torch.no_grad()
    def released(self, step: int, noisy: Tensor) -> None:
        if self._where is None:
            return  # no vector canary was drawn so far: nothing to see
        clip = self.run.clip_norm
        assert clip is not None
        products = (noisy[self._places].double() * self._signs).sum(1) / (clip * self._width**0.5)
        self._products[step] = products.cpu().numpy()

    @property
    def scores(self) -> np.ndarray:
        """How much of each canary was released. Correlated noise is taken apart first, as anyone can who has the releases: rows
        of fresh noise, in which a canary that took part is spread out like the coefficients, and only in its group's turns."""
        steps, bands = self.run.mechanism.steps, self.run.mechanism.bands
        products = np.zeros((steps, len(self.coins)))
        for step, found in self._products.items():
            products[step] = found
        if bands == 1:
            return products.sum(0)
        mix = sum(np.diag(np.full(steps - k, c), -k) for k, c in enumerate(self.run.mechanism.coefficients))
        matched = mix.T @ mix @ products
        groups = self.run.groups[self.first : self.first + len(self.coins)]
        return np.where(np.arange(steps)[:, None] % bands == groups, matched, 0).sum(0)
