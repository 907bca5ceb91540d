"""Config -> data, model, optimizer, schedule, method: everything `rgp.privatize` is given, and how to evaluate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rgp
from rgp import accounting
from rgp.naming import METHODS
from rgp.optimizers import AdamCorrected
from rgp.public import ROWS
from rgp.torchstate import evaluating
from rgp.train import language
from rgp.train.config import Config, ConfigError
from rgp.train.sections import CARRIED, IMAGE_MODELS, MethodConfig, TrainingConfig


@dataclass
class Parts:
    """What a run is made of."""

    data: Any  # rgp.data.Data
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any
    method: Any
    steps: int
    device: torch.device
    tokenizer: Any = None
    public_loss: Callable[[], Tensor] | None = None

    @property
    def published_test(self) -> bool:
        """Whether held-out rows come from a published test split, so that accuracy on them may be published."""
        return bool(self.data.published_test)


def make(config: Config, data: Any = None) -> Parts:
    """Load and build everything; ConfigError where the config does not fit the data. data: already loaded."""
    device = pick_device(config.run.device)
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    tokenizer = None if config.model.name in IMAGE_MODELS else language.load_tokenizer(config)
    data = load_data(config, tokenizer) if data is None else data
    steps = check_against_data(config, data)
    with initial_seed(config.run.seed):
        model = make_model(config, data, tokenizer).to(device)
    method = make_method(config.method)
    optimizer = make_optimizer(config, model)
    return Parts(
        data=data,
        model=model,
        optimizer=optimizer,
        scheduler=make_schedule(config, optimizer, steps),
        method=method,
        steps=steps,
        device=device,
        tokenizer=tokenizer,
        public_loss=make_public_loss(config, model, data, tokenizer),
    )


def pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}[device.type]
    if not there or (device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count()):
        raise ConfigError([f"run.device = {name}: this machine has none; use auto"])
    return device


@contextmanager
def initial_seed(seed: int | None) -> Iterator[None]:
    """Make initial weights repeatable with a seed. They are public either way."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


# ---------------------------------------------------------------------- data


def load_data(config: Config, tokenizer: Any) -> Any:
    from rgp.data import DataSpec, load

    return load(DataSpec(**{f.name: getattr(config.data, f.name) for f in fields(config.data)}, tokenizer=tokenizer))


def count_units(data: Any) -> int:
    """What sampling rates and delta refer to: persons, where the data have any, or rows."""
    members = getattr(data, "members", None)
    return len(data.train) if members is None else members.unit.size


def check_against_data(config: Config, data: Any) -> int:
    """The number of steps; ConfigError for mistakes that only the data show."""
    training, budget, size = config.training, config.budget, count_units(data)
    members = getattr(data, "members", None)
    units = "rows" if members is None else f"{members.unit.noun}s"
    mistakes = []
    if training.batch_size > size:
        mistakes.append(
            f"training.batch_size = {training.batch_size}: must be at most {size}, the number of training {units}"
        )
    if budget.delta is not None and budget.delta * size >= 1:
        mistakes.append(
            f"budget.delta = {budget.delta:g}: must be below 1/{size}, one over the number of training {units}; null "
            f"chooses {accounting.default_delta(size):g}"
        )
    images = config.model.name in IMAGE_MODELS
    if images != (data.kind == "image"):
        wanted = "a Hugging Face model" if images else f"one of {', '.join(IMAGE_MODELS)}"
        mistakes.append(f"model.name = {config.model.name}: the data hold {data.kind}s; the model must be {wanted}")
    if mistakes:
        raise ConfigError(mistakes)
    if training.steps is not None:
        return training.steps
    assert training.epochs is not None
    return accounting.planned_steps(training.epochs, size, training.batch_size)


# ---------------------------------------------------------------------- model


