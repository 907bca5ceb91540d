"""Ways to an epsilon that is too small, each as a careful user would write it: refused, noticed, or at most C (1 + 1e-6).

`make attack-suite` runs this folder. The numbers are those of the table in docs/faults.md.
"""

from __future__ import annotations

import copy
import json
import pickle
import random
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rgp
from rgp import accounting
from rgp.observing import Observer

C = 0.5
ROWS = 24


def data(outputs: int = 2) -> list[tuple[Tensor, int]]:
    x = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(1))
    return [(x[i], i % outputs) for i in range(ROWS)]


def net(outputs: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, outputs))


def private(model: nn.Module, rows: Any = None, **options: Any) -> rgp.Run:
    options = {
        "method": rgp.DPSGD(),
        "noise_multiplier": 1.0,
        "batch_size": 12,
        "steps": 2,
        "clip": C,
        "seed": 0,
        **options,
    }
    return rgp.privatize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), data() if rows is None else rows, **options
    )


def loop(model: nn.Module, loss: Any, **options: Any) -> rgp.Run:
    with private(model, **options) as run:
        try:
            for x, y in run:
                run.step(loss(model, x, y))
        except (rgp.UnsupportedError, rgp.WrongUseError):
            assert run.ledger.count == 0, "nothing may have been released"
            raise
    return run


