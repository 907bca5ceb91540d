"""What the `clip` argument may be: a number, or one of these rules. Each says how far one example can move the sum.

Flat (a number C)  g min(1, C / |g|): at most C
AutoClip           C g / (|g| + gamma): everyone is brought to nearly C, so C is only a scale
GroupClip          each group of parameters clipped to its own C_k: at most sqrt(sum C_k^2) jointly
AdaptiveClip       flat, and C follows a quantile of the norms (Andrew et al. 2021). The noisy count that this takes is
                   one more coordinate of the same release, so a drawn batch stays one Gaussian event.

A rule answers four questions, and nobody asks what kind of rule it is: which group a parameter belongs to (`groups`), how
one step clips (`bound`), what C to begin with (`first`), and which C follows from a release (`after`). A new rule is a class
here, in `RULES`, and a name in `rgp/__init__.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from rgp.validate import check_positive, per_step

SMALLEST, LARGEST = 1e-10, 1e10  # outside of this, squares of float32 gradients under- or overflow where they matter


@dataclass(frozen=True)
class Bound:
    """How one step clips, and what follows for the noise. Clipping, noise and ledger all read it here.

    norms: C of each group (one group, unless groups are clipped separately); None without clipping.
    gamma: that of automatic clipping; None otherwise.
    count_weight: the weight of the count in its released coordinate; 0 without one.
    """

    norms: tuple[float, ...] | None
    gamma: float | None = None
    count_weight: float = 0.0

    @property
    def clip(self) -> float | None:
        """C, the largest norm of one example's gradient."""
        return None if self.norms is None else math.hypot(*self.norms)

    @property
    def sensitivity(self) -> float:
        """By how much one example can move the released sum; inf without clipping (never multiplied by noise then)."""
        return math.inf if self.norms is None else math.hypot(*self.norms, self.count_weight / 2)


def clip_factors(
    squares: Tensor, clip: float | None, dtype: torch.dtype = torch.float64, *, gamma: float | None = None
) -> Tensor:
    """min(1, clip / norm), or clip / (norm + gamma), less what rounding can add; 0 where the norm is not finite or too
    large for a factor."""
    norms, info = squares.sqrt(), torch.finfo(dtype)
    if clip is None:
        factors = torch.ones_like(norms)
    elif gamma is not None:
        factors = clip * (1 - 16 * info.eps) / (norms + gamma)
    else:
        factors = (clip * (1 - 16 * info.eps) / norms).clamp_max(1.0)
    return torch.where(squares.isfinite() & (factors >= info.tiny), factors, torch.zeros_like(factors)).to(dtype)


class ClipRule:
    """What all rules share: one group, a C that nothing changes."""

    adapts = False  # whether C reacts to what was released; it may, because the noise is sigma C

    @property
    def first(self) -> float | None:
        """C of the first step: the joint one of groups, the initial one of an adaptive rule; None without clipping."""
        raise NotImplementedError

    def planned(self, step: int) -> float | None:
        """C of a step as far as it is known beforehand."""
        return self.first

    def bound(self, step: int, *, sigma: float, batch_size: int, adapted: float | None = None) -> Bound:
        """How this step clips. `adapted`: the C that the rule has arrived at; None before the first release."""
        return Bound(None if (norm := self.planned(step)) is None else (norm,))

    def groups(self, names: Sequence[str]) -> list[int]:
        """Which group each parameter belongs to."""
        return [0] * len(names)

    def after(self, bound: Bound, released: Tensor, batch_size: int) -> float | None:
        """C of the next step, from this step's noisy sum; None where it does not react."""
        return None

    def to_json(self) -> dict[str, Any] | None:
        return {type(self).__name__: {f.name: getattr(self, f.name) for f in fields(self)}}  # type: ignore[arg-type]


@dataclass(frozen=True)
class FlatClip(ClipRule):
    """C of each step, from a number or a schedule; None: no clipping, without noise only."""

    norms: tuple[float, ...] | None

    @property
    def first(self) -> float | None:
        return self.planned(0)

    def planned(self, step: int) -> float | None:
        return None if self.norms is None else self.norms[step]

    def to_json(self) -> None:
        return None  # a checkpoint keeps the norms themselves


@dataclass(frozen=True)
class AutoClip(ClipRule):
    """Automatic clipping (Bu et al. 2022): every example's gradient g becomes norm * g / (|g| + gamma).

    norm: what |g| comes close to; it scales both the update and its noise.
    gamma: keeps tiny gradients tiny.
    """

    norm: float = 1.0
    gamma: float = 0.01

    def __post_init__(self) -> None:
        _check_norm("AutoClip's norm", self.norm)
        if not check_positive("AutoClip's gamma", self.gamma) >= SMALLEST:
            raise ValueError(
                f"AutoClip's gamma must be at least {SMALLEST:g}, or rounding dominates tiny gradients; got {self.gamma!r}"
            )

    @property
    def first(self) -> float:
        return self.norm

    def bound(self, step: int, *, sigma: float, batch_size: int, adapted: float | None = None) -> Bound:
        return Bound((self.first,), gamma=self.gamma)


