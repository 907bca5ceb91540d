"""A text encoder with a plain linear head on its pooled tokens: what MiniLM and other sentence encoders need.

pooling   "mean" over the tokens that are not padding, or "cls", the first token
centre    a fixed vector that is subtracted: the mean over public sentences (public_text.py, or a file), or zero. Features of one
          encoder share a large common part; a head then spends its gradient on that part, and clipping cuts the rest
head      "linear", or "layernorm": features are first normalised to mean 0 and variance 1, without parameters, so that the
          head does not depend on their scale, nor on how the scale moves while the encoder is trained
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rgp.files import write_json
from rgp.torchstate import evaluating
from rgp.validate import check_one_of

POOLINGS, HEADS = ("cls", "mean"), ("linear", "layernorm")
ABOUT = "pooled.json"
START = 0.02  # standard deviation of the head's first weights


class PooledClassifier(nn.Module):
    """An ordinary module around a Hugging Face encoder; called and saved as their classifiers are.

    The encoder stands under its own base name (`bert.`, `distilbert.`, ...), so that `AutoModel.from_pretrained` finds it
    in a saved folder; `PooledClassifier.from_pretrained(folder)` gives all of it back.
    """

    centre: Tensor

    def __init__(self, encoder: nn.Module, classes: int, *, pooling: str = "mean", head: str = "linear") -> None:
        super().__init__()
        check_one_of("pooling", pooling, POOLINGS)
        check_one_of("head", head, HEADS)
        self.config = encoder.config
        width = getattr(self.config, "hidden_size", None) or self.config.dim  # DistilBERT's name for it
        self.pooling, self.head, self.classes = pooling, head, classes
        self.base_model_prefix: str = getattr(encoder, "base_model_prefix", "") or "encoder"
        if getattr(encoder, "pooler", None) is not None:
            encoder.pooler = None  # type: ignore[assignment]  # its output is not used, and would get noise only
        self.add_module(self.base_model_prefix, encoder)
        self.register_buffer("centre", torch.zeros(width))
        dropout = getattr(self.config, "hidden_dropout_prob", getattr(self.config, "dropout", 0.0))
        self.dropout = nn.Dropout(dropout if isinstance(dropout, float) else 0.0)
        self.classifier = nn.Linear(width, classes)
        nn.init.normal_(self.classifier.weight, std=START)
        nn.init.zeros_(self.classifier.bias)

    @property
    def encoder(self) -> nn.Module:
        return getattr(self, self.base_model_prefix)

    def pooled(self, input_ids: Tensor, attention_mask: Tensor | None = None, **inputs: Any) -> Tensor:
        """(m, width), before centring and head."""
        states = self.encoder(input_ids=input_ids, attention_mask=attention_mask, **inputs).last_hidden_state
        if self.pooling == "cls":
            return states[:, 0]
        if attention_mask is None:
            return states.mean(1)
        mask = attention_mask.to(states.dtype)[..., None]
        return (states * mask).sum(1) / mask.sum(1).clamp_min(1)

    def features(self, *args: Any, **inputs: Any) -> Tensor:
        """(m, width): what the linear layer sees."""
        found = self.pooled(*args, **inputs) - self.centre
        return F.layer_norm(found, found.shape[-1:]) if self.head == "layernorm" else found

    def forward(self, *args: Any, labels: Tensor | None = None, **inputs: Any) -> Any:
        from transformers.modeling_outputs import SequenceClassifierOutput

        logits = self.classifier(self.dropout(self.features(*args, **inputs)))
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)

    @torch.no_grad()
    def recentre(self, batches: Sequence[dict[str, Tensor]]) -> None:
        """Set the centre to the mean pooled feature of PUBLIC texts: fixed from then on, and nothing is spent on it."""
        with evaluating(self):
            found = [self.pooled(**batch) for batch in batches]
        self.centre.copy_(torch.cat(found).mean(0))

    @torch.no_grad()
    def start_head(self, batches: Sequence[dict[str, Tensor]]) -> None:
        """Start the head from PUBLIC texts, one for each class: a row points to its text, away from the others.

        Rows are as long as ordinary first weights. Untrained, such a head tells classes apart as far as the encoder does.
        """
        with evaluating(self):
            found = torch.cat([self.features(**batch) for batch in batches])
        rows = F.normalize(found - found.mean(0), dim=1)
        self.classifier.weight.copy_(rows * START * rows.shape[1] ** 0.5)
        self.classifier.bias.zero_()

    # ------------------------------------------------------------------ files

    def save_pretrained(self, folder: Any, **_: Any) -> None:
        """config.json of the encoder, model.safetensors of everything, pooled.json for the rest."""
        from safetensors.torch import save_model

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.config.save_pretrained(folder)
        save_model(self, str(folder / "model.safetensors"), metadata={"format": "pt"})
        (folder / "model.safetensors").chmod(0o644)
        about = {"pooling": self.pooling, "head": self.head, "classes": self.classes}
        write_json(folder / ABOUT, about)

    @classmethod
    def from_pretrained(cls, folder: Any) -> PooledClassifier:
        """What `save_pretrained` wrote."""
        from safetensors.torch import load_model
        from transformers import AutoConfig, AutoModel

        about = json.loads((Path(folder) / ABOUT).read_text(encoding="utf-8"))
        encoder = AutoModel.from_config(AutoConfig.from_pretrained(folder))
        model = cls(encoder, about["classes"], pooling=about["pooling"], head=about["head"])
        load_model(model, str(Path(folder) / "model.safetensors"))
        return model


def public_sentences(name: str) -> list[str]:
    """The sentences that come with rgp, "public" or "films"; or the lines of a file."""
    from rgp.models.public_text import TEXTS

    if name in TEXTS:
        return list(TEXTS[name])
    found = [line.strip() for line in Path(name).expanduser().read_text(encoding="utf-8").splitlines() if line.strip()]
    if not found:
        raise ValueError(f"{name} holds no sentence; a file of public text has one per line")
    return found


def public_batches(
    sentences: list[str],
    tokenizer: Any,
    collate: Callable[[list[Any]], dict[str, Tensor]],
    *,
    max_length: int,
    device: torch.device,
) -> list[dict[str, Tensor]]:
    """Public sentences in micro-batches of 32."""
    rows = public_rows(sentences, tokenizer, max_length=max_length)
    return [{k: v.to(device) for k, v in collate(rows[at : at + 32]).items()} for at in range(0, len(rows), 32)]


def public_rows(sentences: list[str], tokenizer: Any, *, max_length: int) -> list[dict[str, Tensor]]:
    """Public sentences, tokenised as the private texts are."""
    ids = tokenizer(sentences, truncation=True, max_length=max_length)["input_ids"]
    return [{"input_ids": torch.tensor(i), "attention_mask": torch.ones(len(i), dtype=torch.long)} for i in ids]
