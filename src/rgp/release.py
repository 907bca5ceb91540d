"""Clipped sums -> a noisy sum that is on record: ranks meet, noise is added, the ledger is written, crashes are replayed.

Formal guarantees (tests/test_noise.py, test_ledger.py, test_checkpoint.py, test_distributed.py):
- every entry of the sum gets noise of sigma times the sum's own sensitivity, on the first rank, once
- no rank has a noisy sum before its line in the ledger is durable
- no noise is used on two sums: a step that comes out differently from what is on record is drawn afresh and charged again
- correlated noise (correlated.py; tests/test_correlated_runs.py): at most one later release takes something of each one
  back, and where a step may have been released before, the past is forgotten
"""

from __future__ import annotations

import hashlib
import warnings
from typing import Any

import torch
from torch import Tensor

from rgp import accounting
from rgp.clipping import ClippedSum
from rgp.clips import Bound
from rgp.coordinates import Coordinates
from rgp.correlated import Chain
from rgp.distributed import Ranks
from rgp.ledger import Ledger
from rgp.mechanism import Mechanism
from rgp.noise import NoiseSource


class Releases:
    """The releases of a run.

    attempt: which draw of the current step is worked on
    replay_from: lines of the ledger before this one are not computed again (rgp.resume)
    """

    def __init__(
        self, mechanism: Mechanism, source: NoiseSource, ledger: Ledger, ranks: Ranks, *, run_id: str | None = None
    ) -> None:
        """run_id: of the streams that deal units into groups; another one than the ledger's after a secret was lost."""
        self.mechanism, self.source, self.ledger, self.ranks = mechanism, source, ledger, ranks
        self.attempt = 0
        self.discarded = 0  # draws of this step that were on record and came out differently
        self.replay_from = 0
        self._allowed = 0  # releases that are known to fit in the budget
        self.chain = Chain(mechanism.coefficients)  # used on the first rank; empty on the others
        self._deal = run_id if mechanism.bands > 1 and run_id != ledger.header.get("run") else None
        self._coordinates: Coordinates | None = None  # the coordinates of its past vectors

    # ------------------------------------------------------------------ attempts

    def begin(self, step: int) -> None:
        self.attempt = self.attempts(step)[self.discarded]

    def attempts(self, step: int) -> list[int]:
        """The draws to try for a step, in order: those on record that can be computed again, then one never used."""
        recorded = self.ledger.of_step(step, since=self.replay_from) if self.source.replayable else []
        return [*(r["attempt"] for r in recorded), self.ledger.fresh_attempt(step)]

    def follow(self, coordinates: Coordinates) -> None:
        """Move past noise to the coordinates of the step, before a batch is drawn."""
        if self.chain.length and self._coordinates is not None:
            turning = self._coordinates.turned_into(coordinates)
            if turning is None:
                self.chain.forget()
            elif not turning.stays:
                self.chain.move(turning)
        self._coordinates = coordinates

    def restore(self, past: list[Tensor], coordinates: Coordinates) -> None:
        """The chain of a saved run; these coordinates are those of its last step."""
        self.chain.restore(past)
        self._coordinates = coordinates

    def end(self) -> None:
        """The step was taken."""
        self.discarded = 0

    # ------------------------------------------------------------------ one release

    def release(self, step: int, clipped: ClippedSum, bound: Bound) -> Tensor | None:
        """The noisy sum, on all ranks; None if it must not be used, and the step is done again with a fresh draw."""
        self.ranks.sum(clipped.total)
        digest, accepted = self.ranks.from_first(lambda: self._publish(step, clipped, bound))
        if not self.ranks.first:
            self._record(step, digest, bound)  # their copy of the ledger, in memory
        if not accepted:
            self.discarded += 1
            return None
        self.ranks.send(clipped.total)
        return clipped.total

    def _publish(self, step: int, clipped: ClippedSum, bound: Bound) -> tuple[str | None, bool]:
        """Noise and record, on the first rank alone: (digest of the noisy sum, whether it may be used)."""
        try:
            noisy = self._add_noise(step, clipped)
            # the digest only serves replay from disk; without a folder there is nothing to replay from
            digest = None if self.ledger.path is None else hashlib.sha256(noisy.cpu().numpy().data).hexdigest()
            return digest, self._record(step, digest, bound)
        except BaseException:
            self.chain.forget()  # it holds noise of a release that was not made, and may be made yet
            raise

    def _add_noise(self, step: int, clipped: ClippedSum) -> Tensor:
        if (std := self.mechanism.noise_std(step, clipped.sensitivity)) > 0:
            if self.chain.bands > 1:
                self._add_correlated(step, clipped)
            else:
                self.source.add(clipped.total, std=std, step=step, attempt=self.attempt)
        return clipped.total

    def _add_correlated(self, step: int, clipped: ClippedSum) -> None:
        """In units of the sensitivity, so that a clip norm may change from step to step.

        A step that may be on record already has taken back what came before it; a second one must not do so too, and starts
        a new chain. That depends on the lines before its own alone, so that a replay decides as the first time.
        """
        if self.ledger.drawn_before(step, self.attempt):
            self.chain.forget()
        total = clipped.total
        precise = torch.float64 if self.source.name == "secure" else total.dtype  # what is rounded is the noisy sum
        z = torch.zeros(total.numel(), dtype=precise, device=total.device)
        self.source.add(z, std=self.mechanism.sigma(step), step=step, attempt=self.attempt)
        total.copy_(total.to(precise).add_(self.chain.next(z), alpha=clipped.sensitivity))

    def _record(self, step: int, digest: str | None, bound: Bound) -> bool:
        """Put the release on record. False: it must not be used.

        After a crash the ledger may hold this step already. The same digest is the same release and costs nothing more.
        Any difference means that this noise was used on another sum: it must not be released twice.
        """
        known = [r for r in self.ledger.of_step(step) if r["attempt"] == self.attempt]
        if known:
            return digest is not None and known[0]["digest"] == digest
        charge = self.mechanism.charge(step, bound) | ({} if self._deal is None else {"deal": self._deal})
        self.ledger.append(step=step, attempt=self.attempt, digest=digest, processes=self.ranks.size, **charge)
        return True

    # ------------------------------------------------------------------ what they cost

    def epsilon(self, delta: float | None = None, *, quick: bool = False) -> float:
        delta = self.mechanism.delta if delta is None else delta
        if quick:
            ask: dict[str, Any] = {"delta": delta, "accountant": self.mechanism.accountant}
            return accounting.quick_epsilon(self.ledger.events(), planned=self.mechanism.events(), **ask)
        return accounting.epsilon(self.ledger.events(), delta=delta, accountant=self.mechanism.accountant)

    def fits(self, step: int) -> bool:
        """Whether the budget allows the release of this step. It does, unless releases were charged twice after a crash, or
        groups were dealt anew."""
        mechanism, ledger = self.mechanism, self.ledger
        spare, budget = mechanism.steps - step, mechanism.budget
        as_planned = ledger.count + spare <= mechanism.steps and self._deal is None
        if budget is None or as_planned or ledger.count < self._allowed:
            return True
        if self.discarded + 1 < len(self.attempts(step)):
            return True  # this one is on record and paid for
        ask: dict[str, Any] = {"epsilon": budget.epsilon, "delta": mechanism.delta, "accountant": budget.accountant}
        turns, group = mechanism.sampling.turns(spare), mechanism.charge(step).get("group")
        more = accounting.affordable_steps(mechanism.worst_event(), at_most=turns, spent=ledger.events(), **ask)
        own = ledger.events(group, deal=self._deal)  # what the units that can be in this step were charged
        more = more or accounting.affordable_steps(mechanism.event(step), at_most=1, spent=own, **ask)
        self._allowed = ledger.count + more
        if more:
            return True
        warnings.warn(
            f"the budget of epsilon {budget.epsilon} is spent after {step} of {mechanism.steps} steps, because releases were "
            "charged twice after a crash, or groups were dealt anew after a secret was lost. Training stops here."
        )
        return False
