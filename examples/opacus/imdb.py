"""Opacus's IMDB example with rgp: reviews as the mean of their words' embeddings, the embedding trained too.

The reviews are made here. They differ in length, and are padded to the longest of their batch: the mean must leave the padding
out. With `embedded.mean(1)` a review's gradient would depend on how long its neighbours are, and the run refuses to begin.
"""

import random

import torch
import torch.nn.functional as F
from torch import nn

import rgp

VOCABULARY, PAD = 500, 0
GOOD, BAD = range(1, 21), range(21, 41)  # words that say what a review thinks; the others say nothing


def reviews(count: int, seed: int) -> list[tuple[list[int], int]]:
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        label = rng.randrange(2)
        words = rng.choices(range(41, VOCABULARY), k=rng.randint(10, 40)) + rng.choices((BAD, GOOD)[label], k=6)
        rng.shuffle(words)
        found.append((words, label))
    return found


def padded(rows: list[tuple[list[int], int]]) -> tuple[torch.Tensor, torch.Tensor]:
    words = [torch.tensor(row) for row, _ in rows]
    return nn.utils.rnn.pad_sequence(words, batch_first=True, padding_value=PAD), torch.tensor([y for _, y in rows])


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.hidden = nn.Linear(16, 16)
        self.out = nn.Linear(16, 2)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        there = (words != PAD).unsqueeze(-1)
        mean = (self.embedding(words) * there).sum(1) / there.sum(1)
        return self.out(F.relu(self.hidden(mean)))


torch.manual_seed(0)
model = Classifier()
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
run = rgp.privatize(
    model,
    optimizer,
    reviews(3000, seed=1),
    method=rgp.DPSGD(),
    collate_fn=padded,  # what the DataLoader had
    noise_multiplier=0.7,
    clip=1.0,
    batch_size=300,
    microbatch_size=300,
    epochs=8,
)
with run:
    for words, labels in run:
        run.step(F.cross_entropy(model(words), labels))

words, labels = padded(reviews(500, seed=2))
with torch.no_grad():
    accuracy = (model(words).argmax(1) == labels).float().mean().item()
print(f"held-out accuracy {accuracy:.3f} at epsilon {run.epsilon():.2f}")
