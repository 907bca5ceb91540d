"""Opacus's char-lstm example with rgp: which language a name is from, read letter by letter by torch's own LSTM.

The names are made here: three languages with syllables of their own. There is no DPLSTM: `nn.LSTM` has exact per-example
gradients, and its state_dict stays what it is.
"""

import random

import torch
import torch.nn.functional as F
from torch import nn

import rgp

SYLLABLES = (
    ("ka", "shi", "mo", "to", "ya", "na", "ri"),
    ("ov", "ski", "ev", "dra", "mir", "pol", "vla"),
    ("el", "ot", "eau", "ier", "gu", "bre", "oux"),
)
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def names(count: int, seed: int) -> list[tuple[torch.Tensor, int]]:
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        label = rng.randrange(3)
        name = "".join(rng.choices(SYLLABLES[label], k=rng.randint(2, 4)))
        found.append((torch.tensor([1 + LETTERS.index(letter) for letter in name]), label))
    return found


def padded(rows: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    letters = nn.utils.rnn.pad_sequence([name for name, _ in rows], batch_first=True)
    return letters, torch.tensor([len(name) for name, _ in rows]), torch.tensor([label for _, label in rows])


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1 + len(LETTERS), 16)
        self.lstm = nn.LSTM(16, 32, batch_first=True)
        self.out = nn.Linear(32, len(SYLLABLES))

    def forward(self, letters: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        states, _ = self.lstm(self.embedding(letters))
        last = states[torch.arange(len(letters)), lengths - 1]  # after the name's last letter, before the padding
        return self.out(last)


torch.manual_seed(0)
model = Reader()
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
run = rgp.privatize(
    model,
    optimizer,
    names(1500, seed=1),
    method=rgp.DPSGD(),
    collate_fn=padded,
    noise_multiplier=0.8,
    clip=1.0,
    batch_size=150,
    microbatch_size=150,
    epochs=4,
)
with run:
    for letters, lengths, labels in run:
        run.step(F.cross_entropy(model(letters, lengths), labels))

letters, lengths, labels = padded(names(500, seed=2))
with torch.no_grad():
    accuracy = (model(letters, lengths).argmax(1) == labels).float().mean().item()
print(f"held-out accuracy {accuracy:.3f} at epsilon {run.epsilon():.2f}")
