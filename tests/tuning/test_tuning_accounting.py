"""The price of a search: law of the number of trials, epsilon of the best of them, noise for a budget.

Held against the theorems of Papernot and Steinke (arXiv 2110.03620), written out here, against exact laws of the best of K
trials, and against dp-accounting.
"""

import math

import numpy as np
import pytest
from scipy import stats

from rgp import accounting
from rgp.accounting import Event
from rgp.tuning import accounting as search
from rgp.tuning.law import Law
from rgp.tuning.profiles import CELLS, KNOTS, SearchProfile, reach

NAMES = ("geometric", "logarithmic", "poisson", "negative-binomial:0.5", "negative-binomial:3")
DELTA = 1e-5

# ---------------------------------------------------------------------- the law


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mean", [1.5, 10, 60])
def test_a_law_has_its_mean_and_its_weight_is_the_derivative_of_its_generating_function(name, mean):
    law = Law.named(name, mean)
    counts = np.arange(0, 4000)
    chances = np.array([law.probability(int(k)) for k in counts])
    assert chances.sum() == pytest.approx(1, abs=1e-6)
    assert chances @ counts == pytest.approx(mean, rel=1e-4)
    assert law.chance_of_none == pytest.approx(chances[0])
    for u in (0.0, 0.01, 0.3, 1.0):
        derivative = sum(k * p * (1 - u) ** (k - 1) for k, p in zip(counts[1:], chances[1:], strict=True))
        assert law.weight(u) == pytest.approx(derivative, rel=1e-3)
    assert Law.named(law.name, law.mean) == law


@pytest.mark.parametrize("name", NAMES)
def test_numbers_are_drawn_from_the_law(name):
    law, rng = Law.named(name, 5), np.random.default_rng(1)
    drawn = np.array([law.draw(rng) for _ in range(4000)])
    most = 12
    seen = np.array([*(np.mean(drawn == k) for k in range(most)), np.mean(drawn >= most)])
    chances = np.array([law.probability(k) for k in range(most)])
    right = np.append(chances, 1 - chances.sum())
    there = right > 0
    assert not seen[~there].any()
    assert stats.chisquare(4000 * seen[there], 4000 * right[there]).pvalue > 1e-3
    for wrong in (2 / 3, 3 / 2):  # of the mean
        other = Law.named(name, 5 * wrong)
        chances = np.array([other.probability(k) for k in range(most)])
        chances = np.append(chances, 1 - chances.sum())
        assert stats.chisquare(4000 * seen[there], 4000 * chances[there]).pvalue < 1e-6


@pytest.mark.parametrize(
    ("name", "mean"),
    [
        ("fixed", 10),
        ("negative-binomial:-1", 10),
        ("negative-binomial:x", 10),
        ("geometric", 1),
        ("negative-binomial:1e12", 10),
    ],
)
def test_wrong_laws_are_refused(name, mean):
    with pytest.raises(ValueError, match=r"law|trials="):
        Law.named(name, mean)


# ---------------------------------------------------------------------- Rényi: the paper's theorems, written out

ORDERS = np.array([1 + x / 10 for x in range(1, 100)] + list(range(11, 64)) + [128, 256, 512, 1024])


def to_epsilon(orders, rdp, delta):
    """Proposition 12 of Canonne, Kamath and Steinke (2020)."""
    values = rdp + np.log1p(-1 / orders) - np.log(delta * orders) / (orders - 1)
    return max(0.0, values.min())


def to_delta(orders, rdp, epsilon):
    """The same, for delta."""
    logs = (orders - 1) * (rdp - epsilon + np.log1p(-1 / orders)) - np.log(orders)
    return min(1.0, math.exp(logs.min()))


def theorem_2(orders, rdp, law):
    """Truncated negative binomial, the best lambda-hat of all."""
    tail = (1 + law.shape) * np.min((1 - 1 / orders) * rdp + math.log(1 / law.gamma) / orders)
    return rdp + tail + math.log(law.mean) / (orders - 1)


