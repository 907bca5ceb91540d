"""A second hostile review, after the loop is rehearsed: what the rehearsal itself could be made to miss.

Each was silent when it was found. The rest of the folder: test_silent_ways.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_silent_ways import ROWS, C, data, loop, mean, net, per_example, private, released
from torch import Tensor, nn

import rgp
from rgp.ledger import Ledger

# ---------------------------------------------------------------------- dropout that examples share


class WeightDrop(nn.Module):
    """DropConnect, the weight-dropped layers of AWD-LSTM: one mask of the weights for the whole micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = nn.Linear(6, 16), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(F.relu(F.linear(x, F.dropout(self.a.weight, 0.5), self.a.bias)))


class LockedDropout(WeightDrop):
    """One mask of the features for all examples."""

    def forward(self, x: Tensor) -> Tensor:
        return self.c(F.relu(self.a(x)) * F.dropout(torch.ones(1, 16), 0.5))


@pytest.mark.parametrize("kind", [WeightDrop, LockedDropout])
def test_dropout_of_weights_and_masks_for_all_examples(kind):
    with pytest.raises(rgp.UnsupportedError, match="share random numbers"):
        loop(kind(), mean)


def test_dropout_of_activations_is_each_examples_own():
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 2))
    assert loop(model, mean).step_index == 2


# ---------------------------------------------------------------------- what autocast alone does


class ScaledInHalf(nn.Module):
    """One scale for the whole tensor, as layers of eight bits have it, where the input is of half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = nn.Linear(6, 16), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        if hidden.dtype == torch.bfloat16:
            hidden = hidden / hidden.detach().abs().max()
        return self.c(F.relu(hidden)).float()


def test_a_scale_for_the_whole_batch_in_half_precision_alone():
    def under_autocast(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            outputs = model(x)
        return F.cross_entropy(outputs.float(), y)

    torch.manual_seed(0)
    assert loop(ScaledInHalf(), mean).step_index == 2, "in full precision there is nothing to find"
    with pytest.raises(rgp.UnsupportedError, match="the model mixes the examples"):
        loop(ScaledInHalf(), under_autocast)


# ---------------------------------------------------------------------- what a small first batch does not show


def hardest(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Hard examples only: the nine largest losses of a micro-batch, where it has as many."""
    losses = per_example(model, x, y)
    least = losses.detach().topk(min(9, len(losses))).values[-1]
    return (losses * (losses >= least)).mean()


def test_a_choice_among_more_examples_than_a_trial_has():
    with pytest.raises(rgp.UnsupportedError, match="the loss couples"):
        loop(net(), hardest, microbatch_size=16, batch_size=20)


def test_a_coupling_that_is_not_felt_while_weights_are_zero():
    """Noticed after the first step, which has moved them; what it released is said to be affected."""
    model = net()
    nn.init.zeros_(model[-1].weight)
    nn.init.zeros_(model[-1].bias)

    def train(run: rgp.Run) -> None:
        for x, _ in run:
            run.step((model(x) @ model(x).T).square().sum(1).mean())

    with private(model, steps=4) as run:
        with pytest.raises(rgp.UnsupportedError, match="before step 1: the releases so far may be affected"):
            train(run)
        assert run.ledger.count == 1


def test_a_coupling_that_comes_in_late():
    model = net()

    def train(run: rgp.Run) -> None:
        for x, y in run:
            outputs = model(x)
            weight = 0.0 if run.step_index < 3 else 1.0
            run.step(F.cross_entropy(outputs, y) + weight * (outputs @ outputs.T).logsumexp(1).mean())

    with private(model, steps=30) as run:
        with pytest.raises(rgp.UnsupportedError, match="before step 4"):
            train(run)
        assert run.ledger.count == 4


def test_when_a_loop_is_rehearsed():
    model, seen = net(), set()
    with private(model, steps=20, batch_size=ROWS) as run:
        for x, y in run:
            run.step(mean(model, x, y))
            if run.rehearsing:
                seen.add(run.step_index)
    assert seen == {0, 1, 4, 16}


class Baseline:
    """A running mean of the loss, as a baseline: an example's weight depends on those that came before."""

    def __init__(self) -> None:
        self.value = 0.0

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        losses = per_example(model, x, y)
        weights = losses.detach() - self.value
        self.value = 0.9 * self.value + 0.1 * float(losses.detach().mean())
        return (weights * losses).mean()


class Largest:
    """Inputs over the largest entry so far."""

    def __init__(self) -> None:
        self.value = 0.0

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        self.value = max(self.value, float(x.abs().max()))
        return mean(model, x / self.value, y)


@pytest.mark.parametrize("size", [1, 8])
@pytest.mark.parametrize("kind", [Baseline, Largest])
def test_what_the_loop_keeps_of_earlier_examples(kind, size):
    with pytest.raises(rgp.UnsupportedError, match="keeps something of earlier batches"):
        loop(net(), kind(), microbatch_size=size)


def test_micro_batches_of_one_are_fine():
    assert loop(net(), mean, microbatch_size=1).step_index == 2


def test_an_example_that_makes_the_others_nan():
    """They would all be dropped for it."""
    rows = data()
    rows[5] = (torch.full((6,), 40.0), 1)

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        scale = torch.log(30 - x.abs().max())  # NaN if one example is larger
        return (per_example(model, x, y) * (1 + 0 * scale)).mean()

    with pytest.raises(rgp.UnsupportedError, match="turning into NaN or Inf"):
        loop(net(), loss, rows=rows)


# ---------------------------------------------------------------------- private data left in the model