@dataclass(frozen=True)
class GroupClip(ClipRule):
    """Clip groups of parameters separately: parameter-name pattern (as in fnmatch) -> that group's largest norm.

    The first pattern that matches counts; end with "*". Noise is sigma times the joint sensitivity sqrt(sum C_k^2).
    """

    norms: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.norms:
            raise ValueError("GroupClip needs at least one pattern, such as GroupClip({'head*': 0.1, '*': 1.0})")
        for pattern, norm in self.norms.items():
            _check_norm(f"GroupClip's {pattern!r}", norm)

    @property
    def first(self) -> float:
        return math.hypot(*self.norms.values())

    def bound(self, step: int, *, sigma: float, batch_size: int, adapted: float | None = None) -> Bound:
        return Bound(tuple(self.norms.values()))

    def groups(self, names: Sequence[str]) -> list[int]:
        patterns = list(self.norms)
        found = [next((k for k, p in enumerate(patterns) if fnmatchcase(name, p)), None) for name in names]
        for name, group in zip(names, found, strict=True):
            if group is None:
                raise ValueError(f"GroupClip has no pattern for {name!r}; add a '*' pattern for the rest")
        for k, pattern in enumerate(patterns):
            if k not in found:
                raise ValueError(f"GroupClip's pattern {pattern!r} is left with no trained parameter; leave it out")
        return [group for group in found if group is not None]


@dataclass(frozen=True)
class AdaptiveClip(ClipRule):
    """C follows a quantile of the per-example norms: C <- C exp(-rate (b - quantile)), b the noisy share below C.

    initial: C of the first step.
    quantile: the share of examples that should not be clipped.
    rate: how fast C moves.
    count_noise: standard deviation of the noise on the count of examples below C. None: a twentieth of the expected batch,
        and at least 2 sigma. The gradients' noise grows a little, so that both together are one event of noise sigma.
    """

    adapts = True

    initial: float = 1.0
    quantile: float = 0.5
    rate: float = 0.2
    count_noise: float | None = None

    def __post_init__(self) -> None:
        _check_norm("AdaptiveClip's initial", self.initial)
        if not 0 < self.quantile < 1:
            raise ValueError(f"AdaptiveClip's quantile must be between 0 and 1; got {self.quantile!r}")
        check_positive("AdaptiveClip's rate", self.rate)
        if self.count_noise is not None:
            check_positive("AdaptiveClip's count_noise", self.count_noise)

    @property
    def first(self) -> float:
        return self.initial

    def bound(self, step: int, *, sigma: float, batch_size: int, adapted: float | None = None) -> Bound:
        """With a weight w of the count such that noise s = sigma sqrt(C^2 + (w/2)^2) on it is count_noise in examples.

        With s = w count_noise this is 1/sigma^2 = (C/s)^2 + ((1/2)/count_noise)^2: two quantities of one draw, one event.
        """
        norm = self.initial if adapted is None else adapted
        if sigma == 0:
            return Bound((norm,), count_weight=norm)
        noise = max(batch_size / 20, 2 * sigma) if self.count_noise is None else self.count_noise
        room = 1 - (sigma / (2 * noise)) ** 2
        if room <= 0:
            raise ValueError(
                f"AdaptiveClip's count_noise {noise:g} must be above half the noise multiplier {sigma:g}: the count alone "
                "would spend more than a step may"
            )
        return Bound((norm,), count_weight=sigma * norm / math.sqrt(room) / noise)

    def after(self, bound: Bound, released: Tensor, batch_size: int) -> float:
        assert bound.clip is not None
        return self.next(bound.clip, released[-1].item() / bound.count_weight, batch_size)

    def next(self, norm: float, noisy_count: float, batch_size: int) -> float:
        """The C of the next step. `noisy_count` is the sum over the batch of 1/2 (not clipped) or -1/2, with noise."""
        share = min(1.0, max(0.0, noisy_count / batch_size + 0.5))
        return min(LARGEST, max(SMALLEST, norm * math.exp(-self.rate * (share - self.quantile))))


RULES: dict[str, type[ClipRule]] = {kind.__name__: kind for kind in (AutoClip, GroupClip, AdaptiveClip)}


def as_rule(clip: float | Callable[[int], float] | ClipRule | None, steps: int) -> ClipRule:
    """The `clip` argument as a rule."""
    if isinstance(clip, ClipRule):
        return clip
    if clip is None:
        return FlatClip(None)
    inside = f"from {SMALLEST:g} to {LARGEST:g}, a rule such as rgp.AutoClip(), or None without noise"
    return FlatClip(per_step("clip", clip, steps, lambda c: SMALLEST <= c <= LARGEST, inside))


def rule_from_json(content: Mapping[str, Any] | None, norms: tuple[float, ...] | None) -> ClipRule:
    """The inverse of `to_json`; `norms` are those of a flat rule."""
    if content is None:
        return FlatClip(norms)
    ((name, values),) = content.items()
    if name not in RULES:
        raise ValueError(f"clip rule {name!r} is not one of {', '.join(RULES)}: a newer version of rgp wrote this")
    return RULES[name](**values)


def _check_norm(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not SMALLEST <= value <= LARGEST:
        raise ValueError(f"{name} must be from {SMALLEST:g} to {LARGEST:g}; got {value!r}")