def theorem_6(orders, rdp, law):
    """Poisson."""
    deltas = np.array([to_delta(orders, rdp, math.log1p(1 / (a - 1))) for a in orders])
    return rdp + law.mean * deltas + math.log(law.mean) / (orders - 1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mean", [2, 10, 50])
def test_renyi_epsilon_is_that_of_the_paper(name, mean):
    law, sigma, steps, score = Law.named(name, mean), 8.0, 100, 20.0
    rdp = ORDERS * (steps / sigma**2 + 1 / score**2) / 2  # Gaussian, sampling rate 1: exact
    searched = (theorem_6 if law.poisson else theorem_2)(ORDERS, rdp, law)
    found = search.epsilon([[Event(1.0, sigma, steps), Event(1.0, score)]], law, delta=DELTA, accountant="rdp")
    assert found == pytest.approx(to_epsilon(ORDERS, searched, DELTA), rel=2e-3)
    alone = accounting.epsilon([Event(1.0, sigma, steps), Event(1.0, score)], delta=DELTA, accountant="rdp")
    assert found > 1.1 * alone  # a search costs something


# ---------------------------------------------------------------------- profiles: against exact laws


def gaussian_profile(mu):
    def profile(epsilon):
        a, b = stats.norm.cdf(mu / 2 - epsilon / mu), stats.norm.cdf(-mu / 2 - epsilon / mu)
        return float(a - math.exp(epsilon) * b)

    return profile


@pytest.mark.parametrize(
    ("name", "mu"), [("geometric", 0.5), ("geometric", 1.5), ("logarithmic", 1.5), ("poisson", 0.5)]
)
def test_the_bound_holds_and_is_nearly_reached_by_the_best_of_gaussians(name, mu):
    """A trial puts out y ~ N(0, 1), or N(mu, 1) on neighbouring data. The scores: y above a, from the top; then -y.

    What is above y <= a is then likelier on the neighbouring data than anything else could be, and low y are less likely
    there: the search makes them rarer still. The law of the best is known exactly.
    """
    law, delta = Law.named(name, 10), 1e-3
    y = np.linspace(-10, 10 + mu, 20_001)
    exact = 0.0
    for a in np.linspace(0.5, 3, 11):
        densities = []
        for mean in (0, mu):
            top = stats.norm.sf(a, mean)
            above = np.where(y > a, stats.norm.sf(y, mean), np.minimum(1, top + stats.norm.cdf(y, mean)))
            densities.append(stats.norm.pdf(y, mean) * law.weight(above))
        exact = max(exact, epsilon_of(*densities, y, delta), epsilon_of(*densities[::-1], y, delta))
    bound = SearchProfile.of(law, gaussian_profile(mu)).epsilon(delta)
    assert 0.93 * bound < exact <= bound


def epsilon_of(p, q, y, delta):
    low, high = 0.0, 40.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        small = np.trapezoid(np.maximum(0, p - math.exp(middle) * q), y) <= delta
        low, high = (low, middle) if small else (middle, high)
    return low


def test_the_bound_is_above_the_exact_law_of_random_discrete_mechanisms():
    rng = np.random.default_rng(0)
    tight = 0.0
    for name in ("geometric", "logarithmic", "poisson"):
        law = Law.named(name, 4)
        for _ in range(20):
            p, q = rng.dirichlet(np.ones(6)), rng.dirichlet(np.ones(6) * 3)
            q = 0.7 * p + 0.3 * q

            def profile(epsilon, p=p, q=q):
                grow = math.exp(epsilon)
                return max(np.maximum(0, p - grow * q).sum(), np.maximum(0, q - grow * p).sum())

            found = SearchProfile.of(law, profile)
            best = [law_of_best(law, x) for x in (p, q)]
            for epsilon in (0.2, 0.5, 1.0):
                grow = math.exp(epsilon)
                exact = max(np.maximum(0, a - grow * b).sum() for a, b in (best, best[::-1]))
                assert found.delta(epsilon) >= exact - 1e-12
                tight = max(tight, exact / max(found.delta(epsilon), 1e-12))
    assert tight > 0.5  # not a bound that holds because it is far away


def law_of_best(law, p):
    """Outcomes in the order of their scores; the first of equal ones, or any: the same law. The last entry: no trial."""
    counts = range(400)
    chances = np.array([law.probability(k) for k in counts])
    at_most = np.array([chances @ (z ** np.array(counts)) for z in np.concatenate([[0.0], np.cumsum(p)])])
    return np.append(np.diff(at_most), at_most[0])


@pytest.mark.parametrize(("name", "factor"), [("geometric", 3), ("logarithmic", 2), ("negative-binomial:0.5", 2.5)])
def test_pure_privacy_costs_two_plus_eta_times_as_much(name, factor):
    """Corollary 3 of the paper, as published: (2 + eta) epsilon, whatever the mean; 3 for geometric (Liu and Talwar, 2019)."""
    one = 0.4

    def profile(epsilon):  # randomized response
        return max(0.0, (math.exp(one) - math.exp(epsilon)) / (1 + math.exp(one)))

    knots = np.unique(np.append(KNOTS, [one]))
    for mean in (3, 30, 1000):
        found = SearchProfile.of(Law.named(name, mean), profile, knots).epsilon(1e-9)
        assert found <= factor * one * 1.02
    assert found > 0.75 * factor * one  # and it is nearly reached by many trials


def test_never_worse_than_the_published_bound_for_profiles():
    """Koskela et al. (ICML 2024), Poisson: delta(e) <= m d(e - m (exp(e1) - 1) - m d(e1)) for every e1."""
    profile = gaussian_profile(1.0)
    for mean in (2, 10):
        law = Law.named("poisson", mean)
        found = SearchProfile.of(law, profile)
        for epsilon in (3.0, 6.0):
            shifts = [mean * math.expm1(e1) + mean * profile(e1) for e1 in np.linspace(0, 2, 200)]
            published = min(mean * profile(max(0.0, epsilon - shift)) if shift < epsilon else 1.0 for shift in shifts)
            assert found.delta(epsilon) <= published * 1.02


def test_a_finer_grid_gains_less_than_half_a_percent():
    law, profile = Law.named("geometric", 10), gaussian_profile(1.2)
    knots = np.unique(np.concatenate([KNOTS, (KNOTS[1:] + KNOTS[:-1]) / 2]))
    cells = np.unique(np.concatenate([CELLS, (CELLS[1:] + CELLS[:-1]) / 2]))
    fine = SearchProfile.of(law, profile, knots, cells).epsilon(DELTA)
    assert fine <= SearchProfile.of(law, profile).epsilon(DELTA) <= 1.005 * fine


def test_what_an_event_can_become_on_neighbouring_data():
    mu = 1.0
    deltas = np.array([gaussian_profile(mu)(e) for e in KNOTS])
    u = np.array([1e-6, 0.01, 0.5, 0.9])
    exact = stats.norm.cdf(stats.norm.ppf(u) + mu)  # Neyman and Pearson
    found = reach(u, KNOTS, deltas)
    assert (found >= exact).all() and (found <= 1.01 * exact).all()


def test_profiles_pay():
    """What the default accountant is worth: a quarter of epsilon, for the settings of digits-rgp."""
    trial = [Event(256 / 1438, 2.0, 112)]
    for name in ("geometric", "poisson"):
        law = Law.named(name, 10)
        by_pld, by_rdp = (search.epsilon([trial], law, delta=DELTA, accountant=a) for a in ("pld", "rdp"))
        alone = accounting.epsilon(trial, delta=DELTA)
        assert 1.2 * alone < by_pld < 0.8 * by_rdp


# ---------------------------------------------------------------------- calibration


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_the_noise_is_the_least_that_keeps_the_search_in_its_budget(accountant):
    law, score = Law.named("geometric", 5), Event(1.0, 10.0)
    rate = 0.2 if accountant == "rdp" else 1.0  # pld is quick without sampling

    def trials(sigma):
        return [[Event(rate, sigma, 30), score]]

    sigma = search.calibrate(trials, law, epsilon=4.0, delta=DELTA, accountant=accountant)
    assert search.epsilon(trials(sigma), law, delta=DELTA, accountant=accountant) <= 4.0
    assert search.epsilon(trials(sigma - 1e-4), law, delta=DELTA, accountant=accountant) > 4.0
    assert sigma > accounting.calibrate(epsilon=4.0, delta=DELTA, sampling_rate=rate, steps=30, accountant=accountant)


def test_kinds_of_trials_are_averaged_and_none_is_forgotten():
    law, quiet, loud = Law.named("geometric", 5), [Event(0.2, 3.0, 30)], [Event(0.2, 1.5, 30)]
    low, high = (search.epsilon([kind], law, delta=DELTA) for kind in (quiet, loud))
    both = search.epsilon([quiet, loud], law, delta=DELTA)
    assert low < both < high and both > search.epsilon([quiet, quiet, quiet, loud], law, delta=DELTA)
    with pytest.raises(ValueError, match="rdp"):
        search.epsilon([quiet, loud], law, delta=DELTA, accountant="rdp")


def test_no_noise_anywhere_is_no_privacy():
    law = Law.named("poisson", 3)
    assert search.epsilon([[Event(0.1, 2.0, 10), Event(1.0, 0.0)]], law, delta=DELTA) == math.inf


def test_a_budget_that_the_score_alone_exceeds_is_out_of_reach():
    with pytest.raises(ValueError, match="out of reach"):
        search.calibrate(
            lambda s: [[Event(0.1, s, 10), Event(1.0, 0.5)]], Law(10), epsilon=1.0, delta=DELTA, accountant="rdp"
        )


# ---------------------------------------------------------------------- the search of docs/tuning.md


def test_the_search_over_digits_costs_epsilon_8_by_an_independent_computation():
    """Ten trials of digits-rgp, geometric, from the atoms of dp-accounting's own loss distribution: no chords, another grid."""
    from dp_accounting import dp_event
    from dp_accounting.pld import PLDAccountant

    sigma, mean = 1.7867, 10
    trial = [Event(256 / 1438, sigma, 112), Event(1.0, 5.0)]
    found = search.epsilon([trial], Law.named("geometric", mean), delta=DELTA)
    assert 7.99 < found <= 8.0

    accountant = PLDAccountant(value_discretization_interval=1e-3)
    accountant.compose(dp_event.PoissonSampledDpEvent(256 / 1438, dp_event.GaussianDpEvent(sigma)), 112)
    accountant.compose(dp_event.GaussianDpEvent(5.0))
    pld = accountant._pld
    grid = np.linspace(0, 30, 1501)
    deltas = np.asarray(pld.get_delta_for_epsilon(grid))
    u = np.logspace(-9, 0, 1500)
    t = np.array([min(1.0, np.min(np.exp(grid) * x + deltas), np.min(1 - np.exp(-grid) * (1 - deltas - x))) for x in u])

    def weight(x):  # of the geometric law: phi(z) = z / (m - (m - 1) z), differentiated at 1 - x
        return mean / (1 + (mean - 1) * x) ** 2

    def delta(epsilon):
        worst = 0.0
        for pmf in (pld._pmf_remove, pld._pmf_add):
            dense = pmf.to_dense_pmf()
            losses = (dense._lower_loss + np.arange(len(dense._probs))) * dense._discretization
            there = dense._probs > 0
            probabilities, losses = dense._probs[there], losses[there]
            gain = np.zeros(len(losses))
            for a, b in zip(weight(u), weight(t), strict=True):
                np.maximum(gain, a - b * np.exp(np.minimum(epsilon - losses, 50)), out=gain)
            worst = max(worst, float(probabilities @ gain) + mean * dense._infinity_mass)
        return worst

    assert delta(found) <= DELTA < delta(0.99 * found)
