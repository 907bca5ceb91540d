"""Cyclic Poisson sampling: fair groups that stay, independent draws from the one whose turn it is."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from rgp import sampling
from rgp.groups import DEALING, deal, draw_group
from rgp.streams import Streams

STREAMS = Streams.from_seed(3)
ACCEPT, REJECT = 1e-4, 1e-12


def test_groups_are_uniform_and_independent():
    size, bands = 60_000, 6
    groups = deal(STREAMS, size, bands)
    counts = np.bincount(groups, minlength=bands)
    assert len(counts) == bands
    assert stats.chisquare(counts).pvalue > ACCEPT
    pairs = np.bincount(groups[:-1] * bands + groups[1:], minlength=bands**2)
    assert stats.chisquare(pairs).pvalue > ACCEPT  # an example's neighbour tells nothing
    for wrong in (2 / 3, 3 / 2):  # the first group's share
        shares = np.array([wrong, *[(bands - wrong) / (bands - 1)] * (bands - 1)]) / bands
        assert stats.chisquare(counts, size * shares).pvalue < REJECT
    # group sizes vary as they must: dealt one by one, not cut into equal parts
    many = [np.bincount(deal(Streams.from_seed(s), 600, bands), minlength=bands) for s in range(200)]
    assert 0.8 < np.var(many) / (600 / 6 * 5 / 6) < 1.2


def test_a_row_more_moves_nobody():
    assert np.array_equal(deal(STREAMS, 1001, 7)[:1000], deal(STREAMS, 1000, 7))


@pytest.mark.parametrize("bands", [3, 7, 1000])
def test_the_group_of_one_example_can_be_had_without_the_others(bands):
    """Example i has the i-th number of its stream, wherever the counter starts (Philox gives four at a time)."""
    groups = deal(STREAMS, 5000, bands)
    for i in (0, 1, 17, 4998):
        rng = STREAMS.generator("sampling", DEALING)
        rng.bit_generator.advance(i // 4)
        assert groups[i] == int(rng.random(i % 4 + 1)[-1] * bands)


def test_groups_depend_on_the_secret():
    assert (deal(STREAMS, 1000, 2) != deal(Streams.from_seed(4), 1000, 2)).mean() > 0.4


def test_dealing_shares_no_numbers_with_drawing():
    dealt = STREAMS.generator("sampling", DEALING).random(1000)
    for step in (0, 1, 10**6):
        for part in (0, 1):
            assert len(np.intersect1d(dealt, STREAMS.generator("sampling", step, 0, part).random(1000))) == 0


def test_every_member_is_drawn_at_its_rate_and_nobody_else():
    size, bands, rate, rounds = 4000, 4, 0.2, 100
    groups = deal(STREAMS, size, bands)
    drawn = np.zeros((bands * rounds, size), bool)
    for step in range(len(drawn)):
        batch = draw_group(STREAMS, step, groups, bands, rate)
        assert (np.diff(batch) > 0).all()
        assert (groups[batch] == step % bands).all()
        drawn[step, batch] = True
    times = drawn.sum(0)  # chances of each example: `rounds`
    for probability, accepted in ((rate, True), (rate * 2 / 3, False), (rate * 3 / 2, False)):
        expected = stats.binom.pmf(np.arange(rounds + 1), rounds, probability) * size
        common = expected > 5
        pooled = np.append(expected[common], expected[~common].sum())
        counts = np.bincount(times, minlength=rounds + 1)
        found = np.append(counts[common], counts[~common].sum())
        p = stats.chisquare(found, pooled * found.sum() / pooled.sum()).pvalue
        assert p > ACCEPT if accepted else p < REJECT
    # batches are of the size that was asked for, b B / N / b of N
    assert abs(drawn.sum(1).mean() - rate * size / bands) < 3
    # two examples of one group are drawn independently
    first, second = np.flatnonzero(groups == 0)[:2]
    table = np.histogram2d(drawn[::4, first], drawn[::4, second], bins=2)[0]
    assert stats.fisher_exact(table).pvalue > ACCEPT


def test_nobody_takes_part_twice_in_b_steps():
    bands, size = 5, 300
    groups = deal(STREAMS, size, bands)
    batches = [set(draw_group(STREAMS, step, groups, bands, 0.9).tolist()) for step in range(40)]
    for start in range(40 - bands + 1):
        window = batches[start : start + bands]
        assert len(set.union(*window)) == sum(map(len, window))


def test_one_group_is_ordinary_poisson_sampling():
    groups = deal(STREAMS, 500, 1)
    for step, attempt in ((0, 0), (5, 0), (5, 1)):
        expected = sampling.draw(STREAMS, step, 500, 0.3, attempt=attempt)
        assert np.array_equal(draw_group(STREAMS, step, groups, 1, 0.3, attempt=attempt), expected)


def test_another_attempt_is_another_draw():
    groups = deal(STREAMS, 500, 2)
    first, again = (draw_group(STREAMS, 3, groups, 2, 0.5, attempt=a) for a in (0, 1))
    assert not np.array_equal(first, again)


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="bands must be an integer of at least 1; got 0"):
        deal(STREAMS, 10, 0)
    with pytest.raises(ValueError, match=r"rate=1.5 must be above 0 and at most 1"):
        draw_group(STREAMS, 0, deal(STREAMS, 10, 2), 2, 1.5)
