"""Sampling: tests that Poisson passes and shuffling fails, truncation, and every kind of dataset there is."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

import rgp
from rgp.loading import cut
from rgp.sampling import check_dataset, draw
from rgp.streams import Streams

N, STEPS, BATCH = 60, 4000, 12
RATE = BATCH / N


def poisson(seed: int = 0, size: int = N, rate: float = RATE, steps: int = STEPS, **options) -> np.ndarray:
    """(steps, N) booleans: who was in which batch."""
    streams = Streams.from_seed(seed)
    taken = np.zeros((steps, size), dtype=bool)
    for t in range(steps):
        taken[t, draw(streams, t, size, rate, **options)] = True
    return taken


def shuffled(seed: int = 0, size: int = N, batch: int = BATCH, steps: int = STEPS) -> np.ndarray:
    """What most libraries do: shuffle once per epoch, cut into batches of one size."""
    rng = np.random.default_rng(seed)
    taken = np.zeros((steps, size), dtype=bool)
    for t in range(0, steps, size // batch):
        order = rng.permutation(size)
        for k in range(size // batch):
            taken[t + k, order[k * batch : (k + 1) * batch]] = True
    return taken


def fixed_size(seed: int = 0, size: int = N, batch: int = BATCH, steps: int = STEPS) -> np.ndarray:
    """A fresh uniform subset of fixed size at every step."""
    rng = np.random.default_rng(seed)
    taken = np.zeros((steps, size), dtype=bool)
    for t in range(steps):
        taken[t, rng.choice(size, batch, replace=False)] = True
    return taken


# ---------------------------------------------------------------------- four tests of Poisson sampling, as p-values


def inclusion(taken: np.ndarray, rate: float = RATE) -> float:
    """How often each example is in: a binomial of all steps."""
    steps = len(taken)
    chi = ((taken.sum(0) - steps * rate) ** 2 / (steps * rate * (1 - rate))).sum()
    return float(2 * min(stats.chi2.sf(chi, taken.shape[1]), stats.chi2.cdf(chi, taken.shape[1])))


def pairwise_independence(taken: np.ndarray, rate: float = RATE) -> float:
    """Two examples are in together with probability q^2: the sum over all pairs, which fixed sizes lower."""
    x = taken - rate
    pairs = (x.sum(1) ** 2 - (x**2).sum(1)) / 2  # sum over pairs of x_i x_j, per step; mean 0
    spread = rate * (1 - rate) * (taken.shape[1] * (taken.shape[1] - 1) / 2) ** 0.5
    return float(2 * stats.norm.sf(abs(pairs.mean()) / spread * len(taken) ** 0.5))


def batch_sizes(taken: np.ndarray, rate: float = RATE) -> float:
    """Batch sizes are binomial."""
    sizes = taken.sum(1)
    low, high = (int(q) for q in stats.binom.ppf([0.02, 0.98], taken.shape[1], rate))
    edges = [-1, *range(low, high), taken.shape[1]]
    expected = np.diff(stats.binom.cdf(edges, taken.shape[1], rate)) * len(taken)
    observed = np.histogram(sizes, bins=np.array(edges) + 0.5)[0]
    return float(stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue)


def steps_apart(taken: np.ndarray, rate: float = RATE) -> float:
    """Being in at one step says nothing about the next: shuffling never takes the same example twice in an epoch."""
    x = taken - rate
    product = x[1:] * x[:-1]
    return float(2 * stats.norm.sf(abs(product.mean()) / (rate * (1 - rate)) * product.size**0.5))


TESTS = [inclusion, pairwise_independence, batch_sizes, steps_apart]


@pytest.mark.parametrize("test", TESTS)
def test_poisson_sampling_passes(test):
    assert test(poisson()) > 1e-3


@pytest.mark.parametrize("test", TESTS)
def test_shuffling_fails(test):
    assert test(shuffled()) < 1e-6


@pytest.mark.parametrize("test", [pairwise_independence, batch_sizes])
def test_fixed_sizes_fail(test):
    assert test(fixed_size()) < 1e-6


@pytest.mark.parametrize("rate", [RATE * 0.9, RATE * 1.1])
def test_another_rate_fails(rate):
    assert inclusion(poisson(rate=rate)) < 1e-6
    assert batch_sizes(poisson(rate=rate)) < 1e-6


def test_batch_sizes_of_a_larger_set():
    sizes = poisson(size=5000, rate=0.02, steps=500).sum(1)
    assert (
        stats.kstest(sizes + np.random.default_rng(0).uniform(-0.5, 0.5, 500), _smoothed_binomial(5000, 0.02)).pvalue
        > 1e-3
    )


def _smoothed_binomial(n: int, q: float):
    def cdf(x):
        k = np.floor(np.asarray(x) + 0.5)
        below, at = stats.binom.cdf(k - 1, n, q), stats.binom.pmf(k, n, q)
        return below + at * (np.asarray(x) + 0.5 - k)

    return cdf


def test_the_sampler_of_a_run_is_this_sampler():
    """Through privatize, seen in what the loop gets: indices are the data."""
    size, steps = 40, 400
    model = nn.Linear(1, 1)
    data = [torch.tensor([float(i)]) for i in range(size)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    run = rgp.privatize(
        model,
        optimizer,
        data,
        method=rgp.DPSGD(),
        batch_size=8,
        microbatch_size=3,
        steps=steps,
        noise_multiplier=1.0,
        seed=0,
        probe=False,
    )
    taken = np.zeros((steps, size), dtype=bool)
    for x in run:
        step, indices = run.step_index, x.flatten().long().numpy()
        assert len(x) <= 3 and not taken[step, indices].any()
        taken[step, indices] = True
        run.step(model(x).mean())
    for test in TESTS:
        assert test(taken, 8 / size) > 1e-3
    assert run.ledger.events() == [rgp.accounting.Event(8 / size, 1.0, steps)]


def test_draws_are_a_function_of_secret_step_and_attempt():
    a, b = Streams.from_seed(1), Streams.from_seed(1)
    assert np.array_equal(draw(a, 7, 1000, 0.1), draw(b, 7, 1000, 0.1))
    for other in (draw(a, 8, 1000, 0.1), draw(a, 7, 1000, 0.1, attempt=1), draw(Streams.from_seed(2), 7, 1000, 0.1)):
        assert not np.array_equal(draw(a, 7, 1000, 0.1), other)
    x = np.array([np.isin(np.arange(500), draw(a, t, 500, 0.2)) for t in range(400)])
    y = np.array([np.isin(np.arange(500), draw(a, t, 500, 0.2, attempt=1)) for t in range(400)])
    assert abs(np.corrcoef(x.ravel(), y.ravel())[0, 1]) < 5 / x.size**0.5


def test_edges_of_the_rate():
    streams = Streams.from_seed(0)
    assert len(draw(streams, 0, 100, 1.0)) == 100
    assert sum(len(draw(streams, t, 100, 1e-6)) for t in range(50)) == 0


# ---------------------------------------------------------------------- truncation


def test_a_cap_keeps_a_uniform_subset():
    free, capped = poisson(), poisson(max_batch=10)
    assert capped.sum(1).max() == 10
    assert not (capped & ~free).any()
    small = free.sum(1) <= 10
    assert np.array_equal(free[small], capped[small])
    kept = capped[~small].sum(0) / free[~small].sum(0)  # no position is favoured
    expected = (10 * (~small).sum()) / free[~small].sum()
    assert np.abs(kept - expected).max() < 5 * (0.25 / free[~small].sum(0).min()) ** 0.5


def test_a_cap_is_accounted():
    model, data = nn.Linear(1, 1), [torch.zeros(1)] * 40
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    options = {"batch_size": 8, "max_batch": 9, "steps": 30, "noise_multiplier": 4.0, "seed": 0}  # 1.0: seconds more
    run = rgp.privatize(model, optimizer, data, **options)
    total = np.zeros(30, dtype=int)
    for x in run:
        total[run.step_index] += len(x)
        run.step(model(x).mean())
    assert total.max() == 9
    (event,) = run.ledger.events()
    assert (event.max_batch, event.dataset_size, event.count) == (9, 40, 30)
    free = rgp.accounting.epsilon([rgp.accounting.Event(8 / 40, 4.0, 30)], delta=run.mechanism.delta)
    assert run.epsilon() > 2 * free  # a cut batch makes every example's presence tell on the others


# ---------------------------------------------------------------------- micro-batches


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 100])
def test_cutting_keeps_every_index_once(count):
    parts = cut(np.arange(count), 8)
    assert [i for part in parts for i in part] == list(range(count))
    assert all(len(part) <= 8 for part in parts)
    assert not parts or max(map(len, parts)) - min(map(len, parts)) <= 1


# ---------------------------------------------------------------------- datasets


def weights_after(data, *, steps: int = 4, **options) -> torch.Tensor:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    run = rgp.privatize(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        data,
        batch_size=6,
        steps=steps,
        noise_multiplier=1.0,
        seed=0,
        **options,
    )
    for batch in run:
        x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
        run.step(nn.functional.cross_entropy(model(x), y))
    run.close()
    return model.weight.detach().clone()


X, Y = torch.randn(20, 3, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 2
PAIRS = [(X[i], int(Y[i])) for i in range(20)]


class Hub:
    """As a Hugging Face dataset looks to a loader: columns, dicts, batched access."""

    def __init__(self):
        self.batched = 0

    def __len__(self):
        return 20

    def __getitem__(self, i):
        if isinstance(i, str):
            raise KeyError(i)
        return {"x": X[i], "y": int(Y[i])}

    def __getitems__(self, indices):
        self.batched += 1
        return [self[i] for i in indices]


class Mapped(Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, i):
        return PAIRS[i]


def stack(examples):
    return torch.stack([x for x, _ in examples]), torch.tensor([y for _, y in examples])


@pytest.mark.parametrize(
    ("data", "options"),
    [
        (TensorDataset(X, Y), {}),
        (Mapped(), {}),
        (Subset(Mapped(), range(20)), {}),
        (Hub(), {}),
        (PAIRS, {"collate_fn": stack}),
        (PAIRS, {"workers": 2}),
        (Mapped(), {"workers": 2, "collate_fn": stack}),
        (PAIRS, {"pin_memory": True}),
        (PAIRS, {"microbatch_size": 32}),
    ],
    ids=["tensors", "map-style", "subset", "hub", "collate_fn", "workers", "workers+collate", "pinned", "microbatch"],
)
@pytest.mark.filterwarnings("ignore:.*pin_memory.*")
def test_every_kind_of_dataset_gives_the_same_training(data, options):
    assert torch.equal(weights_after(data, **options), weights_after(PAIRS))


def test_batched_access_is_used():
    hub = Hub()
    weights_after(hub)
    assert hub.batched > 0


def test_a_list_of_tensors():
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = rgp.privatize(model, optimizer, list(X), batch_size=6, steps=2, noise_multiplier=1.0, seed=0)
    for x in run:
        assert x.shape[1:] == (3,)
        run.step(model(x).square().mean())
    assert run.step_index == 2


class Augmented(Dataset):
    """Draws from all three generators that augmentations use."""

    def __len__(self):
        return 20

    def __getitem__(self, i):
        return X[i] * torch.rand(1) + np.random.rand() * random.random(), int(Y[i])


@pytest.mark.parametrize("workers", [0, 2])
def test_augmentation_is_a_function_of_the_secret_and_the_step(workers):
    """Whatever process loads, and whatever the user's generators did before: else no crashed step could be repeated."""
    torch.manual_seed(1)
    first = weights_after(Augmented())
    torch.manual_seed(2)
    random.seed(3)
    assert torch.equal(weights_after(Augmented(), workers=workers), first)