def make_model(config: Config, data: Any, tokenizer: Any = None) -> nn.Module:
    name, width = config.model.name, config.model.width
    if name not in IMAGE_MODELS:
        return language.make_transformer(config, data, tokenizer)
    shape = tuple(data.shape)
    if name == "mlp":
        hidden = width or 128
        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(math.prod(shape), hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, data.classes),
        )
    from rgp.models import SmallCNN, wrn

    if name in ("small-cnn", "tiny-cnn"):
        stride = 2 if name == "tiny-cnn" else 1
        least = 8 * stride
        if min(shape[1:]) < least:
            raise ConfigError(
                [f"model.name = {name}: needs images of at least {least} x {least}; these are {shape[1]} x {shape[2]}"]
            )
        return SmallCNN(num_classes=data.classes, in_channels=shape[0], width=width or 32, stride=stride)
    return wrn(
        name,
        num_classes=data.classes,
        in_channels=shape[0],
        affine=config.model.affine,
        weight_standardization=config.model.weight_standardization,
    )


# ---------------------------------------------------------------------- method, optimizer


def make_method(config: MethodConfig) -> Any:
    given = {name: getattr(config, name) for name in CARRIED if getattr(config, name) is not None}
    if config.name == "dp-lora":
        given = {}  # its rank is the adapters'; their factors are exact, and all else has requires_grad False
    kind: Any = METHODS[config.name]
    return kind(**given, head_scale=config.head_scale, overrides=config.overrides)


def make_public_loss(config: Config, model: nn.Module, data: Any, tokenizer: Any) -> Callable[[], Tensor] | None:
    """The loss for method.source = public: logits of other public inputs at every step, without labels, in evaluation mode."""
    if config.method.public is None:
        return None
    device = next(model.parameters()).device
    texts = language.public_inputs(config, data, tokenizer) if tokenizer is not None else None

    def logits() -> Tensor:
        with evaluating(model):
            if texts is None:  # images are normalised to mean 0 and deviation 1
                return model(torch.randn(ROWS, *data.shape).to(device))
            return model(**{name: values.to(device) for name, values in texts().items()}).logits

    return rgp.without_labels(logits)


def make_clip(config: TrainingConfig) -> Any:
    """What `privatize` takes as clip."""
    if isinstance(config.clip, dict):
        return rgp.GroupClip(config.clip)
    if config.clip is None or config.clipping == "flat":
        return config.clip
    return rgp.AutoClip(config.clip) if config.clipping == "auto" else rgp.AdaptiveClip(config.clip, config.quantile)


def make_augment(config: TrainingConfig) -> Callable[[Any], Any] | None:
    from rgp.data.augment import crop_and_flip

    return crop_and_flip if config.augment == "crop-flip" else None


def make_optimizer(config: Config, model: nn.Module) -> torch.optim.Optimizer:
    settings, parameters = config.optimizer, parameter_groups(config, model)
    if settings.name == "sgd":
        return torch.optim.SGD(
            parameters, lr=settings.lr, momentum=settings.momentum, weight_decay=settings.weight_decay
        )
    kind: Any = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "adam-corrected": AdamCorrected}[settings.name]
    return kind(parameters, lr=settings.lr, betas=(settings.momentum, 0.999), weight_decay=settings.weight_decay)


def parameter_groups(config: Config, model: nn.Module) -> list[Any]:
    """All parameters; with a bias_lr vectors have their own group, and with a head_lr so has the head, as the last one."""
    settings = config.optimizer
    if settings.bias_lr is None and settings.head_lr is None:
        return list(model.parameters())
    rates = {"": settings.lr, "bias": settings.bias_lr, "head": settings.head_lr}
    plan = rgp.make_plan(model, make_method(config.method))
    head = {e.name for e in plan if e.kind in ("head", "head_bias")}
    groups: dict[str, list[Tensor]] = {kind: [] for kind, rate in rates.items() if rate is not None}
    for name, parameter in model.named_parameters():
        kind = "head" if name in head else "bias" if parameter.ndim == 1 else ""
        groups[kind if kind in groups else ""].append(parameter)
    return [{"params": group, "lr": rates[kind]} for kind, group in groups.items()]


