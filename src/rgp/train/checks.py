"""Mistakes in a config: how they are collected, and those that several keys make together."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rgp.accountants import ACCOUNTANTS, with_max_batch
from rgp.models.public_text import TEXTS as PUBLIC_TEXTS
from rgp.naming import METHODS, UNPROTECTED
from rgp.train.sections import (
    CARRIED,
    IMAGE_MODELS,
    IMAGES,
    TEXTS,
    WEIGHTS,
    Config,
    DataConfig,
    ModelConfig,
    short,
)


class Mistakes(list[str]):
    """Mistakes found so far, and the keys they are about: one mistake per key is enough."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: set[str] = set()
        self.no_base = False  # preset or file could not be read, which is why most keys are missing

    def add(self, message: str, *keys: str) -> None:
        if not self.keys.intersection(keys):
            self.append(message.rstrip("; "))


class ConfigError(ValueError):
    """Everything that is wrong with a configuration, one line each in `mistakes`."""

    def __init__(self, mistakes: list[str]) -> None:
        self.mistakes = mistakes
        count = "a mistake" if len(mistakes) == 1 else f"{len(mistakes)} mistakes"
        super().__init__("\n  ".join([f"{count} in the configuration:", *mistakes]))


def cross_check(config: Config, mistakes: Mistakes) -> None:
    """Add the mistakes that several keys make together."""
    method, budget, training = config.method, config.budget, config.training

    def one_of(a: str, b: str, first: Any, second: Any) -> None:
        if (first is None) == (second is None):
            state = "neither is set" if first is None else "both are set"
            mistakes.add(f"{a} and {b}: set one of them, and the other to null; {state}", a, b)

    one_of("training.epochs", "training.steps", training.epochs, training.steps)
    protecting = {
        "budget.epsilon": budget.epsilon,
        "budget.noise_multiplier": budget.noise_multiplier,
        "training.clip": training.clip,
    }
    if method.name in UNPROTECTED:
        for name, value in protecting.items():
            if value:
                words = f"{name} = {short(value)}: method {method.name} protects nothing, so this must be null"
                mistakes.add(words, name, "method.name")
    else:
        one_of("budget.epsilon", "budget.noise_multiplier", budget.epsilon, budget.noise_multiplier)
        if training.clip is None and config.private:
            mistakes.add(
                f"training.clip = null: method {method.name} needs a number above 0, such as 1", "training.clip"
            )
    if training.clipping != "flat" and not isinstance(training.clip, float):
        words = f"training.clipping = {training.clipping}: needs training.clip = a number; got {short(training.clip)}"
        mistakes.add(words, "training.clipping", "training.clip")
    if training.views > 1 and training.augment == "none":
        words = (
            f"training.views = {training.views}: needs training.augment = crop-flip; copies of an example add nothing"
        )
        mistakes.add(words, "training.views", "training.augment")
    images = model_is_image(config.model)
    if training.augment != "none" and not images:
        mistakes.add(f"training.augment = {training.augment}: is for images, so this must be none", "training.augment")
    for leaf, plain in (("weight_standardization", False), ("affine", True)):
        if getattr(config.model, leaf) != plain and not config.model.name.startswith("wrn"):
            words = f"model.{leaf} = {short(not plain)}: is for wide ResNets, so this must be {short(plain)}"
            mistakes.add(words, f"model.{leaf}", "model.name")
    allowed: tuple[str, ...] = ("rank",) if method.name in ("powersgd", "dp-powersgd", "dp-lora") else ()
    allowed = CARRIED if METHODS[method.name].carries else allowed
    for leaf in CARRIED:
        value = getattr(method, leaf)
        if value is not None and leaf not in allowed:
            words = f"method.{leaf} = {short(value)}: method {method.name} has no carriers, so this must be null"
            mistakes.add(words, f"method.{leaf}", "method.name")
    if method.name == "rgp-random" and method.source not in (None, "random"):
        words = f"method.source = {method.source}: the carriers of rgp-random are random; use method.name = rgp"
        mistakes.add(words, "method.source")
    if training.max_batch is not None and not ACCOUNTANTS[budget.accountant].max_batch:
        words = f"training.max_batch = {training.max_batch}: needs budget.accountant = {with_max_batch()}"
        mistakes.add(words, "training.max_batch", "budget.accountant")
    if training.bands not in (None, 1):
        _check_bands(config, mistakes)
    if config.run.device != "auto" and not _is_device(config.run.device):
        words = f"run.device = {config.run.device}: must be auto, cpu, cuda or cuda with a number, such as cuda:1"
        mistakes.add(words, "run.device")
    if config.optimizer.head_first > 0 and config.optimizer.head_lr is None:
        words = (
            f"optimizer.head_first = {config.optimizer.head_first}: needs optimizer.head_lr, the head's learning rate"
        )
        mistakes.add(words, "optimizer.head_first", "optimizer.head_lr")
    _check_names(config.data, config.model, mistakes)
    _check_language(config, mistakes)