class Centres(nn.Module):
    """Class centres for later use: the loop updates them after each step, and training does not look at them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.register_buffer("centres", torch.zeros(2, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def test_a_buffer_that_the_loop_fills_after_the_step():
    model = Centres()

    def train(run: rgp.Run) -> None:
        for x, y in run:
            run.step(mean(model, x, y))
            model.centres.lerp_(x.mean(0).expand(2, 6), 0.1)

    with private(model) as run, pytest.raises(rgp.UnsupportedError, match="'centres' was changed"):
        train(run)
    assert not model.centres.any(), "the rehearsal leaves nothing behind"


# ---------------------------------------------------------------------- earlier runs


def test_an_earlier_run_that_is_left_out():
    model, rows = net(), data()
    first = loop(model, mean, rows=rows)
    second = loop(model, mean, rows=rows, after=first)
    with pytest.raises(rgp.WrongUseError, match="trained by an earlier run"):
        private(model, rows, after=first)  # counts the first run, not the second
    third = loop(model, mean, rows=rows, after=second)
    assert third.epsilon() > second.epsilon()


def test_an_earlier_run_that_went_on_meanwhile(tmp_path):
    model, rows = net(), data()
    first = private(model, rows, steps=4, folder=tmp_path / "first")
    for x, y in first:
        first.step(mean(model, x, y))
        if first.step_index == 2:
            break

    old = Ledger.open(tmp_path / "first")
    for x, y in first:
        first.step(mean(model, x, y))
    first.close()
    assert (old.count, first.ledger.count) == (2, 4)
    with pytest.raises(rgp.WrongUseError, match="with 4 releases"):
        private(model, rows, after=old)
    assert private(model, rows, after=tmp_path / "first").epsilon() > 0


def test_two_runs_with_one_seed_are_two_runs():
    """Without a folder their ledgers are equal to the last hash."""
    model, rows = net(), data()
    first = loop(model, mean, rows=rows, seed=3)
    second = loop(model, mean, rows=rows, seed=3, after=())
    assert first.ledger.head == second.ledger.head
    with pytest.raises(rgp.WrongUseError, match="trained by an earlier run"):
        private(model, rows, after=first)
    both, one = (loop(net(), mean, after=after).epsilon() for after in ([first, second], [first]))
    assert both > one


# ---------------------------------------------------------------------- backward passes beside run.step


def test_a_backward_pass_for_inputs_leaves_nothing_in_the_sum():
    model, rows = net(), data()

    def plainly(run: rgp.Run, x: Tensor, y: Tensor) -> None:
        run.step(mean(run.model, x, y))

    def attacked(run: rgp.Run, x: Tensor, y: Tensor) -> None:
        x = x.clone().requires_grad_()
        F.cross_entropy(run.model(x), y).backward()
        torch.autograd.grad(F.cross_entropy(run.model(x), y), x)
        run.step(mean(run.model, x.detach(), y))

    assert torch.equal(released(model, rows, plainly), released(model, rows, attacked))


@pytest.mark.parametrize("method", [rgp.DPSGD(), rgp.RGP(rank=2)])
def test_adversarial_training_is_bounded(method):
    model, rows = net(), data()

    def loss(run: rgp.Run, x: Tensor, y: Tensor) -> None:
        x = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(F.cross_entropy(run.model(x), y, reduction="sum"), x)
        run.step(mean(run.model, x.detach() + 0.1 * g.sign(), y))

    options: dict[str, Any] = {"method": method, "seed": 1}
    both, less = (released(model, part, loss, **options) for part in (rows, rows[:-1]))
    assert 0.1 * C < (both - less).norm() <= C * (1 + 1e-6)


# ---------------------------------------------------------------------- a dataset that loads several rows at once


class Together:
    """As Hugging Face's datasets with a transform: one row alone is one thing, and several are loaded together."""

    def __init__(self, centred: bool) -> None:
        self.rows, self.centred = data(), centred

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        x = torch.stack([self.rows[i][0] for i in indices])
        x = x - x.mean(0) if self.centred else x
        return [(row, self.rows[i][1]) for row, i in zip(x, indices, strict=True)]


def test_rows_that_are_loaded_together():
    with pytest.raises(rgp.UnsupportedError, match="when only other examples"):
        loop(net(), mean, rows=Together(centred=True))
    assert loop(net(), mean, rows=Together(centred=False)).step_index == 2


# ---------------------------------------------------------------------- padding that counts a little


class Attends(nn.Module):
    """At its beginning a transformer hardly looks at other positions: padding changes gradients by a thousandth."""

    def __init__(self, masked: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.masked, self.table, self.out = masked, nn.Embedding(50, 8), nn.Linear(8, 2)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        there = (ids > 0) if self.masked else torch.ones_like(ids, dtype=torch.bool)
        scores = (x @ x.mT).masked_fill(~there[:, None], -torch.inf)
        return self.out((x + 0.05 * scores.softmax(2) @ x)[:, 0])


def padded(rows: list[Any]) -> tuple[Tensor, Tensor]:
    ids = nn.utils.rnn.pad_sequence([ids for ids, _ in rows], batch_first=True)
    return ids, torch.tensor([y for _, y in rows])


@pytest.mark.parametrize("masked", [False, True])
def test_padding_that_counts_a_little(masked):
    generator = torch.Generator().manual_seed(3)
    rows = [(torch.randint(1, 50, (3 + i % 8,), generator=generator), i % 2) for i in range(ROWS)]
    options: dict[str, Any] = {"rows": rows, "collate_fn": padded, "seed": 1}
    if masked:
        assert loop(Attends(True), mean, **options).step_index == 2
    else:
        with pytest.raises(rgp.UnsupportedError, match="depend on the padding"):
            loop(Attends(False), mean, **options)
