"""The loss-threshold attack, against answers known in closed form."""

import math

import numpy as np
import pytest
import torch

from rgp.attacks.threshold import attack


def normal(n, shift, seed):
    return np.random.default_rng(seed).normal(shift, 1, n)


def test_separable_losses_give_every_member_away():
    result = attack(normal(400, 0, 0) / 100, 5 + normal(300, 0, 1) / 100)
    assert result["success_rate"] == result["auc"] == result["tpr_at_0.001"] == result["tpr_at_0.01"] == 1
    assert (result["members"], result["nonmembers"]) == (400, 300)


def test_one_distribution_is_a_coin():
    result = attack(normal(20000, 0, 2), normal(20000, 0, 3))
    assert abs(result["success_rate"] - 0.5) < 5 * result["standard_error"]
    assert abs(result["auc"] - 0.5) < 0.02
    assert abs(result["tpr_at_0.01"] - 0.01) < 0.006
    assert abs(result["standard_error"] - math.sqrt(0.25 / 20000)) < 1e-5


@pytest.mark.parametrize("shift", [0.5, 2.0])
def test_shifted_normal_losses_give_the_known_rates(shift):
    result = attack(normal(40000, 0, 4), normal(40000, shift, 5))
    phi = torch.distributions.Normal(0.0, 1.0).cdf
    assert abs(result["success_rate"] - float(phi(torch.tensor(shift / 2)))) < 5 * result["standard_error"] + 0.003
    assert abs(result["auc"] - float(phi(torch.tensor(shift / math.sqrt(2))))) < 0.01
    assert abs(result["tpr_at_0.01"] - float(phi(torch.tensor(shift - 2.3263)))) < 0.03


def test_the_threshold_is_not_chosen_on_the_rows_it_is_judged_by():
    rates = [attack(normal(8, 0, i), normal(8, 0, 100 + i), seed=i)["success_rate"] for i in range(400)]
    assert abs(np.mean(rates) - 0.5) < 0.04  # chosen on the same rows it would be about 0.66


def test_ties_count_half_and_never_raise_the_false_positive_rate():
    result = attack([1.0] * 50, torch.ones(50))
    assert result["auc"] == 0.5 and result["tpr_at_0.01"] == 0 and result["success_rate"] == 0.5


def test_a_seed_repeats_and_an_uneven_set_is_balanced():
    a, b = normal(500, 0, 6), normal(50, 0.3, 7)
    assert attack(a, b, seed=3) == attack(a, b, seed=3)
    assert abs(attack(a, b)["success_rate"] - 0.5) < 0.3  # not 10/11, which "always a member" would score


@pytest.mark.parametrize(("losses", "words"), [([1.0] * 3, "3 losses"), ([math.nan] * 9, "NaN")])
def test_losses_that_say_nothing_are_refused(losses, words):
    with pytest.raises(ValueError, match=words):
        attack(losses, [1.0] * 9)