def _check_bands(config: Config, mistakes: Mistakes) -> None:
    bands, method, training = config.training.bands, config.method, config.training
    why = None
    if not config.private:
        why, other = f"method {method.name} without noise has nothing to take back, so this must be 1", "method.name"
    elif training.max_batch is not None:
        why, other = (
            "does not go with training.max_batch, whose accounting is not known for groups",
            "training.max_batch",
        )
    elif method.sides == "alternate":
        why, other = (
            "needs method.sides = both, left or right: noise of the other side cannot be taken back",
            "method.sides",
        )
    elif bands == "auto" and config.budget.epsilon is None:
        why, other = "needs budget.epsilon, at which to compare", "budget.epsilon"
    if why is not None:
        mistakes.add(f"training.bands = {bands}: {why}", "training.bands", other)


def _check_language(config: Config, mistakes: Mistakes) -> None:
    """Add mistakes with the keys that only Hugging Face models have."""
    data, model, method = config.data, config.model, config.method
    if method.name == "dp-lora" and not (method.rank is None or isinstance(method.rank, int)):
        words = f"method.rank = {short(method.rank)}: the rank of adapters must be one whole number"
        mistakes.add(words, "method.rank")
    if model_is_image(model):
        if method.name == "dp-lora":
            mistakes.add(f"method.name = dp-lora: needs a Hugging Face model; {model.name} is none", "method.name")
        for leaf, plain in (
            ("task", "classify"),
            ("pooling", None),
            ("head", "linear"),
            ("centre", "none"),
            ("label_texts", None),
            ("dropout", None),
        ):
            value = getattr(model, leaf)
            if value != plain:
                words = f"model.{leaf} = {short(value)}: is for Hugging Face models, so this must be {plain or 'null'}"
                mistakes.add(words, f"model.{leaf}", "model.name")
    if (method.source == "public") != (method.public is not None):
        words = f"method.source = {short(method.source)}, method.public = {short(method.public)}: "
        words += "source public and the inputs it looks at go together, such as method.public = noise"
        mistakes.add(words, "method.source", "method.public")
    if method.public is not None and method.name != "rgp":
        mistakes.add(f"method.public = {method.public}: is for method rgp, so this must be null", "method.public")
    elif method.public is not None and model.task != "classify":
        words = f"method.public = {method.public}: is for classifiers; in Python, privatize(public_loss=...)"
        mistakes.add(words, "method.public", "model.task")
    elif model_is_image(model) and method.public not in (None, "noise"):
        words = f"method.public = {method.public}: is text, and the model takes images, so this must be noise"
        mistakes.add(words, "method.public", "model.name")
    for name, value, more in (("model.centre", model.centre, "none"), ("method.public", method.public, "noise")):
        if value is not None and value not in (more, *PUBLIC_TEXTS) and not Path(value).expanduser().is_file():
            allowed = ", ".join([more, *PUBLIC_TEXTS])
            mistakes.add(f"{name} = {value}: must be {allowed}, or a file with one public sentence per line", name)
    if model.pooling is None:
        for leaf, plain in (("head", "linear"), ("centre", "none"), ("label_texts", None)):
            if getattr(model, leaf) != plain:
                words = f"model.{leaf} = {short(getattr(model, leaf))}: needs model.pooling = cls or mean"
                mistakes.add(words, f"model.{leaf}", "model.pooling")
    if model.task == "causal-lm":
        if model.pooling is not None:
            words = f"model.pooling = {model.pooling}: is for classifiers, so with task causal-lm it must be null"
            mistakes.add(words, "model.pooling")
        if data.unit is None:
            words = "data.unit = null: task causal-lm needs document, line or block: what one example is, and protected"
            mistakes.add(words, "data.unit")
    elif data.unit is not None:
        words = f"data.unit = {data.unit}: is for language models, so it needs model.task = causal-lm"
        mistakes.add(words, "data.unit", "model.task")


