"""A Hugging Face text classifier, trained privately; the model is not wrapped, and save_pretrained works as always.

The sentences are made here and the model is a small BERT with random weights, so that nothing is downloaded. With a
folder or a name of the hub, `python huggingface.py MODEL`, it is that model, from its own weights.
"""

import random
import sys
import tempfile

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, BertTokenizer

import rgp

GOOD, BAD = ["good", "great", "fine", "warm"], ["bad", "dull", "weak", "cold"]
REST = ["the", "film", "was", "and", "story", "acting", "felt", "so", "a"]


def sentences(count: int, seed: int) -> list[tuple[str, int]]:
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        label = rng.randrange(2)
        words = rng.choices(REST, k=rng.randint(4, 9)) + rng.choices((BAD, GOOD)[label], k=2)
        rng.shuffle(words)
        found.append((" ".join(words), label))
    return found


def small_bert(folder: str) -> tuple[torch.nn.Module, BertTokenizer]:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *GOOD, *BAD, *REST]
    with open(f"{folder}/vocab.txt", "w") as file:
        file.write("\n".join(words))
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=128,
        initializer_range=0.1,  # the usual 0.02 is for wide models: here nothing would be learnt in so few steps
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return AutoModelForSequenceClassification.from_config(config), BertTokenizer(f"{folder}/vocab.txt")


def main(name: str | None, folder: str) -> None:
    torch.manual_seed(0)
    if name is None:
        model, tokenizer = small_bert(folder)
    else:
        model = AutoModelForSequenceClassification.from_pretrained(name, num_labels=2)
        tokenizer = AutoTokenizer.from_pretrained(name)

    def collate(rows: list[tuple[str, int]]) -> dict[str, torch.Tensor]:
        texts, labels = zip(*rows, strict=True)
        batch = tokenizer(list(texts), padding=True, truncation=True, max_length=64, return_tensors="pt")
        return {**batch, "labels": torch.tensor(labels)}

    training, held_out = sentences(2000, seed=0), sentences(400, seed=1)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3 if name is None else 3e-4)
    run = rgp.privatize(
        model,
        optimizer,
        training,
        method=rgp.RGP(rank=4, source="weight"),  # biases, norms, small embeddings and the head exact
        budget=rgp.Budget(epsilon=8.0),
        batch_size=250,
        epochs=8,
        microbatch_size=64,
        collate_fn=collate,
    )
    print(f"noise multiplier {run.noise_multiplier}, noise in {run.plan.noise_dimensions:,} dimensions")
    for batch in run:
        run.step(model(**batch).loss)  # the mean over the sentences of the micro-batch: what run.step expects
    run.close()

    model.eval()
    with torch.no_grad():
        batch = collate(held_out)
        right = model(**batch).logits.argmax(1) == batch["labels"]
    print(f"held-out accuracy {right.float().mean():.3f} at epsilon {run.epsilon():.2f}")
    model.save_pretrained(f"{folder}/model")
    AutoModelForSequenceClassification.from_pretrained(f"{folder}/model")  # an ordinary model, for anyone


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(sys.argv[1] if len(sys.argv) > 1 else None, folder)
