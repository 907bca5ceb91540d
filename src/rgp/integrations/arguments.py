"""`PrivacyArguments`: what private training needs besides `TrainingArguments`, and which of the latter it refuses."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from rgp import naming
from rgp.accountants import ACCOUNTANTS, accountant_help
from rgp.methods import NORMS, SIDES, SOURCES, Method

METHODS = {name: naming.METHODS[name] for name in ("rgp", "rgp-random", "dpsgd", "linear", "bitfit")}
CARRIED = ("rank", "sides", "source", "norm", "keep")
ROW = "one row of the dataset"  # what the sampler draws


@dataclass
class PrivacyArguments:
    """For `PrivateTrainer`; also for `HfArgumentParser((TrainingArguments, PrivacyArguments))`.

    >>> PrivacyArguments(epsilon=3.0, batch_size=512).make_method().rank
    8
    """

    epsilon: float | None = field(
        default=None,
        metadata={"help": "Privacy that may be spent; the noise follows from it. Or give noise_multiplier."},
    )
    delta: float | None = field(
        default=None, metadata={"help": "Probability that epsilon fails. Default: 1/(10 N), at most 1e-5."}
    )
    noise_multiplier: float | None = field(
        default=None, metadata={"help": "The noise itself, in multiples of clip, in place of epsilon. 0: no privacy."}
    )
    accountant: str = field(
        default="pld", metadata={"help": f"With epsilon: {accountant_help()}.", "choices": list(ACCOUNTANTS)}
    )
    clip: float = field(default=1.0, metadata={"help": "Largest gradient norm of one example."})
    auto_clip: bool = field(
        default=False,
        metadata={"help": "Normalise every example's gradient to about clip (AUTO-S), not only large ones."},
    )
    batch_size: int | None = field(
        default=None,
        metadata={
            "help": "Expected size of a logical batch; each example is drawn on its own. Default: "
            "per_device_train_batch_size (the micro-batch) times gradient_accumulation_steps."
        },
    )
    method: str = field(
        default="rgp",
        metadata={
            "help": "rgp, rgp-random, dpsgd, linear or bitfit. For LoRA adapters (peft): dpsgd.",
            "choices": list(METHODS),
        },
    )
    rank: int | None = field(default=None, metadata={"help": "rgp: columns of L and rows of R. Default: 8."})
    sides: str | None = field(
        default=None, metadata={"help": "rgp: which carriers get gradients. Default: both.", "choices": list(SIDES)}
    )
    source: str | None = field(
        default=None,
        metadata={
            "help": "rgp: what the carriers are found in; public needs a public_loss. Default: history.",
            "choices": list(SOURCES),
        },
    )
    norm: str | None = field(
        default=None, metadata={"help": "rgp: which norm is clipped. Default: intrinsic.", "choices": list(NORMS)}
    )
    keep: int | None = field(default=None, metadata={"help": "rgp: steps for which carriers stay. Default: 1."})
    bands: str | None = field(  # or the number itself; argument parsers know one type per field
        default=None,
        metadata={
            "help": "Steps over which noise is correlated; 1: independent noise; auto: the best number for epsilon. With rgp, "
            "give keep too. Default: auto where it pays, at learning rates as they are."
        },
    )
    head_scale: float = field(default=1.0, metadata={"help": "Multiplies the head's gradient before clipping."})
    overrides: str | None = field(  # or the mapping itself; argument parsers know one type per field
        default=None,
        metadata={"help": 'JSON: parameter-name pattern -> carried, exact, frozen or a rank. {"*norm*": "frozen"}'},
    )
    ema: float | None = field(
        default=None, metadata={"help": "Decay of a running mean of the weights, which is what is evaluated and saved."}
    )
    noise_seed: int | None = field(
        default=None,
        metadata={
            "help": "Repeats a run exactly. Whoever knows it can undo the protection: leave it out for real data."
        },
    )
    secure_noise: bool = field(
        default=False, metadata={"help": "Noise from a cryptographic generator; needs rgp[secure]."}
    )
    unit: str = field(
        default=ROW,
        metadata={
            "help": "What the guarantee protects. Rows are drawn, so it is one row of the dataset and nothing else."
        },
    )
    units: str | None = field(
        default=None,
        metadata={
            "help": "Column of train_dataset that says whose an example is: a person with all their examples is then drawn, "
            "clipped and protected, and batch_size counts persons."
        },
    )
    rows_per_unit: int | None = field(
        default=None, metadata={"help": "With units: examples of a person that a step uses at most. Default: 8."}
    )
    log_loss: bool = field(
        default=False,
        metadata={
            "help": "Log the training loss too, also to W&B, MLflow or TensorBoard where report_to names them. It comes from "
            "private data without noise: epsilon does not cover it."
        },
    )

    def __post_init__(self) -> None:
        self.treatments: Any = json.loads(self.overrides) if isinstance(self.overrides, str) else self.overrides or {}
        if not isinstance(self.treatments, Mapping):
            raise ValueError(f"overrides must be a mapping from pattern to treatment; got {self.overrides!r}")
        if (self.epsilon is None) == (self.noise_multiplier is None):
            raise ValueError(
                f"give either epsilon or noise_multiplier; got epsilon={self.epsilon}, "
                f"noise_multiplier={self.noise_multiplier}"
            )
        if self.bands not in (None, "auto") and not (str(self.bands).isdecimal() and int(self.bands) >= 1):
            raise ValueError(f"bands must be a whole number of at least 1, or auto; got {self.bands!r}")
        if self.method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}; got {self.method!r}")
        if self.unit not in (ROW, "one row of the training data"):  # the default of earlier versions
            raise ValueError(
                f"unit={self.unit!r}: the guarantee is for {ROW}, because rows are what is drawn, and the card says "
                "nothing else. Leave unit out, and make a row of the dataset of whatever you want to protect"
            )
        if self.rows_per_unit is not None and self.units is None:
            raise ValueError(
                f"rows_per_unit={self.rows_per_unit} goes with units, the column that says whose an example is"
            )
        self.make_method()

    def make_method(self) -> Method:
        given = {name: getattr(self, name) for name in CARRIED if getattr(self, name) is not None}
        if given and not METHODS[self.method].carries:
            raise ValueError(f"{', '.join(given)}: method {self.method!r} has no carriers; leave it out, or use rgp")
        kind: Any = METHODS[self.method]
        return kind(head_scale=self.head_scale, overrides=self.treatments, **given)

    @property
    def number_of_bands(self) -> int | str | None:
        """What `privatize` takes as bands."""
        return self.bands if self.bands is None or self.bands == "auto" else int(self.bands)

    def record(self) -> dict[str, Any]:
        """What a run is made with, and must be the same when it is resumed."""
        recorded = (f.name for f in fields(self) if f.name not in ("log_loss", "unit"))
        return {name: getattr(self, name) for name in recorded} | {
            "overrides": dict(self.treatments),
            "bands": None if self.bands is None else str(self.bands),
        }

    @property
    def private(self) -> bool:
        return self.noise_multiplier != 0


def logical_batch(args: Any, privacy: PrivacyArguments) -> int:
    """The expected size of a logical batch: batch_size, or what gradient_accumulation_steps makes it."""
    if privacy.batch_size is None:
        return args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    if args.gradient_accumulation_steps != 1:
        raise ValueError(
            f"gradient_accumulation_steps={args.gradient_accumulation_steps} and PrivacyArguments.batch_size="
            f"{privacy.batch_size} both say how large a logical batch is: leave one of them out"
        )
    return privacy.batch_size


def refuse(args: Any) -> None:
    """Raise ValueError for arguments that private training cannot allow."""
    half = "the model's own precision is used; load it with dtype=torch.float32, or in bfloat16 as a whole"
    refused: list[tuple[str, Any, str]] = [
        ("fp16", args.fp16, f"a loss scaler skips steps that were released; {half}"),
        ("bf16", args.bf16, half),
        ("deepspeed", args.deepspeed, "it has an optimizer and gradients of its own"),
        ("fsdp", args.fsdp, "sharded parameters have no per-example gradients here"),
        ("parallelism_config", getattr(args, "parallelism_config", None), "it splits the batch by itself"),
        ("torch_compile", args.torch_compile, "it hides the model's operations from the engine"),
        ("use_liger_kernel", args.use_liger_kernel, "its fused kernels hide operations from the engine"),
        ("auto_find_batch_size", args.auto_find_batch_size, "it repeats steps; set per_device_train_batch_size"),
        (
            "neftune_noise_alpha",
            args.neftune_noise_alpha,
            "its noise is scaled by the longest text of a batch, so that examples depend on each other",
        ),
        ("push_to_hub", args.push_to_hub, "it would publish training losses; publish what save_model writes"),
        (
            "include_num_input_tokens_seen",
            getattr(args, "include_num_input_tokens_seen", "no") not in ("no", False),
            "the number of tokens seen depends on the private texts",
        ),
        (
            "lr_scheduler_type",
            getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type) in ("reduce_lr_on_plateau", "greedy"),
            "a schedule that reacts to losses reacts to data; choose one that is fixed in advance",
        ),
        (
            "WANDB_WATCH",
            os.environ.get("WANDB_WATCH") in ("all", "gradients")
            and {"wandb", "all"} & set([args.report_to] if isinstance(args.report_to, str) else args.report_to or ()),
            "W&B would log gradients before noise is added; set it to parameters, or leave it out",
        ),
        ("optim", "layerwise" in str(args.optim).lower(), "it steps inside the backward pass, before noise is added"),
        (
            "train_sampling_strategy",
            strategy(args) == "sequential",
            "examples must be drawn at random, each on its own",
        ),
    ]
    for name, value, why in refused:
        if value:
            shown = "" if isinstance(value, (bool, set)) else f"={value!r}"
            raise ValueError(f"{name}{shown} cannot be used in private training: {why}")


def taken_over(args: Any, privacy: PrivacyArguments, batch_size: int, rate: float) -> list[str]:
    """What private training does differently with these arguments, for the log."""
    each = "example" if privacy.units is None else "person"
    said = [
        f"sampling: Poisson, each {each} on its own with probability {rate:.4g}, in place of the Trainer's own sampler",
        f"batch: {batch_size} {each}s are expected per step, per_device_train_batch_size="
        f"{args.per_device_train_batch_size} {'of them' if privacy.units is None else 'examples of theirs'} at once",
    ]
    if privacy.units is not None:
        said.append(f"units: what is protected is a person (column {privacy.units}) with all their examples")
    if args.gradient_accumulation_steps != 1:
        said.append(f"gradient_accumulation_steps={args.gradient_accumulation_steps} was taken into that batch size")
    if args.max_grad_norm:
        said.append(f"max_grad_norm={args.max_grad_norm:g} is not used: clip={privacy.clip:g} bounds each example")
    if strategy(args) == "group_by_length":
        said.append("group_by_length: examples of similar length share a micro-batch; it does not decide who is drawn")
    if args.dataloader_drop_last:
        said.append("dataloader_drop_last is not used: a Poisson batch has no fixed size, and none is dropped")
    return said


def strategy(args: Any) -> str:
    if getattr(args, "group_by_length", False):  # before transformers 5
        return "group_by_length"
    found = getattr(args, "train_sampling_strategy", "random")
    return str(getattr(found, "value", found))
