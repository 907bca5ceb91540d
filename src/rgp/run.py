"""`Run`: the public face of a private training run. The work is done by step.py, loop.py, release.py and update.py."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rgp.distributed import Ranks, Traffic
from rgp.ema import WeightMean
from rgp.errors import WrongUseError
from rgp.files import PAST_NOISE, remove
from rgp.groups import deal
from rgp.ledger import Ledger
from rgp.loading import Loading
from rgp.loop import Loop
from rgp.mechanism import Mechanism
from rgp.observing import Observer
from rgp.plan import Plan
from rgp.release import Releases
from rgp.step import Step
from rgp.streams import Streams


class Epoch:
    """One epoch of a run: iterate over it for micro-batches. `number` counts from 1."""

    def __init__(self, number: int, batches: Iterator[Any]) -> None:
        self.number = number
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return self._batches


class Run:
    """A private training run: iterate over it for micro-batches, give each loss to `step`. Made by `privatize`."""

    def __init__(self, step: Step, dataset: Any, loading: Loading, streams: Streams, *, rehearse: bool = True) -> None:
        self._step, self._streams = step, streams
        self._loop = Loop(step, dataset, loading, streams, rehearse=rehearse)
        self.dataset = dataset
        self.secret_file: Path | None = None  # the file in which rgp.checkpoint keeps the secret of the streams
        step.trained.take()
        if step.regions is not None:
            step.regions.take()

    # ------------------------------------------------------------------ training

    @property
    def loading(self) -> Loading:
        """How drawn examples become micro-batches."""
        return self._loop.loading

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loop)

    def __len__(self) -> int:
        """Logical steps of the whole run: what a learning-rate schedule and a progress bar need. (A step may come in several
        micro-batches, so a loop has more rounds.)"""
        return self.mechanism.steps

    def epochs(self) -> Iterator[Epoch]:
        """The run in epochs, each as many steps as make one pass over the data on average, for loops over both:

        >>> import torch, rgp
        >>> model = torch.nn.Linear(8, 2)
        >>> data = [(torch.randn(8), i % 2) for i in range(64)]
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> run = rgp.privatize(model, optimizer, data, noise_multiplier=1.0, batch_size=16, epochs=2)
        >>> for epoch in run.epochs():
        ...     for x, y in epoch:
        ...         ended = run.step(torch.nn.functional.cross_entropy(model(x), y))
        >>> run.step_index, epoch.number
        (8, 2)
        """
        steps, size = self.mechanism.steps, self.mechanism.dataset_size
        length = max(1, round(size / self.mechanism.batch_size(0)))
        batches = iter(self)
        for number in range(self.step_index // length + 1, -(-steps // length) + 1):
            yield Epoch(number, self._until(batches, number * length))

    def _until(self, batches: Iterator[Any], step: int) -> Iterator[Any]:
        while self.step_index < step and not self.finished:
            try:
                yield next(batches)
            except StopIteration:
                return

    def step(self, loss: Tensor) -> bool:
        """Backward, clip, add up; at the end of a logical batch also noise, rebuild, `optimizer.step()` and zero.

        Returns True when a logical batch ended and the optimizer took its step. (After a crash a repeated batch may come
        out differently from what is on record; it is discarded then, and another one is drawn for the same step.)
        """
        return self._loop.take(loss)

    def stop(self) -> None:
        """End the loop where it stands, on all ranks; the logical batch that is not finished is dropped.

        Nothing of it was released, and the next loop over this run draws it again. (With `same_passes` the loop ends
        when the next logical batch would have been released.)
        """
        self._loop.stop()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The running mean of the weights in their place, for evaluation; without `ema`, nothing changes."""
        if self.ema is None:
            yield
        elif self._loop.waiting:
            raise WrongUseError("run.averaged() was entered between a batch and its run.step(loss); step first")
        else:
            with self.ema.applied():
                yield

    def save(self, folder: Any) -> None:
        """Write a checkpoint that `rgp.resume` can continue from. Atomic; no pickle."""
        from rgp.checkpoint import save

        save(self, folder)

    def close(self) -> None:
        """Leave the model as it was found. Called again, it does nothing."""
        if self.closed:
            return
        self._loop.close()
        if self.secret_file is not None and self.finished:
            for secret in (self.secret_file, *self.secret_file.parent.glob(PAST_NOISE + "*")):
                remove(secret)
        self.ledger.close()
        self._step.update.close(warn=self.ranks.first)
        self._step.trained.give_back()
        if self._step.regions is not None:
            self._step.regions.give_back()
        if self.never_used and self.step_index and self.ranks.first:
            warnings.warn(
                f"{len(self.never_used)} trained parameters were never used by the model and received noise only: "
                f"{', '.join(self.never_used[:5])}. Freeze them with the method's overrides."
            )

    def __enter__(self) -> Run:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is not None:
            self._loop.leave_ranks(error)
        self.close()

    def __reduce__(self) -> Any:
        raise WrongUseError(
            "a run cannot be pickled or copied: it holds the secret of its noise, and its ledger. Save it with run.save(folder), "
            "which keeps the secret in a file of its own, and continue with rgp.resume; the weights alone: model.state_dict()."
        )

    # ------------------------------------------------------------------ what it is

    @property
    def model(self) -> nn.Module:
        return self._step.trained.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._step.update.optimizer

    @property
    def scheduler(self) -> Any:
        return self._step.update.scheduler

    @property
    def ema(self) -> WeightMean | None:
        return self._step.update.ema

    @property
    def plan(self) -> Plan:
        """What each parameter gets."""
        return self._step.trained.plan

    @property
    def mechanism(self) -> Mechanism:
        """What is promised."""
        return self._step.mechanism

    settings = mechanism  # its name in versions before 0.2

    @property
    def ranks(self) -> Ranks:
        return self._step.ranks

    @property
    def ledger(self) -> Ledger:
        return self.releases.ledger

    @property
    def releases(self) -> Releases:
        """Noise, record and cost of what was released."""
        return self._step.releases

    @property
    def seed_known(self) -> bool:
        """Whether a user gave the seed: the guarantee does not hold against whoever knows it."""
        return self._streams.known

    @property
    def same_passes(self) -> bool:
        """Whether every rank makes the same number of passes in a step, so that a loop may use collectives of its own."""
        return self._loop.same_passes

    @same_passes.setter
    def same_passes(self, wanted: bool) -> None:
        self._loop.same_passes = wanted

    # ------------------------------------------------------------------ where it stands

    @property
    def step_index(self) -> int:
        """Logical steps taken."""
        return self._step.index

    @property
    def rehearsing(self) -> bool:
        """Whether this batch is one of the few small ones at the beginning with which the loop is checked, and not trained.

        For loops that count examples or keep a mean of the loss. Between a batch and its `run.step`.
        """
        return self._loop.rehearsing

    @property
    def finished(self) -> bool:
        """Whether all planned steps were taken, or the budget allows no further one."""
        return self._loop.finished

    @property
    def closed(self) -> bool:
        return self._loop.closed

    def epsilon(self, delta: float | None = None, *, quick: bool = False) -> float:
        """Epsilon spent so far, from the ledger; inf if any release was without noise.

        quick: an upper bound that lies about 1% higher, for loops that show it at every step; a tenth of a second is
        otherwise spent on each.
        """
        return self.releases.epsilon(delta, quick=quick)

    @property
    def clip_norm(self) -> float | None:
        """C of the current (or last) step; None without clipping."""
        return self.mechanism.bound(self._now, self._step.adapted).clip

    @property
    def noise_multiplier(self) -> float:
        """sigma of the current (or last) step."""
        return self.mechanism.sigma(self._now)

    @property
    def _now(self) -> int:
        return min(self.step_index, self.mechanism.steps - 1)

    @property
    def carriers(self) -> Mapping[str, tuple[Tensor, Tensor]]:
        """Name -> (L, R) of the current step, or of the last one. Released information."""
        found = {}
        for name, slot in self._step.trained.carried.items():
            if slot.R.numel():
                for alias in (name, *slot.entry.aliases):
                    found[alias] = (slot.Lt.T, slot.R)
        return found

    def begin_step(self) -> None:
        """Find the carriers of the coming step now, from released state; the loop does it by itself."""
        self._step.begin()

    @property
    def traffic(self) -> Traffic:
        """What a step sends between ranks, and what plain data-parallel training would send."""
        plain = 2 * sum(p.numel() * p.element_size() for p in self._step.trained.trained.values())
        return Traffic(self.ranks.size, self._step.sent_bytes, plain if self.ranks.size > 1 else 0)

    @property
    def groups(self) -> np.ndarray:
        """The group of each example, where noise is correlated: private, and for audits alone."""
        return deal(self._streams, self.mechanism.dataset_size, self.mechanism.bands)

    # ------------------------------------------------------------------ diagnostics: private, not covered by the guarantee

    @property
    def bad_examples(self) -> int:
        """Examples that were dropped for NaN or Inf: private."""
        return self._step.bad_examples

    @property
    def never_used(self) -> tuple[str, ...]:
        """Trained parameters that no micro-batch has used so far: they received noise and nothing else. Private."""
        return tuple(name for name in self._step.trained.slots if name in self._step.unused)

    @property
    def norms(self) -> Tensor | None:
        """Each example's norm in the last micro-batch, before clipping: private."""
        return self._step.gradients.norms

    @property
    def per_example_bytes(self) -> int:
        """Memory of the per-example gradients of a micro-batch."""
        return self._step.gradients.nbytes

    def observe(self, observer: Observer) -> None:
        """Let an audit or an analysis watch the run; see rgp.observing."""
        self._step.observer = observer

    # ------------------------------------------------------------------ state, for checkpoints

    def state(self) -> dict[str, Any]:
        """What JSON can hold; tensors are in `tensors`."""
        return {
            **self._step.state(),
            "ema": None if self.ema is None else self.ema.decay,
            "secure_noise": self.releases.source.name == "secure",
            "noise": self.releases.source.name,
            **({} if (thin := self._step.update.thin) is None else {"turned_at": thin.turned_at}),
        }

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Kind -> name -> tensor, of everything but the model and the optimizer. Released."""
        update = self._step.update
        return {
            "carriers": self._step.search.state(),
            "ema": {} if update.ema is None else update.ema.state,
            "power": {} if update.power is None else update.power.state,
            **({} if update.thin is None else {"thin": update.thin.tensors()}),
        }

    @property
    def initial(self) -> dict[str, Tensor]:
        """W_0 of the carried weights, where the method looks at W_t - W_0; nothing with state="thin"."""
        return self._step.search.initial

    def secret_state(self) -> dict[str, Any]:
        """What must never be published."""
        return {"secret": self._streams.secret.hex(), "known": self._streams.known, **self._step.private_state()}

    def past_noise(self) -> list[Tensor]:
        """The noise that correlated noise has to take back: as secret as the seed. Empty for noise that is never repeated."""
        return self.releases.chain.secrets() if self.releases.source.replayable else []

    def load_optimizer(self, state: dict[str, Any]) -> None:
        """The optimizer's state dict, where the state of carried weights may be thin."""
        if (thin := self._step.update.thin) is None:
            self.optimizer.load_state_dict(state)
        else:
            thin.load_optimizer(state)

    def load(
        self,
        state: Mapping[str, Any],
        tensors: Mapping[str, Mapping[str, Tensor]],
        initial: Mapping[str, Tensor] | None,
        private: Mapping[str, Any] | None,
        *,
        replay_from: int,
        past_noise: list[Tensor] | None = None,
    ) -> None:
        """The inverse of `state`, `tensors`, `secret_state` and `past_noise`."""
        step = self._step
        step.load(dict(state))
        if private is not None:
            step.load_private(dict(private))
        self.releases.replay_from = replay_from
        if initial is not None:
            step.search.load_initial(initial)
        step.search.load(tensors["carriers"], step.index)
        if step.update.thin is not None:
            step.update.thin.load(tensors["thin"], state["turned_at"])
        device = step.trained.device
        for kept, name in ((step.update.ema, "ema"), (step.update.power, "power")):
            if kept is not None:
                kept.state = {k: t.to(device) for k, t in tensors[name].items()}
        if past_noise:
            step.restore_noise(past_noise)
