"""Units of several rows: a person is drawn, and clipped, once. Compared with autograd one person at a time."""

from __future__ import annotations

import collections
import copy
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rgp
from helpers import Expected, check_step, per_example_gradients, privatize, seeded
from rgp.members import Members, cut_units
from rgp.streams import Streams
from rgp.units import Persons
from toys import examples, loss_of, losses_of, toy

ROWS = 24
IDS = [
    "a",
    "b",
    3,
    "b",
    "c",
    ("d", 1),
    "b",
    3,
    "a",
    "c",
    "e",
    "b",
    "b",
    "f",
    3,
    "c",
    "b",
    "a",
    "g",
    "g",
    "b",
    "b",
    "h",
    "c",
]
METHODS = [
    rgp.RGP(rank=2),
    rgp.RGP(rank=2, norm="paper"),
    rgp.RGP(rank=2, sides="left"),
    rgp.RGP(rank=2, sides="alternate"),
    rgp.RGPRandom(rank=3),
    rgp.DPSGD(),
    rgp.LinearProbe(),
    rgp.BiTFiT(),
]


class Tokens(nn.Module):
    """Operations of every kind of use that is deferred: a table, a convolution, a product over positions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(11, 6)
        self.conv, self.grouped = nn.Conv1d(6, 8, 3), nn.Conv1d(8, 8, 2, groups=2)
        self.body, self.head = nn.Linear(8, 7), nn.Linear(7, 3)

    def forward(self, x):
        x = self.grouped(torch.tanh(self.conv(self.table(x).transpose(1, 2)))).transpose(1, 2)
        return self.head(torch.tanh(self.body(x)).mean(1))


def tokens(count: int = ROWS) -> list:
    ids = torch.randint(11, (count, 7), generator=seeded(2))
    return [(ids[i], i % 3) for i in range(count)]


def unit_gradients(model: nn.Module, data: list, ids: list) -> list[dict]:
    """The mean gradient of each unit's rows, in the order in which units appear."""
    rows = collections.defaultdict(list)
    for gradient, name in zip(per_example_gradients(model, data, losses_of), ids, strict=True):
        rows[name].append(gradient)
    return [{name: torch.stack([g[name] for g in own]).mean(0) for name in own[0]} for own in rows.values()]


def run_one(model: nn.Module, data: list, ids: list, **options):
    """One step over all units, and what autograd says it should have been."""
    size = len(set(ids))
    options = {"clip": 0.05, "rows_per_unit": len(ids), **options}
    run = privatize(model, data, units=ids, batch_size=size, **options)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    frozen = copy.deepcopy(model)
    for batch in run:
        run.step(loss_of(model, batch))
    carriers = {name: tuple(t.clone() for t in pair) for name, pair in run.carriers.items()}
    after = {n: p.detach().clone() for n, p in model.named_parameters()}
    expected = Expected(unit_gradients(frozen, data, ids), run.plan, carriers, 0, options["clip"], size)
    return run, expected, check_step(expected, before, after)


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name + getattr(m, "norm", "") + getattr(m, "sides", ""))
@pytest.mark.parametrize("microbatch", [3, 5, 100])
def test_the_mean_gradient_of_each_unit_is_clipped_once(method, microbatch):
    """Units are larger than a micro-batch, or share one: the result is the same, to rounding."""
    _, expected, error = run_one(toy(), examples(ROWS), IDS, method=method, microbatch_size=microbatch)
    assert expected.clipped >= 4 and error < 1e-9
    # where nothing is clipped, a sum over rows would show
    _, expected, error = run_one(toy(), examples(ROWS), IDS, method=method, microbatch_size=microbatch, clip=1e3)
    assert expected.clipped == 0 and error < 1e-9


@pytest.mark.parametrize("microbatch", [2, 6, 100])
@pytest.mark.parametrize("deferred", [False, True])
def test_large_parameters_are_clipped_by_unit_without_forming_their_gradients(microbatch, deferred, monkeypatch):
    from rgp import slots

    if deferred:
        monkeypatch.setattr(slots, "LARGEST_DENSE", 0)
    _, expected, error = run_one(Tokens().double(), tokens(), IDS, method=rgp.DPSGD(), microbatch_size=microbatch)
    assert expected.clipped >= 4 and error < 1e-9


