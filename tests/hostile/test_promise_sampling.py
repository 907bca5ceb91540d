"""Sampling attacked: one row or person more, and what changes for everybody else. Nothing, number for number.

Neighbours are compared under one secret and one rate: N is public, and with it q. The privacy proof needs the distributions
alone; that the very numbers stay is more than it asks for, and is easily seen.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
from test_silent_ways import ROWS, data, mean, net, private
from torch.utils.data import Dataset

import rgp
from rgp.groups import deal, draw_group
from rgp.loading import cut
from rgp.members import Members, cut_units
from rgp.sampling import draw
from rgp.streams import Streams

STREAMS = Streams.from_seed(5)


@pytest.mark.parametrize("attempt", [0, 1, 7])
def test_one_row_more_moves_nobody(attempt):
    for step in range(20):
        few, more = (draw(STREAMS, step, n, 0.3, attempt=attempt) for n in (200, 201))
        assert more[more < 200].tolist() == few.tolist()


@pytest.mark.parametrize("bands", [2, 3, 8])
def test_one_row_more_moves_nobody_to_another_group(bands):
    few, more = (deal(STREAMS, n, bands) for n in (200, 201))
    assert (more[:200] == few).all()
    for step in range(20):
        drawn, again = (draw_group(STREAMS, step, groups, bands, 0.5) for groups in (few, more))
        assert again[again < 200].tolist() == drawn.tolist()


def test_one_person_more_changes_nobody_elses_rows():
    ids = [f"person {i % 30}" for i in range(400)]
    few, more = Members(ids, rows_per_unit=4), Members([*ids, *["new"] * 50], rows_per_unit=4)
    for step in range(5):
        for unit in range(30):
            rows = few.draw(STREAMS, step, 0, unit)
            assert rows.tolist() == more.draw(STREAMS, step, 0, unit).tolist()
            assert {ids[row] for row in rows} == {f"person {unit}"}


def test_steps_attempts_and_units_share_no_draw():
    """Whoever is in one batch says nothing about another."""
    draws = [tuple(draw(STREAMS, step, 400, 0.5, attempt=attempt)) for step in range(30) for attempt in range(3)]
    assert len(set(draws)) == len(draws)
    members = Members([i // 100 for i in range(1000)], rows_per_unit=50)
    chosen = [tuple(members.draw(STREAMS, s, a, u) % 100) for s in range(5) for a in range(2) for u in range(10)]
    assert len(set(chosen)) == len(chosen)
    both = [np.isin(np.arange(400), a) & np.isin(np.arange(400), b) for a, b in itertools.pairwise(draws)]
    together = np.mean([hits.mean() for hits in both])
    assert abs(together - 0.25) < 0.02


@pytest.mark.parametrize("size", [1, 3, 7, 32])
@pytest.mark.parametrize("lengths", [False, True])
def test_micro_batches_hold_each_drawn_row_once(size, lengths):
    rng = np.random.default_rng(1)
    sizes = rng.integers(1, 99, 300).astype(float) if lengths else None
    for n in (0, 1, 5, 31, 32, 33, 100):
        drawn = np.sort(rng.choice(300, n, replace=False))
        parts = cut(drawn, size, sizes)
        assert sorted(i for part in parts for i in part) == drawn.tolist()
        assert all(0 < len(part) <= size for part in parts)
        rows = [np.arange(3 * u, 3 * u + 1 + u % 5) for u in drawn]
        units = cut_units(
            drawn.tolist(), rows, size, None if sizes is None else rng.integers(1, 99, 2000).astype(float)
        )
        weight: Counter[int] = Counter()
        for part in units:
            for owner, share in zip(part.group.owner, part.group.share, strict=True):
                weight[part.group.units[owner]] += share
        assert all(abs(weight[u] - 1) < 1e-9 for u in drawn) and len(weight) == n
        assert sum(part.group.ends for part in units) >= (n > 0)


class Numbered(Dataset):
    def __init__(self, n: int) -> None:
        self.rows = (data() * 3)[:n]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index], index


def seen_by_the_loop(n: int, **options: Any) -> list[list[int]]:
    model, found, step = net(), [], []
    with private(model, Numbered(n), seed=3, steps=6, batch_size=n // 4, **options) as run:
        for (x, y), index in run:
            step += [] if run.rehearsing else index.tolist()
            if run.step(mean(model, x, y)):
                found.append(sorted(step))
                step = []
    return found


@pytest.mark.parametrize(
    "options", [{}, {"microbatch_size": 3}, {"workers": 1}, {"lengths": range(40)}, {"probe": False}]
)
def test_the_loop_gets_what_was_drawn_whatever_loads_it(options):
    """Micro-batches, workers, sorting and the rehearsal change nothing in who is drawn."""
    expected = [draw(Streams.from_seed(3), step, 40, 0.25).tolist() for step in range(6)]
    assert list(seen_by_the_loop(40, **options)) == [rows for rows in expected if rows]


def test_nobody_is_drawn_twice_within_the_bands():
    model, last = net(), {}
    with private(model, Numbered(ROWS), steps=12, batch_size=4, bands=3, seed=2) as run:
        for (x, y), index in run:
            if not run.rehearsing:
                for i in index.tolist():
                    assert run.step_index - last.get(i, -9) >= 3
                    last[i] = run.step_index
            run.step(mean(model, x, y))
    assert len(last) > ROWS / 2


def test_the_rate_that_is_drawn_with_is_the_rate_that_is_told():
    run = private(net(), Numbered(40), steps=3, batch_size=lambda step: 5 * (step + 1), seed=3)
    for x, _y in run:
        run.step(mean(run.model, x[0], x[1]))
    told = [record["q"] for record in run.ledger.records]
    assert told == [5 / 40, 10 / 40, 15 / 40]
    counts = [np.mean([len(draw(Streams.from_seed(s), t, 40, told[t])) for s in range(200)]) for t in range(3)]
    assert np.allclose(counts, [5, 10, 15], rtol=0.08)
    assert isinstance(run, rgp.Run)
