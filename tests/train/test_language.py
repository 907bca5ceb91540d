"""`rgp train` on texts: GLUE's tasks, tables, optimizers, dropout, LoRA, causal models."""

from __future__ import annotations

import json
import random

import pytest
import torch
from torch import nn

import rgp
from rgp.data import DataSpec, load
from rgp.train import evaluation, progress, runner
from rgp.train.config import ConfigError
from tiny_language import (
    changes_for,
    sentence,
    settings,
    train,
    transformers,
    write_as_table,
    write_rows,
)

# ---------------------------------------------------------------------- rgp train on texts


@pytest.mark.parametrize("optimizer", ["sgd", "adam-corrected"])
def test_train_with_pooling_head_lr_and_optimizer(bert_folder, tmp_path, optimizer):
    from rgp.models.pooled import PooledClassifier
    from rgp.train import setup

    write_rows(tmp_path / "data", "sst2")
    chosen = settings(
        changes_for(
            bert_folder,
            tmp_path / "data",
            **{
                "model.pooling": "mean",
                "model.head": "layernorm",
                "model.centre": "public",
                "optimizer.name": optimizer,
                "optimizer.head_lr": 0.05,
                "optimizer.schedule": "linear",
            },
        )
    )
    groups = setup.make(chosen).optimizer.param_groups
    assert [g["initial_lr"] for g in groups] == [0.001, 0.05]
    assert [tuple(p.shape) for p in groups[1]["params"]] == [(2, 16), (2,)]
    summary = train(chosen, tmp_path / "run")
    assert summary["finished"] and summary["epsilon"] <= 8
    measured = evaluation.evaluate_run(tmp_path / "run")
    assert measured["accuracy"] == pytest.approx(summary["accuracy"])
    assert isinstance(PooledClassifier.from_pretrained(tmp_path / "run" / "model"), nn.Module)


def test_biases_and_norms_may_have_a_rate_of_their_own(bert_folder, tmp_path):
    from rgp.train import setup

    write_rows(tmp_path / "data", "sst2")
    changes = {"optimizer.head_lr": 0.05, "optimizer.bias_lr": 0.02}
    made = setup.make(settings(changes_for(bert_folder, tmp_path / "data", **changes)))
    matrices, vectors, head = made.optimizer.param_groups
    assert [g["lr"] for g in (matrices, vectors, head)] == [0.001, 0.02, 0.05]
    assert {p.ndim for p in matrices["params"]} == {2} and {p.ndim for p in vectors["params"]} == {1}
    assert [tuple(p.shape) for p in head["params"]] == [(2, 16), (2,)]
    assert sum(len(g["params"]) for g in made.optimizer.param_groups) == len(list(made.model.parameters()))


def test_head_first_keeps_the_body_still_and_then_trains_it(bert_folder, tmp_path):
    from rgp.train import setup

    write_rows(tmp_path / "data", "sst2")
    changes = {"optimizer.head_lr": 0.05, "optimizer.head_first": 0.4, "optimizer.schedule": "linear"}
    chosen = settings(changes_for(bert_folder, tmp_path / "data", **changes))
    optimizer = setup.make(chosen).optimizer
    schedule = setup.make_schedule(chosen, optimizer, 10)
    body, head = zip(*(_rates(optimizer, schedule) for _ in range(10)), strict=True)
    assert body[:4] == (0, 0, 0, 0)
    assert body[4:] == pytest.approx([0.001 * (6 - i) / 6 for i in range(6)])  # a run of its own
    assert head == pytest.approx([0.05 * (10 - i) / 10 for i in range(10)])
    assert train(chosen, tmp_path / "run")["finished"]


