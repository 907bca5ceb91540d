"""Honest loops, as people write them: none may be refused or warned about. The rest: tests/checks/test_no_false_alarm.py."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_silent_ways import ROWS, data, net, private
from torch import Tensor, nn

import rgp

Loss = Callable[[Any, Tensor, Tensor], Tensor]


def features(x: Tensor) -> Tensor:
    return torch.cat([x, x], 1)


def tokens(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Six positions, of which each example has its own: a mean within the example, then over examples."""
    logits = model(x)[:, None] * (1 + x[:, :, None])
    there = (x > -0.5).float()
    losses = F.cross_entropy(logits.transpose(1, 2), y[:, None].expand(-1, 6), reduction="none")
    return ((losses * there).sum(1) / there.sum(1).clamp_min(1)).mean()


def focal(model: Any, x: Tensor, y: Tensor) -> Tensor:
    losses = F.cross_entropy(model(x), y, reduction="none")
    return ((1 - torch.exp(-losses)) ** 2 * losses).mean()


def two_views(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Contrastive between two views of one example."""
    one, two = (model(x + 0.1 * torch.randn_like(x)) for _ in range(2))
    return (1 - F.cosine_similarity(one, two)).mean() + F.cross_entropy(one, y)


def by_rows(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Stochastic depth and feature masks, drawn for each row."""
    kept = (torch.rand(len(x), 1) < 0.8).float()
    return F.cross_entropy(model(x * kept * (torch.rand_like(x) < 0.9)), y)


def accumulated(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """A habit of gradient accumulation: every loss divided by a constant."""
    return F.cross_entropy(model(x), y) / 4


TEACHER = net().eval()


def taught(model: Any, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        soft = (TEACHER(x) / 2).softmax(1)
    return F.kl_div((model(x) / 2).log_softmax(1), soft, reduction="batchmean") + F.cross_entropy(model(x), y)


def ordinal(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.smooth_l1_loss(model(x).cumsum(1), torch.stack([y, y + 1], 1).float())


LOSSES: dict[str, Loss] = {
    "regression": lambda m, x, y: F.mse_loss(m(x), torch.stack([y, 1 - y], 1).float()),
    "huber": lambda m, x, y: F.huber_loss(m(x)[:, 0], y.float()),
    "several labels": lambda m, x, y: F.binary_cross_entropy_with_logits(m(x), F.one_hot(y, 2).float()),
    "smoothed labels": lambda m, x, y: F.cross_entropy(m(x), y, label_smoothing=0.1),
    "soft targets": lambda m, x, y: F.cross_entropy(m(x), F.one_hot(y, 2) * 0.9 + 0.05),
    "hinge": lambda m, x, y: F.multi_margin_loss(m(x), y),
    "mean of tokens within an example": tokens,
    "focal": focal,
    "knowledge distillation": taught,
    "two views of one example": two_views,
    "stochastic depth per row": by_rows,
    "gradient accumulation": accumulated,
    "ordinal": ordinal,
    "entropy of each example": lambda m, x, y: (
        F.cross_entropy(m(x), y) - 0.1 * torch.distributions.Categorical(logits=m(x)).entropy().mean()
    ),
    "discriminator": lambda m, x, y: F.softplus(-m(x)[:, 0]).mean() + F.softplus(m(torch.randn_like(x))[:, 0]).mean(),
    "weight of the label": lambda m, x, y: (
        F.cross_entropy(m(x), y, reduction="none") * torch.tensor([1.0, 3.0])[y]
    ).mean(),
    "checkpointed": lambda m, x, y: F.cross_entropy(torch.utils.checkpoint.checkpoint(m, x, use_reentrant=False), y),
}


def honest(model: nn.Module, loss: Loss, **options: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*never used|.*frozen|Try method=rgp.DPSGD")
        with private(model, steps=3, **options) as run:
            for batch in run:
                run.step(loss(model, *batch))
        assert run.step_index == 3


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("method", [rgp.DPSGD(), rgp.RGP(rank=2)], ids=["dpsgd", "rgp"])
def test_losses(name, method):
    honest(net(), LOSSES[name], method=method)


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(6, 8), nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        mean, log = self.encode(x).chunk(2, 1)
        z = mean + torch.randn_like(mean) * (0.5 * log).exp()
        return F.mse_loss(self.decode(z), x, reduction="none").sum(1) - 0.5 * (1 + log - mean**2 - log.exp()).sum(1)


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(1, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        outputs, _ = self.lstm(x[:, :, None])
        last = (x > -9).sum(1) - 1
        return self.out(outputs[torch.arange(len(x)), last])


class Graph(nn.Module):
    """Two rounds of message passing on a graph of six nodes that each example has to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.out = nn.Linear(1, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        near = ((x[:, :, None] - x[:, None]).abs() < 1).float()
        near = near / near.sum(2, keepdim=True)
        return self.out(F.relu(self.two(near @ F.relu(self.one(near @ x[:, :, None])))).mean(1))


class Translates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8)
        self.body = nn.Transformer(8, 2, 1, 1, 16, dropout=0.1, batch_first=True)
        self.out = nn.Linear(8, 20)

    def forward(self, x: Tensor) -> Tensor:
        ids = (x.abs() * 5).long().clamp_max(19)
        mask = nn.Transformer.generate_square_subsequent_mask(5)
        return self.out(self.body(self.table(ids), self.table(ids[:, :5]), tgt_mask=mask))


MODELS: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "variational autoencoder": (Autoencoder, lambda m, x, y: m(x).mean()),
    "LSTM with lengths": (Packed, lambda m, x, y: F.cross_entropy(m(x), y)),
    "graph of each example": (Graph, lambda m, x, y: F.cross_entropy(m(x), y)),
    "sequence to sequence": (
        Translates,
        lambda m, x, y: F.cross_entropy(m(x).transpose(1, 2), (x[:, 1:].abs() * 5).long().clamp_max(19)),
    ),
    "dropout": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 2)),
        lambda m, x, y: F.cross_entropy(m(x), y),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_models(name):
    torch.manual_seed(0)
    kind, loss = MODELS[name]
    honest(kind(), loss)


def test_an_augmentation_of_each_row_and_labels_that_are_words():
    def jitter(batch: Any) -> Any:
        x, words = batch
        return x * (1 + 0.1 * torch.randn(len(x), 1)), words

    rows = [(x, ("no", "yes")[y]) for x, y in data()]

    def loss(model: Any, x: Tensor, words: Any) -> Tensor:
        return F.cross_entropy(model(x), torch.tensor([word == "yes" for word in words]).long())

    honest(net(), loss, rows=rows, augment=jitter)
    assert len(rows) == ROWS


def test_a_schedule_of_the_loops_own():
    """Stepped where run.step returns True, as plain loops have it."""
    model = copy.deepcopy(net())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with private(model, steps=5) as run:
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(run.optimizer, 5)
            for x, y in run:
                if run.step(F.cross_entropy(model(x), y)):
                    schedule.step()
    assert run.optimizer.param_groups[0]["lr"] < 0.05
