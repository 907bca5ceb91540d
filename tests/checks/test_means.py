"""Means that are even in the first batches, and uneven later: the rehearsal cannot know, so every batch is looked at."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rgp

ROWS = 64


def late(loss) -> rgp.Run:
    """A run whose rows have a hole from the second step on."""
    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(6, generator=generator), torch.tensor([i % 3, (i + 1) % 3])) for i in range(ROWS)]
    model = nn.Linear(6, 6)
    with rgp.privatize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), data, noise_multiplier=1.0, batch_size=32, steps=3
    ) as run:
        for x, y in run:
            if run.step_index:
                y = torch.where(torch.arange(len(y))[:, None] == torch.tensor([0, 9]), -100, y)
            run.step(loss(model(x).view(-1, 3, 2), y))
    return run


def tokens(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y)


def in_turn(logits: Tensor, y: Tensor) -> Tensor:
    kept = [i for i in range(len(y)) if y[i, 0] != -100]
    return torch.stack([F.cross_entropy(logits[i, :, 0], y[i, 0]) for i in kept]).mean()


def own(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y, reduction="none").mean(1).mean()


def test_a_mean_that_becomes_uneven_later_is_refused():
    with pytest.raises(rgp.UnsupportedError, match="divisor depends on all examples' labels"):
        late(tokens)


def test_a_loop_that_leaves_examples_out_later_is_refused():
    with pytest.raises(rgp.UnsupportedError, match="divisor depends on all examples' labels"):
        late(in_turn)


def test_one_loss_for_each_example_is_fine():
    assert late(own).step_index == 3
