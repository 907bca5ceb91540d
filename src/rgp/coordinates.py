"""What the numbers of a release mean, so that past noise can follow when carriers turn: columns -> carriers, in order."""

from __future__ import annotations

from dataclasses import dataclass

from rgp.clipping import Gradients
from rgp.slots import CarriedSlot
from rgp.turning import Frame, Turn, Turning


@dataclass(frozen=True)
class Coordinates:
    """Parts of a released vector in the order of its columns: (name, carriers), or (name, how many numbers).

    Columns without a parameter, which fill up a block or hold the count of an adaptive clip norm, mean the same at every step.
    """

    parts: tuple[tuple[str, Frame | int], ...]

    @classmethod
    def of(cls, gradients: Gradients) -> Coordinates:
        """Those of the current step."""
        slots = {slot.entry.name: slot for slot in gradients.slots}
        parts: list[tuple[str, Frame | int]] = []
        end = 0
        for name, columns in sorted(gradients.where.items(), key=lambda item: item[1].start):
            if columns.start > end:
                parts.append(("", columns.start - end))
            slot, width = slots[name], columns.stop - columns.start
            parts.append(
                (name, Frame(Lt=slot.Lt, R=slot.R, sides=slot.sides) if isinstance(slot, CarriedSlot) else width)
            )
            end = columns.stop
        if gradients.size > end:
            parts.append(("", gradients.size - end))
        return cls(tuple(parts))

    def turned_into(self, after: Coordinates) -> Turning | None:
        """P from these to those; None where the columns are other ones and nothing can be said."""
        moves: list[Turn | int] = []
        if [name for name, _ in self.parts] != [name for name, _ in after.parts]:
            return None
        for (_, here), (_, there) in zip(self.parts, after.parts, strict=True):
            if isinstance(here, Frame) and isinstance(there, Frame):
                moves.append(Turn(here, there))
            elif here == there and isinstance(here, int):
                moves.append(here)
            else:
                return None
        return Turning(moves)
