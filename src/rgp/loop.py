"""The loop over a run: micro-batches handed out, losses taken back, in the right order or with an error that says why."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from rgp.checks.rehearsal import Rehearsal
from rgp.distributed import HERE, STOPS
from rgp.errors import WrongUseError
from rgp.loading import Loader, Loading, Schedule
from rgp.members import UnitPart
from rgp.sharding import Filler
from rgp.step import Pass, Step
from rgp.streams import Streams
from rgp.torchstate import forked_rng, kept_rng, seed_others, without_autocast


class Loop:
    """Draws each step's batch, hands it out in passes, and ends the step with the last of them."""

    def __init__(self, step: Step, dataset: Any, loading: Loading, streams: Streams, *, rehearse: bool = True) -> None:
        self.rehearsal: Rehearsal | None = None
        if rehearse and not step.plain:
            self.rehearsal = Rehearsal(
                dataset,
                loading,
                step.trained.dtype,
                lambda at, number: streams.torch_seed(at, 2**40 + number),
                self._together,
                compiled=step.regions is not None,
            )
        self._step, self.loading, self._streams = step, loading, streams
        self._dataset = dataset
        self._loader = Loader(dataset, loading, streams)
        # whether every rank makes the same number of passes in a step (fillers make up for it), so that a loop may use
        # collectives of its own; passes over sharded weights are such
        self.same_passes = step.trained.sharding.active
        self._current: object | None = None  # the newest iterator over the run
        self._handed: Pass | None = None  # what was handed out last
        self._waiting: Pass | None = None  # the same, as long as it waits for its loss
        self._failed = False  # whether run.step failed
        self._stop = False  # whether the loop is to end early
        self._ended = False  # whether a loop over this run has come to its end
        self._rates: list[float] = []  # learning rates at the beginning of the step
        self._watches_rates = True
        self._around = ExitStack()  # what is undone after a pass: random numbers
        self.closed = False

    @property
    def waiting(self) -> bool:
        """Whether a batch was handed out whose loss has not come back."""
        return self._waiting is not None

    @property
    def finished(self) -> bool:
        """Whether all planned steps were taken, or the budget allows no further one."""
        index = self._step.index
        return index >= self._step.mechanism.steps or not self._step.releases.fits(index)

    def __iter__(self) -> Iterator[Any]:
        if self.closed:
            raise WrongUseError("this run is closed; make a new one with privatize, or rgp.resume a saved one")
        if self._ended:
            raise WrongUseError(
                "write `for epoch in run.epochs(): for batch in epoch:` for a loop over epochs, or one `for batch in run:` "
                f"without them. All {self._step.mechanism.steps} steps of this run are taken: one loop over it is the whole "
                "training, and there is nothing left for another. To train longer, plan more epochs or steps in privatize."
            )
        self.abandon()
        self._failed = self._stop = self._step.stopped = False
        self._current = token = object()
        return self._batches(token)

    def _batches(self, token: object) -> Iterator[Any]:
        step, loader, began = self._step, None, self._step.index
        try:
            while not (self.finished or step.stopped):
                self._check_newest(token)
                if self._stop and not self.same_passes:
                    step.ranks.meet(step.report(STOPS))
                    return
                step.begin()
                self._rates = self._learning_rates()
                index, discarded, parts = step.index, step.releases.discarded, self._microbatches(step.index)
                if not parts:
                    self._end_step()
                    continue
                if loader is None or discarded:
                    loader = self._load()
                if self.rehearsal is not None and self.rehearsal.is_due(index):
                    yield from self._rehearse(token)
                    if self.rehearsal.microbatch_size != self.loading.microbatch_size:
                        self._load_alone()
                        parts, loader = self._microbatches(index), self._load()
                for current in self._passes(parts):
                    if current.view == 0:
                        with kept_rng():
                            batch = next(loader)
                    shown = self._augmented(batch, current)
                    self._enter(current)
                    yield shown
                    self._check_newest(token)
                    self._check_taken()
                    self._leave()
                    if self._stop and not self.same_passes:
                        break
                ended = step.index > index or step.releases.discarded > discarded
                assert ended or self._stop or step.stopped, "the last micro-batch ends its step"
            step.writes.check_between()
            self._ended = self.finished and step.index > began
        finally:
            if token is self._current:
                self.abandon()

    def take(self, loss: Any) -> bool:
        """The loss of the batch that was handed out last. Returns whether it ended a logical batch."""
        current, step = self._waiting, self._step
        if self.closed:
            raise WrongUseError("this run is closed; run.step has nothing to do")
        if current is None:
            raise WrongUseError("run.step was called twice for one batch, or outside `for batch in run`")
        weights = step.weights(loss, current)
        index = step.index
        self._failed = True
        try:
            with torch.enable_grad(), without_autocast():  # whatever the loop has switched on or off by now
                step.backward(loss, weights, current)
        except BaseException:
            step.drop()
            raise
        finally:
            self._waiting = None
            self._quiet()
        if current.trial is None:
            self._check_rates()
        if current.ends_batch:
            with without_autocast():
                self._end_step()
        self._failed = False
        return step.index > index

    def _end_step(self) -> None:
        # where no rank may leave out a pass, this is the first moment at which to stop
        self._step.end(stop=self._stop and self.same_passes)

    def stop(self) -> None:
        self._stop = True

    def close(self) -> None:
        self.abandon()
        self._current, self.closed = None, True

    def leave_ranks(self, error: BaseException) -> None:
        """Tell the other ranks that this one will not go on."""
        # with sharded weights the others wait elsewhere, and will notice that this process is gone
        if not (self.closed or self.finished or self.same_passes):
            self._step.ranks.leave(self._step.report(HERE), error)

    # ------------------------------------------------------------------ order

    def _learning_rates(self) -> list[float]:
        return [float(group.get("lr", 0.0)) for group in self._step.update.optimizer.param_groups]

    def _check_rates(self) -> None:
        """A learning rate that changes inside a logical batch is a scheduler that is called too often."""
        if self._watches_rates and (now := self._learning_rates()) != self._rates:
            self._watches_rates = False  # once is enough
            warnings.warn(
                "give the scheduler to privatize(scheduler=...), or call its step() where run.step(loss) returns True: the "
                f"learning rate became {now[0]:g} inside a logical batch, so it is stepped for every micro-batch, which is "
                "more often than there are steps. Schedules that need their length have it in len(run)."
            )

    def _check_newest(self, token: object) -> None:
        if token is not self._current:
            raise WrongUseError("another loop over this run was started; this one cannot go on")

    def _check_taken(self) -> None:
        if self._waiting is not None:
            raise WrongUseError("the next batch was asked for before run.step(loss) was called for the last one")
        if self._failed:
            raise WrongUseError(
                "run.step failed for the last batch, and the loop went on. A batch cannot be left out, or one example would "
                "affect others. Start the loop again, `for batch in run`: the step is repeated."
            )

    # ------------------------------------------------------------------ passes

    @property
    def rehearsing(self) -> bool:
        """Whether the batch that was handed out last belongs to the rehearsal."""
        return self._handed is not None and self._handed.trial is not None

    def _rehearse(self, token: object) -> Iterator[Any]:
        """Hand out the batches of the rehearsal; nothing of them is summed."""
        assert self.rehearsal is not None
        writes = self._step.writes
        with writes.rehearsed():
            for trial in self.rehearsal.trials(self._step.index):
                self._enter(Pass(list(range(trial.examples)), 0, 0, True, False, trial))
                yield trial.batch
                self._check_newest(token)
                self._check_taken()
                self._leave()
                writes.compare()

    def _together(self, flag: bool) -> bool:
        """Whether it holds on all ranks, where they make the same passes."""
        if self.same_passes and self._step.ranks.size > 1:
            return self._step.on_all_ranks(flag)
        return flag

    def _passes(self, parts: list[list[int]]) -> Iterator[Pass]:
        """The passes in which one logical batch is processed."""
        views = self.loading.views
        for i, part in enumerate(parts):
            group = part.group if isinstance(part, UnitPart) else None
            for view in range(views):
                last = view + 1 == views
                ends_part = last and (group is None or group.ends)
                yield Pass(part, i, view, ends_part, ends_batch=last and i + 1 == len(parts), group=group)

    def _microbatches(self, step: int) -> list[list[int]]:
        """This rank's share of a step's draw, cut into micro-batches."""
        current, ranks = self._step, self._step.ranks
        attempt = self._attempt(step)
        units = current.mechanism.sampling.draw(self._streams, step, attempt)
        parts = self._loader.cut(ranks.share(units), step, attempt)
        if self.same_passes and ranks.size > 1:
            cuts = [self._loader.cut(units[rank :: ranks.size], step, attempt) for rank in range(ranks.size)]
            most = max(map(len, cuts))
            parts += [Filler(cuts[0][0][:1]) for _ in range(most - len(parts))]
        return parts

    def _attempt(self, step: int) -> int:
        """The number of the draw of a step that is, or will be, processed."""
        releases = self._step.releases
        return releases.attempt if step == self._step.index else releases.attempts(step)[0]

    def _seed(self, part: int) -> int:
        """The seed of torch's generator in one pass; a step that is drawn again has other random numbers."""
        return self._streams.torch_seed(self._step.index, part, self._step.releases.attempt)

    def _load_alone(self) -> None:
        """From now on one example at a time: the rehearsal has found that rows cannot be assigned to examples."""
        self.loading = replace(self.loading, microbatch_size=1)
        self._loader = Loader(self._dataset, self.loading, self._streams)

    def _load(self) -> Iterator[Any]:
        index = self._step.index

        def seed(step: int, part: int) -> int:
            return self._streams.loading_seed(step, part, self._attempt(step))

        schedule = Schedule(self._microbatches, index, self._step.mechanism.steps, seed=seed)
        return self._loader.batches(schedule, self._streams.torch_seed(index, part=2**32))

    def _augmented(self, batch: Any, current: Pass) -> Any:
        if self.loading.augment is None:
            return batch
        seed = self._seed(current.part + 2**35 + (current.view << 36))
        with kept_rng(), forked_rng(seed):
            seed_others(seed)
            return self.loading.augment(batch)

    def _enter(self, current: Pass) -> None:
        self._waiting = self._handed = current
        if current.trial is not None:
            self._around.enter_context(current.trial.watching(self._step.trained.model))
        else:
            seed = self._seed(current.part + (current.view << 36))
            self._around.enter_context(forked_rng(seed))
        self._step.enter(current)

    def _quiet(self) -> None:
        self._step.leave()
        self._around.close()

    def _leave(self) -> None:
        self._quiet()
        self._waiting = None
        self._step.unwatch()

    def abandon(self) -> None:
        """Forget a logical batch that was not finished."""
        self._leave()
        self._step.drop()