def _rates(optimizer, schedule):
    found = [group["lr"] for group in optimizer.param_groups]
    optimizer.step()
    schedule.step()
    return found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.head": "layernorm"}, "model.head = layernorm: needs model.pooling"),
        ({"model.centre": "public"}, "model.centre = public: needs model.pooling"),
        ({"model.label_texts": '["bad", "good"]'}, "model.label_texts = .*: needs model.pooling"),
        ({"model.pooling": "mean", "model.label_texts": '["same", "same"]'}, "model.label_texts = .*no two the same"),
        (
            {"model.pooling": "mean", "model.centre": "nowhere.txt"},
            "model.centre = nowhere.txt: must be none, public, films",
        ),
        ({"optimizer.head_first": 0.2}, "optimizer.head_first = 0.2: needs optimizer.head_lr"),
        ({"data.unit": "block"}, "data.unit = block: is for language models"),
        ({"model.task": "causal-lm"}, "data.unit = null: task causal-lm needs"),
        ({"method.name": "dp-lora", "method.rank": "auto", "method.source": None}, "method.rank = auto"),
        (
            {"model.name": "mlp", "data.name": "digits", "method.name": "dp-lora", "method.source": None},
            "dp-lora: needs",
        ),
        ({"method.source": "public"}, "method.source = public, method.public = null: source public and the inputs"),
        ({"method.public": "films"}, "method.source = weight, method.public = films: source public and"),
        (
            {"method.source": "public", "method.public": "nowhere.txt"},
            "method.public = nowhere.txt: must be noise, public, films",
        ),
        (
            {"method.name": "rgp-random", "method.source": "public", "method.public": "films"},
            "method.public = films: is for method rgp",
        ),
        (
            {"model.name": "mlp", "data.name": "digits", "method.source": "public", "method.public": "films"},
            "method.public = films: is text, and the model takes images",
        ),
        ({"model.name": "mlp", "data.name": "digits", "model.dropout": 0}, "model.dropout = 0: is for Hugging Face"),
    ],
)
def test_settings_that_do_not_go_together(bert_folder, tmp_path, change, message):
    write_rows(tmp_path, "sst2")
    with pytest.raises(ConfigError, match=message):
        settings(changes_for(bert_folder, tmp_path, **change))


def test_train_with_carriers_from_public_sentences(bert_folder, tmp_path):
    """They are really used: other sentences, and random ones, give other weights."""
    from safetensors.torch import load_file

    write_rows(tmp_path / "data", "sst2")
    found = {}
    (tmp_path / "a").write_text("good film\ndull story")
    (tmp_path / "b").write_text("the film\na good dull story")
    for name in ("a", "b", "noise"):
        where = name if name == "noise" else str(tmp_path / name)
        change = {"method.source": "public", "method.public": where, "run.seed": 0}
        chosen = settings(changes_for(bert_folder, tmp_path / "data", **change))
        summary = train(chosen, tmp_path / f"run-{name}")
        assert summary["finished"]
        found[name] = load_file(tmp_path / f"run-{name}" / "model" / "model.safetensors")
        card = (tmp_path / f"run-{name}" / "model" / "privacy_card.md").read_text()
        assert ("carriers follow: random inputs" if name == "noise" else "which the user says is public") in card
    name = "bert.encoder.layer.0.attention.self.query.weight"
    assert not torch.equal(found["a"][name], found["b"][name])
    assert not torch.equal(found["a"][name], found["noise"][name])


@pytest.mark.parametrize("rate", [0.0, 0.25])
@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_dropout_of_every_part_is_what_was_asked_for(kind, rate):
    from transformers import AutoModelForSequenceClassification, BertConfig, GPT2Config

    from rgp.train.language import set_dropout

    small = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 8, "vocab_size": 9}
    shape = BertConfig(**small) if kind == "bert" else GPT2Config(**small, bos_token_id=1, eos_token_id=1)

    def rates():
        model = AutoModelForSequenceClassification.from_config(shape)
        return [m.p for m in model.modules() if isinstance(m, nn.Dropout)]

    before = rates()
    assert len(before) >= 3 and set(before) == {0.1}
    set_dropout(shape, rate)
    assert rates() == [rate] * len(before)


def test_a_run_has_the_dropout_that_was_asked_for(bert_folder, tmp_path):
    from rgp.train import setup

    write_rows(tmp_path, "sst2")
    batch = {"input_ids": torch.arange(5, 13)[None], "attention_mask": torch.ones(1, 8, dtype=torch.long)}
    for rate, same in ((0.5, False), (0, True)):
        change = {"model.dropout": rate, "model.pooling": "mean"}
        model = setup.make(settings(changes_for(bert_folder, tmp_path, **change))).model.train()
        first, second = (model(**batch).logits for _ in range(2))
        assert torch.equal(first, second) is same


