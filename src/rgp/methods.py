"""The methods: each a few settings over the one plan (plan.py) and the one engine (step.py).

A method says what a parameter gets by its kind, and how carriers are found. It holds no state and no tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rgp.in_place import ROUNDINGS
from rgp.validate import check_count, check_one_of, check_positive

if TYPE_CHECKING:
    from rgp.powersgd import PowerIteration

Treatment = Literal["carried", "exact", "frozen"]
Kind = Literal["matrix", "head", "bias", "head_bias", "norm", "embedding", "token", "other"]

SIDES = ("both", "left", "right", "alternate")
SOURCES = ("history", "weight", "random", "momentum", "public")
NORMS = ("intrinsic", "paper")
STATES = ("full", "thin")
FALLBACKS = ("loop", "error")
TREATMENTS = ("carried", "exact", "frozen")


@dataclass(frozen=True, kw_only=True)
class Method:
    """What all methods share.

    head_scale: multiplies the exact head's per-example gradient before norm and clip; the noisy sum is divided by it
        afterwards. Without clip and noise the update is unchanged; with them the head takes less of the clipping budget.
    overrides: parameter-name pattern (as in fnmatch) -> "carried", "exact", "frozen" or a rank. Later patterns win.
    fallback: what to do with a trained parameter in an operation without a rule: "loop" over the examples, which is slow
        and exact and says so in a warning, or "error".
    """

    treatments: ClassVar[Mapping[str, Treatment]]
    carries: ClassVar[bool] = False
    private: ClassVar[bool] = True  # whether it is for training with privacy; it may still be run without noise
    residual: ClassVar[bool] = True  # whether the forward pass uses W, and not L R alone

    head_scale: float = 1.0
    overrides: Mapping[str, str | int] = field(default_factory=dict)
    fallback: str = "loop"

    def __post_init__(self) -> None:
        check_positive("head_scale", self.head_scale)
        check_one_of("fallback", self.fallback, FALLBACKS)
        for pattern, value in self.overrides.items():
            if isinstance(value, int) and not isinstance(value, bool):
                check_count(f"overrides[{pattern!r}]", value, least=1)
            else:
                check_one_of(f"overrides[{pattern!r}]", value, TREATMENTS)

    @property
    def name(self) -> str:
        return type(self).__name__.lower()

    def power_iteration(self) -> PowerIteration | None:
        """What replaces released gradients by low-rank approximations, where the method does that."""
        return None

    def to_json(self) -> dict[str, Any]:
        """For a checkpoint; `naming.method_from_json` reads it."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        settings = {k: dict(v) if isinstance(v, Mapping) else v for k, v in found.items()}
        return {"name": type(self).__name__, "fields": settings}


