"""Turning carriers: past noise goes along when a carried parameter's carriers change.

Shapes: Lt (r, p), R (r, d); a part of the released vector as slots.CarriedSlot lays it out: At (r, p), then dR (r, d).

What the optimizer is given is G = J(A, dR) = (I - L L^T) A R + L dR (reconstruct.py); with one side released, A R or L dR.
Noise that was added in the coordinates of (L_s, R_s) is therefore the matrix J_s w in the weights, and the vector in the
coordinates of (L_t, R_t) that comes closest to it is J_t^T J_s w, with J^T G = ((I - L L^T) G R^T, L^T G).

Why P = J_t^T J_s lengthens nothing: the two terms of J are orthogonal, because L^T (I - L L^T) = 0, so
|J(A, dR)|^2 = |(I - L L^T) A|^2 + |dR|^2 <= |A|^2 + |dR|^2; and a map and its transpose have the same norm. That holds for
both norms that can be clipped ("intrinsic" releases A, "paper" dL in its place): they differ in what an example adds to the
release, and not in what the release is made into, and P need not mean anything to be safe, only be short.

It rests on L and R being orthonormal, which carriers are only approximately in float32, and hardly at all in bfloat16. So P
is computed in float64 from the nearest orthonormal carriers, and made a little shorter than 1 for the rounding of its result.
Both are fixed before any noise is seen: a correction that looked at the length of w would itself depend on a secret.

Formal guarantees (tests/test_turning.py):
- |P w| <= |w| for every w, whatever the carriers, orthonormal or not; carriers far from it give P = 0
- P is the dense J_t^T J_s, and the identity (to the bit) where carriers and sides stay
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rgp.reconstruct import factors

FARTHEST = 0.25  # an eigenvalue of L^T L may be that far from 1


@dataclass(frozen=True, kw_only=True)
class Frame:
    """The coordinates of one carried parameter: its carriers, and the sides that are released."""

    Lt: Tensor
    R: Tensor
    sides: str = "both"

    def __post_init__(self) -> None:
        if self.sides not in ("both", "left", "right"):
            raise ValueError(f'sides={self.sides!r} must be "both", "left" or "right"')

    @property
    def width(self) -> int:
        left = self.Lt.numel() if self.sides != "right" else 0
        return left + (self.R.numel() if self.sides != "left" else 0)

    def same_as(self, other: Frame) -> bool:
        """Whether the same numbers mean the same matrix: carriers that do not enter J may differ."""
        left = self.sides == "right" or torch.equal(self.R, other.R)
        right = self.sides == "left" or torch.equal(self.Lt, other.Lt)
        return self.sides == other.sides and left and right

    def orthonormal(self) -> Frame | None:
        """The nearest frame with orthonormal carriers, in float64; None if it is not near."""
        Lt, R = _nearest_orthonormal(self.Lt), _nearest_orthonormal(self.R)
        return None if Lt is None or R is None else Frame(Lt=Lt, R=R, sides=self.sides)


class Turn:
    """P of one parameter, from the coordinates of `before` to those of `after`; ranks and sides may differ."""

    def __init__(self, before: Frame, after: Frame) -> None:
        p, d = before.Lt.shape[1], before.R.shape[1]
        if (after.Lt.shape[1], after.R.shape[1]) != (p, d):
            raise ValueError(
                f"carriers of a {p} x {d} matrix cannot turn into those of a "
                f"{after.Lt.shape[1]} x {after.R.shape[1]} one: these are two parameters"
            )
        self.width_before, self.width_after = before.width, after.width
        self.stays = before.same_as(after)
        frames = (None, None) if self.stays else (before.orthonormal(), after.orthonormal())
        self._before, self._after = frames

    def __call__(self, part: Tensor) -> Tensor:
        """P w for this parameter's part (width_before,) of a released vector; a new tensor, unless it stays."""
        if part.shape != (self.width_before,):
            raise ValueError(f"part has shape {tuple(part.shape)}; these coordinates have {self.width_before} numbers")
        if self.stays:
            return part
        if self._before is None or self._after is None:
            return part.new_zeros(self.width_after)
        U, V = _spread(self._before, part.double())
        shorter = 1 - max(4 * torch.finfo(part.dtype).eps, 1e-12)
        return _gather(self._after, U, V).mul_(shorter).to(part.dtype)


class Turning:
    """P of a whole released vector: parts in the order of its layout, a `Turn` or a number of entries that stay.

    >>> Turning([3])(torch.ones(3))
    tensor([1., 1., 1.])
    """

    def __init__(self, parts: Sequence[Turn | int]) -> None:
        self._parts = tuple(parts)
        self.stays = all(isinstance(part, int) or part.stays for part in self._parts)
        self.width_before = sum(part if isinstance(part, int) else part.width_before for part in self._parts)
        self.width_after = sum(part if isinstance(part, int) else part.width_after for part in self._parts)

    def __call__(self, vector: Tensor) -> Tensor:
        """P w; written into `vector` itself if the layout stays."""
        if vector.shape != (self.width_before,):
            raise ValueError(f"vector has shape {tuple(vector.shape)}; the layout has {self.width_before} numbers")
        if self.stays:
            return vector
        widths = [(p, p) if isinstance(p, int) else (p.width_before, p.width_after) for p in self._parts]
        out = vector if all(a == b for a, b in widths) else vector.new_empty(self.width_after)
        at = to = 0
        for part, (before, after) in zip(self._parts, widths, strict=True):
            piece = vector[at : at + before]
            out[to : to + after] = piece if isinstance(part, int) else part(piece)
            at, to = at + before, to + after
        return out


def _spread(frame: Frame, part: Tensor) -> tuple[Tensor, Tensor]:
    """J w as a product of thin matrices, (p, k) and (k, d)."""
    cut = frame.Lt.numel() if frame.sides != "right" else 0
    At = part[:cut].view_as(frame.Lt) if frame.sides != "right" else None
    dR = part[cut:].view_as(frame.R) if frame.sides != "left" else None
    return factors(frame.Lt, frame.R, At, dR)


def _gather(frame: Frame, U: Tensor, V: Tensor) -> Tensor:
    """J^T (U V), without forming U V."""
    pieces = []
    if frame.sides != "right":
        At = (frame.R @ V.T) @ U.T
        if frame.sides == "both":
            At = At - (At @ frame.Lt.T) @ frame.Lt
        pieces.append(At.reshape(-1))
    if frame.sides != "left":
        pieces.append(((frame.Lt @ U) @ V).reshape(-1))
    return torch.cat(pieces)


def _nearest_orthonormal(rows: Tensor) -> Tensor | None:
    """(Y Y^T)^{-1/2} Y in float64, or None where Y is too far from orthonormal for that to be the same carriers."""
    rows = rows.detach().double()
    gram = rows @ rows.T
    if not bool(gram.isfinite().all()):
        return None
    values, vectors = torch.linalg.eigh(gram)
    if bool(((values - 1).abs() > FARTHEST).any()):
        return None
    return (vectors * values.rsqrt()) @ vectors.T @ rows