def test_a_model_without_dropout_says_so():
    from transformers import T5Config

    from rgp.train.language import set_dropout

    shape = T5Config()
    shape.__dict__ = {k: v for k, v in shape.__dict__.items() if "dropout" not in k}
    with pytest.raises(ConfigError, match=r"model.dropout = 0: a t5 has no dropout"):
        set_dropout(shape, 0.0)


@pytest.mark.parametrize("task", ["qnli", "qqp", "mnli"])
def test_glue_tasks_of_two_texts(bert_folder, tmp_path, task):
    """Pairs go in with their token types; MNLI is measured on both of its test sets."""
    write_rows(tmp_path / "data", task)
    chosen = settings(changes_for(bert_folder, tmp_path / "data", task, **{"training.steps": 1}))
    data = load(DataSpec(name=task, folder=tmp_path / "data", tokenizer=bert_folder, max_length=24))
    assert data.train[0]["token_type_ids"].max() == 1 and data.published_test
    summary = train(chosen, tmp_path / "run")
    measured = evaluation.evaluate_run(tmp_path / "run")
    extra = [k for k in measured if k.startswith("accuracy_") and k != "accuracy_is_publishable"]
    assert extra == (["accuracy_mismatched"] if task == "mnli" else [])
    card = json.loads((tmp_path / "run" / "model" / "privacy_card.json").read_text())
    for key in ("accuracy", *extra):
        assert measured[key] == pytest.approx(summary[key]) == pytest.approx(card[key])
    if task == "mnli":
        assert len(data.more_tests["mismatched"]) == len(data.test) + 1  # another file


@pytest.mark.parametrize("ending", ["csv", "tsv", "jsonl", "parquet"])
@pytest.mark.parametrize("pairs", [False, True])
def test_any_table_with_one_or_two_text_columns(bert_folder, tmp_path, ending, pairs):
    names = ("review", "reply") if pairs else ("review",)
    rng = random.Random(0)
    rows = [{**{n: sentence(rng) for n in names}, "stars": ("low", "high")[i % 2]} for i in range(20)]
    path = tmp_path / f"rows.{ending}"
    write_as_table(path, rows)
    text = names if pairs else names[0]
    data = load(DataSpec(name=str(path), text=text, label="stars", tokenizer=bert_folder))
    tokenizer = transformers.AutoTokenizer.from_pretrained(bert_folder)
    kept = [row for i, row in enumerate(rows) if i in hold_in(rows)]
    assert len(data.train) == len(kept) < 20 and data.label_names == ("high", "low")
    assert data.train[3]["input_ids"].tolist() == tokenizer(*(kept[3][n] for n in names))["input_ids"]


def hold_in(rows):
    from rgp.data.splits import content, hold_out

    return set(hold_out([content(*row.values()) for row in rows], 0.2, 0, "")[0].tolist())


# ---------------------------------------------------------------------- LoRA through rgp train


@pytest.mark.parametrize("pooling", [None, "mean"])
def test_train_dp_lora(bert_folder, tmp_path, pooling):
    """Adapters and head are trained, everything else stays; what is published is an ordinary model with them added in."""
    pytest.importorskip("peft")
    from rgp.train import setup

    write_rows(tmp_path / "data", "sst2")
    options = {"method.name": "dp-lora", "method.rank": 3, "method.source": None, "model.pooling": pooling}
    chosen = settings(changes_for(bert_folder, tmp_path / "data", **options))
    parts = setup.make(chosen)
    plan = rgp.make_plan(parts.model, parts.method)
    trained = {e.name: e for e in plan.trained}
    assert all("lora_" in n or "modules_to_save" in n for n in trained)
    assert {e.treatment for e in trained.values()} == {"exact"}
    assert {min(e.shape) for n, e in trained.items() if "lora_" in n} == {3}
    linear = [m for m in parts.model.modules() if isinstance(m, nn.Linear)]
    assert sum("lora_A" in n for n in trained) >= 12 and len(linear) > 24  # query, key, value and three dense, twice
    summary = train(chosen, tmp_path / "run")
    assert summary["method"] == "dp-lora" and summary["epsilon"] <= 8
    measured = evaluation.evaluate_run(tmp_path / "run")
    assert measured["accuracy"] == pytest.approx(summary["accuracy"])
    from safetensors.torch import load_file

    names = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert not [n for n in names if "lora" in n or "base_layer" in n or "modules_to_save" in n]
    if pooling is None:
        transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "model")


