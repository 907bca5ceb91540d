"""The sections of a config: every key with its type, what is allowed, and what it means. Help and checks are made from this."""

# ruff: noqa: RUF009 - key() makes a dataclasses.field

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import yaml

from rgp.accountants import ACCOUNTANTS, accountant_help
from rgp.naming import METHODS, UNPROTECTED
from rgp.train.allowed import (
    Allowed,
    bands,
    choice,
    clips,
    columns,
    flag,
    number,
    ranks,
    string,
    texts,
    treatments,
    whole,
)
from rgp.units import ROWS_PER_UNIT

OPTIMIZERS = ("sgd", "adam", "adamw", "adam-corrected")
IMAGE_MODELS = ("small-cnn", "tiny-cnn", "mlp", "wrn-10-1", "wrn-16-1", "wrn-16-4", "wrn-28-4", "wrn-40-4")
IMAGES = ("digits", "cifar10", "svhn", "mnist", "fashion_mnist")
TEXTS = ("sst2", "qnli", "qqp", "mnli")
WEIGHTS = ("minilm", "mpnet")  # fetched by `rgp data get`
CARRIED = (
    "rank",
    "sides",
    "source",
    "warmup_steps",
    "power_iterations",
    "norm",
    "keep",
    "state",
    "rounding",
)  # keys that only methods with carriers have


def key(default: Any, allowed: Allowed, meaning: str) -> Any:
    made = {"default_factory": dict} if default == {} else {"default": default}
    return field(**made, metadata={"allowed": allowed, "nullable": default is None, "meaning": meaning})


# ---------------------------------------------------------------------- the sections


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    name: str = key("digits", string(), "a built-in name, a file or a folder")
    text: Any = key(None, columns(), "column of the text in a table; a list of two for pairs of texts")
    label: str | None = key(None, string(), "column of the label in a table")
    held_out: float = key(
        0.2, number(0, above=True, high=1, below=True), "share held out, where the data come without a test split"
    )
    seed: int = key(0, whole(0), "which rows are held out; public")
    folder: str | None = key(None, string(), "where `rgp data get` put the data, if not in its usual place")
    max_length: int = key(128, whole(1), "tokens of a text; the rest is cut off")
    unit: str | None = key(
        None, choice("document", "line", "block"), "language models: what one example is, and what is protected"
    )
    block: int = key(128, whole(2), "language models: tokens of a block")
    units: str | None = key(
        None,
        string(),
        "column with the person a row belongs to: persons are protected, not rows; with unit block also document",
    )
    rows_per_unit: int = key(ROWS_PER_UNIT, whole(1), "with units: rows of a person that a step uses at most")
    image_size: int | None = key(None, whole(1), "height and width that the images of a folder are resized to")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    name: str = key("small-cnn", string(), f"{', '.join(IMAGE_MODELS)}; a folder or hub name of a Hugging Face model")
    width: int | None = key(
        None, whole(8), "small-cnn, tiny-cnn: channels of the first layer (32); mlp: hidden units (128)"
    )
    pretrained: bool = key(True, flag(), "Hugging Face: start from its weights, not from random ones")
    task: str = key("classify", choice("classify", "causal-lm"), "Hugging Face: a classifier, or a language model")
    pooling: str | None = key(
        None,
        choice("cls", "mean"),
        "encoders: a linear head on the first token or the mean of all (the model's own head)",
    )
    head: str = key("linear", choice("linear", "layernorm"), "with pooling: layernorm makes the head scale-free")
    centre: str = key(
        "none",
        string(),
        "with pooling: subtract the mean feature of public sentences: films, public, or a file of them",
    )
    label_texts: Any = key(
        None,
        texts(),
        "with pooling: a public text for each class, such as [a bad film, a good film]; the head starts there",
    )
    dropout: float | None = key(
        None, number(0, high=1, below=True), "Hugging Face: every dropout of the model; 0 is none (its own)"
    )
    weight_standardization: bool = key(False, flag(), "wide ResNets: kernels with mean 0 and variance 1 / fan-in")
    affine: bool = key(True, flag(), "wide ResNets: norms with a trained scale and shift")


@dataclass(frozen=True, kw_only=True)
class MethodConfig:
    name: str = key("rgp", choice(*METHODS), ", ".join(METHODS))
    rank: Any = key(None, ranks(), "columns of L and rows of R; auto, or a number per parameter-name pattern (8)")
    sides: str | None = key(None, choice("both", "left", "right", "alternate"), "which carriers get gradients (both)")
    source: str | None = key(
        None, choice("history", "weight", "momentum", "public", "random"), "what the carriers are found in (history)"
    )
    public: str | None = key(
        None,
        string(),
        "source public: inputs without labels: noise; or, of texts, films, public, a file of sentences",
    )
    warmup_steps: int | None = key(None, whole(0), "steps before history or momentum is used (a tenth of the run)")
    power_iterations: int | None = key(None, whole(1), "of the power method that finds the carriers (1)")
    keep: int | None = key(None, whole(1), "steps for which carriers stay (1)")
    state: str | None = key(
        None,
        choice("full", "thin"),
        "the optimizer's state of carried weights: full-size, or in released coordinates (full)",
    )
    rounding: str | None = key(
        None,
        choice("nearest", "stochastic", "compensated"),
        "with state thin: how updates to 16-bit weights are rounded (nearest)",
    )
    norm: str | None = key(None, choice("intrinsic", "paper"), "which norm is clipped (intrinsic)")
    head_scale: float = key(1.0, number(0, above=True), "multiplies the head's gradient before clipping")
    overrides: dict[str, Any] = key({}, treatments(), "parameter-name pattern: carried, exact, frozen or a rank")


