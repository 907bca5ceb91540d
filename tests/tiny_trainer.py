"""A PrivateTrainer over a tiny random model and made-up rows; needs transformers and accelerate."""

from __future__ import annotations

import torch
import transformers

import helpers
from rgp.integrations.transformers import PrivacyArguments, PrivateTrainer
from tiny_models import bert_config, gpt2_config

N, VOCABULARY = 40, 30


def make_rows(count=N, seed=0):
    generator = helpers.seeded(seed)
    rows = []
    for i in range(count):
        length = int(torch.randint(3, 12, (), generator=generator))
        ids = torch.randint(5, VOCABULARY, (length,), generator=generator)
        rows.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.tensor(i % 2)})
    return rows


def collate(rows):
    from rgp.data.text import Pad

    return Pad(0)(rows)


def make_bert(dtype=torch.float32):
    torch.manual_seed(0)
    config = bert_config(VOCABULARY, 32)
    return transformers.BertForSequenceClassification(config).to(dtype)


def make_gpt2():
    torch.manual_seed(0)
    config = gpt2_config(VOCABULARY, 32)
    return transformers.GPT2LMHeadModel(config)


def arguments(folder, **options):
    options = {
        "per_device_train_batch_size": 4,
        "max_steps": 3,
        "learning_rate": 0.01,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        **options,
    }
    return transformers.TrainingArguments(output_dir=str(folder), **options)


def privacy(**options):
    return PrivacyArguments(
        **{
            "noise_multiplier": 8.0,
            "clip": 0.5,
            "batch_size": 12,
            "rank": 2,
            "source": "weight",
            "noise_seed": 5,
            "log_loss": True,
            **options,
        }
    )


def trainer(folder, model=None, data=None, chosen=None, callbacks=None, evaluate=None, public_loss=None, **options):
    return PrivateTrainer(
        make_bert() if model is None else model,
        arguments(folder, **options),
        train_dataset=make_rows() if data is None else data,
        eval_dataset=evaluate,
        data_collator=collate,
        callbacks=callbacks,
        privacy=privacy() if chosen is None else chosen,
        public_loss=public_loss,
    )
