"""Attacks on persons: a unit is known by all its rows, and is in the data or not with all of them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from rgp.attacks.lira import lira
from rgp.attacks.metrics import judge
from rgp.attacks.pool import Pool
from rgp.attacks.shadows import halves
from rgp.members import Members

EACH, PERSONS = 16, 400


def pool(train: list, test: list) -> Pool:
    """Rows are named by their place; `train` and `test` say whose they are."""
    members, others = Members(train), Members(test)
    data = SimpleNamespace(train=range(len(train)), test=range(len(train), len(train) + len(test)))
    data.members, data.test_members = members, others
    return Pool.of(data)


def test_units_of_both_sides_are_told_apart_and_known_by_the_mean_of_their_rows():
    found = pool(["a", "b", "a", "c"], ["c", "d", "d"])  # a name that is on both sides is two persons
    assert (found.trained, found.size, found.noun) == (3, 5, "person")
    assert found.mean(np.array([1.0, 5, 3, 7, 10, 20, 40])).tolist() == [2, 5, 7, 10, 30]
    chosen = np.array([True, False, False, False, True])
    rows = found.rows(chosen)
    assert [rows[i] for i in range(len(rows))] == [0, 2, 5, 6]


def test_rows_are_units_of_their_own():
    data = SimpleNamespace(train=range(4), test=range(4, 6), members=None)
    found = Pool.of(data)
    values = np.random.default_rng(0).standard_normal(6)
    assert (found.trained, found.size, found.noun) == (4, 6, "row") and (found.mean(values) == values).all()


def test_an_attack_on_persons_finds_what_one_on_rows_misses():
    """Each row of a member is known a little better. Over sixteen rows that adds up: the known rates for normal scores."""
    from scipy.stats import norm

    rng, shift = np.random.default_rng(1), 0.4
    ids = [i // EACH for i in range(EACH * PERSONS)]
    found = pool(ids, ids)
    members = np.repeat([True, False], EACH * PERSONS)
    rows = rng.standard_normal(2 * EACH * PERSONS) + shift * members
    of_rows = judge(-rows[members], -rows[~members])["auc"]
    units = found.mean(rows)
    of_persons = judge(-units[:PERSONS], -units[PERSONS:])["auc"]
    assert of_rows == pytest.approx(norm.cdf(shift / 2**0.5), abs=0.03)
    assert of_persons == pytest.approx(norm.cdf(shift * EACH**0.5 / 2**0.5), abs=0.04) and of_persons > of_rows + 0.2


def test_lira_on_persons_is_nearly_the_best_test():
    from scipy.stats import norm

    rng, shift, models = np.random.default_rng(2), 0.4, 16
    ids = [i // EACH for i in range(EACH * PERSONS)]
    found = pool(ids, ids)
    inside = np.stack([halves(found.size, i, 0) for i in range(models)])
    hardness = 3 * rng.standard_normal(len(found.owner))  # of each row, whoever was trained on it

    def confidences(chosen):
        return hardness + rng.standard_normal(len(found.owner)) + shift * chosen[found.owner]

    target = found.mean(confidences(np.arange(found.size) < PERSONS))
    scores = lira(target, np.stack([found.mean(confidences(row)) for row in inside]), inside)
    auc = judge(-scores[:PERSONS], -scores[PERSONS:])["auc"]
    best = norm.cdf(shift * EACH**0.5 / 2**0.5)
    assert best - 0.12 < auc < best + 0.04 and judge(-target[:PERSONS], -target[PERSONS:])["auc"] < auc
