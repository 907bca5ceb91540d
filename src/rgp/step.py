"""Algorithm 1 of the paper, in order: the only file that calls the stages of one step.

begin     carriers    released state -> L, R                                     carriers.py
          (sampling   a Poisson batch, cut into micro-batches                    sampling.py, loading.py, loop.py)
enter     capture     the loop's forward pass is watched                         capture.py, rules/, slots.py
backward              per-example carrier gradients; one norm, clip, sum         slots.py, clipping.py
end       release     ranks meet, noise N(0, (sigma C)^2), ledger                distributed.py, release.py, ledger.py
          update      noisy dL, dR -> a full-size gradient -> any optimizer      update.py, reconstruct.py
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from rgp.capture import Capture
from rgp.carriers import CarrierSearch
from rgp.checks import guards
from rgp.checks.kinks import check_kinks
from rgp.checks.means import check_even
from rgp.checks.trial import Trial
from rgp.checks.writes import Writes
from rgp.clipping import Gradients
from rgp.coordinates import Coordinates
from rgp.distributed import HERE, STOPS, RankReport
from rgp.errors import LayoutError, UnsupportedError
from rgp.mechanism import Mechanism
from rgp.members import Group
from rgp.observing import Observer
from rgp.release import Releases
from rgp.sharding import Filler
from rgp.slots import Slot
from rgp.torchstate import as_written, is_compiled, remove_mode
from rgp.trained import TrainedModel
from rgp.update import Update


@dataclass(frozen=True)
class Pass:
    """One forward and backward pass: micro-batch number `part` of a logical batch, in its view number `view`."""

    indices: list[int]  # indices of the rows
    part: int
    view: int
    ends_part: bool  # the last pass over its units: view, and piece of a unit that is larger than a micro-batch
    ends_batch: bool
    trial: Trial | None = None  # of a rehearsal: nothing of it is summed
    group: Group | None = None  # which units the rows belong to; None: each is its own unit

    @property
    def examples(self) -> int:
        """Rows that go through the model."""
        return len(self.indices)

    @property
    def units(self) -> list[int]:
        """Whose gradients are clipped."""
        return self.indices if self.group is None else self.group.units

    @property
    def begins_part(self) -> bool:
        return self.view == 0 and (self.group is None or self.group.begins)

    @property
    def counts(self) -> bool:
        """Whether this is a filler, which keeps sharded ranks in step and contributes nothing."""
        return not isinstance(self.indices, Filler)


class Step:
    """The current step: `begin`, then `enter`, the loop's forward pass and `backward` for each pass, then `end`."""

    def __init__(
        self,
        trained: TrainedModel,
        mechanism: Mechanism,
        search: CarrierSearch,
        releases: Releases,
        update: Update,
        *,
        views: int = 1,
        loss_reduction: str = "mean",
        called: nn.Module | None = None,
    ) -> None:
        """called: what the loop calls in the model's place, if torch.compile wrapped it."""
        self.trained, self.mechanism = trained, mechanism
        self.search, self.releases, self.update = search, releases, update
        self.ranks = releases.ranks
        self._views, self._reduction = views, loss_reduction
        method = trained.plan.method
        self.plain = not (
            method.private or method.carries or trained.sharding.active or mechanism.unit.rows is None
        )  # no per-example gradients needed
        self.gradients = Gradients(_groups(trained, mechanism), dtype=trained.dtype, device=trained.device)
        self.capture = Capture(trained.slot_of, sharded=trained.sharding.active, model=trained.model)
        self.regions = self._regions(called)
        self.writes = Writes(trained.model)
        self.observer = Observer()
        self.index = 0  # logical steps taken
        self.adapted: float | None = None  # C, where it follows a released quantile; None before the first step
        self.bound = mechanism.bound(0)  # how this step clips, and the noise that belongs to it
        self.begun = False  # whether carriers and layout of this step are in place
        self.stopped = False  # whether `end` found that a rank wants to stop
        self.bad_examples = 0  # dropped for NaN or Inf: private, not covered by the guarantee
        self.unused = set(trained.slots)  # trained parameters that no micro-batch has used: private
        self.sent_bytes = 0  # between ranks, in the last step
        self._set_aside: dict[str, Tensor] = {}  # weights that something else replaces during a pass
        self._uncompiled = ExitStack()  # what is compiled and not the model's runs as it is written

    # ------------------------------------------------------------------ Algorithm 1

    @torch.no_grad()
    def begin(self) -> None:
        """Carriers of this step, from released state only: no batch of this step has been drawn yet."""
        if self.begun:
            return
        self.writes.check_between()
        self.trained.sharding.reshard()
        guards.check_unchanged(self.trained, self.update.optimizer)
        self.releases.begin(self.index)
        self.search.find(self.index)
        self.bound = self.mechanism.bound(self.index, self.adapted)
        self.gradients.begin_batch(self.bound)
        if self.mechanism.bands > 1 and self.ranks.first:
            self.releases.follow(Coordinates.of(self.gradients))
        self.begun = True

    def enter(self, current: Pass) -> None:
        """Before the loop gets a micro-batch: watch its forward pass."""
        self.trained.sharding.reshard()
        if self.plain or not current.begins_part:
            self.gradients.begin_pass(current.group)
        else:
            plain = current.trial is not None and current.trial.plain
            self.gradients.begin(1 if plain else len(current.units), current.group)
        self.capture.rehearsing = current.trial is not None
        self.capture.rehearsing_precisely = current.trial is not None and current.trial.precise
        self.capture.rehearsing_compiled = current.trial is not None and current.trial.compiled
        if not self.plain:
            self.capture.begin(current.examples)
            self.capture.plainly = current.trial is not None and current.trial.plain
        self.capture.__enter__()
        self._uncompiled.enter_context(as_written())
        self._residual_off()
        self.observer.begin_pass(self.gradients)
        first = current.part == 0 and current.view == 0
        # contents are compared in every rehearsal and after 0, 1, 2, 4, 8 ... steps: twice a pass over the weights
        self.writes.start(closely=first and (current.trial is not None or self.index & (self.index - 1) == 0))
        if current.trial is not None:
            current.trial.weights = self.writes.weights()

    def leave(self) -> None:
        """After a pass: capture off; its guard against foreign backward passes stays until the loop goes on."""
        self.capture.end()
        for name, weight in self._set_aside.items():
            self.trained.parameters[name].data = weight
        self._set_aside.clear()

    def unwatch(self) -> None:
        """The loop goes on, or ends."""
        self._uncompiled.close()
        remove_mode(self.capture)

    def weights(self, loss: Any, current: Pass) -> Tensor:
        """What to backpropagate; WrongUseError for what is no loss of this micro-batch."""
        return guards.loss_weights(loss, current.examples, self._reduction, views=self._views)

    def backward(self, loss: Tensor, weights: Tensor, current: Pass) -> None:
        """The loop's loss -> per-example gradients; at the end of a micro-batch clip each example, and add it to the sum."""
        self.capture.in_backward = True  # from here on, differentiating is the engine's own
        try:
            if self.capture.unassigned is None:
                self._differentiate(loss, weights, current)
        except LayoutError as error:
            if not self.capture.may_go_alone:
                raise
            self.capture.unassigned = error
        finally:
            self.capture.in_backward = False
        with torch._C.DisableTorchFunction():  # the capture is on until the loop goes on, and need not see what follows
            self._after_backward(current)

    def _after_backward(self, current: Pass) -> None:
        m, unassigned = current.examples, self.capture.unassigned
        if current.trial is not None and (current.trial.plain or unassigned is not None):
            self._take_plain()
        if self.plain:
            if current.counts:
                self.gradients.add_plain(self.trained.gradients(), m)
            self.trained.drop_gradients()
        if unassigned is None and (current.counts or not self.plain):
            guards.check_captured(self.trained.parameters, self.trained.slots)
        self.writes.check()
        if current.trial is not None:
            current.trial.unassigned = unassigned
            current.trial.sketches = self.gradients.sketches()
            current.trial.autocast = self.capture.left_autocast_out
            return
        if current.ends_part and current.counts and not self.plain:
            self.gradients.end_passes()
            self.observer.before_clipping(self.gradients, current.units)
            self.gradients.clip_and_add()
        if current.counts:
            self.unused -= {name for name in self.unused if self.trained.slots[name].used}

    def _take_plain(self) -> None:
        """Let the slots have what plain training left in .grad: one gradient, of all examples together."""
        for name, gradient in self.trained.gradients().items():
            if self.capture.unassigned is None and self.trained.slots[name].derive is None:
                self.trained.slots[name].add_dense(gradient.unsqueeze(0))
        self.trained.drop_gradients()

    def _differentiate(self, loss: Tensor, weights: Tensor, current: Pass) -> None:
        plain = current.trial is not None and current.trial.plain
        if not (self.plain or plain):
            guards.check_leaves(loss, self.trained)
            check_even(loss, self.capture.uneven)
            if (
                current.trial is not None and not self.trained.sharding.active
            ):  # it would gather weights, on this rank alone
                check_kinks(loss, self.capture.outputs, current.examples)
        guards.check_no_backward_yet(self.trained.slots)
        torch.autograd.backward(loss, weights)

    def end(self, *, stop: bool = False) -> None:
        """Noise, ledger, rebuild, optimizer: the release of one logical batch. stop: this rank wants to end the loop."""
        guards.check_optimizer(self.update.optimizer, self.trained.parameters, self.trained.names)
        self.update.check()
        with torch._C.DisableTorchFunction():
            clipped = self.gradients.take()
        if clipped.examples:
            self.search.check_public(self.index)
        sent = self.ranks.sent
        all_ranks = self.ranks.meet(self.report(STOPS if stop else HERE, clipped.bad_examples))
        if all_ranks.condition == STOPS:
            self.drop()
            self.stopped = True
            return
        with torch._C.DisableTorchFunction():
            noisy = self.releases.release(self.index, clipped, self.bound)
        self.begun = False
        if noisy is None:
            return
        self.sent_bytes = self.ranks.sent - sent
        self.bad_examples += all_ranks.bad_examples
        self.unused = {name for name, used in zip(self.trained.slots, all_ranks.used, strict=True) if not used}
        self.observer.released(self.index, noisy)
        divisor = self.mechanism.batch_size(self.index)
        self.adapted = self.mechanism.clip.after(self.bound, noisy, divisor)
        noise_std = self.mechanism.noise_of_step(self.index, clipped.sensitivity)
        with torch._C.DisableTorchFunction():
            self.update.apply(noisy, self.gradients.where, step=self.index, divisor=divisor, noise_std=noise_std)
        if not self.trained.sharding.active:
            self.writes.settle()
        self.index += 1
        self.releases.end()

    # ------------------------------------------------------------------ around it

    def _regions(self, called: nn.Module | None) -> Any:
        """The compiled modules of the model; None without any, as torch's compiler takes a while to import."""
        modules = (*self.trained.model.modules(), *(() if called is None else (called,)))
        if not any(map(is_compiled, modules)):
            return None
        if self.trained.sharding.active:
            raise UnsupportedError(
                "a compiled model cannot be sharded as well here. Leave out torch.compile or fully_shard."
            )
        from rgp.compiled import Regions

        return Regions(self.trained.model, self.capture, called)

    def drop(self) -> None:
        """Forget a logical batch that was not finished: nothing was released, the same draw is repeated."""
        self.begun = False
        self.trained.drop_gradients()

    @torch.no_grad()
    def _residual_off(self) -> None:
        """The paper's ablation: use L R instead of W until the pass is over."""
        if not self.trained.plan.method.residual:
            for name, slot in self.trained.carried.items():
                parameter = self.trained.parameters[name]
                self._set_aside[name] = parameter.data
                parameter.data = (slot.Lt.T @ slot.R).view(parameter.shape)

    def report(self, condition: int, bad_examples: int = 0) -> RankReport:
        """Where this rank is, for the others to compare with."""
        carriers = (tensor for slot in self.trained.carried.values() for tensor in (slot.Lt, slot.R))
        return RankReport(
            condition,
            step=self.index,
            attempt=self.releases.attempt,
            releases=self.releases.ledger.count,
            weights=self.ranks.fingerprint(self.trained.trained.values()),
            carriers=self.ranks.fingerprint(carriers),
            bad_examples=bad_examples,
            used=tuple(int(name not in self.unused) for name in self.trained.slots),
        )

    def on_all_ranks(self, flag: bool) -> bool:
        """Whether something holds on all ranks; collective."""
        return bool(self.ranks.meet(replace(self.report(HERE), flag=int(flag))).flag)

    def state(self) -> dict[str, Any]:
        return {"step": self.index, "adapted_clip": self.adapted}

    def load(self, state: dict[str, Any]) -> None:
        self.index, self.adapted = state["step"], state["adapted_clip"]

    def restore_noise(self, past: list[Tensor]) -> None:
        """Continue correlated noise from these vectors, in the coordinates of the carriers that were loaded."""
        self.gradients.begin_batch(self.mechanism.bound(min(self.index, self.mechanism.steps - 1), self.adapted))
        self.releases.restore([v.to(self.trained.device) for v in past], Coordinates.of(self.gradients))

    def private_state(self) -> dict[str, Any]:
        """Two counts computed from private data without noise: kept with the secret."""
        return {"bad_examples": self.bad_examples, "never_used": sorted(self.unused)}

    def load_private(self, state: dict[str, Any]) -> None:
        self.bad_examples, self.unused = state["bad_examples"], set(state["never_used"])


def _groups(trained: TrainedModel, mechanism: Mechanism) -> list[list[Slot]]:
    """The slots that are clipped together."""
    groups: dict[int, list[Slot]] = {}
    for slot, group in zip(trained.slots.values(), mechanism.clip.groups(list(trained.slots)), strict=True):
        groups.setdefault(group, []).append(slot)
    return [groups[k] for k in sorted(groups)]