def test_views_and_pieces_of_a_unit_add_up():
    data = examples(ROWS)
    _, _, error = run_one(
        toy(), data, IDS, method=rgp.RGP(rank=2), microbatch_size=3, views=2, augment=lambda batch: batch
    )
    assert error < 1e-9


def test_plain_training_takes_the_mean_of_units_too():
    _, _, error = run_one(toy(), examples(ROWS), IDS, method=rgp.NonPrivate(), clip=None, microbatch_size=4)
    assert error < 1e-9


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name + getattr(m, "norm", "") + getattr(m, "sides", ""))
def test_one_unit_with_all_its_rows_moves_the_sum_by_at_most_c(method):
    """Rows of a unit that agree with each other, and are scaled up: the worst case for a sum over rows."""
    rng = np.random.default_rng(5)
    for _ in range(3):
        ids = [int(i) for i in rng.integers(0, 7, 30)]
        person = ids[0]
        rows = zip(examples(30), ids, strict=True)
        data = [(x * (50 if name == person else 1), 0 if name == person else y) for (x, y), name in rows]
        sums = []
        for keep in (True, False):
            rows = [i for i, name in enumerate(ids) if keep or name != person]
            model = toy()
            run = privatize(
                model,
                [data[i] for i in rows],
                units=[ids[i] for i in rows],
                rows_per_unit=30,
                batch_size=len({ids[i] for i in rows}),
                clip=0.3,
                method=method,
                microbatch_size=8,
                probe=False,
            )
            seen = Released()
            run.observe(seen)
            for batch in run:
                run.step(loss_of(model, batch))
            sums.append(seen.sums[0])
        moved = float((sums[0] - sums[1]).norm())
        assert 0.2 < moved <= 0.3 * (1 + 1e-6)


class Released(rgp.observing.Observer):
    def __init__(self) -> None:
        self.sums: list[torch.Tensor] = []

    def released(self, step, noisy) -> None:
        self.sums.append(noisy.clone())


def test_a_unit_with_a_bad_row_gives_nothing_at_all():
    data = examples(ROWS)
    data[3] = (data[3][0] * torch.nan, 0)  # of "b", who has other rows
    model, kept = toy(), toy()
    with pytest.raises(ValueError, match="from 1 to the number of units 9"):
        privatize(toy(), data, units=IDS, batch_size=10)
    left = [i for i, name in enumerate(IDS) if name != "b"]
    options = {"clip": 0.05, "rows_per_unit": 24, "method": rgp.DPSGD(), "probe": False}
    run = privatize(model, data, units=IDS, batch_size=9, lr=9.0, **options)
    rest, ids = [data[i] for i in left], [IDS[i] for i in left]
    other = privatize(kept, rest, units=ids, batch_size=8, lr=8.0, **options)
    for one, m in ((run, model), (other, kept)):
        for batch in one:
            one.step(loss_of(m, batch))
    assert run.bad_examples == 1
    for p, q in zip(model.parameters(), kept.parameters(), strict=True):
        assert torch.allclose(p, q, atol=1e-12)


# ---------------------------------------------------------------------- drawing


def members(ids=IDS, k: int = 2) -> Members:
    return Members(ids, rows_per_unit=k)


def test_of_a_drawn_unit_each_row_is_used_equally_often_and_none_twice():
    drawn, streams, rounds, k = members(k=3), Streams.from_seed(3), 3000, 3
    b = 1  # the unit "b", with 8 rows
    counts = collections.Counter()
    for step in range(rounds):
        rows = drawn.draw(streams, step, 0, b)
        assert len(set(rows)) == k and {IDS[i] for i in rows} == {"b"}
        counts.update(rows.tolist())
    own = [i for i, name in enumerate(IDS) if name == "b"]
    expected = rounds * k / len(own)
    spread = (rounds * (k / 8) * (1 - k / 8)) ** 0.5
    assert set(counts) == set(own)
    assert all(abs(counts[i] - expected) < 5 * spread for i in own)
    assert not all(abs(counts[i] - expected * 2 / 3) < 5 * spread for i in own)
    assert drawn.draw(streams, 0, 0, 2).tolist() == [2, 7, 14]  # no more than there are
    again = [drawn.draw(Streams.from_seed(3), 5, a, b).tolist() for a in (0, 0, 1)]
    assert again[0] == again[1] != again[2]