def model_is_image(model: ModelConfig) -> bool:
    return model.name in IMAGE_MODELS


def _check_names(data: DataConfig, model: ModelConfig, mistakes: Mistakes) -> None:
    images = model_is_image(model)
    hub = "/" in model.name and not model.name.startswith((".", "/", "~"))
    if not images and not hub and model.name not in WEIGHTS and not Path(model.name).expanduser().is_dir():
        near = perhaps(model.name, IMAGE_MODELS)
        mistakes.add(
            f"model.name = {model.name}: {near}must be one of {', '.join(IMAGE_MODELS)}, a folder with a Hugging Face "
            "model, or its name on the hub (owner/name)",
            "model.name",
        )
        mistakes.keys.add("model.name")
    known = data.name in IMAGES + TEXTS
    hub = data.name.startswith("hf:") or (
        data.name.count("/") == 1 and not Path(data.name).suffix and not data.name.startswith((".", "/", "~"))
    )
    if not known and not hub and not Path(data.name).expanduser().exists():
        near = perhaps(data.name, IMAGES + TEXTS) or "there is no such file or folder; "
        mistakes.add(
            f"data.name = {data.name}: {near}must be one of {', '.join(IMAGES + TEXTS)}, a file or folder that exists, "
            "or a data set of the Hugging Face hub (hf:owner/name)",
            "data.name",
        )
    elif known and images != (data.name in IMAGES):
        holds, wanted = ("texts", "a Hugging Face model") if images else ("images", f"one of {', '.join(IMAGE_MODELS)}")
        mistakes.add(f"model.name = {model.name}: {data.name} holds {holds}; the model must be {wanted}", "model.name")
    if data.units is not None and data.name in IMAGES:
        words = f"data.units = {data.units}: {data.name} has no persons; units need a table, so this must be null"
        mistakes.add(words, "data.units")
    if model.width is not None and model.name not in ("small-cnn", "tiny-cnn", "mlp"):
        words = f"model.width = {model.width}: is for small-cnn, tiny-cnn and mlp; {model.name} has its own, so this must be null"
        mistakes.add(words, "model.width", "model.name")
    if model.width is not None and model.name in ("small-cnn", "tiny-cnn") and model.width % 8:
        words = f"model.width = {model.width}: must be a multiple of 8 for {model.name}, whose norms have 8 groups"
        mistakes.add(words, "model.width")


def _is_device(name: str) -> bool:
    kind, colon, index = name.partition(":")
    return kind in ("cpu", "cuda", "mps") and (not colon or index.isdigit())


def perhaps(name: str, among: Iterable[str]) -> str:
    near = get_close_matches(name, list(among), n=1, cutoff=0.6)
    return f"did you mean {near[0]}? " if near else ""
