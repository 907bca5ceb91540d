"""Thin state: between two turns of the carriers, the optimizer of a carried weight works in the released coordinates.

Shapes: W (p, d); Lt (r, p), R (r, d); a released part as slots.CarriedSlot lays it out: At (r, p), then dR (r, d).

During optimizer.step() a stand-in of r (p + d) zeros takes the place of each carried weight in its parameter
group, with the noisy released part as its gradient. What the step makes of the zeros is the update U, and the weight gets

    W <- (1 - rate x decay) W + (I - L L^T) U_A R + L U_R

in place, layer by layer (in_place.py). So no gradient, moment or W_0 of full size exists. Between steps the optimizer looks
as its owner made it: its groups hold the weights, and their state, which is thin, is found under them; `state_dict` and
schedulers need not know. Element-wise optimizers (Adam) are element-wise in these coordinates.

When carriers turn, first moments and the sum of updates go along by P = J_t^T J_s (turning.py), and every second moment
becomes the mean over its parameter: in the released coordinates all entries have the same noise, so that the mean is
nearly right for all, and a direction that is new has one from the beginning.

All of it is post-processing: nothing private is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rgp import in_place
from rgp.errors import UnsupportedError
from rgp.optimizers import AdamCorrected
from rgp.reconstruct import Factors, factors
from rgp.sharding import is_cut_by_rows, local_rows
from rgp.slots import CarriedSlot
from rgp.streams import Streams
from rgp.torchstate import is_sharded, momentum_of
from rgp.trained import TrainedModel
from rgp.turning import Frame, Turn

FIRST = ("momentum_buffer", "exp_avg")  # moments that are linear in the gradients
SECOND = ("exp_avg_sq", "max_exp_avg_sq")  # of their squares
OPTIMIZERS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, AdamCorrected)
ROUNDING_PART = 2  # part of the carriers' stream; 0 is for the carriers, 1 for the public loss


class ThinState:
    """The stand-ins of the carried weights, and what is kept for them between steps.

    sums: name -> the sum of updates, carried along when carriers turn: what "history" means without W_0.
    lost: name -> what rounding left out so far, for rounding="compensated".
    """

    def __init__(self, trained: TrainedModel, optimizer: torch.optim.Optimizer, streams: Streams) -> None:
        self._trained, self._optimizer, self._streams = trained, optimizer, streams
        self.turned_at = -1  # the step whose carriers are in place: to find them once more would be to turn twice
        self.sums: dict[str, Tensor] = {}
        self.lost: dict[str, Tensor] = {}
        self._stand_ins: dict[int, nn.Parameter] = {}  # id of the weight -> its stand-in
        self._ids: set[int] = set()  # of stand-ins
        rounding = getattr(trained.plan.method, "rounding", "nearest")
        check_optimizer(optimizer, [trained.parameters[name] for name in trained.carried])
        for name in trained.carried:
            weight = trained.parameters[name]
            if rounding == "stochastic" and weight.dtype == torch.float16:
                raise UnsupportedError(
                    f"rounding='stochastic' is for bfloat16 weights, and {name!r} has float16; use rounding='compensated'"
                )
            if is_sharded(weight) and not is_cut_by_rows(weight):
                raise UnsupportedError(
                    f"parameter {name!r} is not sharded by rows (shard_placement_fn), and a thin state is added to "
                    "rows. Leave shard_placement_fn out, or use state='full'."
                )
            if rounding == "compensated" and is_sharded(weight):
                raise UnsupportedError(
                    f"rounding='compensated' cannot be used with weights that fully_shard has sharded ({name!r}); use "
                    "rounding='stochastic', which keeps nothing"
                )
            if rounding == "compensated" and weight.element_size() == 2:
                self.lost[name] = torch.zeros_like(weight.detach())
        self._stochastic = rounding == "stochastic"

    # ------------------------------------------------------------------ a step

    def check(self) -> None:
        """Refuse, before a release, what a step could not use it for."""
        check_optimizer(self._optimizer)
        for name, slot in self._trained.carried.items():
            if slot.derive is not None:
                raise UnsupportedError(
                    f"parameter {name!r} is used through derived(weight, f), whose update has full size: it cannot have a thin "
                    f"state. Use state='full', or overrides={{{name!r}: 'exact'}}. Nothing of this batch was released."
                )

    def set_gradient(self, name: str, part: Tensor) -> None:
        """The noisy released part, divided by the batch size, is the stand-in's gradient."""
        weight = self._trained.parameters[name]
        stand_in = self._stand_ins.get(id(weight))
        if stand_in is None:
            stand_in = self._make(weight, part.numel())
        stand_in.grad = part

    def stands_in(self, parameter: Tensor) -> bool:
        return id(parameter) in self._ids

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """Put stand-ins in place of the weights, in groups of their own without decay; state goes to them and back."""
        optimizer, stand_ins = self._optimizer, self._stand_ins
        groups, whole = [], optimizer.param_groups
        for group in whole:
            thin = [stand_ins[id(p)] for p in group["params"] if id(p) in stand_ins]
            rest = [p for p in group["params"] if id(p) not in stand_ins]
            groups += [{**group, "params": rest}] if rest else []
            groups += [{**group, "params": thin, "weight_decay": 0.0}] if thin else []
        self._move_state(to_stand_ins=True)
        optimizer.param_groups = groups
        try:
            yield
        finally:
            optimizer.param_groups = whole
            self._move_state(to_stand_ins=False)

    def load_optimizer(self, state: Mapping[str, Any]) -> None:
        """optimizer.load_state_dict, which brings state to the kind of number of its parameter: of the stand-in, here."""
        self._make_stand_ins(state)
        stand_ins = self._stand_ins
        weights: dict[int, Tensor] = {}
        for group in self._optimizer.param_groups:
            weights |= {id(stand_ins[id(p)]): p for p in group["params"] if id(p) in stand_ins}
            group["params"] = [stand_ins.get(id(p), p) for p in group["params"]]
        try:
            self._optimizer.load_state_dict(dict(state))
        finally:
            for group in self._optimizer.param_groups:
                group["params"] = [weights.get(id(p), p) for p in group["params"]]
            self._move_state(to_stand_ins=False)

    def _make_stand_ins(self, state: Mapping[str, Any]) -> None:
        held = [p for group in self._optimizer.param_groups for p in group["params"]]
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        kept = {id(p): state["state"].get(number, {}) for number, p in zip(numbers, held, strict=True)}
        for name in self._trained.carried:
            weight = self._trained.parameters[name]
            widths = [t.numel() for key, t in kept[id(weight)].items() if key in (*FIRST, *SECOND) and t is not None]
            if widths:
                self._make(weight, widths[0])

    def _make(self, weight: Tensor, width: int) -> nn.Parameter:
        stand_in = nn.Parameter(torch.zeros(width, dtype=self._trained.dtype, device=weight.device))
        self._stand_ins[id(weight)] = stand_in
        self._ids.add(id(stand_in))
        return stand_in

    def _move_state(self, *, to_stand_ins: bool) -> None:
        state = self._optimizer.state
        for name in self._trained.carried:
            weight = self._trained.parameters[name]
            if (stand_in := self._stand_ins.get(id(weight))) is not None:
                source, target = (weight, stand_in) if to_stand_ins else (stand_in, weight)
                if source in state:
                    state[target] = state.pop(source)

    @torch.no_grad()
    def apply(self, step: int) -> None:
        """What the optimizer made of the zeros goes into the weights, which decay on the way."""
        groups = {id(p): group for group in self._optimizer.param_groups for p in group["params"]}
        for i, (name, slot) in enumerate(self._trained.carried.items()):
            weight = self._trained.parameters[name]
            stand_in = self._stand_ins[id(weight)]
            group, update = groups[id(weight)], stand_in.detach()
            keep = 1 - float(group["lr"]) * float(group.get("weight_decay", 0.0))
            if name not in self.sums:
                self.sums[name] = torch.zeros_like(update)
            self.sums[name] += update
            generator = None
            if self._stochastic and weight.dtype == torch.bfloat16:
                numbers = self._streams.generator("carriers", step, part=ROUNDING_PART + i)
                generator = in_place.generator_on(weight.device, int(numbers.integers(0, 2**63 - 1)))
            left, right = _factors(slot, update)
            self._add(weight, left, right, keep, generator, self.lost.get(name))
            update.zero_()
            stand_in.grad = None

    def _add(self, weight: Any, left: Tensor, right: Tensor, keep: float, generator: Any, lost: Tensor | None) -> None:
        left = local_rows(left, like=weight)
        mine = weight.detach().to_local() if is_sharded(weight) else weight.detach()
        matrix = mine.view(len(mine), -1)
        in_place.add_product(
            matrix, left, right, keep=keep, generator=generator, lost=None if lost is None else lost.flatten(1)
        )

    # ------------------------------------------------------------------ carriers that turn

    def history(self, name: str) -> Factors | None:
        """The sum of updates as a product of thin matrices, for the power method."""
        slot = self._trained.carried[name]
        return Factors(*_factors(slot, self.sums[name])) if name in self.sums else None

    def momentum(self, name: str) -> Factors | None:
        moment = momentum_of(self._optimizer, self._trained.parameters[name])
        return None if moment is None else Factors(*_factors(self._trained.carried[name], moment))

    @torch.no_grad()
    def turn(self, name: str, Lt: Tensor, R: Tensor, sides: str) -> None:
        """State in the coordinates of the carriers that are about to be set."""
        slot = self._trained.carried[name]
        if not slot.R.numel():
            return
        turn = Turn(Frame(Lt=slot.Lt, R=slot.R, sides=slot.sides), Frame(Lt=Lt, R=R, sides=sides))
        if turn.stays:
            return
        state = self._optimizer.state.get(self._trained.parameters[name], {})
        for key in FIRST:
            if isinstance(state.get(key), Tensor):
                state[key].copy_(turn(state[key]))
        for key in SECOND:
            if isinstance(state.get(key), Tensor):
                state[key].fill_(state[key].mean())
        if name in self.sums:
            self.sums[name] = turn(self.sums[name])

    # ------------------------------------------------------------------ checkpoints

    def tensors(self) -> dict[str, Tensor]:
        return {
            **{f"{name}.sum": t for name, t in self.sums.items()},
            **{f"{name}.lost": t for name, t in self.lost.items()},
        }

    def load(self, tensors: Mapping[str, Tensor], turned_at: int) -> None:
        device = self._trained.device
        self.turned_at = turned_at
        for kept, ending in ((self.sums, ".sum"), (self.lost, ".lost")):
            kept |= {k.removesuffix(ending): t.to(device) for k, t in tensors.items() if k.endswith(ending)}


