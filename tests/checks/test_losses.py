"""Losses that keep the examples apart run, others are refused before anything is released; `rgp.check` is the judge."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rgp
from helpers import seeded

EXAMPLES, WEIGHTS = 12, torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
Loss = Callable[[nn.Module, list[Tensor]], Tensor]


class Towers(nn.Module):
    """Ends in a residual sum, so that the loss is made of two operations, one behind the other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.first(x))
        return x + torch.tanh(self.second(x))


def examples() -> list[tuple[Tensor, Tensor, Tensor]]:
    x = torch.randn(EXAMPLES, 3, generator=seeded(1), dtype=torch.float64)
    tags = torch.randint(0, 3, (EXAMPLES, 4), generator=seeded(2))
    tags[5:, 2:] = -100
    return [(x[i], torch.tensor(i % 3), tags[i]) for i in range(EXAMPLES)]


def batch() -> list[Tensor]:
    return [torch.stack(column) for column in zip(*examples(), strict=True)]


def mean(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def contrastive(model, batch):
    ours, theirs = (F.normalize(model(batch[0] + shift), dim=1) for shift in (0.0, 0.1))
    return F.cross_entropy(ours @ theirs.T / 0.1, torch.arange(len(ours)))


def hinge(model, batch):  # linear in either tower alone
    scores = model(batch[0]) @ model(batch[0] + 0.1).T
    return (5 - scores.diagonal()[:, None] + scores).relu().mean()


def standardised(model, batch):
    y = model(batch[0])
    return F.cross_entropy((y - y.mean(0)) / (1 + y.std(0, correction=0)), batch[1])


def focal(model, batch):  # of the mean, where it should be of each example
    loss = mean(model, batch)
    return (1 - torch.exp(-loss)) ** 2 * loss


def tokens(model, batch, **options):
    logits = model(batch[0])[:, :, None].expand(-1, -1, 4)
    return F.cross_entropy(logits, batch[2], **options)


def each_example(model, batch):
    found = tokens(model, batch, reduction="none")
    return (found.sum(1) / (batch[2] != -100).sum(1)).mean()


def looked_at(model, batch):  # an uneven mean, but no part of the loss
    tokens(model, batch)
    return mean(model, batch)


def ranking(model, batch):  # piecewise linear: its second derivatives are zero
    scores = model(batch[0])[:, 0]
    order = torch.sign(batch[1][:, None] - batch[1])
    return (order != 0).mul((1 - order * (scores[:, None] - scores)).relu()).mean()


def in_turn(model, batch, wanted=lambda label: True):
    rows = [i for i in range(len(batch[0])) if wanted(batch[1][i])]
    found = [F.cross_entropy(model(batch[0])[i : i + 1], batch[1][i : i + 1], WEIGHTS) for i in rows]
    return torch.stack(found).mean() if found else 0 * mean(model, batch)


def over_classes(model, batch):
    losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return torch.stack([losses[batch[1] == label].sum() for label in batch[1].unique()]).mean()


def triplets(model, batch):
    y = model(batch[0])
    return F.triplet_margin_loss(y, y.roll(1, 0), y.roll(2, 0))


def hinge_of_centred(model, batch):
    y = model(batch[0])
    return (1 - (y - y.mean(0)) * (2 * F.one_hot(batch[1], 3) - 1)).relu().mean()


COUPLED: dict[str, Loss] = {
    "ranking": ranking,
    "triplets": triplets,
    "hinge of centred": hinge_of_centred,
    "flooded": lambda model, batch: (mean(model, batch) - 1).abs(),
    "capped": lambda model, batch: mean(model, batch).clamp(max=1.3),
    "contrastive": contrastive,
    "hinge": hinge,
    "root": lambda model, batch: F.mse_loss(model(batch[0]), batch[0]).sqrt(),
    "square": lambda model, batch: mean(model, batch) ** 2,
    "norm": lambda model, batch: model(batch[0]).norm(),
    "standardised": standardised,
    "focal": focal,
    "variance": lambda model, batch: mean(model, batch) + model(batch[0]).var(),
    "tokens": tokens,
    "classes": lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], WEIGHTS),
    "classes of log-likelihoods": lambda model, batch: F.nll_loss(model(batch[0]).log_softmax(1), batch[1], WEIGHTS),
    "masked": lambda model, batch: tokens(model, batch, reduction="none")[batch[2][:, 3] != -100].mean(),
    "masked labels": lambda m, b: F.cross_entropy(m(b[0])[b[1] > 0], b[1][b[1] > 0]),
    "masked squares": lambda m, b: F.mse_loss(m(b[0])[b[0] > 0], b[0][b[0] > 0]),
    "a loop that leaves some out": lambda m, b: in_turn(m, b, lambda label: label > 0),
    "classes that are there": over_classes,
    "two of the rows": lambda m, b: torch.cat([m(b[0])[0], m(b[0])[-1, :2]]).square().mean() + mean(m, b),
    "half of the rows": lambda m, b: m(b[0])[: len(b[0]) // 2 + 2].square().mean(),
    "ignored": lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], ignore_index=0),
}
APART: dict[str, Loss] = {
    "mean": mean,
    "squares": lambda model, batch: F.mse_loss(model(batch[0]), batch[0]),
    "in place": lambda model, batch: F.cross_entropy(model(batch[0]).relu_(), batch[1]),
    "twice": lambda model, batch: mean(model, batch) + mean(model, [2 * batch[0], batch[1]]),
    "one after the other": lambda model, batch: F.cross_entropy(model(model(batch[0])), batch[1]),
    "cosine": lambda model, batch: (1 - F.cosine_similarity(model(batch[0]), batch[0])).mean(),
    "diagonal": lambda model, batch: (model(batch[0]) @ batch[0].T).diagonal().exp().mean(),
    "each example's tokens": each_example,
    "equal class weights": lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], 2 * torch.ones(3).double()),
    "weighted examples": lambda m, b: (F.cross_entropy(m(b[0]), b[1], WEIGHTS, reduction="none")).mean(),
    "smoothed": lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1),
    "looked at": looked_at,
    "each example's hinge": lambda m, b: (1 - m(b[0]) * (2 * F.one_hot(b[1], 3) - 1)).relu().mean(),
    "each example's cap": lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="none").clamp(max=1.0).mean(),
    "distances": lambda model, batch: F.l1_loss(model(batch[0]), batch[0]),
    "triplets with given ones": lambda m, b: F.triplet_margin_loss(m(b[0]), b[0] + 1, b[0] - 1),
    "mean of a number": lambda model, batch: mean(model, batch).mean(),
    "mean of two": lambda m, b: torch.stack([mean(m, b), F.mse_loss(m(b[0]), b[0])]).mean(),
    "mean of classes": lambda m, b: torch.stack([m(b[0])[:, k].square().mean() for k in range(2)]).mean(),
    "a loop": lambda m, b: torch.stack([F.cross_entropy(m(b[0])[i], b[1][i]) for i in range(len(b[0]))]).mean(),
    "a loop over rows": lambda m, b: sum(F.mse_loss(y, x) for y, x in zip(m(b[0]), b[0], strict=True)) / len(b[0]),
    "a loop backwards": lambda m, b: sum(m(b[0])[-i].square().mean() for i in range(1, 1 + len(b[0]))) / len(b[0]),
    "a loop with class weights": in_turn,
    "best class": lambda m, b: (m(b[0]).max(1).values - m(b[0]).gather(1, b[1][:, None])[:, 0]).mean(),
}


