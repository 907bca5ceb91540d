"""A model's name -> its shapes on the meta device, a batch of m examples, and its loss. No weights, no data, no network
unless the name is a hub id."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rgp.bench.settings import MODEL_PATTERN, MODELS, Settings
from rgp.torchstate import kept_rng

TASKS = ("classification", "causal-lm")

# Shapes as published with the models (Llama 3.1 and 3.2); any other is a folder with a config.json away.
_LLAMA = {"vocab_size": 128256, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072}
PUBLISHED: dict[str, dict[str, Any]] = {
    "llama-1b": {
        **_LLAMA,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "llama-8b": {
        **_LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "llama-70b": {
        **_LLAMA,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
}


@dataclass(frozen=True)
class Subject:
    """The model that is planned for.

    build: depth -> the model on the meta device; None stands for the depth that it has. Embeddings are frozen.
    batch: m -> the tensors of m examples.
    loss: (model, batch) -> the mean loss.
    depth: how many equal layers it has, if that is known.
    """

    build: Callable[[int | None], nn.Module]
    batch: Callable[[int], Sequence[Tensor]]
    loss: Callable[[nn.Module, Sequence[Tensor]], Tensor]
    depth: int | None = None


def find(name: str, *, task: str, labels: int, seq: int, dtype: torch.dtype, checkpointing: bool) -> Subject:
    if task not in TASKS:
        raise ValueError(f"task={task!r} must be one of {', '.join(TASKS)}")
    config = _config(name)
    if config is not None:
        return _hugging_face(config, task, labels, seq, dtype, checkpointing)
    if task != "classification" or checkpointing:
        asked = f"task={task!r}" if task != "classification" else "checkpointing"
        raise ValueError(f"{asked} is for Hugging Face models; model={name!r} is not one")
    return _bench(name, seq, dtype)


def _config(name: str) -> Any:
    """The configuration of a Hugging Face model; None for the benchmark's own models and for the user's function."""
    from rgp.bench.workloads import HUGGING_FACE

    folder = Path(name).is_dir()
    if name not in HUGGING_FACE and not folder and (name in MODELS or MODEL_PATTERN.fullmatch(name)):
        return None
    if importlib.util.find_spec("transformers") is None:
        raise ValueError(f"model={name!r} needs transformers: pip install 'rgp[hf]'")
    from transformers import AutoConfig, BertConfig, LlamaConfig

    if name in HUGGING_FACE:
        return BertConfig(**HUGGING_FACE[name])
    if name in PUBLISHED:
        return LlamaConfig(**PUBLISHED[name])
    if folder and not (Path(name) / "config.json").is_file():
        raise ValueError(f"model={name!r} is a folder without config.json; a Hugging Face model has one")
    try:
        return AutoConfig.from_pretrained(name, local_files_only=folder)
    except (OSError, ValueError) as error:
        known = ", ".join([*HUGGING_FACE, "wrn28-4", *PUBLISHED])
        first = next(iter(str(error).splitlines()), "")
        raise ValueError(
            f"model={name!r} is not known ({known}), and neither a folder with config.json, module:function, nor a model "
            f"that the hub would give: {first}"
        ) from None


def _hugging_face(config: Any, task: str, labels: int, seq: int, dtype: torch.dtype, checkpointing: bool) -> Subject:
    import transformers

    image = getattr(config, "image_size", None)
    if task == "causal-lm":
        auto = transformers.AutoModelForCausalLM
    elif image is not None:
        auto = transformers.AutoModelForImageClassification
    else:
        auto = transformers.AutoModelForSequenceClassification
    if task == "classification":
        config.num_labels = labels
    if getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = 0  # a classifier of sequences looks for their ends
    config.use_cache = False
    positions = getattr(config, "max_position_embeddings", None)
    if image is None and positions is not None and seq > positions:
        raise ValueError(f"seq={seq} is longer than the {positions} positions of the model")
    depth = getattr(config, "num_hidden_layers", None)

    def build(layers: int | None) -> nn.Module:
        from rgp.bench.workloads import freeze_embeddings

        chosen = config
        if layers is not None:
            chosen = type(config)(**{**config.to_dict(), "num_hidden_layers": layers, "layer_types": None})
        with torch.device("meta"), kept_rng():
            model = auto.from_config(chosen).to(dtype)
        freeze_embeddings(model)
        if checkpointing:
            model.gradient_checkpointing_enable()
        return model.train()

    def batch(m: int) -> list[Tensor]:
        targets = torch.empty(m, dtype=torch.int64, device="meta")
        if image is None:
            return [torch.empty(m, seq, dtype=torch.int64, device="meta"), targets]
        height, width = (image, image) if isinstance(image, int) else image
        shape = (m, getattr(config, "num_channels", 3), height, width)
        return [torch.empty(shape, dtype=dtype, device="meta"), targets]

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        inputs, targets = batch
        if image is not None:
            return F.cross_entropy(model(pixel_values=inputs).logits, targets)
        logits = model(input_ids=inputs, attention_mask=torch.ones_like(inputs)).logits
        if task == "causal-lm":
            return F.cross_entropy(logits.flatten(0, 1), inputs.flatten())
        return F.cross_entropy(logits, targets)

    return Subject(build, batch, loss, depth)


def _bench(name: str, seq: int, dtype: torch.dtype) -> Subject:
    """Wide ResNets, the toy and the user's own function, as the benchmark builds them."""
    from rgp.bench import workloads

    def workload(m: int) -> workloads.Workload:
        with torch.device("meta"), kept_rng():
            return workloads.build(Settings(model=name, batch=m, microbatch=m, seq=seq, threads=1))

    def build(_layers: int | None) -> nn.Module:
        return workload(1).model.to("meta").to(dtype)

    def batch(m: int) -> list[Tensor]:
        dataset = workload(m).dataset
        columns = zip(*(dataset[i] for i in range(m)), strict=True)
        tensors = [torch.stack([torch.as_tensor(value).to("meta") for value in column]) for column in columns]
        return [t.to(dtype) if t.is_floating_point() else t for t in tensors]

    return Subject(build, batch, workload(1).loss)
