"""Hugging Face models for `rgp train`: classifiers with their own head or ours, language models, LoRA adapters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rgp.public import ROWS
from rgp.train.config import Config, ConfigError
from rgp.train.sections import WEIGHTS

LORA_RANK = 8


def load_tokenizer(config: Config) -> Any:
    return _from_hub(config, lambda t, where: t.AutoTokenizer.from_pretrained(where))


def make_transformer(config: Config, data: Any, tokenizer: Any) -> nn.Module:
    settings = config.model

    def load(t: Any, where: str) -> nn.Module:
        options: dict[str, Any] = {}
        if settings.task == "causal-lm":
            kind = t.AutoModelForCausalLM
        elif settings.pooling is not None:
            kind = t.AutoModel
        else:
            kind, options = t.AutoModelForSequenceClassification, {"num_labels": data.classes}
        shape = t.AutoConfig.from_pretrained(where, **options)
        if settings.dropout is not None:
            set_dropout(shape, settings.dropout)
        if not settings.pretrained:
            return kind.from_config(shape)
        # a head for another number of classes is initialised
        return kind.from_pretrained(where, config=shape, ignore_mismatched_sizes="num_labels" in options)

    # some checkpoints are in half precision, and recent versions load them so: updates would be lost in rounding
    model = _from_hub(config, load).float()
    if settings.pooling is not None:
        model = pool(config, model, data, tokenizer)
    elif getattr(model.config, "pad_token_id", 0) is None:
        model.config.pad_token_id = data.collate_fn.token  # classifiers look for the last token before it
    return adapt(config, model) if config.method.name == "dp-lora" else model


def set_dropout(shape: Any, rate: float) -> None:
    """Set every dropout rate in a transformers config; each family has its own names: hidden_dropout_prob, resid_pdrop, ..."""
    known = [name for name, value in shape.to_dict().items() if _is_dropout(name) and isinstance(value, float | int)]
    if not known:
        raise ConfigError([f"model.dropout = {rate:g}: a {shape.model_type} has no dropout; leave it out"])
    for name in known:
        setattr(shape, name, rate)


def _is_dropout(name: str) -> bool:
    return "dropout" in name or name.endswith("pdrop")


def pool(config: Config, encoder: nn.Module, data: Any, tokenizer: Any) -> nn.Module:
    from rgp.models.pooled import PooledClassifier, public_batches, public_sentences

    assert config.model.pooling is not None
    model = PooledClassifier(encoder, data.classes, pooling=config.model.pooling, head=config.model.head)

    def batches(sentences: Sequence[str]) -> list[dict[str, Tensor]]:
        length, cpu = config.data.max_length, torch.device("cpu")
        return public_batches(list(sentences), tokenizer, data.collate_fn, max_length=length, device=cpu)

    if config.model.centre != "none":
        model.recentre(batches(public_sentences(config.model.centre)))
    if (texts := config.model.label_texts) is not None:
        if len(texts) != data.classes:
            words = (
                f"model.label_texts = {list(texts)}: {len(texts)} texts for {data.classes} classes; one for each of "
            )
            raise ConfigError([words + f"{', '.join(map(str, data.label_names))}, in this order"])
        model.start_head(batches(texts))
    return model


def public_inputs(config: Config, data: Any, tokenizer: Any) -> Callable[[], dict[str, Tensor]]:
    """Batches for method.source = public: some of the public sentences, or random tokens."""
    from rgp.models.pooled import public_rows, public_sentences

    assert config.method.public is not None
    length = config.data.max_length
    if config.method.public == "noise":
        special = set(tokenizer.all_special_ids)
        tokens = torch.tensor([i for i in range(len(tokenizer)) if i not in special])

        def random_texts() -> dict[str, Tensor]:
            lengths = torch.randint(4, 20, (ROWS,)).tolist()
            drawn = [tokens[torch.randint(len(tokens), (n,))].tolist() for n in lengths]
            return data.collate_fn(public_rows([tokenizer.decode(ids) for ids in drawn], tokenizer, max_length=length))

        return random_texts
    rows = public_rows(public_sentences(config.method.public), tokenizer, max_length=length)
    return lambda: data.collate_fn([rows[i] for i in torch.randperm(len(rows))[:ROWS]])


def adapt(config: Config, model: nn.Module) -> nn.Module:
    """Put LoRA adapters on every linear layer of the body; they and the head are trained, all else is frozen."""
    try:
        import peft
    except ImportError as error:
        raise ConfigError(["method.name = dp-lora: needs pip install 'rgp[peft]'"]) from error
    import rgp

    heads = [e.name for e in rgp.make_plan(model, rgp.DPSGD()) if e.kind == "head"]
    classifies = config.model.task == "classify" and bool(heads)
    head_name = heads[0].removesuffix(".weight") if classifies else None
    output = getattr(model, "get_output_embeddings", lambda: None)() if config.model.task == "causal-lm" else None
    kinds = (nn.Linear, *_conv1d())
    targets = [n for n, m in model.named_modules() if isinstance(m, kinds) and n != head_name and m is not output]
    rank = LORA_RANK if config.method.rank is None else config.method.rank
    settings = peft.LoraConfig(
        r=rank,
        lora_alpha=rank,
        lora_dropout=0.0,
        target_modules=targets,
        modules_to_save=None if head_name is None else [head_name],
    )
    return peft.get_peft_model(model, settings)


def without_adapters(model: nn.Module) -> nn.Module:
    """The model with its adapters added into the weights; a model without adapters is returned as it is."""
    return model.merge_and_unload() if hasattr(model, "merge_and_unload") else model  # type: ignore[operator]


def _conv1d() -> tuple[type, ...]:
    from transformers.pytorch_utils import Conv1D  # GPT-2's linear layers

    return (Conv1D,)


# ---------------------------------------------------------------------- losses


def shifted(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """A language model's logits and the tokens they are about: position t predicts token t + 1."""
    return logits[:, :-1], labels[:, 1:]


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """(m,): the mean loss of every example over its own tokens. A mean over all tokens of a batch would mix examples."""
    losses = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=-100, reduction="none")
    return losses.sum(1) / (labels != -100).sum(1).clamp_min(1)


def tokens_right(logits: Tensor, labels: Tensor) -> Tensor:
    """(m,): the share of every example's tokens that was ranked first."""
    known = labels != -100
    return ((logits.argmax(-1) == labels) & known).sum(1) / known.sum(1).clamp_min(1)


# ---------------------------------------------------------------------- from the hub


def weights_folder(config: Config) -> Path | None:
    """Where `rgp data get NAME` put the weights, if the model is called by such a name."""
    from rgp.data import data_folder

    if config.model.name not in WEIGHTS:
        return None
    where = [data_folder(config.data.folder) / config.model.name, data_folder() / config.model.name]
    found = next((folder for folder in where if folder.is_dir()), None)
    if found is None:
        places = " and not in ".join(dict.fromkeys(str(folder.parent) for folder in where))
        raise ConfigError(
            [f"model.name = {config.model.name}: is not in {places}; fetch it: rgp data get {config.model.name}"]
        )
    return found


def _from_hub(config: Config, load: Callable[[Any, str], Any]) -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ConfigError([f"model.name = {config.model.name}: needs pip install 'rgp[hf]'"]) from error
    where = weights_folder(config) or Path(config.model.name).expanduser()
    try:
        return load(transformers, str(where) if where.is_dir() else config.model.name)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError([f"model.name = {config.model.name}: cannot be loaded: {reason[:300]}"]) from error
