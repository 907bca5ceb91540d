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
    with pytest.raises(rgp.UnsupportedError, match="divisor depends on how many entries of each example are counted"):
        late(in_turn)


def test_one_loss_for_each_example_is_fine():
    assert late(own).step_index == 3


# -------- a message names tokens, ignored labels and class weights where there are some, and not elsewhere


def refusal(loss, y: Tensor, inputs: int = 6) -> str:
    """What a run says to this loss of a linear model's outputs (m, 3) and targets y."""
    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(inputs, generator=generator), y[i]) for i in range(ROWS)]
    model = nn.Linear(inputs, 3)
    run = rgp.privatize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), data, noise_multiplier=1.0, batch_size=32, steps=3
    )

    def train() -> None:
        for x, target in run:
            run.step(loss(model(x), target))

    with run, pytest.raises(rgp.UnsupportedError) as caught:
        train()
    return str(caught.value)


CLASSES = torch.arange(ROWS) % 3
NUMBERS = torch.linspace(-1, 1, ROWS)


def test_a_regression_hears_nothing_of_tokens_and_class_weights():
    said = refusal(lambda out, y: F.mse_loss(out[:, :1].expand(-1, len(y)), y.expand(len(y), -1)), NUMBERS)
    assert "the loss couples the examples" in said and "(m, 1) against targets of shape (m,)" in said
    assert "token" not in said and "class weights" not in said
    said = refusal(lambda out, y: F.mse_loss(out[y > 0, 0], y[y > 0]), NUMBERS)
    assert "how many entries of each example are counted" in said
    assert "token" not in said and "class weights" not in said and "ignored" not in said


def test_a_classifier_without_tokens_hears_nothing_of_them():
    said = refusal(lambda out, y: F.cross_entropy(out, y, torch.tensor([1.0, 2.0, 3.0])), CLASSES)
    assert "class weights" in said and "ignored" not in said and "token" not in said
    said = refusal(lambda out, y: F.cross_entropy(out, torch.where(y == 0, -100, y)), CLASSES)
    assert "not ignored" in said and "class weights" not in said and "token" not in said
    said = refusal(lambda out, y: F.cross_entropy(out, y) ** 2, CLASSES)
    assert "class weights" in said and "token" not in said


def test_a_tagger_hears_of_tokens():
    said = refusal(
        lambda out, y: F.cross_entropy(out.unsqueeze(2).expand(-1, -1, 2), y) ** 2, torch.stack([CLASSES] * 2, 1)
    )
    assert "a mean over the tokens or labels that are there" in said