def train(loss: Loss, **options) -> rgp.Run:
    model = Towers().double()
    options = {"noise_multiplier": 1.0, "batch_size": EXAMPLES, "steps": 2, "microbatch_size": 6, **options}
    with rgp.privatize(model, torch.optim.SGD(model.parameters(), lr=0.1), examples(), **options) as run:
        try:
            for microbatch in run:
                run.step(loss(model, microbatch))
        except rgp.UnsupportedError:
            assert run.epsilon() == 0
            raise
    return run


@pytest.mark.parametrize("method", [rgp.RGP(rank=2), rgp.DPSGD()], ids=["rgp", "dpsgd"])
@pytest.mark.parametrize("loss", COUPLED.values(), ids=COUPLED)
def test_a_loss_that_couples_examples_is_refused(loss, method):
    assert not rgp.check(Towers(), batch(), loss).ok
    with pytest.raises(rgp.UnsupportedError, match=r"the loss couples the examples|divisor depends on"):
        train(loss, method=method)


@pytest.mark.parametrize("method", [rgp.RGP(rank=2), rgp.DPSGD()], ids=["rgp", "dpsgd"])
@pytest.mark.parametrize("loss", APART.values(), ids=APART)
def test_a_loss_that_keeps_them_apart_is_not(loss, method):
    assert rgp.check(Towers(), batch(), loss).ok
    assert train(loss, method=method).step_index == 2


def test_a_cap_that_is_not_active_yet_is_refused():
    with pytest.raises(rgp.UnsupportedError, match="a hinge, a cap"):
        train(lambda model, batch: mean(model, batch).clamp(max=100.0))


def test_losses_of_examples_are_looked_at_too():
    def coupled(model, batch):
        return F.cross_entropy(model(batch[0]) @ model(batch[0] + 1).T, torch.arange(len(batch[0])), reduction="none")

    def apart(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], WEIGHTS, reduction="none")

    with pytest.raises(rgp.UnsupportedError, match="the loss couples"):
        train(coupled, loss_reduction="none")
    assert train(apart, loss_reduction="none").step_index == 2