@dataclass(frozen=True)
class RGP(Method):
    """Reparametrized gradient perturbation, Algorithm 1 of the paper. Embedding and position tables of over 10^6 entries
    are frozen, unless overrides say otherwise; `print(make_plan(model, method))` shows what every parameter gets.

    >>> RGP(rank=4, sides="left").rank
    4

    rank: columns of L and rows of R: one number, a dict from parameter-name pattern to number, or "auto" (per
        layer, from the stable rank of the initial weights, at most 16).
    sides: which carrier gradients are released: dL and dR ("both"), one of them, or each in turn ("alternate").
    source: the released state whose principal subspace the carriers span: "history" (W_t - W_0, the paper), "weight",
        "momentum" (the optimizer's), "public" (the gradient of a loss on public data) or "random".
    warmup_steps: steps that use the weight instead of history or momentum. None: a tenth of the run.
    power_iterations: K of Algorithm 2.
    keep: steps for which carriers stay before they are found again.
    norm: what is clipped: "intrinsic" (the norm of the projected gradient) or "paper" (|dL|^2 + |dR|^2).
    state: "full" (the optimizer sees full-size gradients) or "thin": its state of carried weights lives in the coordinates
        that are released, and nothing of full size exists but the weights. SGD, Adam, AdamW and AdamCorrected. History is
        the sum of updates then, as far as the current carriers can represent it. Meant for keep of tens of steps.
    rounding: with state="thin", how updates go into weights of 16 bits: "nearest", "stochastic" (bfloat16; no memory) or
        "compensated" (keeps what was lost, in as many bytes as the weights). Others are not rounded.
    """

    treatments: ClassVar[Mapping[str, Treatment]] = {
        "matrix": "carried",
        "head": "exact",
        "bias": "exact",
        "head_bias": "exact",
        "norm": "exact",
        "embedding": "exact",  # of up to 10^6 entries; larger ones are frozen: LARGEST_EXACT_TABLE in plan.py
        "token": "exact",
        "other": "exact",
    }
    carries: ClassVar[bool] = True

    rank: int | Mapping[str, int] | Literal["auto"] = 8
    sides: str = "both"
    source: str = "history"
    warmup_steps: int | None = None
    power_iterations: int = 1
    norm: str = "intrinsic"
    keep: int = 1
    state: str = "full"
    rounding: str = "nearest"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_of("sides", self.sides, SIDES)
        check_one_of("source", self.source, SOURCES)
        check_one_of("norm", self.norm, NORMS)
        check_count("power_iterations", self.power_iterations, least=1)
        check_count("keep", self.keep, least=1)
        check_one_of("state", self.state, STATES)
        check_one_of("rounding", self.rounding, ROUNDINGS)
        if self.state == "thin" and self.sides == "alternate":
            raise ValueError(
                "sides='alternate' releases another side at every step, and state='thin' would forget its moments each time; "
                "choose one side or both, or state='full'"
            )
        if self.state == "full" and self.rounding != "nearest":
            raise ValueError(
                f"rounding={self.rounding!r} goes with state='thin': with 'full' the optimizer itself rounds"
            )
        if self.warmup_steps is not None:
            check_count("warmup_steps", self.warmup_steps, least=0)
        if isinstance(self.rank, Mapping):
            for pattern, rank in self.rank.items():
                check_count(f"rank[{pattern!r}]", rank, least=1)
        elif self.rank != "auto":
            check_count("rank", self.rank, least=1)

    def sides_at(self, step: int) -> str:
        """The side or sides released at this step (0 is the first)."""
        if self.sides == "alternate":
            return "left" if step % 2 == 0 else "right"
        return self.sides


@dataclass(frozen=True, kw_only=True)
class DPSGD(Method):
    """Every parameter trained, and exact, embeddings and positions too: differentially private SGD (Abadi et al. 2016), in
    its cheap form."""

    treatments: ClassVar[Mapping[str, Treatment]] = {**RGP.treatments, "matrix": "exact"}


@dataclass(frozen=True)
class RGPRandom(RGP):
    """RGP with random orthonormal carriers: the control that every claim about a subspace needs."""

    source: str = "random"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source != "random":
            raise ValueError(
                f"RGPRandom has random carriers by definition; got source={self.source!r}, use rgp.RGP for it"
            )


@dataclass(frozen=True, kw_only=True)
class LinearProbe(Method):
    """Only the classification head, exact; its bias too."""

    treatments: ClassVar[Mapping[str, Treatment]] = {
        **dict.fromkeys(RGP.treatments, "frozen"),
        "head": "exact",
        "head_bias": "exact",
    }


@dataclass(frozen=True, kw_only=True)
class BiTFiT(Method):
    """Biases and the classification head (Bu et al. 2022); all other weights frozen."""

    treatments: ClassVar[Mapping[str, Treatment]] = {**LinearProbe.treatments, "bias": "exact"}


@dataclass(frozen=True, kw_only=True)
class NonPrivate(DPSGD):
    """Everything trained, nothing protected: for comparison. Runs with noise_multiplier=0 and clip=None only, as plain
    training does: without per-example gradients."""

    private: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class DPPowerSGD(DPSGD):
    """DP-SGD whose noisy gradient is replaced by its rank-r approximation, found by PowerSGD's power iteration.

    rank: of the approximation.
    error_feedback: add what an approximation left out to the next gradient; with noise, that is mostly noise.
    """

    rank: int = 8
    error_feedback: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("rank", self.rank, least=1)

    def power_iteration(self) -> PowerIteration:
        from rgp.powersgd import PowerIteration

        return PowerIteration(self.rank, error_feedback=self.error_feedback)


@dataclass(frozen=True, kw_only=True)
class PowerSGD(DPPowerSGD):
    """PowerSGD (Vogels et al. 2019) without privacy: noise_multiplier=0 and clip=None only."""

    private: ClassVar[bool] = False
    error_feedback: bool = True


@dataclass(frozen=True)
class ResidualOff(RGP):
    """The paper's ablation: the forward pass uses L R alone in place of W, the update goes to W. It learns nothing, and
    runs with noise_multiplier=0 only."""

    private: ClassVar[bool] = False
    residual: ClassVar[bool] = False