def mean(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def released(model: nn.Module, rows: Any, loss: Any, **options: Any) -> Tensor:
    """The clipped sum of one batch with every row, as it is before noise."""
    found: list[Tensor] = []

    class Spy(Observer):
        def released(self, step: int, noisy: Tensor) -> None:
            found.append(noisy.clone().double())

    options = {"noise_multiplier": 0.0, "batch_size": len(rows), "steps": 1, "probe": False, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with private(copy.deepcopy(model), rows, **options) as run:
            run.observe(Spy())
            for x, y in run:
                loss(run, x, y)
    return found[0]


# ---------------------------------------------------------------------- 1: random numbers that examples share


class LayerDrop(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate, self.a, self.b, self.c = rate, nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.a(x))
        if torch.rand([]) >= self.rate:
            x = x + F.relu(self.b(F.dropout(x, 0.1)))
        return self.c(x)


class StochasticDepth(LayerDrop):
    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.a(x))
        kept = torch.empty(1, 1).bernoulli_(1 - self.rate)  # one for the batch
        return self.c(x + kept * F.relu(self.b(x)))


def flip_all(batch: Any) -> Any:
    return (batch[0] if torch.rand(()) < 0.5 else -batch[0]), batch[1]


def flip_all_by_python(batch: Any) -> Any:
    return (batch[0] if random.random() < 0.5 else -batch[0]), batch[1]


def flip_all_and_jitter(batch: Any) -> Any:
    """What is shared is hidden under noise that each example has to itself."""
    return flip_all(batch)[0] + 0.1 * torch.randn_like(batch[0]), batch[1]


def flip_each(batch: Any) -> Any:
    return batch[0] * torch.rand(len(batch[0]), 1).sub(0.5).sign(), batch[1]


@pytest.mark.parametrize("augment", [flip_all, flip_all_by_python, flip_all_and_jitter])
def test_01_an_augmentation_that_is_drawn_once_for_a_batch(augment):
    with pytest.raises(rgp.UnsupportedError, match="share random numbers"):
        loop(net(), mean, augment=augment, seed=1)


@pytest.mark.parametrize("kind", [LayerDrop, StochasticDepth])
@pytest.mark.parametrize("rate", [0.5, 0.2])
def test_01_a_layer_that_is_left_out_for_a_batch(kind, rate):
    with pytest.raises(rgp.UnsupportedError, match="share random numbers"):
        loop(kind(rate), mean)


def test_01_random_numbers_of_each_example_are_fine():
    assert loop(net(), mean, augment=flip_each).step_index == 2
    assert loop(net(), lambda m, x, y: mean(m, F.dropout(x, 0.5) + torch.randn_like(x), y)).step_index == 2


# ---------------------------------------------------------------------- 2, 9, 10: losses


def per_example(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def masked(function: Any) -> Any:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        kept = x[:, 0] > 0
        return function(model(x)[kept, 0], 2.0 * y[kept] - 1)

    return loss


def by_scatter(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    counts = torch.zeros(2).scatter_add_(0, y, torch.ones(len(y)))
    return (per_example(model, x, y) / counts[y]).mean()


def by_histogram(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (per_example(model, x, y) / torch.histc(y.float(), 2, 0, 1)[y]).mean()


def by_unique(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    values, counts = y.unique(return_counts=True)
    return (per_example(model, x, y) / counts[torch.searchsorted(values, y)]).mean()


COUPLED = {
    "nanmean": lambda m, x, y: torch.where(x[:, 0] > 0, per_example(m, x, y), torch.nan).nanmean(),
    "soft margin": masked(F.soft_margin_loss),
    "gaussian": masked(lambda out, y: F.gaussian_nll_loss(out, y, torch.ones_like(out))),
    "poisson": masked(lambda out, y: F.poisson_nll_loss(out, (y + 1) / 2)),
    "hinge embedding": masked(F.hinge_embedding_loss),
    "classes by scatter_add": by_scatter,
    "classes by histc": by_histogram,
    "classes by unique": by_unique,
    "a softmax over the batch": lambda m, x, y: (torch.softmax((l := per_example(m, x, y)).detach(), 0) * l).sum(),
    "standardised targets": lambda m, x, y: F.mse_loss(m(x)[:, 0], (y - y.float().mean()) / y.float().std()),
    "standardised inputs": lambda m, x, y: mean(m, (x - x.mean(0)) / x.std(0), y),
    "inputs over the largest": lambda m, x, y: mean(m, x / x.abs().max(), y),
    "a count that left torch": lambda m, x, y: per_example(m, x, y).sum() / (x[:, 0] > 0).sum().item(),
    "mixup in the loop": lambda m, x, y: mean(m, 0.5 * x + 0.5 * x[torch.randperm(len(x))], y),
}


def test_02_outputs_with_a_column_against_targets_without():
    with pytest.raises(rgp.UnsupportedError, match=r"\(m, 1\) against targets of shape \(m,\).*the loss couples"):
        loop(net(1), lambda m, x, y: ((m(x) - y) ** 2).mean())


@pytest.mark.parametrize("loss", COUPLED.values(), ids=COUPLED)
def test_09_means_over_what_is_there(loss):
    with pytest.raises(rgp.UnsupportedError):
        loop(net(), loss)


def test_10_a_contrastive_loss_whose_step_is_taken_under_no_grad():
    model = net()

    def train(run: rgp.Run) -> None:
        for x, _ in run:
            loss = (model(x) @ model(x).T).logsumexp(1).mean()
            with torch.no_grad():
                run.step(loss)

    with private(model) as run, pytest.raises(rgp.UnsupportedError, match="the loss couples"):
        train(run)


def test_a_sum_where_a_mean_was_promised():
    with pytest.raises(rgp.UnsupportedError, match="loss_reduction='mean' was promised, and the loss is a sum"):
        loop(net(), lambda m, x, y: F.cross_entropy(m(x), y, reduction="sum"))
    with pytest.raises(rgp.UnsupportedError, match="loss_reduction='sum' was promised"):
        loop(net(), mean, loss_reduction="sum")


# ---------------------------------------------------------------------- 3: public inputs that are not


def test_03_a_public_loss_that_sees_the_loops_variable():
    model, rows = net(), data()
    inputs = torch.randn(8, 6)
    options = {"method": rgp.RGP(rank=2, source="public"), "public_loss": rgp.without_labels(lambda: model(inputs))}
    run = private(model, rows, **options)
    refused = None
    try:
        for inputs, labels in run:
            run.step(F.cross_entropy(model(inputs), labels))
    except rgp.WrongUseError as error:
        refused = error
    assert refused is not None and "sees something that the loop has changed" in str(refused)
    assert run.ledger.count == 0


def test_03_a_public_loss_with_a_name_of_its_own():
    model, public = net(), torch.randn(8, 6)
    loss = rgp.without_labels(lambda: model(public[torch.randint(8, (4,))]))
    assert loop(model, mean, method=rgp.RGP(rank=2, source="public"), public_loss=loss).step_index == 2


# ---------------------------------------------------------------------- 4: batch norm out of sight


def test_04_batch_norm_of_a_teacher_under_no_grad():
    teacher = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))

    def taught(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            target = teacher(x)
        return F.mse_loss(model(x), target)

    with pytest.raises(rgp.UnsupportedError, match=r"batch norm in training mode.*teacher"):
        loop(net(), taught)
    teacher.eval()
    assert loop(net(), taught).step_index == 2


# ---------------------------------------------------------------------- 5: the same data again


def test_05_training_a_little_longer():
    model, rows = net(), data()
    first = loop(model, mean, rows=rows)
    with pytest.raises(rgp.WrongUseError, match="trained by an earlier run"):
        private(model, rows)
    second = loop(model, mean, rows=rows, after=first.ledger)
    third = loop(
        model, mean, rows=rows, after=[first, second]
    )  # second counts first already: more than needed, not less
    event = accounting.Event(12 / ROWS, 1.0, 4)
    assert second.epsilon() == accounting.epsilon([event], delta=second.mechanism.delta)
    assert third.epsilon() > second.epsilon() > first.epsilon()


def test_05_a_budget_covers_what_was_spent_before():
    model, rows = net(), data()
    first = loop(model, mean, rows=rows, budget=rgp.Budget(2.0, 1e-3), noise_multiplier=None)
    with pytest.raises(ValueError, match="nothing is left of the budget"):
        private(model, rows, budget=rgp.Budget(1.5, 1e-3), noise_multiplier=None, after=first)
    longer = loop(model, mean, rows=rows, budget=rgp.Budget(4.0, 1e-3), noise_multiplier=None, after=first)
    assert 3.5 < longer.epsilon() <= 4.0


def test_05_other_data_are_the_users_word():
    model = net()
    loop(model, mean)
    assert loop(model, mean, after=()).epsilon() > 0


# ---------------------------------------------------------------------- 6, 8: numbers


class Tokens(nn.Module):
    """A large exact layer over many tokens: its norms come from Gram matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(192, 192, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@pytest.mark.parametrize("how", ["outside", "inside autocast", "medium precision"])
def test_06_norms_do_not_depend_on_autocast_and_matmul_precision(how):
    generator = torch.Generator().manual_seed(2)
    shared = torch.randn(64, 192, generator=generator)  # terms that cancel in part
    rows = [(shared + 0.05 * torch.randn(64, 192, generator=generator), 0) for _ in range(2)]
    torch.manual_seed(0)
    model = Tokens()
    weights = torch.randn(64, 192, generator=generator)
    weights = weights - weights.mean(0)

    def loss(run: rgp.Run, x: Tensor, y: Tensor) -> None:
        def value() -> Tensor:
            return (run.model(x).float() * weights).sum((1, 2)).mean()

        if how == "inside autocast":
            with torch.autocast("cpu", dtype=torch.bfloat16):
                run.step(value())
        else:
            run.step(value())

    before = torch.get_float32_matmul_precision()
    if how == "medium precision":
        torch.set_float32_matmul_precision("medium")
    try:
        both, one = (released(model, part, loss) for part in (rows, rows[:1]))
        assert torch.get_float32_matmul_precision() == ("medium" if how == "medium precision" else before)
    finally:
        torch.set_float32_matmul_precision(before)
    assert (both - one).norm() <= C * (1 + 1e-6)
    assert one.norm() > 0.9 * C  # it is clipped, so the norm mattered


def test_06_norms_and_sums_are_computed_outside_of_autocast_at_full_precision(monkeypatch):
    """Whether bfloat16 makes a norm too small depends on luck; that it has no part in it does not."""
    from rgp import norms

    seen, whole = [], norms.outer_squared_norms

    def spy(left: Tensor, right: Tensor) -> Tensor:
        seen.append((torch.is_autocast_enabled("cpu"), torch.get_float32_matmul_precision()))
        return whole(left, right)

    monkeypatch.setattr(norms, "outer_squared_norms", spy)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rows = [(torch.randn(64, 192), 0) for _ in range(2)]
            released(Tokens(), rows, lambda run, x, y: run.step(run.model(x).float().square().mean((1, 2)).mean()))
    finally:
        torch.set_float32_matmul_precision(before)
    assert seen and set(seen) == {(False, "highest")}


def test_08_automatic_clipping_with_a_tiny_gamma():
    with pytest.raises(ValueError, match="gamma must be at least 1e-10"):
        rgp.AutoClip(gamma=1e-25)
    model = nn.Linear(6, 2, bias=False)
    for size in (1.0, 1e-8, 1e-12, 1e-20, 1e-30):
        rows = [(torch.randn(6, generator=torch.Generator().manual_seed(i)), i) for i in range(2)]

        def loss(run: rgp.Run, x: Tensor, y: Tensor, size: float = size) -> None:
            run.step((run.model(x).sum(1) * size).mean())

        clip = rgp.AutoClip(norm=C, gamma=1e-10)
        both, one = (released(model, part, loss, clip=clip) for part in (rows, rows[:1]))
        assert (both - one).norm() <= C * (1 + 1e-6)


# ---------------------------------------------------------------------- 7: rows that are no examples


class Lookup(nn.Module):
    """A trained layer over a frozen table: 24 rows for batches of 8, 4 and 2."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.key, self.head = nn.Embedding(24, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.table.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        keys = self.key(self.table.weight)
        return self.head(torch.softmax(x @ keys.T, 1) @ keys)


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(24, 6), nn.LayerNorm(6), nn.Linear(6, 2)
        self.table.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(x[:, None] + self.norm(self.table.weight))).mean(1)


@pytest.mark.parametrize("kind", [Lookup, Positions])
@pytest.mark.parametrize("size", [2, 4, 8, 12, 24])
def test_07_a_trained_layer_over_a_frozen_table(kind, size):
    """Its rows are no examples, however they divide by the examples of a micro-batch: a form of the layer's parameters."""
    torch.manual_seed(0)
    model = kind()
    rows = data()

    def loss(run: rgp.Run, x: Tensor, y: Tensor) -> None:
        run.step(mean(run.model, 9 * x, y))  # large enough to be clipped

    both, less = (released(model, part, loss, microbatch_size=size) for part in (rows, rows[:-1]))
    assert 0.5 * C < (both - less).norm() <= C * (1 + 1e-6)
    assert loop(model, mean, microbatch_size=size).step_index == 2


# ---------------------------------------------------------------------- 11, 12: the secret


def test_11_a_secret_that_was_being_written_when_the_process_died(tmp_path):
    model = net()
    run = private(model, folder=tmp_path)
    run.save(tmp_path)
    secret = (tmp_path / "secret.json").read_bytes()
    (tmp_path / "secret.json.new").write_bytes(secret)  # killed between writing and renaming
    again = net()
    resumed = rgp.resume(tmp_path, again, torch.optim.SGD(again.parameters(), lr=0.1), data())
    with resumed:
        for x, y in resumed:
            resumed.step(mean(again, x, y))
        (tmp_path / "secret.json.new").write_bytes(secret)
        resumed.save(tmp_path)
    text = json.loads(secret)["secret"].encode()
    left = [p.name for p in tmp_path.rglob("*") if p.is_file() and text in p.read_bytes()]
    assert not left


@pytest.mark.parametrize("how", [pickle.dumps, copy.deepcopy, copy.copy, lambda run: torch.save(run, "unused")])
def test_12_a_run_cannot_be_pickled(how, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with private(net()) as run, pytest.raises(rgp.WrongUseError, match="secret"):
        how(run)


# ---------------------------------------------------------------------- also


def test_a_step_that_is_drawn_again_has_other_random_numbers():
    streams = private(net(), seed=3)._streams
    assert streams.torch_seed(1, 0, attempt=0) != streams.torch_seed(1, 0, attempt=1)
    assert streams.loading_seed(1, 0, attempt=0) != streams.loading_seed(1, 0, attempt=1)


def test_a_checkpoint_of_step_0_belongs_to_its_run(tmp_path):
    for name in ("a", "b"):
        run = private(net(), folder=tmp_path / name, seed=None)
        run.save(tmp_path / name)
        run.close()
    (tmp_path / "b" / "ledger.jsonl").write_bytes((tmp_path / "a" / "ledger.jsonl").read_bytes())
    model = net()
    with pytest.raises(rgp.LedgerError, match="belongs to another run"):
        rgp.resume(tmp_path / "b", model, torch.optim.SGD(model.parameters(), lr=0.1), data())
