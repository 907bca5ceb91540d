"""Does a cell start? A few real steps of it: its model, plan, clipping, noise and optimizer, on fewer rows at a time.

The noise is calibrated for the whole run, then a step draws 4 rows in place of hundreds. What is not available here is replaced
by a stand-in: made-up rows, in files that the usual loaders read; a tiny random transformer with a tokenizer.
"""

from __future__ import annotations

import csv
import functools
import math
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rgp import accounting
from rgp.reproduce.items import digest
from rgp.reproduce.running import missing_data, missing_weights
from rgp.train import language, setup
from rgp.train.config import Config
from rgp.train.folder import RunFolder
from rgp.train.progress import Silent
from rgp.train.runner import Session
from rgp.train.sections import IMAGE_MODELS

STEPS, BATCH = 3, 4
# published numbers of training rows, for the noise of those that are made up
TRAINING_ROWS = {"svhn": 73257, "cifar10": 50000, "mnist": 60000, "fashion_mnist": 60000, "digits": 1438}
TRAINING_ROWS |= {"sst2": 67349, "qnli": 104743, "qqp": 363846, "mnli": 392702}
WORDS = ("the", "film", "is", "a", "good", "bad", "long", "story", "who", "what", "why", "not", "it", "was", "?", ".")
_PICTURES = {"cifar10": (32, 32, 3), "svhn": (32, 32, 3), "mnist": (28, 28), "fashion_mnist": (28, 28)}


class StandIns:
    """Made-up rows and weights in a folder of their own; what is read or calibrated for one cell is kept for others."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._data: dict[str, Any] = {}

    def check(self, settings: Config) -> dict[str, Any]:
        """Take a few steps; says which stand-ins were used and how long it took. Any failure is raised."""
        began = time.monotonic()
        used: list[str] = []
        rows = TRAINING_ROWS.get(settings.data.name)
        model = self.model(settings, used)
        if missing_data(settings.data.name, settings.data.folder):
            used.append(f"made-up rows for {settings.data.name}")
            settings = replace(settings, data=replace(settings.data, folder=str(self.rows(settings.data.name))))
        settings = replace(settings, model=replace(settings.model, name=model))
        data = self.read(settings)
        rows = rows or len(data.train)
        sigma = self.noise(settings, rows)
        size = max(4 * BATCH, round(rows * BATCH / settings.training.batch_size))
        chosen = torch.utils.data.Subset(data.train, range(min(size, len(data.train))))
        budget = replace(settings.budget, epsilon=None, noise_multiplier=sigma)
        training = replace(
            settings.training, batch_size=BATCH, microbatch_size=BATCH, epochs=None, steps=STEPS, max_batch=None
        )
        parts = setup.make(replace(settings, budget=budget, training=training), replace(data, train=chosen))
        settings = replace(settings, budget=budget, training=training)
        steps = _step(settings, parts)
        return {
            "steps": steps,
            "stand_ins": used,
            "noise_multiplier": sigma,
            "seconds": round(time.monotonic() - began, 1),
        }

    def noise(self, settings: Config, rows: int) -> float | None:
        """The noise multiplier of the whole run, on the published number of rows."""
        budget, training = settings.budget, settings.training
        if budget.epsilon is None:
            return budget.noise_multiplier
        steps = training.steps or accounting.planned_steps(training.epochs or 1.0, rows, training.batch_size)
        delta = accounting.default_delta(rows) if budget.delta is None else budget.delta
        return _calibrated(budget.epsilon, delta, training.batch_size / rows, steps, budget.accountant)

    def read(self, settings: Config) -> Any:
        tokenizer = None
        if settings.model.name not in IMAGE_MODELS:
            tokenizer = language.load_tokenizer(settings)
        about = settings.to_dict()["data"]
        key = digest([about, None if tokenizer is None else settings.model.name])
        if key not in self._data:
            self._data = {key: setup.load_data(settings, tokenizer)}  # one at a time: they are large
        return self._data[key]

    # ------------------------------------------------------------------ made up

    def model(self, settings: Config, used: list[str]) -> str:
        """The model's name, or the folder of its weights, real ones or tiny ones."""
        if missing_weights(settings):
            used.append(f"tiny random weights for {settings.model.name}")
            return str(self.weights())
        return str(language.weights_folder(settings) or settings.model.name)

    def rows(self, name: str) -> Path:
        """A data folder with a small made-up set of this name."""
        from rgp.data.catalogue import IMAGES, TEXTS

        rng = np.random.default_rng(0)
        if name in _PICTURES:
            path = self.folder / f"{name}.npz"
            if not path.exists():
                count, classes = 400, len(IMAGES[name].labels)
                arrays: dict[str, Any] = {
                    f"x_{s}": rng.integers(0, 256, (count, *_PICTURES[name]), np.uint8) for s in ("train", "test")
                }
                arrays |= {f"y_{s}": np.arange(count, dtype=np.uint8) % classes for s in ("train", "test")}
                np.savez(path, **arrays)
            return self.folder
        entry = TEXTS[name]
        for split, count in (
            ("train", 2000),
            *((test, 20) for test in [entry.test[0], *(m[0] for m in entry.more.values())]),
        ):
            path = self.folder / name / f"{split}.tsv"
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("w", encoding="utf-8", newline="") as file:
                    writer = csv.writer(file, delimiter="\t", quoting=csv.QUOTE_NONE, lineterminator="\n")
                    writer.writerow([*entry.text[0], entry.label[0]])
                    for i in range(count):
                        texts = [" ".join(rng.choice(WORDS, rng.integers(3, 12))) for _ in entry.text[0]]
                        writer.writerow([*texts, i % len(entry.labels)])
        return self.folder

    def weights(self) -> Path:
        """A tiny random BERT with a tokenizer, as a Hugging Face folder."""
        folder = self.folder / "tiny-bert"
        if not (folder / "config.json").exists():
            from transformers import BertConfig, BertModel, BertTokenizerFast

            folder.mkdir(parents=True, exist_ok=True)
            words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
            (folder / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
            BertTokenizerFast(vocab_file=str(folder / "vocab.txt")).save_pretrained(folder)
            sizes: dict[str, Any] = {
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "intermediate_size": 64,
            }
            sizes |= {"initializer_range": 0.3}  # with the usual 0.02 so small a network hardly tells two texts apart
            BertModel(BertConfig(vocab_size=len(words), **sizes)).save_pretrained(folder)
        return folder


@functools.cache
def _calibrated(epsilon: float, delta: float, rate: float, steps: int, accountant: str) -> float:
    return accounting.calibrate(epsilon=epsilon, delta=delta, sampling_rate=rate, steps=steps, accountant=accountant)


def _step(settings: Config, parts: setup.Parts) -> int:
    before = {name: p.detach().clone() for name, p in parts.model.named_parameters()}
    with tempfile.TemporaryDirectory(prefix="rgp-check-") as scratch:
        session = Session(settings, parts, RunFolder(Path(scratch) / "run"), Silent(), began=time.monotonic())
        with session.begin() as run:
            for batch in run:
                logits, labels = setup.logits_and_labels(parts.model, batch, parts.device)
                loss = setup.losses(logits, labels).mean()
                if not math.isfinite(loss.item()):
                    raise ValueError(f"the loss is {loss.item()} at step {run.step_index}")
                run.step(loss)
            moved = sum(
                not torch.equal(before[e.name], dict(parts.model.named_parameters())[e.name]) for e in run.plan.trained
            )
            if not moved:
                raise ValueError(f"none of the {len(run.plan.trained)} trained parameters moved in {STEPS} steps")
            return run.step_index
