"""Tiny language models, made-up texts, and runs of `rgp train` on them."""

from __future__ import annotations

import hashlib
import json
import random
import tempfile
import warnings
from pathlib import Path

import pytest
import torch

from rgp.data import DataSpec, load
from rgp.train import config, progress, runner

transformers = pytest.importorskip("transformers")

from tiny_models import bert_config, gpt2_config  # noqa: E402

WORDS = ["good", "great", "fine", "warm", "bad", "dull", "the", "film", "was", "and", "story", "felt", "so", "a", "why"]


def save_tiny(folder, kind):
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    tokenizer = transformers.BertTokenizer(str(folder / "vocab.txt"))
    tokenizer.save_pretrained(folder)
    size = 5 + len(WORDS)
    torch.manual_seed(0)
    if kind == "bert":
        made = transformers.BertModel(bert_config(size, 64))
    elif kind == "gpt2":
        made = transformers.GPT2LMHeadModel(gpt2_config(size, 64))
    else:
        made = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=size,
                hidden_size=16,
                intermediate_size=24,
                num_hidden_layers=2,
                num_attention_heads=2,
                max_position_embeddings=64,
            )
        )
    made.save_pretrained(folder)
    return folder


def sentence(rng, low=2, high=14):
    return " ".join(rng.choices(WORDS, k=rng.randint(low, high)))


def texts(count, seed=0):
    """Texts of very different lengths, and labels."""
    rng = random.Random(seed)
    return [(sentence(rng), rng.randrange(2)) for _ in range(count)]


def write_rows(folder, task, rows=48, seed=0):
    """Made-up rows in the layout of a GLUE task."""
    rng = random.Random(seed)
    columns, labels, tests = {
        "sst2": (("sentence",), 2, ("validation",)),
        "qnli": (("question", "sentence"), 2, ("dev",)),
        "qqp": (("question1", "question2"), 2, ("validation",)),
        "mnli": (("premise", "hypothesis"), 3, ("validation_matched", "validation_mismatched")),
    }[task]
    (folder / task).mkdir(parents=True, exist_ok=True)
    for split, count in (("train", rows), *((t, rows // 4 + i) for i, t in enumerate(tests))):
        lines = ["\t".join((*columns, "label"))]
        lines += ["\t".join((*(sentence(rng) for _ in columns), str(i % labels))) for i in range(count)]
        (folder / task / f"{split}.tsv").write_text("\n".join(lines))
    return folder


def load_sst2_like(bert_folder, rows, **options):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.csv"
        path.write_text("text,label\n" + "\n".join(f"{text},{label}" for text, label in rows))
        return load(DataSpec(name=str(path), tokenizer=bert_folder, max_length=32, **options))


def settings(changes, preset=None):
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as empty:
        return config.load(None if preset else Path(empty.name), preset=preset, changes=changes)


def train(settings, out):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="noise_multiplier is 0")
        warnings.filterwarnings("ignore", message=".*secret.json.*")
        return runner.train(settings, out, progress=progress.Silent())


def changes_for(bert_folder, folder, task="sst2", **more):
    made = {
        "data.name": task,
        "data.folder": folder,
        "data.max_length": 24,
        "model.name": bert_folder,
        "method.name": "rgp",
        "method.rank": 2,
        "method.source": "weight",
        "budget.noise_multiplier": 8,  # accounting is quick then
        "training.clip": 0.1,
        "training.batch_size": 16,
        "training.steps": 2,
        "training.microbatch_size": 8,
        "optimizer.name": "adam",
        "optimizer.lr": 0.001,
        "run.threads": 1,
        **more,
    }
    return [f"{k}={'null' if v is None else json.dumps(v) if isinstance(v, dict) else v}" for k, v in made.items()]


class Words:
    """A tokenizer of the form transformers has: one id per word, [1] ... [2] around, pairs with token types."""

    pad_token_id, padding_side, name_or_path = 0, "right", "words"

    def __call__(self, texts, pairs=None, *, truncation, max_length):
        assert truncation
        rows = [[1, *(self.id(w) for w in text.split()), 2] for text in texts]
        kinds = [[0] * len(row) for row in rows]
        if pairs is not None:
            seconds = [[*(self.id(w) for w in text.split()), 2] for text in pairs]
            kinds = [k + [1] * len(s) for k, s in zip(kinds, seconds, strict=True)]
            rows = [a + b for a, b in zip(rows, seconds, strict=True)]
        return {"input_ids": [r[:max_length] for r in rows], "token_type_ids": [k[:max_length] for k in kinds]}

    @staticmethod
    def id(word):
        return 3 + int(hashlib.md5(word.encode()).hexdigest(), 16) % 1000


def write_as_table(path, rows):
    """Rows, dicts of texts, as .csv, .tsv, .jsonl or .parquet, by the path's ending."""
    if path.suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    elif path.suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        mark = "," if path.suffix == ".csv" else "\t"
        path.write_text("\n".join([mark.join(rows[0]), *(mark.join(row.values()) for row in rows)]))