# ---------------------------------------------------------------------- causal language models


def write_text(path, documents=40, seed=0):
    rng = random.Random(seed)
    path.write_text(
        "\n\n".join("\n".join(sentence(rng, 3, 9) for _ in range(rng.randint(1, 3))) for _ in range(documents))
    )
    return path


@pytest.mark.parametrize(
    ("unit", "options", "words"),
    [
        ("document", {"data.max_length": 20}, "one document"),
        ("line", {"data.max_length": 20}, "one line"),
        ("block", {"data.block": 8}, "one block of 8 tokens"),
    ],
)
def test_the_unit_of_a_language_model_is_what_was_asked_for(gpt2_folder, tmp_path, unit, options, words):
    path = write_text(tmp_path / "text.txt")
    spec = {k.removeprefix("data."): v for k, v in options.items()}
    data = load(DataSpec(name=str(path), unit=unit, tokenizer=gpt2_folder, **spec))
    text = path.read_text()
    tokenizer = transformers.AutoTokenizer.from_pretrained(gpt2_folder)
    if unit == "block":
        tokens = sum(len(i) + 1 for i in tokenizer(text.split("\n\n"))["input_ids"])
        expected, longest = tokens // 8, 8
        assert {len(r["input_ids"]) for r in data.train} == {8}
    else:
        expected, longest = len(text.split("\n\n") if unit == "document" else [x for x in text.split("\n") if x]), 20
    assert len(data.train) + len(data.test) == expected and max(data.train.lengths) <= longest
    assert data.row.startswith(words) and words in data.description
    batch = data.collate_fn([data.train[i] for i in range(6)])
    assert ((batch["labels"] == -100) == (batch["attention_mask"] == 0)).all()


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_train_a_causal_language_model(request, tmp_path, kind, capsys):
    folder = request.getfixturevalue(f"{kind}_folder")
    path = write_text(tmp_path / "text.txt")
    options = {"data.name": path, "data.folder": None, "data.unit": "document", "model.task": "causal-lm"}
    chosen = settings(changes_for(folder, tmp_path, **{**options, "optimizer.lr": 0.05, "training.steps": 6}))
    said = []
    shown = progress.Silent()
    shown.say = said.append
    summary = runner.train(chosen, tmp_path / "run", progress=shown)
    unit = "one row of the dataset (one document of the training text)"
    assert any(f"privacy unit: {unit}" in line for line in said)
    assert summary["unit"] == unit and 0 <= summary["accuracy"] <= 1
    measured = evaluation.evaluate_run(tmp_path / "run")
    assert measured["perplexity"] == pytest.approx(summary["perplexity"], rel=1e-5)
    card = (tmp_path / "run" / "model" / "privacy_card.md").read_text()
    assert f"for {unit}" in card and "one row is added or removed" in card
    assert "perplexity" not in card  # the held-out documents are private
    published = [f for f in (tmp_path / "run" / "model").rglob("*") if f.suffix in (".md", ".json")]
    assert published and not any(str(tmp_path.parent) in f.read_text() for f in published), "no path of this machine"
    # the model's own loss, one text at a time: what perplexity is
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").eval()
    data = load(DataSpec(name=str(path), unit="document", tokenizer=folder, max_length=24))
    with torch.no_grad():
        rows = [(model(**{k: v[None] for k, v in r.items()}).loss.double(), len(r["labels"]) - 1) for r in data.test]
    mean = sum(loss * n for loss, n in rows) / sum(n for _, n in rows)
    assert summary["perplexity"] == pytest.approx(float(mean.exp()), rel=1e-4)
