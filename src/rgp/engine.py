"""The engine: Algorithm 1 of the paper, and the only file that calls the stages in order.

carriers     released state -> L, R                                     carriers.py
sampling     a Poisson batch, cut into micro-batches                    sampling.py
capture      forward and backward -> per-example carrier gradients      capture.py, rules/, slots.py
clipping     one norm per example, clip, sum                            clipping.py
ranks        sums of all processes meet on the first, if there are more distributed.py
noise        N(0, (sigma C)^2) on every entry of the sum                noise.py
ledger       the release is on record before it is used                 ledger.py
reconstruct  noisy dL, dR -> a full-size gradient -> any optimizer      reconstruct.py
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from rgp import accounting, guards, rules
from rgp.capture import Capture
from rgp.carriers import Released, find_carriers
from rgp.clipping import ClippedSum, Gradients
from rgp.clips import AdaptiveClip, group_of
from rgp.distributed import HERE, STOPS, Ranks, Standing, Traffic
from rgp.ema import WeightMean
from rgp.errors import WrongUseError
from rgp.ledger import Ledger
from rgp.methods import RGP, DPPowerSGD, ResidualOff
from rgp.mixing import Apart
from rgp.moved import Moves
from rgp.noise import NoiseSource
from rgp.optimizers import AdamCorrected
from rgp.plan import Plan
from rgp.powersgd import PowerIteration
from rgp.reconstruct import factors, noise_variance
from rgp.rules.derived import carry_back
from rgp.sampling import Schedule, Seeded, check_lengths, cut, draw
from rgp.settings import Settings
from rgp.sharding import Filler, Sharding, product, shard
from rgp.slots import CarriedSlot, Slot, make_slot
from rgp.streams import Streams
from rgp.torchstate import Watch, forked_rng, is_sharded, kept_rng, momentum_of, remove_mode, seed_others
from rgp.vetting import Vetting


class Run:
    """A private training run: iterate over it for micro-batches, give each loss to `step`. Made by `privatize`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        dataset: Any,
        *,
        plan: Plan,
        settings: Settings,
        streams: Streams,
        noise: NoiseSource,
        ledger: Ledger,
        scheduler: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        workers: int = 0,
        pin_memory: bool = False,
        lengths: Any = None,
        public_loss: Callable[[], Tensor] | None = None,
        augment: Callable[[Any], Any] | None = None,
        ema: float | None = None,
        probe: bool = True,
        ranks: Ranks | None = None,
    ) -> None:
        rules.load()
        self.ranks = Ranks() if ranks is None else ranks
        self.model, self.optimizer, self.dataset = model, optimizer, dataset
        self.plan, self.settings, self.ledger = plan, settings, ledger
        self.scheduler = scheduler
        self._streams, self._noise = streams, noise
        if probe and collate_fn is not None:
            collate_fn = Apart(collate_fn, "collate_fn", of_list=True)
        if probe and augment is not None:
            augment = Apart(augment, "augment", of_list=False)
        self._loading = {"collate_fn": collate_fn, "num_workers": workers, "pin_memory": pin_memory}
        self._lengths = check_lengths(lengths, settings.dataset_size)
        self._public_loss, self._augment = public_loss, augment

        named = dict(model.named_parameters())
        self._parameters = {entry.name: named[entry.name] for entry in plan}
        self._sharding = Sharding(model, self._parameters)
        self._sharding.check(
            public_loss=public_loss is not None,
            ema=ema is not None,
            rgp_ResidualOff=isinstance(plan.method, ResidualOff),
            rgp_AdamCorrected=isinstance(optimizer, AdamCorrected),
        )
        intrinsic = getattr(plan.method, "norm", "intrinsic") == "intrinsic"
        self._slots: dict[str, Slot] = {
            e.name: make_slot(e, intrinsic=intrinsic, views=settings.views) for e in plan.trained
        }
        trained = [self._parameters[name] for name in self._slots]
        dtype = torch.float64 if any(p.dtype == torch.float64 for p in trained) else torch.float32
        groups: dict[int, list[Slot]] = {}
        for slot, group in zip(self._slots.values(), group_of(settings.clip_rule, list(self._slots)), strict=True):
            groups.setdefault(group, []).append(slot)
        self._gradients = Gradients([groups[k] for k in sorted(groups)], dtype=dtype, device=trained[0].device)
        self._plain = not (
            plan.method.private or plan.method.carries or self._sharding.active
        )  # no per-example gradients are needed
        self._power: PowerIteration | None = None
        if isinstance(plan.method, DPPowerSGD):
            self._power = PowerIteration(plan.method.rank, error_feedback=plan.method.error_feedback)
        self.ema = None if ema is None else WeightMean({n: self._parameters[n] for n in self._slots}, ema)
        slot_of = {id(self._parameters[name]): slot for name, slot in self._slots.items()}
        self._capture = Capture(slot_of, sharded=self._sharding.active)
        if isinstance(optimizer, AdamCorrected):
            optimizer.noise = lambda parameter: self._noise_variance(slot_of[id(parameter)])
        self._noise_std = 0.0  # of this step's gradient, in the coordinates that are released
        self._moves: Moves | None = None
        self._initial: dict[str, Tensor] = {}
        if getattr(plan.method, "source", None) == "history":
            self._initial = {
                e.name: self._parameters[e.name].detach().clone() for e in plan if e.treatment == "carried"
            }

        # whether every rank makes the same number of passes in a step (fillers make up for it), so that a loop may use
        # collectives of its own; passes over sharded weights are such
        self.same_passes = self._sharding.active
        for hook in optimizer._optimizer_step_pre_hooks.values():
            if isinstance(getattr(hook, "__self__", None), Run):
                raise WrongUseError("the optimizer belongs to another run that is not closed; call its close() first")
        self._required_grad = {name: p.requires_grad for name, p in self._parameters.items()}
        for name, parameter in self._parameters.items():
            parameter.grad = None
            parameter.requires_grad_(name in self._slots)
        for name, parameter in self._sharding.inside().items():  # what stands in for sharded ones in a forward pass
            parameter.requires_grad_(name in self._slots)
            if name in self._slots:
                slot_of[id(parameter)] = self._slots[name]
        self._stepping = False
        self._guard = optimizer.register_step_pre_hook(self._refuse_foreign_step)

        self.step_index = 0  # logical steps taken
        self._attempt = 0  # which draw of this step is being worked on, see _attempts
        self._discarded = 0  # draws of this step that were on record and came out differently, see _record
        self._replay_from = 0  # lines of the ledger before this one are not computed again, see rgp.resume
        self._allowed = 0  # releases that are known to fit in the budget
        self._failed = False  # whether run.step did not get through
        self._stop = self._stopped = False  # whether the loop is to end early, and whether it did, see stop
        self._step_bytes = 0  # sent between ranks in the last step
        self._secret_file: Path | None = None  # where rgp.checkpoint keeps the secret of the streams
        self._watch = Watch(model)
        self._started = False  # whether carriers and layout of this step are in place
        self._bound = settings.bound(0)  # how this step clips, and the noise that belongs to it
        self._set_aside: dict[str, Tensor] = {}  # weights whose place something else has taken for a pass
        self._adapted: float | None = None  # C, where it follows a released quantile; None before the first step
        self._view = 0
        self._waiting: int | None = None  # examples of the micro-batch that waits for its loss
        self._last = False  # whether that micro-batch ends the logical batch
        self._iterator: object | None = None
        self._closed = False
        self._never_used = set(self._slots)
        self.bad_examples = 0  # examples dropped for NaN or Inf: private, not covered by the guarantee
        self._forked: Any = None
        all_ranks = self._all if self._sharding.active else None
        self._vetting = Vetting(model, self._capture, streams, wanted=probe and not self._plain, all_ranks=all_ranks)
        self._indices: list[int] = []  # the examples of the micro-batch that waits for its loss
        # for audits, which run this very engine: per-example gradients before clipping, releases before their use
        self._inject: Callable[[Gradients, list[int]], None] | None = None
        self._observe: Callable[[int, Tensor], None] | None = None

    # ------------------------------------------------------------------ the loop

    def __iter__(self) -> Iterator[Any]:
        if self._closed:
            raise WrongUseError("this run is closed; make a new one with privatize, or rgp.resume a saved one")
        self._leave()
        self._drop_partial()
        self._failed = self._stop = self._stopped = False
        self._iterator = token = object()
        return self._batches(token)

    def _batches(self, token: object) -> Iterator[Any]:
        try:
            loader = None
            while not (self.finished or self._stopped):
                self._check_loop(token)
                if self._stop and not self.same_passes:
                    self.ranks.meet(self._standing(STOPS))
                    return
                self._begin_step()
                step, discarded, parts = self.step_index, self._discarded, self._microbatches(self.step_index)
                if not parts:
                    self._end_step()
                    continue
                if loader is None or discarded:
                    loader = self._loader()
                for i, part, view in self._passes(parts):
                    if view == 0:
                        with kept_rng():
                            batch = next(loader)
                    shown = batch if self._augment is None else self._augmented(batch, i, view)
                    self._enter(part, last=i + 1 == len(parts), part=i, view=view)
                    yield shown
                    self._check_loop(token)
                    if self._waiting is not None:
                        raise WrongUseError(
                            "the next batch was asked for before run.step(loss) was called for the last one"
                        )
                    if self._failed:
                        raise WrongUseError(
                            "run.step failed for the last batch, and the loop went on. A batch cannot be left out, or "
                            "one example would decide over others. Start the loop again, `for batch in run`: the step "
                            "is repeated."
                        )
                    self._leave()
                    if self._stop and not self.same_passes:
                        break
                ended = self.step_index > step or self._discarded > discarded
                assert ended or self._stop or self._stopped, "the last micro-batch ends its step"
        finally:
            if token is self._iterator:
                self._leave()
                self._drop_partial()

    def _check_loop(self, token: object) -> None:
        if token is not self._iterator:
            raise WrongUseError("another loop over this run was started; this one cannot go on")

    def _passes(self, parts: list[list[int]]) -> Iterator[tuple[int, list[int], int]]:
        """(number of the micro-batch, its examples, view): what one logical batch is worked through in."""
        return ((i, part, view) for i, part in enumerate(parts) for view in range(self.settings.views))

    def _augmented(self, batch: Any, part: int, view: int) -> Any:
        assert self._augment is not None
        with kept_rng(), forked_rng(self._streams.torch_seed(self.step_index, part + 2**35 + (view << 36))):
            seed_others(self._streams.torch_seed(self.step_index, part + 2**35 + (view << 36)))
            return self._augment(batch)

    def step(self, loss: Tensor) -> bool:
        """Backward, clip, add up; at the end of a logical batch also noise, rebuild, `optimizer.step()` and zero.

        Returns True when a logical batch ended and the optimizer took its step. (After a crash a repeated batch may come
        out differently from what is on record; it is discarded then, and another one is drawn for the same step.)
        """
        m = self._waiting
        if self._closed:
            raise WrongUseError("this run is closed; run.step has nothing to do")
        if m is None:
            raise WrongUseError("run.step was called twice for one batch, or outside `for batch in run`")
        weights = guards.loss_weights(loss, m, self.settings.loss_reduction, views=self.settings.views)
        last, step = self._last and self._view + 1 == self.settings.views, self.step_index
        counts = not isinstance(self._indices, Filler)
        self._failed = True
        try:
            if not self._plain:
                self._vetting.check(loss, m, step)
            if any(slot.used for slot in self._slots.values()):
                raise WrongUseError(
                    "a backward pass was run on this batch before run.step(loss), by torch.autograd.grad or "
                    "torch.autograd.backward: it would count twice. Call run.step(loss) in place of it."
                )
            self._capture.in_backward = True
            torch.autograd.backward(loss, weights)
            if self._plain:
                if counts:
                    found = {n: g for n in self._slots if (g := self._parameters[n].grad) is not None}
                    self._gradients.add_plain(found, m)
                self._drop_gradients()
            if counts or not self._plain:
                guards.check_captured(self._parameters, self._slots)
            self._watch.check()
            if self._view + 1 == self.settings.views and counts and not self._plain:
                if self._inject is not None:
                    self._inject(self._gradients, self._indices)
                self._gradients.clip_and_add()
        except BaseException:
            self._drop_partial()
            raise
        finally:
            self._capture.in_backward = False
            self._waiting = None
            self._quiet()
        if counts:
            self._never_used -= {name for name in self._never_used if self._slots[name].used}
        if last:
            self._end_step()
        self._failed = False
        return self.step_index > step

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The running mean of the weights in their place, for evaluation; without `ema`, nothing changes."""
        if self.ema is None:
            yield
        elif self._waiting is not None:
            raise WrongUseError("run.averaged() was entered between a batch and its run.step(loss); step first")
        else:
            with self.ema.applied():
                yield

    @property
    def clip_norm(self) -> float | None:
        """C of the current (or last) step; None without clipping."""
        return self.settings.bound(min(self.step_index, self.settings.steps - 1), self._adapted).clip

    def stop(self) -> None:
        """End the loop where it stands, on all ranks; the logical batch that is not finished is dropped.

        Nothing of it was released, and the next loop over this run draws it again. (With `same_passes` the loop ends
        when the next logical batch would have been released.)
        """
        self._stop = True

    @property
    def finished(self) -> bool:
        """Whether all planned steps were taken, or the budget allows no further one."""
        if self.step_index >= self.settings.steps:
            return True
        spare = self.settings.steps - self.step_index
        budget = self.settings.budget
        if budget is None or self.ledger.count + spare <= self.settings.steps or self.ledger.count < self._allowed:
            return False
        # releases were charged twice after a crash: the plan no longer bounds epsilon, so ask
        if self._discarded + 1 < len(self._attempts(self.step_index)):
            return False  # this one is on record and paid for
        ask: dict[str, Any] = {"epsilon": budget.epsilon, "delta": self.settings.delta, "accountant": budget.accountant}
        spent = self.ledger.events()
        more = accounting.affordable_steps(self.settings.worst_event(), at_most=spare, spent=spent, **ask)
        more = more or accounting.affordable_steps(self.settings.event(self.step_index), at_most=1, spent=spent, **ask)
        self._allowed = self.ledger.count + more
        if more:
            return False
        warnings.warn(
            f"the budget of epsilon {budget.epsilon} is spent after {self.step_index} of {self.settings.steps} steps, "
            "because releases were charged twice after a crash. Training stops here."
        )
        return True

    def epsilon(self, delta: float | None = None) -> float:
        """Epsilon spent so far, from the ledger; inf if any release was without noise."""
        delta = self.settings.delta if delta is None else delta
        return accounting.epsilon(self.ledger.events(), delta=delta, accountant=self.settings.accountant)

    @property
    def carriers(self) -> Mapping[str, tuple[Tensor, Tensor]]:
        """Name -> (L, R) of the current step, or of the last one. Released information."""
        found = {}
        for name, slot in self._slots.items():
            if isinstance(slot, CarriedSlot) and slot.R.numel():
                for alias in (name, *slot.entry.aliases):
                    found[alias] = (slot.Lt.T, slot.R)
        return found

    @property
    def noise_multiplier(self) -> float:
        """sigma of the current (or last) step."""
        return self.settings.sigma(min(self.step_index, self.settings.steps - 1))

    @property
    def per_example_bytes(self) -> int:
        """Memory of the per-example gradients of a micro-batch."""
        return self._gradients.nbytes

    @property
    def norms(self) -> Tensor | None:
        """Each example's norm in the last micro-batch, before clipping: private, not covered by the guarantee."""
        return self._gradients.norms

    @property
    def traffic(self) -> Traffic:
        """What a step sends between ranks, and what plain data-parallel training would send."""
        plain = 2 * sum(p.numel() * p.element_size() for p in (self._parameters[name] for name in self._slots))
        return Traffic(self.ranks.size, self._step_bytes, plain if self.ranks.size > 1 else 0)

    @property
    def never_used(self) -> tuple[str, ...]:
        """Trained parameters that no micro-batch has used so far: they received noise and nothing else."""
        return tuple(name for name in self._slots if name in self._never_used)

    def save(self, folder: Any) -> None:
        """Write a checkpoint from which `rgp.resume` goes on. Atomic; no pickle."""
        from rgp.checkpoint import save

        save(self, folder)

    def close(self) -> None:
        """Leave the model as it was found. Called again, it does nothing."""
        if self._closed:
            return
        self._leave()
        self._drop_partial()
        self._iterator = None
        self._closed = True
        if self._secret_file is not None and self.finished:
            self._secret_file.unlink(missing_ok=True)
        self.ledger.close()
        self._guard.remove()
        for name, parameter in self._parameters.items():
            parameter.requires_grad_(self._required_grad[name])
            parameter.grad = None
        if self._moves is not None and self.ranks.first:
            self._moves.warn()
        if self._never_used and self.step_index and self.ranks.first:
            warnings.warn(
                f"{len(self._never_used)} trained parameters were never used by the model and received noise only: "
                f"{', '.join(self.never_used[:5])}. Freeze them with the method's overrides."
            )

    def __enter__(self) -> Run:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        # with sharded weights the others wait elsewhere, and will notice that this process is gone
        if error is not None and not (self._closed or self.finished or self._sharding.active):
            self.ranks.leave(self._standing(HERE), error)
        self.close()

    # ------------------------------------------------------------------ one step of Algorithm 1

    @torch.no_grad()
    def _begin_step(self) -> None:
        """Carriers of this step, from released state only: no batch of this step has been drawn yet."""
        if self._started:
            return
        self._sharding.reshard()
        guards.check_unchanged(self.model, self.optimizer, self._parameters, set(self._slots))
        self._attempt = self._attempts(self.step_index)[self._discarded]
        method = self.plan.method
        groups: dict[tuple[Any, ...], list[CarriedSlot]] = {}
        for name, slot in self._slots.items():
            if isinstance(slot, CarriedSlot):
                weight = self._parameters[name]
                key = (slot.entry.rank, slot.entry.p, slot.entry.d, weight.dtype, weight.device)
                groups.setdefault(key, []).append(slot)
        if groups:
            assert isinstance(method, RGP)
            source = self._source()
            public = self._public_gradients() if source == "public" else {}
            rng = self._streams.generator("carriers", self.step_index)
            for (rank, *_), slots in groups.items():
                released = [self._released(slot.entry.name, public) for slot in slots]
                Lt, R = find_carriers(released, source=source, rank=rank, iterations=method.power_iterations, rng=rng)
                for i, slot in enumerate(slots):
                    slot.set_carriers(Lt[i], R[i], method.sides_at(self.step_index))
        self._bound = self.settings.bound(self.step_index, self._adapted)
        self._gradients.begin_batch(self._bound)
        self._started = True

    def _source(self) -> str:
        method = self.plan.method
        assert isinstance(method, RGP)
        warmup = method.warmup_steps if method.warmup_steps is not None else max(1, round(self.settings.steps / 10))
        if method.source in ("history", "momentum") and self.step_index < warmup:
            return "weight"
        return method.source

    def _released(self, name: str, public: Mapping[str, Tensor]) -> Released:
        weight = self._parameters[name]
        return Released(
            weight=weight,
            initial=self._initial.get(name),
            momentum=momentum_of(self.optimizer, weight),
            public=public.get(name),
        )

    def _public_gradients(self) -> dict[str, Tensor]:
        assert self._public_loss is not None
        names = [name for name, slot in self._slots.items() if slot.carried]
        seed = int(self._streams.generator("carriers", self.step_index, part=1).integers(0, 2**63 - 1))
        with forked_rng(seed), torch.enable_grad():  # on every rank the same numbers, and after a resume
            loss = self._public_loss()
            grads = torch.autograd.grad(loss, [self._parameters[n] for n in names], allow_unused=True)
        return {n: g for n, g in zip(names, grads, strict=True) if g is not None}

    def _end_step(self) -> None:
        """Noise, ledger, rebuild, optimizer: the release of one logical batch."""
        step = self.step_index
        guards.check_optimizer(self.optimizer, self._parameters, set(self._slots))
        clipped = self._gradients.take()
        self._noise_std = self._std(clipped) / self.settings.batch_size(step)
        sent = self.ranks.sent
        # where no rank may leave out a pass, this is the first moment at which to stop
        condition = STOPS if self._stop and self.same_passes else HERE
        all_ranks = self.ranks.meet(self._standing(condition, clipped.bad_examples))
        if all_ranks.condition == STOPS:
            self._drop_partial()
            self._stopped = True
            return
        self.ranks.sum(clipped.total)
        digest, accepted = self.ranks.from_first(lambda: self._publish(clipped))
        if not self.ranks.first:
            self._record(digest)  # their copy of the ledger, in memory
        if not accepted:
            self._discarded += 1
            self._started = False
            return
        noisy = clipped.total
        self.ranks.send(noisy)
        self._step_bytes = self.ranks.sent - sent
        self.bad_examples += all_ranks.bad_examples
        self._never_used = {name for name, used in zip(self._slots, all_ranks.used, strict=True) if not used}
        if self._observe is not None:
            self._observe(step, noisy)
        self._adapt(noisy)
        self._set_gradients(noisy)
        if step == 0 and self._noise_std > 0:
            looked_at = {n: p for n in self._slots if not is_sharded(p := self._parameters[n])}
            self._moves = Moves(looked_at, self.optimizer, self.scheduler)
        if self._moves is not None:
            self._moves.before()
        self._stepping = True
        try:
            self.optimizer.step()
        finally:
            self._stepping = False
            self._drop_gradients()
        if self._moves is not None:
            self._moves.after()
        if self.scheduler is not None:
            self.scheduler.step()
        self.step_index += 1
        self._discarded = 0
        self._started = False
        if self.ema is not None:
            self.ema.update(self.step_index)

    def _adapt(self, noisy: Tensor) -> None:
        """C of the next step, where it follows a quantile: from the released count, the last entry of the release."""
        rule, bound = self.settings.clip_rule, self._bound
        if isinstance(rule, AdaptiveClip):
            assert bound.clip is not None
            count = noisy[-1].item() / bound.count_weight
            self._adapted = rule.next(bound.clip, count, self.settings.batch_size(self.step_index))

    def _standing(self, condition: int, bad_examples: int = 0) -> Standing:
        """Where this rank is, for the others to compare with."""
        carried = [slot for slot in self._slots.values() if isinstance(slot, CarriedSlot)]
        return Standing(
            condition,
            step=self.step_index,
            attempt=self._attempt,
            releases=self.ledger.count,
            weights=self.ranks.fingerprint(self._parameters[name] for name in self._slots),
            carriers=self.ranks.fingerprint(tensor for slot in carried for tensor in (slot.Lt, slot.R)),
            bad_examples=bad_examples,
            used=tuple(int(name not in self._never_used) for name in self._slots),
        )

    def _publish(self, clipped: ClippedSum) -> tuple[str | None, bool]:
        """Noise and record, on the first rank alone: (digest of the noisy sum, whether it may be used)."""
        noisy = self._add_noise(clipped)
        # the digest only serves replay from disk; without a folder there is nothing to replay from
        digest = None if self.ledger.path is None else hashlib.sha256(noisy.cpu().numpy().data).hexdigest()
        return digest, self._record(digest)

    def _std(self, clipped: ClippedSum) -> float:
        """Of the noise on every entry of the sum."""
        sigma = self.settings.sigma(self.step_index)
        return sigma * clipped.sensitivity if sigma > 0 else 0.0

    def _add_noise(self, clipped: ClippedSum) -> Tensor:
        if (std := self._std(clipped)) > 0:
            self._noise.add(clipped.total, std=std, step=self.step_index, attempt=self._attempt)
        return clipped.total

    def _record(self, digest: str | None) -> bool:
        """Put the release on record. False: it must not be used, and the step is done again with a fresh draw.

        After a crash the ledger may hold this step already. The same digest is the same release and costs nothing more.
        Any difference means that this noise was used on another sum: it must not be released twice.
        """
        step = self.step_index
        known = [r for r in self.ledger.of_step(step) if r["attempt"] == self._attempt]
        if known:
            return digest is not None and known[0]["digest"] == digest
        self.ledger.append(
            step=step,
            attempt=self._attempt,
            digest=digest,
            processes=self.ranks.size,
            **self.settings.charge(step, self._bound),
        )
        return True

    @torch.no_grad()
    def _set_gradients(self, noisy: Tensor) -> None:
        """The noisy sum -> every trained parameter's .grad, divided by the public expected batch size."""
        noisy /= self.settings.batch_size(self.step_index)
        for name, slot in self._slots.items():
            parameter, entry = self._parameters[name], slot.entry
            part = noisy[self._gradients.where[name]]
            if isinstance(slot, CarriedSlot):
                cut_at = entry.rank * entry.p if slot.needs_left else 0
                Lt, R = slot.Lt.to(part.dtype), slot.R.to(part.dtype)
                At = part[:cut_at].view(entry.rank, entry.p) if slot.needs_left else None
                dR = part[cut_at:].view(entry.rank, entry.d) if slot.needs_right else None
                part = product(*factors(Lt, R, At, dR), like=parameter)
            elif entry.scale != 1:
                part = part / entry.scale
            part = part.view(parameter.shape)
            if slot.derive is not None:
                part = carry_back(parameter, slot.derive, part)
            if self._power is not None and entry.kind not in ("head", "embedding", "token"):
                part = self._power.approximate(name, part, lambda: self._streams.generator("carriers", self.step_index))
            parameter.grad = shard(part.to(parameter.dtype), like=parameter)

    def _noise_variance(self, slot: Slot) -> Tensor | float:
        """Of the noise in each entry of this step's gradient: what AdamCorrected asks for."""
        if isinstance(slot, CarriedSlot):
            shape = noise_variance(slot.Lt, slot.R, left=slot.needs_left, right=slot.needs_right)
            return shape.reshape(slot.entry.shape) * self._noise_std**2
        return (self._noise_std / slot.entry.scale) ** 2

    # ------------------------------------------------------------------ batches

    def _microbatches(self, step: int) -> list[list[int]]:
        settings = self.settings
        attempt = self._attempt if step == self.step_index else self._attempts(step)[0]
        rate, cap = settings.rate(step), settings.max_batch
        indices = draw(self._streams, step, settings.dataset_size, rate, attempt=attempt, max_batch=cap)
        parts = cut(self.ranks.share(indices), settings.microbatch_size, self._lengths)
        if self.same_passes and self.ranks.size > 1:  # the first rank has the most
            most = -(-len(indices[:: self.ranks.size]) // settings.microbatch_size)
            parts += [Filler(indices[:1].tolist()) for _ in range(most - len(parts))]
        return parts

    def _attempts(self, step: int) -> list[int]:
        """The draws to try for a step, in order: those on record that can be computed again, then one never used."""
        recorded = self.ledger.of_step(step, since=self._replay_from) if self._noise.replayable else []
        return [*(r["attempt"] for r in recorded), self.ledger.fresh_attempt(step)]

    def _loader(self) -> Iterator[Any]:
        schedule = Schedule(self._microbatches, self.step_index, self.settings.steps, seed=self._streams.loading_seed)
        generator = torch.Generator().manual_seed(self._streams.torch_seed(self.step_index, part=2**32))
        return iter(DataLoader(Seeded(self.dataset), batch_sampler=schedule, generator=generator, **self._loading))

    # ------------------------------------------------------------------ capture on and off

    def _enter(self, indices: list[int], *, last: bool, part: int, view: int) -> None:
        m = len(indices)
        self._indices = indices
        self._sharding.reshard()
        if view or self._plain:
            self._gradients.begin_view()
        else:
            self._gradients.begin(m)
        self._waiting, self._last, self._view = m, last, view
        self._vetting.begin(m)
        self._forked = forked_rng(self._streams.torch_seed(self.step_index, part + (view << 36)))
        self._forked.__enter__()
        if not self._plain:
            self._capture.begin(m)
        self._capture.__enter__()
        self._residual_off()
        self._watch.start(closely=part == 0 and view == 0)

    @torch.no_grad()
    def _residual_off(self) -> None:
        """The paper's ablation: L R in the place of W, until the pass is over."""
        if isinstance(self.plan.method, ResidualOff):
            for name, (L, R) in self.carriers.items():
                parameter = self._parameters[name]
                self._set_aside[name] = parameter.data
                parameter.data = (L @ R).view(parameter.shape)

    def _quiet(self) -> None:
        """Capture off; its guard against foreign backward passes stays until the loop goes on."""
        self._capture.end()
        for name, weight in self._set_aside.items():
            self._parameters[name].data = weight
        self._set_aside.clear()
        self._vetting.end()
        if self._forked is not None:
            self._forked.__exit__(None, None, None)
            self._forked = None

    def _leave(self) -> None:
        self._quiet()
        self._waiting = None
        remove_mode(self._capture)

    def _drop_partial(self) -> None:
        """Forget a logical batch that was not finished: nothing was released, the same draw is repeated."""
        self._waiting = None
        self._started = False
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    # ------------------------------------------------------------------ checks

    def _all(self, flag: bool) -> bool:
        """Whether it holds on all ranks."""
        return bool(self.ranks.meet(replace(self._standing(HERE), flag=int(flag))).flag)

    def _refuse_foreign_step(self, *_: object) -> None:
        if not self._stepping:
            raise WrongUseError(
                "run.step(loss) calls optimizer.step() itself, once per logical batch. Remove the call."
            )
