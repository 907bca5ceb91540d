"""Slots of a graph that is being made: they keep what rules give them, until the sink takes it."""

from __future__ import annotations

import copy
from dataclasses import dataclass

from torch import Tensor

from rgp.errors import UnsupportedError
from rgp.slots import CarriedSlot, DeferredSlot, DenseSlot, Slot, Use


class Recorder(Slot):
    """A slot that keeps what it is given until the sink takes it."""

    taken = False

    def gifts(self) -> list[Gift]:
        """What it was given."""
        raise NotImplementedError

    def take(self) -> list[Gift]:
        self.taken = True
        return self.gifts()

    def check_open(self) -> None:
        """Nothing may come after the sink: it would be lost."""
        if self.taken:
            raise went_around(self.entry.name)


@dataclass
class Gift:
    """Something that a rule gave to a slot: tensors by name, and what they belong to."""

    tensors: dict[str, Tensor]
    use: Use | None = None  # of a deferred slot, without its tensors


class RecordedCarried(Recorder, CarriedSlot):
    """Records dL_i transposed and dR_i, summed over the uses of the parameter."""

    def __init__(self, real: CarriedSlot, Lt: Tensor, R: Tensor) -> None:
        super().__init__(real.entry, intrinsic=real.intrinsic)
        self.set_carriers(Lt, R, real.sides)
        self._found: dict[str, Tensor] = {}

    def keep_thin(self, dLt: Tensor | None, dR: Tensor | None, *, taps_first: bool = False) -> None:
        self.check_open()
        dR = self._reordered(dR, taps_first=False) if taps_first and dR is not None else dR
        for side, value in (("dLt", dLt), ("dR", dR)):
            if value is not None:
                self._found[side] = self._found[side] + value if side in self._found else value

    def gifts(self) -> list[Gift]:
        return [Gift(self._found)] if self._found else []


class RecordedDense(Recorder, DenseSlot):
    """Records G_i, summed over the uses of the parameter."""

    def __init__(self, real: Slot, m: int) -> None:
        super().__init__(real.entry)
        self._m, self._found = m, None

    def add_dense(self, gradients: Tensor) -> None:
        self.check_open()
        gradients = gradients.reshape(self._m, -1)
        self._found = gradients if self._found is None else self._found + gradients

    def gifts(self) -> list[Gift]:
        return [] if self._found is None else [Gift({"gradients": self._found})]


class RecordedDeferred(Recorder, DeferredSlot):
    """Records the uses of the parameter."""

    def __init__(self, real: DeferredSlot) -> None:
        super().__init__(real.entry)
        self.uses = []

    def add_use(self, use: Use) -> None:
        self.check_open()
        self.uses.append(use)

    def gifts(self) -> list[Gift]:
        found = []
        for use in self.uses:
            tensors = {name: value for name, value in vars(use).items() if isinstance(value, Tensor)}
            rest = copy.copy(use)
            vars(rest).update(dict.fromkeys(tensors))
            found.append(Gift(tensors, rest))
        return found


def give(slot: Slot, gift: Gift, tensors: dict[str, Tensor]) -> None:
    """What a recorder took, to the run's own slot."""
    if isinstance(slot, CarriedSlot):
        slot.keep_thin(tensors.get("dLt"), tensors.get("dR"))
    elif gift.use is None:
        slot.add_dense(tensors["gradients"])
    else:
        use = copy.copy(gift.use)
        vars(use).update(tensors)
        slot.add_use(use)  # type: ignore[attr-defined]


def went_around(name: str) -> UnsupportedError:
    return UnsupportedError(
        f"parameter {name!r} has a gradient in the compiled graph that no rule has seen, so it could not be clipped per "
        "example. Freeze it, or leave the module that uses it uncompiled."
    )


def as_port(tensor: Tensor) -> Tensor:
    """Gradients have no integers; float64 holds those of any table exactly."""
    return tensor if tensor.is_floating_point() else tensor.double()
