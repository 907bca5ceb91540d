"""A small GPT-2, trained privately from random weights on a text file; one document is one example, and what is protected.

The text is made here: short stories of a few words in which each word says a lot about the next one. `rgp train` does the same
from a config, with `model.task: causal-lm` and `data.unit: document`, `line` or `block`.
"""

import math
import random
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel

import rgp

NEXT = {
    "once": ["upon"],
    "upon": ["a"],
    "a": ["king", "queen", "fox", "forest"],
    "king": ["lived", "met"],
    "queen": ["lived", "met"],
    "fox": ["lived", "met"],
    "met": ["a"],
    "lived": ["in"],
    "in": ["a"],
    "forest": ["and", "."],
    "and": ["met"],
}
WORDS = ["<end>", *NEXT, "."]


def write_stories(path: Path, count: int, seed: int) -> None:
    rng = random.Random(seed)
    stories = []
    for _ in range(count):
        words = ["once"]
        while words[-1] != "." and len(words) < 24:
            words.append(rng.choice(NEXT[words[-1]]))
        stories.append(" ".join(words))
    path.write_text("\n\n".join(stories))


def read_documents(path: Path) -> list[torch.Tensor]:
    """What stands between blank lines is a document: one example, whatever its length."""
    return [torch.tensor([WORDS.index(w) for w in text.split()] + [0]) for text in path.read_text().split("\n\n")]


def collate(documents: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    pad = torch.nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad(documents, batch_first=True),
        "attention_mask": pad([torch.ones_like(d) for d in documents], batch_first=True),
        "labels": pad(documents, batch_first=True, padding_value=-100),
    }


def losses(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of every document's loss over its tokens, and how many tokens there are."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    labels = batch["labels"][:, 1:]
    lost = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=-100, reduction="none")
    return lost.sum(1), (labels != -100).sum(1)


@torch.no_grad()
def perplexity(model: torch.nn.Module, documents: list[torch.Tensor]) -> float:
    model.eval()
    total, tokens = losses(model, collate(documents))
    model.train()
    return math.exp(total.sum() / tokens.sum())


def main(folder: Path) -> None:
    torch.manual_seed(0)
    write_stories(folder / "train.txt", 3000, seed=0)
    write_stories(folder / "test.txt", 300, seed=1)
    training, held_out = read_documents(folder / "train.txt"), read_documents(folder / "test.txt")
    config = GPT2Config(
        vocab_size=len(WORDS),
        n_embd=32,
        n_layer=1,
        n_head=2,
        n_positions=32,
        initializer_range=0.2,  # the usual 0.02 is for wide models
        tie_word_embeddings=False,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model = GPT2LMHeadModel(config).train()
    before = perplexity(model, held_out)
    run = rgp.privatize(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        training,
        method=rgp.RGP(rank=4, source="weight"),
        budget=rgp.Budget(epsilon=8.0),
        batch_size=300,
        steps=40,
        microbatch_size=100,
        collate_fn=collate,
        lengths=[len(document) for document in training],  # similar lengths share a micro-batch: less padding
        loss_reduction="none",
    )
    print(f"privacy unit: one document; {len(training)} of them, noise multiplier {run.noise_multiplier}")
    for batch in run:
        total, tokens = losses(model, batch)
        run.step(total / tokens)  # each document's own mean: a mean over all tokens would mix documents
    run.close()
    after = perplexity(model, held_out)
    print(f"held-out perplexity {after:.2f}, {before:.2f} before, at epsilon {run.epsilon():.2f}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder))
