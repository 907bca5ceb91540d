"""Carriers: released state -> L with orthonormal columns, R with orthonormal rows (Algorithm 2 of the paper).

Shapes: W, delta (p, d); L (p, r), kept transposed and contiguous as Lt (r, p), because F.linear(g, Lt) is the fast form
of g L; R (r, d). n matrices of one shape are worked on together: (n, r, p), (n, r, d).

Why nothing private can reach this code: the only input is a `Released`, whose fields are the weights, their initial
copy, the optimizer's state and gradients of public data. It is made by the engine before a batch is drawn, when no
private tensor exists in the process's training state, and has no field that could carry one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rgp.errors import WrongUseError
from rgp.reconstruct import Factors
from rgp.sharding import shard, thin_product
from rgp.slots import CarriedSlot
from rgp.streams import Streams
from rgp.thin import ThinState
from rgp.torchstate import forked_rng, kept_rng, momentum_of, seed_others
from rgp.trained import TrainedModel

TOLERANCE = 1e-13


@dataclass(frozen=True, kw_only=True)
class Released:
    """What one carried parameter's carriers may depend on; all of it was released before, or was never private."""

    weight: Tensor
    initial: Tensor | None = None
    momentum: Tensor | Factors | None = None
    public: Tensor | None = None
    history: Factors | None = None  # the sum of updates, where no initial weights are kept (thin.py)

    def matrix(self, source: str, dtype: torch.dtype) -> Tensor | Factors:
        """The matrix (p, d) whose principal subspace is wanted; the weight while the source has nothing yet."""
        if source == "history" and self.initial is not None:
            return torch.sub(self.weight.detach(), self.initial).flatten(1).to(dtype)
        chosen = {"weight": self.weight, "momentum": self.momentum, "public": self.public, "history": self.history}[
            source
        ]
        if isinstance(chosen, Factors):
            return Factors(chosen.left.to(dtype), chosen.right.to(dtype))
        return (self.weight if chosen is None else chosen).detach().flatten(1).to(dtype)