def test_rows_of_a_unit_do_not_depend_on_who_else_is_there():
    """The same place among the units, whoever comes after it."""
    alone, more = members(["b"] * 9 + ["x"]), members(["b"] * 9 + ["x"] * 40 + ["y"] * 7)
    for step in range(20):
        assert (
            alone.draw(Streams.from_seed(1), step, 0, 0).tolist()
            == more.draw(Streams.from_seed(1), step, 0, 0).tolist()
        )


def test_units_are_drawn_with_q_of_units_whatever_their_rows():
    """Each unit is in a step with probability B / U, and a large one no oftener than a small one."""
    steps, size, batch = 1500, 12, 3
    ids = [0] * 20 + [*range(1, size)] * 2  # units are numbered in the order in which they appear
    model = toy()
    run = privatize(
        model,
        examples(len(ids)),
        units=ids,
        batch_size=batch,
        steps=steps,
        rows_per_unit=2,
        method=rgp.BiTFiT(),
        clip=1.0,
        probe=False,
    )
    assert run.mechanism.rate(0) == batch / size and run.mechanism.dataset_size == size
    counts, rows = collections.Counter(), collections.Counter()
    for step in range(steps):
        parts = run._loop._microbatches(step)
        for part in parts:
            counts.update(part.group.units)
            rows.update(ids[i] for i in part)
            assert len(part) <= 32 and [ids[i] for i in part] == [part.group.units[o] for o in part.group.owner]
    spread = (steps * 0.25 * 0.75) ** 0.5
    for unit in range(size):
        assert abs(counts[unit] - steps * 0.25) < 5 * spread
        assert abs(counts[unit] - steps * 0.25 * 3 / 2) > 5 * spread
        assert rows[unit] == 2 * counts[unit]


def test_microbatches_hold_whole_units_or_pieces_of_one():
    rows = [np.arange(a, b) for a, b in ((0, 2), (2, 5), (5, 12), (12, 13), (13, 15))]
    parts = cut_units([4, 7, 1, 0, 9], rows, 3)
    assert [list(p) for p in parts] == [[0, 1], [2, 3, 4], [5, 6, 7], [8, 9], [10, 11], [12, 13, 14]]
    assert [p.group.units for p in parts] == [[4], [7], [1], [1], [1], [0, 9]]
    assert [(p.group.begins, p.group.ends) for p in parts][2:5] == [(True, False), (False, False), (False, True)]
    assert sum(sum(p.group.share) for p in parts) == pytest.approx(5)
    lengths = np.arange(15.0)
    assert cut_units([4, 7, 1, 0, 9], rows, 8, lengths)[0].group.units[0] == 9
    assert cut_units([], [], 3) == []


# ---------------------------------------------------------------------- what is asked, and what is said