@pytest.mark.parametrize("how", ["a metric", "a frozen part", "a checkpointed part"])
def test_what_the_loop_or_the_model_does_besides_does_not_hide_a_coupled_loss(how):
    def loss(model, batch):
        x = batch[0]
        if how == "a metric":
            with torch.no_grad():
                model(x).argmax(1)
        elif how == "a frozen part":
            with torch.no_grad():
                x = F.dropout(x, 0.1, training=False)
        else:
            x = checkpoint(model, x, use_reentrant=False)
        return F.cross_entropy(model(x), batch[1]) ** 2

    with pytest.raises(rgp.UnsupportedError, match="the loss couples"):
        train(loss)


def test_the_check_changes_nothing():
    weights = []
    for probe in (True, False):
        run = train(each_example, seed=0, probe=probe)
        weights.append(copy.deepcopy(run.model.state_dict()))
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_losses_without_second_derivatives_and_in_checkpoints_are_asked_like_others():
    def without_second_derivatives(model, batch):
        steps, ones = model(batch[0]).log_softmax(1).expand(4, -1, -1), torch.ones(len(batch[0]), 1, dtype=torch.long)
        return F.ctc_loss(steps, ones, torch.full((len(ones),), 4), ones[:, 0])

    def recomputed(model, batch):
        return F.cross_entropy(checkpoint(model, batch[0], use_reentrant=False), batch[1])

    def own_divisor(model, batch):
        found = tokens(model, batch, reduction="none")
        return found.sum() / (batch[2] != -100).sum().item()

    for loss in (without_second_derivatives, recomputed):
        assert train(loss).step_index == 2
    with pytest.raises(rgp.UnsupportedError, match="the loss couples"):  # though the count has left torch
        train(own_divisor)


FACTORS: dict[str, Callable[[Tensor, list[Tensor]], Tensor]] = {
    "count": lambda losses, batch: losses.sum() / (batch[2] != -100).sum(),
    "count in place": lambda losses, batch: losses.sum().div_((batch[2] != -100).sum().clamp(min=1).double()),
    "one by one": lambda losses, batch: (losses / (batch[2] != -100).sum()).sum(),
    "weight": lambda losses, batch: losses.sum(1).mean() * (1 / (batch[2] != -100).sum()),
    "advantages": lambda losses, b: (losses.sum(1) * (b[0][:, 0] - b[0][:, 0].mean()) / b[0][:, 0].std()).mean(),
    "class counts": lambda losses, b: (losses.sum(1) / b[1].bincount(minlength=3)[b[1]]).sum(),
    "own size": lambda losses, batch: losses.sum(1).mean() / losses.sum(1).mean().detach(),
}


@pytest.mark.parametrize("factor", FACTORS.values(), ids=FACTORS)
def test_a_factor_from_the_whole_batch_is_refused(factor):
    def loss(model, batch):
        return factor(tokens(model, batch, reduction="none"), batch)

    assert not rgp.check(Towers(), batch(), loss).ok
    with pytest.raises(rgp.UnsupportedError, match="the loss couples the examples of a batch"):
        train(loss)


def test_other_factors_are_not():
    temperature, weights = torch.tensor(2.0).double(), torch.tensor([1.0, 2.0, 3.0]).double()

    def loss(model, batch):
        own = (batch[2] != -100).sum(1)
        found = (tokens(model, batch, reduction="none").sum(1) / own / temperature * weights[batch[1]]).sum()
        (found / own.sum()).item()  # to look at
        return found / len(own) + 0.1 * weights.sum() / 3

    assert rgp.check(Towers(), batch(), loss).ok
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(loss)


def test_a_loop_over_parts_of_the_model_is_asked_like_others():
    def parts(model, batch):
        return F.cross_entropy(model.second(torch.tanh(model.first(batch[0]))), batch[1])

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert train(parts).step_index == 2
    with pytest.raises(rgp.UnsupportedError, match="the loss couples"):
        train(lambda model, batch: parts(model, batch) ** 2)


def test_the_built_in_loss_of_a_language_model_is_refused_for_padded_texts():
    config = transformers.GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    ids = torch.randint(0, 20, (EXAMPLES, 8), generator=seeded(3))
    padded = torch.where(torch.arange(8) < torch.arange(2, 2 + EXAMPLES)[:, None], ids, -100)

    def run(labels):
        model = transformers.GPT2LMHeadModel(config)
        data = [{"input_ids": i, "labels": label} for i, label in zip(ids, labels, strict=True)]
        options = {"noise_multiplier": 1.0, "batch_size": EXAMPLES, "steps": 1, "microbatch_size": 6}
        with rgp.privatize(model, torch.optim.SGD(model.parameters(), lr=0.1), data, **options) as run:
            for batch in run:
                run.step(model(**batch).loss)
        return run

    with pytest.raises(rgp.UnsupportedError, match=r"divisor depends on|the loss couples"):
        run(padded)
    assert run(ids).step_index == 1  # blocks of one length