def find_carriers(
    released: Sequence[Released], *, source: str, rank: int, iterations: int, rng: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """Carriers of n parameters that share shape and rank: Lt (n, r, p) and R (n, r, d)."""
    weight = released[0].weight
    n, p, d = len(released), weight.shape[0], weight[0].numel()
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32

    def gaussian(width: int) -> Tensor:
        numbers = rng.standard_normal((n, rank, width), dtype=np.float64 if dtype == torch.float64 else np.float32)
        return torch.from_numpy(numbers).to(weight.device)

    if source == "random":
        Lt, R = orthonormal_rows(gaussian(p), gaussian), orthonormal_rows(gaussian(d), gaussian)
    else:
        Lt, R = _power_method(lambda i: released[i].matrix(source, dtype), gaussian(d), iterations, gaussian)
    return Lt.to(weight.dtype), R.to(weight.dtype)


def _power_method(
    delta: Callable[[int], Tensor | Factors], R: Tensor, iterations: int, gaussian: Callable[[int], Tensor]
) -> tuple[Tensor, Tensor]:
    """Algorithm 2 for n matrices: products one by one, so that no two differences exist at once, the rest together."""
    Lt = R
    for _ in range(iterations):
        products = [thin_product(r, delta(i), transposed=True) for i, r in enumerate(R)]
        Lt = orthonormal_rows(torch.stack(products), gaussian)
        R = torch.stack([thin_product(l, delta(i), transposed=False) for i, l in enumerate(Lt)])
    return Lt, orthonormal_rows(R, gaussian)


def orthonormal_rows(Y: Tensor, gaussian: Callable[[int], Tensor]) -> Tensor:
    """Orthonormal rows spanning those of each Y (n, r, d), also where Y is zero, rank-deficient, tiny or huge.

    Two Cholesky-QR passes in float64 serve well-conditioned inputs at the price of a few small products. What they leave
    worse than the tolerance is mixed with a little Gaussian noise, so that missing directions are random and not
    coordinate axes, and goes to Householder QR, which is orthonormal whatever it is given.
    """
    scale = Y.abs().amax((1, 2), keepdim=True)
    usable = (scale > 0) & scale.isfinite()
    Q = torch.where(usable, Y / torch.where(usable, scale, torch.ones_like(scale)), torch.zeros_like(Y)).double()
    Q = Q / Q.norm(dim=2, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    Z = Q
    for _ in range(2):
        factor, info = torch.linalg.cholesky_ex(Z @ Z.mT)
        Z = torch.linalg.solve_triangular(factor, Z, upper=False)
    gram = Z @ Z.mT - torch.eye(Z.shape[1], dtype=Z.dtype, device=Z.device)
    good = (info == 0) & (gram.abs().amax((1, 2)) < TOLERANCE)
    if not bool(good.all()):
        level = torch.finfo(Y.dtype).eps
        mixed = Q + level * gaussian(Y.shape[2]).double()
        Z = torch.where(good[:, None, None], Z, _householder(mixed))
    return Z.to(Y.dtype)


def _householder(Y: Tensor) -> Tensor:
    return torch.linalg.qr(Y.mT.contiguous()).Q.mT.contiguous()


class CarrierSearch:
    """Finds every carried parameter's carriers at the beginning of a step, from released state alone.

    public_loss: the model's loss on public data, for source="public".
    """

    def __init__(
        self,
        trained: TrainedModel,
        optimizer: torch.optim.Optimizer,
        streams: Streams,
        *,
        steps: int,
        public_loss: Callable[[], Tensor] | None = None,
        thin: ThinState | None = None,
    ) -> None:
        self._thin = thin
        self._trained, self._optimizer, self._streams = trained, optimizer, streams
        self._steps, self._public_loss = steps, public_loss
        self._public_before: float | None = None  # the public loss of this step, before the loop's body ran
        self._public_checked = False
        self.initial: dict[str, Tensor] = {}  # W_0, where the method looks at W_t - W_0
        if getattr(trained.plan.method, "source", None) == "history" and thin is None:
            self.initial = {name: trained.parameters[name].detach().clone() for name in trained.carried}

    @torch.no_grad()
    def find(self, step: int) -> None:
        """Set the carriers of this step. No batch of it has been drawn yet."""
        method: Any = self._trained.plan.method
        groups: dict[tuple[Any, ...], list[CarriedSlot]] = {}
        for name, slot in self._trained.carried.items():
            weight = self._trained.parameters[name]
            key = (slot.entry.rank, slot.entry.p, slot.entry.d, weight.dtype, weight.device)
            groups.setdefault(key, []).append(slot)
        if not groups:
            return
        sides = method.sides_at(step)
        stays = step % method.keep or (self._thin is not None and self._thin.turned_at == step)
        if stays and all(slot.R.numel() for slots in groups.values() for slot in slots):
            for slot in self._trained.carried.values():  # they stay; what is released of them may change
                slot.set_carriers(slot.Lt, slot.R, sides)
            return
        source = self.source(step)
        public = self._public_gradients(step) if source == "public" else {}
        rng = self._streams.generator("carriers", step)
        for (rank, *_), slots in groups.items():
            released = [self._released(slot.entry.name, public) for slot in slots]
            Lt, R = find_carriers(released, source=source, rank=rank, iterations=method.power_iterations, rng=rng)
            if method.keep > 1:  # a checkpoint gives them back in this order of memory, and products round by it
                Lt, R = Lt.contiguous(), R.contiguous()
            for i, slot in enumerate(slots):
                l, r = Lt[i], R[i]
                if method.keep > 1 or self._thin is not None:
                    # a resumed run has them as contiguous tensors of their own, and products depend on layout
                    l, r = (t.clone(memory_format=torch.contiguous_format) for t in (l, r))
                if self._thin is not None:
                    self._thin.turn(slot.entry.name, l, r, sides)
                slot.set_carriers(l, r, sides)
        if self._thin is not None:
            self._thin.turned_at = step

    def source(self, step: int) -> str:
        """The source that carriers are found in: the weight, until there is an update or momentum to look at."""
        method: Any = self._trained.plan.method
        warmup = method.warmup_steps if method.warmup_steps is not None else max(1, round(self._steps / 10))
        if method.source in ("history", "momentum") and step < warmup:
            return "weight"
        return method.source

    def _released(self, name: str, public: Mapping[str, Tensor]) -> Released:
        weight = self._trained.parameters[name]
        return Released(
            weight=weight,
            initial=self.initial.get(name),
            momentum=momentum_of(self._optimizer, weight) if self._thin is None else self._thin.momentum(name),
            public=public.get(name),
            history=None if self._thin is None else self._thin.history(name),
        )

    def _public_gradients(self, step: int) -> dict[str, Tensor]:
        names = list(self._trained.carried)
        with torch.enable_grad():
            loss = self._public_value(step)
            self._public_before = float(loss.detach())
            grads = torch.autograd.grad(loss, [self._trained.parameters[n] for n in names], allow_unused=True)
        return {n: g for n, g in zip(names, grads, strict=True) if g is not None}

    def _public_value(self, step: int) -> Tensor:
        assert self._public_loss is not None
        seed = int(self._streams.generator("carriers", step, part=1).integers(0, 2**63 - 1))
        with kept_rng(), forked_rng(seed):  # on every rank the same numbers, and after a resume
            seed_others(seed)
            return self._public_loss()

    def check_public(self, step: int) -> None:
        """Once, before the first release and after the loop's body has run: the public loss still sees what it saw before.

        A function that looks up `inputs` when it is called sees the loop's private batch under that name.
        """
        if self._public_loss is None or self._public_checked:
            return
        self._public_checked = True
        before = self._public_before
        with torch.no_grad():
            now = float(self._public_value(step).detach())
        if before is not None and not math.isclose(now, before, rel_tol=1e-4, abs_tol=1e-7):
            raise WrongUseError(
                f"public_loss gave {before:.6g} before the loop and {now:.6g} in it, with the same weights and random numbers. "
                "It sees something that the loop has changed: a lambda that uses `inputs` sees the private batch once the loop "
                "calls that `inputs`. Give public tensors a name of their own. Nothing was released."
            )

    def state(self) -> dict[str, Tensor]:
        """The carriers of this step or the last one, as tensors by name."""
        found: dict[str, Tensor] = {}
        for name, slot in self._trained.carried.items():
            if slot.R.numel():
                found |= {f"{name}.L": slot.Lt, f"{name}.R": slot.R}
        return found

    def load(self, state: Mapping[str, Tensor], step: int) -> None:
        """step: the one that comes next, or that has begun."""
        device = self._trained.device
        method: Any = self._trained.plan.method
        for name, slot in self._trained.carried.items():
            if f"{name}.L" in state:
                # where they alternate, the next step sets its own; a thin state is in the coordinates of this one
                sides = method.sides_at(0 if self._thin is None else step)
                slot.set_carriers(state[f"{name}.L"].to(device), state[f"{name}.R"].to(device), sides)

    def load_initial(self, initial: Mapping[str, Tensor]) -> None:
        device = self._trained.device
        self.initial = {k: shard(t.to(device), like=self.initial[k]) for k, t in initial.items()}