def test_ids_that_cannot_be_right_are_refused_or_noticed():
    data = examples(6)
    for ids, words in (
        ([1, 2, 3], "3 ids, and the dataset 6 rows"),
        ([1, 1, None, 2, 2, 3], "row 2 has no id"),
        ([1.0, 1.0, float("nan"), 2, 2, 3], "row 2 has no id"),
        ([1, 1, np.float32("nan"), 2, 2, 3], "row 2 has no id"),
        ([1, 1, "", 2, 2, 3], "row 2 has no id"),
        (["1", "1", " ", "2", "2", "3"], "row 2 has no id"),
        ([1, 1, np.datetime64("NaT"), 2, 2, 3], "row 2 has no id"),
        (list(torch.tensor([[1, 2]] * 6)), "a Tensor, which is not hashable"),
        ([1, 1, [2], 2, 2, 3], "a list, which is not hashable"),
    ):
        with pytest.raises(ValueError, match=words):
            privatize(toy(), data, units=ids, batch_size=2)
    with pytest.raises(ValueError, match="rows_per_unit=3 needs units="):
        privatize(toy(), data, rows_per_unit=3)
    with pytest.raises(ValueError, match="rows_per_unit must be an integer of at least 1"):
        privatize(toy(), data, units=[1, 1, 2, 2, 3, 3], rows_per_unit=0, batch_size=2)
    for ids in ("user", {0: "a", 1: "a"}, {"a", "b"}):
        with pytest.raises(TypeError, match="one id per row"):
            privatize(toy(), data, units=ids, batch_size=2)
    with pytest.warns(UserWarning, match="all ids are different"):
        privatize(toy(), data, units=range(6), batch_size=2)
    with pytest.warns(UserWarning, match="has most of the rows"):
        privatize(toy(), data, units=[1, 1, 1, 1, 2, 3], batch_size=2)
    with pytest.warns(UserWarning, match="several rows have the id 'NA'"):
        privatize(toy(), data, units=["a", "a", "NA", "b", "b", "NA"], batch_size=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        privatize(toy(), data, units=torch.tensor([1, 1, 2, 2, 3, 3]), batch_size=2)
        apart = list(torch.tensor([1, 1, 2, 2, 3, 3]))  # equal, and told apart by a dictionary
        assert privatize(toy(), data, units=apart, batch_size=2).mechanism.unit.size == 3


def test_delta_and_epsilon_are_about_units():
    data, ids = examples(40), [i // 4 for i in range(40)]
    run = privatize(toy(), data, units=ids, batch_size=2, steps=5, noise_multiplier=1.0, clip=1.0)
    rows = privatize(toy(), data, batch_size=2, steps=5, noise_multiplier=1.0, clip=1.0)
    assert run.mechanism.rate(0) == 0.2 and rows.mechanism.rate(0) == 0.05
    assert run.mechanism.unit == Persons(size=10) and run.mechanism.dataset_size == 10
    with pytest.raises(ValueError, match="delta"):
        privatize(toy(), data, units=ids, batch_size=2, noise_multiplier=1.0, delta=0.11)
    privatize(toy(), data, units=ids, batch_size=2, noise_multiplier=1.0, delta=0.05)
    assert run.mechanism.unit.describe() == "one person, at most 8 rows in a step"


def test_what_is_not_covered_is_about_the_unit():
    assert any("one person under several ids" in words for words in Persons(size=3).not_covered())
    documents = " ".join(Persons(size=3, noun="document", row="block").not_covered())
    assert "several documents of one person" in documents and "household" not in documents and "ids" not in documents


def test_earlier_runs_with_other_units_do_not_add_up():
    data, ids = examples(40), [i // 4 for i in range(40)]
    options = {"batch_size": 2, "steps": 2, "noise_multiplier": 1.0, "clip": 1.0}
    model = toy()
    rows = privatize(model, data, **options)
    for batch in rows:
        rows.step(loss_of(model, batch))
    with pytest.raises(ValueError, match="do not add up"):
        privatize(model, data, units=ids, after=rows, **options)
    model = toy()
    persons = privatize(model, data, units=ids, **options)
    for batch in persons:
        persons.step(loss_of(model, batch))
    with pytest.raises(ValueError, match="do not add up"):
        privatize(model, data, after=persons, **options)
    assert privatize(model, data, units=ids, after=persons, **options).epsilon() > 0


def test_rows_that_meet_are_still_refused():
    """The rehearsal asks about rows, which is more than units need: rows of two units share a micro-batch."""
    model, data = toy(), examples(ROWS)
    run = privatize(model, data, units=IDS, batch_size=4, clip=1.0, noise_multiplier=1.0)

    def train() -> None:
        for x, _ in run:
            run.step(F.mse_loss(model(x).mean(0, keepdim=True).expand(len(x), -1), torch.zeros(len(x), 3).double()))

    with pytest.raises(rgp.UnsupportedError, match="couples the examples"):
        train()