def test_the_users_generators_are_left_alone():
    torch.manual_seed(7)
    np.random.seed(7)
    random.seed(7)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = (torch.rand(1), np.random.rand(), random.random())
    torch.manual_seed(7)
    np.random.seed(7)
    random.seed(7)
    nn.Linear(3, 2)
    run = rgp.privatize(model, optimizer, Augmented(), batch_size=6, steps=3, noise_multiplier=1.0)
    for x, y in run:
        run.step(nn.functional.cross_entropy(model(x), y))
    run.close()
    assert (torch.rand(1), np.random.rand(), random.random()) == expected


def test_iterable_datasets_are_refused_with_the_reason():
    class Endless(IterableDataset):
        def __iter__(self):
            yield from PAIRS

    with pytest.raises(ValueError, match="each example must be included independently"):
        check_dataset(Endless())


def test_a_users_own_sampler_is_refused_with_the_reason():
    with pytest.raises(ValueError, match="its sampler is not the one the accountant would be told about"):
        check_dataset(DataLoader(Mapped(), batch_size=4, shuffle=True))


@pytest.mark.parametrize(
    ("data", "message"), [(iter(PAIRS), "len\\(\\) and \\[index\\]"), ([], "empty"), (7, "got int")]
)
def test_other_wrong_datasets(data, message):
    with pytest.raises(ValueError, match=message):
        check_dataset(data)