def make_schedule(config: Config, optimizer: torch.optim.Optimizer, steps: int) -> Any:
    settings = config.optimizer
    if settings.schedule == "constant" and settings.warmup == 0 and settings.head_first == 0:
        return None

    def factor(step: int, begin: int) -> float:
        """What multiplies a learning rate that is 0 before step `begin`, then warms up and falls in the steps that are left."""
        step, left = step - begin, steps - begin
        rising = round(settings.warmup * left)
        if step < 0:
            return 0.0
        if step < rising:
            return (step + 1) / rising
        done = (step - rising) / max(1, left - rising)
        if settings.schedule == "steps":
            return 0.1 ** sum(done >= at for at in (0.3, 0.6, 0.8))
        return {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[settings.schedule]

    begins = [round(settings.head_first * steps)] * len(optimizer.param_groups)
    if settings.head_lr is not None:
        begins[-1] = 0
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, [lambda step, begin=begin: factor(step, begin) for begin in begins]
    )


# ---------------------------------------------------------------------- batches and losses


def autocast(config: TrainingConfig, device: torch.device) -> Any:
    """What a training pass runs in. Evaluations run in float32: it is the released weights that they measure."""
    return torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bfloat16")


def logits_and_labels(model: nn.Module, batch: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    """Logits and labels of a batch (x, y), or of a dictionary with "labels" as Hugging Face models take it."""
    if isinstance(batch, (tuple, list)):
        x, y = batch
        return model(x.to(device)), y.to(device)
    inputs = {name: value.to(device) for name, value in batch.items() if name != "labels"}
    logits, labels = model(**inputs).logits, batch["labels"].to(device)
    return language.shifted(logits, labels) if logits.dim() == 3 else (logits, labels)


def losses(logits: Tensor, labels: Tensor) -> Tensor:
    """(m,): the loss of each example."""
    return (
        language.token_losses(logits, labels)
        if logits.dim() == 3
        else F.cross_entropy(logits, labels, reduction="none")
    )


def right(logits: Tensor, labels: Tensor) -> Tensor:
    """(m,): whether the answer was right; for a language model, the share of right tokens."""
    return language.tokens_right(logits, labels) if logits.dim() == 3 else logits.argmax(1) == labels


def scores(lost: Tensor, correct: Tensor, dataset: Any, config: Config) -> dict[str, float]:
    """Accuracy, as a share of the examples; for a language model, as a share of all tokens, and the perplexity."""
    if config.model.task != "causal-lm":
        return {"accuracy": correct.float().mean().item()}
    tokens = torch.as_tensor(dataset.lengths).double() - 1
    share = tokens / tokens.sum()
    mean = (lost.double() * share).sum().item()
    return {"accuracy": (correct.double() * share).sum().item(), "perplexity": math.exp(min(mean, 700.0))}


@torch.no_grad()
def example_losses(
    model: nn.Module, dataset: Any, *, collate_fn: Any, device: torch.device, batch_size: int
) -> tuple[Tensor, Tensor]:
    """(loss, whether the answer was right) of every example, in evaluation mode."""
    lengths = torch.as_tensor(getattr(dataset, "lengths", [0] * len(dataset)))
    order = torch.argsort(lengths, descending=True, stable=True)  # texts of similar length together: less padding
    loader = torch.utils.data.DataLoader(
        torch.utils.data.Subset(dataset, order.tolist()), batch_size=batch_size, collate_fn=collate_fn
    )
    lost, correct = [], []
    with evaluating(model):
        for batch in loader:
            logits, y = logits_and_labels(model, batch, device)
            lost.append(losses(logits.float(), y).cpu())
            correct.append(right(logits, y).cpu())
    back = torch.argsort(order)
    return torch.cat(lost)[back], torch.cat(correct)[back]