def check_optimizer(optimizer: torch.optim.Optimizer, carried: list[Tensor] | None = None) -> None:
    """Its state can be moved between coordinates, and its decay does not go through its moments.

    carried: weights that must have no state yet; what they have would be of full size.
    """
    kind = type(optimizer)
    if kind not in OPTIMIZERS:
        known = ", ".join(k.__name__ for k in OPTIMIZERS)
        raise UnsupportedError(
            f"state='thin' does not know how the state of {kind.__name__} goes along when carriers turn; it does for {known}. "
            "Use one of them, or state='full'."
        )
    for group in optimizer.param_groups:
        decay = float(group.get("weight_decay", 0.0))
        decoupled = kind in (torch.optim.AdamW, AdamCorrected) or bool(group.get("decoupled_weight_decay"))
        through = float(group["momentum"]) != 0 if kind is torch.optim.SGD else not decoupled
        if decay and through:
            raise UnsupportedError(
                f"weight_decay={decay} of {kind.__name__} is added to the gradient and goes through the moments, which for a "
                "whole weight have full size. With state='thin' use AdamW, or SGD without momentum, or weight_decay=0."
            )
    if any(optimizer.state.get(weight) for weight in carried or ()):
        raise UnsupportedError(
            f"the {kind.__name__} has taken steps already, and its moments have full size; with state='thin' begin with a "
            "new one"
        )


def _factors(slot: CarriedSlot, part: Tensor) -> tuple[Tensor, Tensor]:
    """J of a vector in this slot's coordinates, as two thin matrices."""
    entry = slot.entry
    cut = entry.rank * entry.p if slot.needs_left else 0
    At = part[:cut].view(entry.rank, entry.p) if slot.needs_left else None
    dR = part[cut:].view(entry.rank, entry.d) if slot.needs_right else None
    return factors(slot.Lt.to(part.dtype), slot.R.to(part.dtype), At, dR)
