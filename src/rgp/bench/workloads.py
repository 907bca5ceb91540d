"""Model name -> model, data and forward pass, the same for every contender.

Embedding tables are frozen for all, as the engine's default plan does; everything else is trained, the norm
behind an embedding included. Weights are random (or from a folder), the data are random, nothing is downloaded.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from rgp.bench.settings import Settings


def call_model(model: nn.Module, inputs: Sequence[Tensor]) -> Tensor:
    output = model(*inputs)
    return output if isinstance(output, Tensor) else output.logits


def call_text_model(model: nn.Module, inputs: Sequence[Tensor]) -> Tensor:
    return model(input_ids=inputs[0], attention_mask=inputs[1]).logits


@dataclass
class Workload:
    """What is trained, and on what.

    dataset: exactly one logical batch of examples, each a tuple whose last entry is the target.
    logits: `(model, inputs) -> output`, with the inputs of a micro-batch in the order of the example's tuple.
    criterion: `(output, target) -> mean loss`, with torch's `reduction` attribute (Opacus' ghost mode sets it).
    """

    model: nn.Module
    dataset: Dataset
    logits: Callable[[nn.Module, Sequence[Tensor]], Tensor] = call_model
    criterion: nn.Module = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.criterion is None:
            self.criterion = nn.CrossEntropyLoss()

    def loss(self, model: nn.Module, batch: Sequence[Tensor], criterion: Callable[..., Any] | None = None) -> Any:
        device = next(model.parameters()).device
        *inputs, target = (t.to(device) for t in batch)
        return (criterion or self.criterion)(self.logits(model, inputs), target)


def build(settings: Settings) -> Workload:
    """The workload by name, in training mode, embeddings frozen.

    Your own: `--model package.module:function`. The function takes none, some or all of `batch`, `seq`, and
    returns a `Workload`, or `(model, dataset)` with the dataset yielding `(input, ..., label)`.
    """
    torch.manual_seed(settings.seed)
    name = settings.model
    if name == "toy":
        workload = toy(settings)
    elif name.startswith("stack:"):
        workload = stack(settings, width=int(name.removeprefix("stack:")))
    elif name.startswith("transformer:"):
        workload = transformer(settings, width=int(name.removeprefix("transformer:")))
    elif name in HUGGING_FACE:
        workload = hugging_face(settings, HUGGING_FACE[name])
    elif Path(name).is_dir():
        workload = hugging_face_folder(settings)
    elif ":" in name:
        workload = from_user(settings)
    else:
        workload = wide_resnet(settings)
    if len(workload.dataset) != settings.batch:  # type: ignore[arg-type]
        raise ValueError(
            f"the dataset of model={name!r} has {len(workload.dataset)} examples and must have "  # type: ignore[arg-type]
            f"batch={settings.batch}: with as many, Poisson sampling at rate 1 gives every step the same work"
        )
    freeze_embeddings(workload.model)
    workload.model.train()
    return workload


def freeze_embeddings(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            module.weight.requires_grad_(False)


# Hugging Face text models ------------------------------------------------------------------------------------------

HUGGING_FACE: dict[str, dict[str, int]] = {
    "bert-base": {},
    "minilm": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
}


def preload(name: str) -> None:
    """Import what `build` will import, so that libraries count as baseline and not as the model's memory."""
    if name in HUGGING_FACE or Path(name).is_dir():
        from transformers import AutoModelForSequenceClassification, BertForSequenceClassification  # noqa: F401
    elif ":" in name and not name.startswith(("stack:", "transformer:")):
        importlib.import_module(name.split(":")[0])


def hugging_face(settings: Settings, config: dict[str, int]) -> Workload:
    from transformers import BertConfig, BertForSequenceClassification

    model = BertForSequenceClassification(BertConfig(num_labels=2, **config))
    return text_workload(model, settings, model.config.vocab_size)


def hugging_face_folder(settings: Settings) -> Workload:
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(settings.model, num_labels=2, local_files_only=True)
    for parameter in model.parameters():
        parameter.data = parameter.data.float().clone()  # or it stays on disk, mapped, until it is touched
    return text_workload(model, settings, model.config.vocab_size)


def text_workload(model: nn.Module, settings: Settings, vocabulary: int) -> Workload:
    ids = torch.randint(vocabulary, (settings.batch, settings.seq))
    labels = torch.randint(2, (settings.batch,))
    return Workload(model, TensorDataset(ids, torch.ones_like(ids), labels), call_text_model)


# Wide ResNets ------------------------------------------------------------------------------------------------------


def wide_resnet(settings: Settings) -> Workload:
    from rgp.models import wrn

    images = torch.randn(settings.batch, 3, 32, 32)
    return Workload(wrn(settings.model), TensorDataset(images, torch.randint(10, (settings.batch,))))


# Small ones for tests and for the scaling figure ---------------------------------------------------------------------


class ToyBlock(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        m, t, d = x.shape
        qkv = self.qkv(self.norm1(x)).view(m, t, 3, self.heads, d // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(attended.transpose(1, 2).reshape(m, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ToyTransformer(nn.Module):
    def __init__(self, vocabulary: int = 100, width: int = 32, depth: int = 2, heads: int = 4, num_classes: int = 2):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.norm = nn.LayerNorm(width)
        self.blocks = nn.Sequential(*(ToyBlock(width, heads) for _ in range(depth)))
        self.head = nn.Linear(width, num_classes)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.norm(self.embedding(ids))).mean(dim=1))


def toy(settings: Settings) -> Workload:
    return small_text(settings, ToyTransformer())


def transformer(settings: Settings, width: int) -> Workload:
    """Six blocks of a given width, for whoever has no transformers installed; 19 million parameters at width 512."""
    return small_text(settings, ToyTransformer(width=width, depth=6, heads=max(1, width // 64)))


def small_text(settings: Settings, model: nn.Module) -> Workload:
    ids = torch.randint(100, (settings.batch, settings.seq))
    return Workload(model, TensorDataset(ids, torch.randint(2, (settings.batch,))))


class LinearStack(nn.Module):
    """Four square linear layers over a sequence: every cost of the paper's table is one product of its sizes."""

    def __init__(self, width: int, depth: int = 4, num_classes: int = 2):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.relu(layer(x))
        return self.head(x.mean(dim=1))


def stack(settings: Settings, width: int) -> Workload:
    inputs = torch.randn(settings.batch, settings.seq, width) / math.sqrt(width)
    return Workload(LinearStack(width), TensorDataset(inputs, torch.randint(2, (settings.batch,))))


def from_user(settings: Settings) -> Workload:
    module, function = settings.model.split(":")
    make = getattr(importlib.import_module(module), function)
    wanted = inspect.signature(make).parameters
    made = make(**{key: getattr(settings, key) for key in ("batch", "seq") if key in wanted})
    return made if isinstance(made, Workload) else Workload(*made)
