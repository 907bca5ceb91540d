"""Opacus's text-classifier and LoRA tutorials with rgp: BERT without its embeddings, or with `--lora` peft's factors alone.

Made here, so that nothing is downloaded: sentences of made-up words, some of them good and some bad, and a small BERT with
random weights. With `from_pretrained` in place of its configuration the rest stays as it is.
"""

import argparse
import random

import torch
import torch.nn.functional as F
from transformers import BertConfig, BertForSequenceClassification

import rgp

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--lora", action="store_true")
args = parser.parse_args()
VOCABULARY, LENGTH = 200, 16


def sentences(count: int, seed: int) -> list[tuple[list[int], int]]:
    """The first word stands for [CLS]; words 10 to 19 are bad, 20 to 29 good."""
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        label = rng.randrange(2)
        words = rng.choices(range(30, VOCABULARY), k=rng.randint(4, LENGTH - 5))
        words += rng.choices(range(10 + 10 * label, 20 + 10 * label), k=4)
        rng.shuffle(words)
        found.append(([1, *words], label))
    return found


def collate(rows: list[tuple[list[int], int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    words = torch.zeros(len(rows), LENGTH, dtype=torch.long)
    for i, (row, _) in enumerate(rows):
        words[i, : len(row)] = torch.tensor(row)
    return words, (words > 0).long(), torch.tensor([label for _, label in rows])


torch.manual_seed(0)
model = BertForSequenceClassification(
    BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
        initializer_range=0.2,
    )
)
if args.lora:
    import peft

    config = peft.LoraConfig(task_type="SEQ_CLS", r=8, target_modules="all-linear")
    model = peft.get_peft_model(model, config)
else:
    model.bert.embeddings.requires_grad_(False)
model.train()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
run = rgp.privatize(
    model,
    optimizer,
    sentences(2000, seed=1),
    method=rgp.DPSGD(),
    bands=1,  # independent noise, as in Opacus
    budget=rgp.Budget(epsilon=7.5, delta=1e-4),  # the tutorial's epsilon
    clip=0.1,  # and its max_grad_norm
    batch_size=200,
    microbatch_size=200,
    epochs=10,
    collate_fn=collate,
)
with run:
    for words, mask, labels in run:
        run.step(F.cross_entropy(model(input_ids=words, attention_mask=mask).logits, labels))

model.eval()
words, mask, labels = collate(sentences(500, seed=2))
with torch.no_grad():
    accuracy = (model(input_ids=words, attention_mask=mask).logits.argmax(1) == labels).float().mean().item()
print(f"held-out accuracy {accuracy:.3f} at epsilon {run.epsilon():.2f}")