@dataclass(frozen=True, kw_only=True)
class BudgetConfig:
    epsilon: float | None = key(None, number(0, above=True), "the privacy that may be spent; the noise follows from it")
    delta: float | None = key(
        None,
        number(0, above=True, high=1, below=True),
        "probability that epsilon fails (1/(10 N), at most 1e-5)",
    )
    noise_multiplier: float | None = key(None, number(0), "the noise itself, in place of epsilon; 0: no privacy")
    accountant: str = key("pld", choice(*ACCOUNTANTS), accountant_help())


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    batch_size: int = key(
        256, whole(1), "expected examples of a step (with data.units, persons); each is drawn on its own"
    )
    epochs: float | None = key(None, number(0, above=True), "length of the run in passes over the data")
    steps: int | None = key(None, whole(1), "length of the run in steps, in place of epochs")
    clip: Any = key(None, clips(), "largest gradient norm of one example; or one per parameter-name pattern")
    clipping: str = key("flat", choice("flat", "auto", "adaptive"), "auto: all norms near clip; adaptive: a quantile")
    quantile: float = key(0.5, number(0, above=True, high=1, below=True), "adaptive: share that should not be clipped")
    views: int = key(1, whole(1), "augmented views of each example, their gradients averaged before clipping")
    augment: str = key("none", choice("none", "crop-flip"), "of images: random crops and mirror images")
    ema: float | None = key(None, number(0, high=1, below=True), "decay of a running mean of the weights, e.g. 0.999")
    microbatch_size: int | None = key(None, whole(1), "examples that go through the model at once (32)")
    max_batch: int | None = key(None, whole(1), "cap on the examples of a step, with the accounting for it")
    precision: str = key(
        "float32",
        choice("float32", "bfloat16"),
        "bfloat16: the model's products (autocast); weights and sums are float32",
    )
    bands: Any = key(
        None, bands(), "steps over which noise is correlated; auto: the best number; null: auto where it pays"
    )


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    name: str = key("sgd", choice(*OPTIMIZERS), f"{', '.join(OPTIMIZERS)}; corrected: for the noise in g^2")
    lr: float = key(0.1, number(0, above=True), "learning rate")
    head_lr: float | None = key(None, number(0, above=True), "learning rate of the head, if it has its own")
    bias_lr: float | None = key(
        None, number(0, above=True), "learning rate of biases and norms, if they have their own"
    )
    head_first: float = key(
        0.0, number(0, high=1, below=True), "with head_lr: share of the steps in which only the head learns"
    )
    momentum: float = key(0.9, number(0, high=1, below=True), "of sgd; beta1 of adam")
    weight_decay: float = key(0.0, number(0), "weight decay")
    schedule: str = key(
        "constant",
        choice("constant", "cosine", "linear", "steps"),
        "of the learning rate, down to 0; steps: a tenth at 30, 60, 80%",
    )
    warmup: float = key(0.0, number(0, high=1, below=True), "share of the steps in which the learning rate rises")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    seed: int | None = key(
        None, whole(0), "repeats a run exactly; whoever knows it can undo the protection, so leave it out for real data"
    )
    secure_noise: bool = key(False, flag(), "noise from a cryptographic generator; needs rgp[secure]")
    device: str = key("auto", string(), "auto, cpu, cuda, cuda:1, ...")
    threads: int | None = key(None, whole(1), "CPU threads (all)")
    workers: int = key(0, whole(0), "processes that load data")
    eval_every: int | None = key(None, whole(1), "steps between evaluations (a twentieth of the run)")
    checkpoint_seconds: float = key(300.0, number(0), "seconds between checkpoints")


@dataclass(frozen=True, kw_only=True)
class Config:
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    method: MethodConfig = field(default_factory=MethodConfig)
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    run: RunConfig = field(default_factory=RunConfig)

    @property
    def private(self) -> bool:
        return self.method.name not in UNPROTECTED and self.budget.noise_multiplier != 0

    def to_dict(self) -> dict[str, dict[str, Any]]:
        return {
            s.name: {f.name: getattr(getattr(self, s.name), f.name) for f in fields(SECTIONS[s.name])}
            for s in fields(self)
        }

    def to_yaml(self) -> str:
        """As a file that `rgp train` reads, every key with its meaning."""
        lines = []
        for section, kind in SECTIONS.items():
            lines.append(f"{section}:")
            for f in fields(kind):
                value = scalar(getattr(getattr(self, section), f.name))
                lines.append(f"  {f.name + ': ' + value:<26}  # {f.metadata['meaning']}")
            lines.append("")
        return "\n".join(lines)


SECTIONS: dict[str, type] = {
    "data": DataConfig,
    "model": ModelConfig,
    "method": MethodConfig,
    "budget": BudgetConfig,
    "training": TrainingConfig,
    "optimizer": OptimizerConfig,
    "run": RunConfig,
}
KEYS = [f"{section}.{f.name}" for section, kind in SECTIONS.items() for f in fields(kind)]


def short(value: Any) -> str:
    words = scalar(value)
    return words if len(words) <= 60 else words[:57] + "..."


def scalar(value: Any) -> str:
    """As YAML on one line."""
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    value = list(value) if isinstance(value, tuple) else value
    dumped = yaml.safe_dump(value, default_flow_style=True, width=10**6, sort_keys=False).strip()
    return dumped.removesuffix("...").strip()
