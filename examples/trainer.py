"""The Hugging Face Trainer, private: `PrivateTrainer` with `PrivacyArguments`, and everything else as always.

The sentences are made here and the model is a small BERT with random weights, so that nothing is downloaded. All arguments of
both classes can be given: `python trainer.py --epsilon 3 --learning_rate 0.003 --eval_strategy epoch`.
"""

import random
import sys
import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, HfArgumentParser, TrainingArguments

from rgp.integrations.transformers import PrivacyArguments, PrivateTrainer

GOOD, BAD = ["good", "great", "fine", "warm"], ["bad", "dull", "weak", "cold"]
REST = ["the", "film", "was", "and", "story", "acting", "felt", "so", "a"]
WORDS = ["[PAD]", *GOOD, *BAD, *REST]


def sentences(count: int, seed: int) -> list[dict]:
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        label = rng.randrange(2)
        words = rng.choices(REST, k=rng.randint(4, 9)) + rng.choices((BAD, GOOD)[label], k=2)
        rng.shuffle(words)
        found.append({"input_ids": [WORDS.index(word) for word in words], "labels": label})
    return found


def collate(rows: list[dict]) -> dict[str, torch.Tensor]:
    ids = [torch.tensor(row["input_ids"]) for row in rows]
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    labels = torch.tensor([row["labels"] for row in rows])
    return {"input_ids": padded, "attention_mask": (padded != 0).long(), "labels": labels}


def main(folder: str) -> None:
    parser = HfArgumentParser((TrainingArguments, PrivacyArguments))
    defaults = {
        "output_dir": f"{folder}/run",
        "per_device_train_batch_size": 64,  # examples at once: memory
        "batch_size": 250,  # examples of a step: privacy and accuracy
        "num_train_epochs": 8,
        "learning_rate": 5e-3,
        "lr_scheduler_type": "constant",
        "logging_steps": 16,
        "epsilon": 8.0,
        "rank": 4,
        "source": "weight",
        "report_to": "none",
    }
    given = [f"--{name}={value}" for name, value in defaults.items()]
    args, privacy = parser.parse_args_into_dataclasses([*given, *sys.argv[1:]])

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=128,
        initializer_range=0.1,  # the usual 0.02 is for wide models: here nothing would be learnt in so few steps
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    trainer = PrivateTrainer(
        BertForSequenceClassification(config),
        args,
        train_dataset=sentences(2000, seed=0),
        eval_dataset=sentences(400, seed=1),
        data_collator=collate,
        compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(1) == p.label_ids).mean())},
        privacy=privacy,
    )
    trainer.train()
    accuracy = trainer.evaluate()["eval_accuracy"]
    print(f"held-out accuracy {accuracy:.3f} at epsilon {trainer.epsilon():.2f}")
    trainer.save_model(f"{folder}/model")  # with README.md and the privacy card
    with open(f"{folder}/model/privacy_card.md") as file:
        print(file.read().split("\n\n")[1])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(folder)
