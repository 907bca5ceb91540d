"""What the `clip` argument may be: a number, or one of these rules. Each says how far one example can move the sum.

Flat (a number C)  g min(1, C / |g|): at most C
AutoClip           C g / (|g| + gamma): everyone is brought to nearly C, so C is only a scale
GroupClip          each group of parameters clipped to its own C_k: at most sqrt(sum C_k^2) jointly
AdaptiveClip       flat, and C follows a quantile of the norms (Andrew et al. 2021). The noisy count that this takes is
                   one more coordinate of the same release, so a drawn batch stays one Gaussian event.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

SMALLEST, LARGEST = 1e-10, 1e10  # outside of this, squares of float32 gradients under- or overflow where they matter


def _norm(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not SMALLEST <= value <= LARGEST:
        raise ValueError(f"{name} must be from {SMALLEST:g} to {LARGEST:g}; got {value!r}")


@dataclass(frozen=True)
class AutoClip:
    """Automatic clipping (Bu et al. 2022): every example's gradient g becomes norm * g / (|g| + gamma).

    norm: what |g| comes close to; it scales the update and its noise alike.
    gamma: keeps tiny gradients tiny.
    """

    norm: float = 1.0
    gamma: float = 0.01

    def __post_init__(self) -> None:
        _norm("AutoClip's norm", self.norm)
        if not 0 < self.gamma < math.inf:
            raise ValueError(f"AutoClip's gamma must be positive and finite; got {self.gamma!r}")


@dataclass(frozen=True)
class GroupClip:
    """Clip groups of parameters apart: parameter-name pattern (as in fnmatch) -> that group's largest norm.

    The first pattern that matches counts; end with "*". Noise is sigma times the joint sensitivity sqrt(sum C_k^2).
    """

    norms: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.norms:
            raise ValueError("GroupClip needs at least one pattern, such as GroupClip({'head*': 0.1, '*': 1.0})")
        for pattern, norm in self.norms.items():
            _norm(f"GroupClip's {pattern!r}", norm)


@dataclass(frozen=True)
class AdaptiveClip:
    """C follows a quantile of the per-example norms: C <- C exp(-rate (b - quantile)), b the noisy share below C.

    initial: C of the first step.
    quantile: the share of examples that should not be clipped.
    rate: how fast C moves.
    count_noise: standard deviation of the noise on the count of examples below C. None: a twentieth of the expected batch,
        and at least 2 sigma. The gradients' noise grows a little, so that both together are one event of noise sigma.
    """

    initial: float = 1.0
    quantile: float = 0.5
    rate: float = 0.2
    count_noise: float | None = None

    def __post_init__(self) -> None:
        _norm("AdaptiveClip's initial", self.initial)
        if not 0 < self.quantile < 1:
            raise ValueError(f"AdaptiveClip's quantile must be between 0 and 1; got {self.quantile!r}")
        if not 0 < self.rate < math.inf:
            raise ValueError(f"AdaptiveClip's rate must be positive and finite; got {self.rate!r}")
        if self.count_noise is not None and not 0 < self.count_noise < math.inf:
            raise ValueError(f"AdaptiveClip's count_noise must be positive and finite; got {self.count_noise!r}")

    def next(self, norm: float, noisy_count: float, batch_size: int) -> float:
        """The C of the next step. `noisy_count` is the sum over the batch of 1/2 (not clipped) or -1/2, with noise."""
        share = min(1.0, max(0.0, noisy_count / batch_size + 0.5))
        return min(LARGEST, max(SMALLEST, norm * math.exp(-self.rate * (share - self.quantile))))


ClipRule = AutoClip | GroupClip | AdaptiveClip
CLIP_RULES: dict[str, Any] = {kind.__name__: kind for kind in (AutoClip, GroupClip, AdaptiveClip)}


@dataclass(frozen=True)
class Bound:
    """How one step clips, and what follows for the noise. Clipping, noise and ledger all read it here.

    norms: C of each group (one group, unless groups are clipped apart); None without clipping.
    gamma: of automatic clipping; None otherwise.
    count_weight: what a half counts in the released coordinate of the count; 0 without one.
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


def first_norm(rule: ClipRule) -> float:
    """C of the first step: the joint one of groups, the initial one of an adaptive rule."""
    if isinstance(rule, GroupClip):
        return math.hypot(*rule.norms.values())
    return rule.norm if isinstance(rule, AutoClip) else rule.initial


def group_of(rule: ClipRule | None, names: Sequence[str]) -> list[int]:
    """Which group each parameter belongs to; all in one, unless groups are clipped apart."""
    if not isinstance(rule, GroupClip):
        return [0] * len(names)
    patterns = list(rule.norms)
    found = [next((k for k, p in enumerate(patterns) if fnmatchcase(name, p)), None) for name in names]
    for name, group in zip(names, found, strict=True):
        if group is None:
            raise ValueError(f"GroupClip has no pattern for {name!r}; add a '*' pattern for the rest")
    for k, pattern in enumerate(patterns):
        if k not in found:
            raise ValueError(f"GroupClip's pattern {pattern!r} is left with no trained parameter; leave it out")
    return [group for group in found if group is not None]


def adaptive_bound(rule: AdaptiveClip, norm: float, sigma: float, batch_size: int) -> Bound:
    """The count's weight w such that noise s = sigma sqrt(C^2 + (w/2)^2) on it is count_noise in units of examples.

    With s = w count_noise this is 1/sigma^2 = (C/s)^2 + ((1/2)/count_noise)^2: two quantities of one draw, one event.
    """
    if sigma == 0:
        return Bound((norm,), count_weight=norm)
    noise = max(batch_size / 20, 2 * sigma) if rule.count_noise is None else rule.count_noise
    room = 1 - (sigma / (2 * noise)) ** 2
    if room <= 0:
        raise ValueError(
            f"AdaptiveClip's count_noise {noise:g} must be above half the noise multiplier {sigma:g}: the count alone "
            "would spend more than a step may"
        )
    return Bound((norm,), count_weight=sigma * norm / math.sqrt(room) / noise)
