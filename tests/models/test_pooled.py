"""Pooled classifiers: padding, exactness, public centres, heads from public texts."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import helpers
import rgp
from rgp.train.config import ConfigError
from tiny_language import (
    changes_for,
    load_sst2_like,
    settings,
    texts,
    train,
    transformers,
    write_rows,
)

# ---------------------------------------------------------------------- pooling and heads


@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("head", ["linear", "layernorm"])
def test_pooled_classifier_ignores_padding_and_survives_saving(bert_folder, tmp_path, pooling, head):
    from rgp.models.pooled import PooledClassifier

    encoder = transformers.AutoModel.from_pretrained(bert_folder)
    model = PooledClassifier(encoder, 3, pooling=pooling, head=head).eval()
    model.centre += 0.3
    ids = torch.tensor([[2, 7, 9, 3]])
    alone = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    padded = nn.functional.pad(ids, (0, 5))
    together = model(input_ids=padded, attention_mask=(padded != 0).long()).logits
    assert torch.allclose(alone, together, atol=1e-5)
    states = encoder(input_ids=ids).last_hidden_state[0].detach()
    features = (states[0] if pooling == "cls" else states.mean(0)) - 0.3
    if head == "layernorm":
        features = (features - features.mean()) / features.var(correction=0).add(1e-5).sqrt()
    expected = features @ model.classifier.weight.T + model.classifier.bias
    assert torch.allclose(alone[0], expected, atol=1e-5)

    model.save_pretrained(tmp_path)
    again = PooledClassifier.from_pretrained(tmp_path).eval()
    assert torch.equal(again(input_ids=ids).logits, model(input_ids=ids).logits)
    assert torch.equal(  # anyone can load the encoder alone, with transformers only
        transformers.AutoModel.from_pretrained(tmp_path)(input_ids=ids).last_hidden_state[0],
        encoder(input_ids=ids)[0][0],
    )


def test_pooled_classifier_is_exact_per_example(bert_folder):
    from rgp.models.pooled import PooledClassifier

    encoder = transformers.AutoModel.from_pretrained(bert_folder)
    model = PooledClassifier(encoder, 2, head="layernorm").double()
    data = load_sst2_like(bert_folder, texts(12, seed=1), held_out=0.3).train
    collate = load_sst2_like(bert_folder, texts(12, seed=1), held_out=0.3).collate_fn
    weights = dict(zip((tuple(r["input_ids"].tolist()) for r in data), helpers.spread(len(data)), strict=True))

    def losses(model, batch):
        inputs = {k: v for k, v in batch.items() if k != "labels"}
        lost = nn.functional.cross_entropy(model(**inputs).logits, batch["labels"], reduction="none")
        return lost * torch.stack([weights[tuple(i for i in row.tolist() if i)] for row in batch["input_ids"]])

    helpers.check_exact(model, data, losses, method=rgp.RGP(rank=2, source="weight"), collate=collate)


def test_public_centre_is_the_mean_of_public_sentences_and_nothing_else(bert_folder, tmp_path):
    from rgp.train import setup

    write_rows(tmp_path, "sst2")
    options = {"model.pooling": "mean", "model.head": "layernorm", "model.centre": "public"}
    made = [setup.make(settings(changes_for(bert_folder, tmp_path, **options))) for _ in range(2)]
    write_rows(tmp_path, "sst2", seed=9)  # other private rows: the same centre
    made.append(setup.make(settings(changes_for(bert_folder, tmp_path, **options))))
    centres = [parts.model.centre for parts in made]
    assert centres[0].abs().sum() > 0 and all(torch.equal(c, centres[0]) for c in centres)
    assert not centres[0].requires_grad and "centre" in made[0].model.state_dict()
    (tmp_path / "mine.txt").write_text("the film was good\n\nthe story felt dull\n")
    options["model.centre"] = tmp_path / "mine.txt"
    model = setup.make(settings(changes_for(bert_folder, tmp_path, **options))).model.eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(bert_folder)
    lines = ["the film was good", "the story felt dull"]
    with torch.no_grad():
        own = [model.pooled(**tokenizer([line], return_tensors="pt"))[0] for line in lines]
    assert torch.allclose(model.centre, torch.stack(own).mean(0), atol=1e-6)


def test_a_head_may_start_from_public_texts(bert_folder, tmp_path):
    """Each row points to its text's feature, away from the mean of all; private rows have no part in it."""
    from rgp.train import setup

    texts = ["the film was dull", "the film was good"]
    options = {"model.pooling": "mean", "model.head": "layernorm", "model.centre": "public"}
    options["model.label_texts"] = json.dumps(texts)
    heads = []
    for seed in (0, 9):
        write_rows(tmp_path, "sst2", seed=seed)
        made = setup.make(settings(changes_for(bert_folder, tmp_path, **options)))
        heads.append(made.model.classifier)
    assert torch.equal(heads[0].weight, heads[1].weight) and not heads[0].bias.any()
    model, tokenizer = made.model.eval(), transformers.AutoTokenizer.from_pretrained(bert_folder)
    with torch.no_grad():
        alone = [model.features(**tokenizer([text], return_tensors="pt"))[0] for text in texts]
        logits = torch.stack([model(**tokenizer([text], return_tensors="pt")).logits[0] for text in texts])
    away = (alone[1] - alone[0]) / (alone[1] - alone[0]).norm()
    assert torch.allclose(heads[0].weight, 0.02 * 16**0.5 * torch.stack([-away, away]), atol=1e-5)
    assert logits.argmax(1).tolist() == [0, 1]
    train(settings(changes_for(bert_folder, tmp_path, **options)), tmp_path / "run")
    card = (tmp_path / "run" / "model" / "privacy_card.md").read_text()
    assert "texts that the head starts from: the film was dull; the film was good" in card
    options["model.label_texts"] = json.dumps([*texts, "neither"])
    with pytest.raises(ConfigError, match=r"3 texts for 2 classes; one for each of \w+, \w+, in this order"):
        setup.make(settings(changes_for(bert_folder, tmp_path, **options)))
