"""`rgp.tune`: what is drawn, what is paid for, and that nothing but the best comes out."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

import rgp
from rgp.streams import Streams
from rgp.tuning import api
from rgp.tuning.law import Law
from rgp.tuning.plan import Plan, Shape, make_plan
from rgp.tuning.scores import Score, default_noise, noisy_count
from rgp.tuning.space import check_space, combinations, draw
from rgp.tuning.trials import Drawn, best_of

DATA = [(torch.tensor([i / 50, 1.0]), i % 2) for i in range(50)]
SPACE = {"lr": [0.1, 0.3, 1.0], "momentum": [0.0, 0.9]}
CHEAP = {"dataset_size": 50, "batch_size": 50, "steps": 3, "epsilon": 4.0, "accountant": "rdp", "delta": 1e-3}


def seed_with(count, law, most=200):
    """A seed for which the law draws this many trials."""
    return next(s for s in range(most) if Drawn(Streams.from_seed(s), law, SPACE).count == count)


# ---------------------------------------------------------------------- what is drawn


def test_the_number_of_trials_follows_the_law():
    law = Law.named("geometric", 4)
    counts = np.array([Drawn(Streams.from_seed(seed), law, SPACE).count for seed in range(1500)])
    seen = np.array([*((counts == k).sum() for k in range(1, 8)), (counts >= 8).sum()])
    right = np.array([*(law.probability(k) for k in range(1, 8)), 0.75**7])
    assert stats.chisquare(seen, 1500 * right).pvalue > 1e-3
    assert len({Drawn(Streams.from_system(), law, SPACE).count for _ in range(60)}) > 3  # and so without a seed


def test_settings_are_drawn_uniformly_and_again_the_same_from_one_secret():
    drawn, again = (Drawn(Streams.from_seed(3), Law(10), SPACE) for _ in range(2))
    found = [drawn.settings(i) for i in range(1200)]
    assert found == [again.settings(i) for i in range(1200)]
    seen = [found.count(c) for c in combinations(SPACE)]
    assert sum(seen) == 1200 and stats.chisquare(seen).pvalue > 1e-3


def test_seeds_of_trials_differ_and_come_from_a_given_one_alone():
    drawn = Drawn(Streams.from_seed(3), Law(10), SPACE)
    assert len({drawn.seed(i) for i in range(50)}) == 50
    assert Drawn(Streams.from_system(), Law(10), SPACE).seed(0) is None


def test_a_private_score_has_the_noise_that_it_is_charged_for():
    score = Score(kind="private", rows=1000, noise=7.0)
    drawn = Drawn(Streams.from_seed(5), Law(10), SPACE)
    noise = np.array([drawn.score(i, 600, score) - 600 for i in range(1500)])
    assert drawn.score(4, 600, score) == 600 + noise[4]  # a search that goes on finds the same score
    assert all(float(1024 * x).is_integer() for x in noise)  # the last bits of a sum may tell what was added up
    assert abs(noise.mean()) < 4 * 7 / math.sqrt(1500)
    ratio = noise.std() / score.events[0].noise_multiplier
    assert 0.93 < ratio < 1.07  # and 2/3 or 3/2 are not in there
    assert stats.kstest(noise / 7, "norm").pvalue > 1e-3
    assert score.events[0].sampling_rate == 1


def test_a_public_score_is_free_and_exact():
    score = Score(kind="public", rows=10)
    assert score.events == () and noisy_count(7, score, np.random.default_rng(0)) == 7


@pytest.mark.parametrize(
    "wrong",
    [{"kind": "private", "noise": 0.0}, {"kind": "private"}, {"kind": "public", "noise": 1.0}, {"kind": "both"}],
)
def test_scores_that_cannot_be(wrong):
    with pytest.raises(ValueError, match="score"):
        Score(rows=10, **wrong)


def test_a_count_is_of_the_rows():
    assert default_noise(100) == 5 and default_noise(10_000) == 100
    with pytest.raises(ValueError, match="count"):
        noisy_count(11, Score(kind="private", rows=10, noise=1.0), np.random.default_rng(0))


@pytest.mark.parametrize(
    "space", [{}, [1], {"lr": []}, {"lr": 0.1}, {"lr": [1, 1]}, {"a": [*range(40)], "b": [*range(40)]}]
)
def test_spaces_that_cannot_be(space):
    with pytest.raises(ValueError, match="space"):
        check_space(space)


def test_the_best_is_the_highest_and_the_first_of_equals():
    assert best_of({0: 1.0, 1: 5.0, 2: 3.0}) == 1
    assert best_of({0: 1.0, 1: 5.0, 2: 5.0, 3: 4.0}) == 1
    assert best_of({}) is None
    assert draw({"a": [1]}, np.random.default_rng(0)) == {"a": 1}


# ---------------------------------------------------------------------- what comes out


def test_only_the_best_comes_out():
    seen = []

    def train(trial):
        seen.append((dict(trial.settings), len(seen)))
        return f"model {len(seen) - 1}", [3.0, 9.0, 5.0, 9.0][len(seen) - 1]

    law = Law.named("geometric", 3)
    best = rgp.tune(train, SPACE, **CHEAP, score="public", trials=3, seed=seed_with(4, law))
    assert len(seen) == 4 and (best.result, best.score) == ("model 1", 9.0) and best.settings == seen[1][0]
    assert best.epsilon <= 4.0 and best.law == "geometric with mean 3"
    assert set(vars(best)) == {"settings", "result", "score", "epsilon", "delta", "noise_multiplier", "law"}


def test_epsilon_is_the_searchs_by_an_independent_computation():
    from dp_accounting import NeighboringRelation, dp_event
    from dp_accounting.rdp import RdpAccountant

    best = rgp.tune(
        lambda trial: (None, 10), SPACE, **CHEAP, score="private", score_rows=20, score_noise=6.0, trials=2, seed=1
    )
    training = dp_event.SelfComposedDpEvent(dp_event.GaussianDpEvent(best.noise_multiplier), 3)
    trial = dp_event.ComposedDpEvent([training, dp_event.GaussianDpEvent(6.0)])
    accountant = RdpAccountant(None, NeighboringRelation.ADD_OR_REMOVE_ONE)
    accountant.compose(dp_event.RepeatAndSelectDpEvent(trial, 2, 1))
    assert best.epsilon == pytest.approx(accountant.get_epsilon(1e-3), rel=1e-9) and 3.99 < best.epsilon <= 4.0
    assert 0 <= best.score <= 1 and best.score != 0.5  # of 20 rows, with noise


def test_correlated_noise_is_paid_for_by_the_turns_of_a_group():
    """A unit is in at most ceil(5 / 2) draws of its group, each at twice the rate: by an independent computation."""
    from dp_accounting import NeighboringRelation, dp_event
    from dp_accounting.rdp import RdpAccountant

    used = []

    def train(trial):
        model = nn.Linear(2, 2)
        run = trial.privatize(model, torch.optim.SGD(model.parameters(), lr=0.1), DATA, method=rgp.DPSGD())
        for x, y in run:
            run.step(nn.functional.cross_entropy(model(x), y))
        used.append(run.mechanism.bands)
        return None, 1.0

    options = {**CHEAP, "batch_size": 10, "steps": 5, "bands": 2}
    best = rgp.tune(train, {"lr": [1, 2]}, **options, score="public", trials=2, seed=1)
    assert set(used) == {2}
    sampled = dp_event.PoissonSampledDpEvent(0.4, dp_event.GaussianDpEvent(best.noise_multiplier))
    accountant = RdpAccountant(None, NeighboringRelation.ADD_OR_REMOVE_ONE)
    accountant.compose(dp_event.RepeatAndSelectDpEvent(dp_event.SelfComposedDpEvent(sampled, 3), 2, 1))
    assert best.epsilon == pytest.approx(accountant.get_epsilon(1e-3), rel=1e-9) and 3.9 < best.epsilon <= 4.0
    with pytest.raises(ValueError, match="bands"):
        rgp.tune(train, {"lr": [1]}, **{**options, "bands": 6}, score="public")


def test_no_trial_at_all_gives_nothing():
    seed = seed_with(0, Law.named("poisson", 1))
    assert rgp.tune(pytest.fail, SPACE, **CHEAP, score="public", trials=1, law="poisson", seed=seed) is None


def test_a_score_that_is_no_number_never_wins():
    values = iter([math.nan, -5.0, math.nan])
    seed = seed_with(3, Law.named("geometric", 3))
    assert rgp.tune(lambda t: (0, next(values)), SPACE, **CHEAP, score="public", trials=3, seed=seed).score == -5


# ---------------------------------------------------------------------- runs of rgp


def make_parts():
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(50, 4), torch.randint(0, 2, (50,)))
    model = nn.Linear(4, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), data


def whole_run(trial, most=None, **options):
    model, optimizer, data = make_parts()
    run = trial.privatize(model, optimizer, data, method=rgp.DPSGD(), clip=1.0, **options)
    for number, (x, y) in enumerate(run):
        run.step(nn.functional.cross_entropy(model(x), y))
        if number + 1 == most:
            break
    return run, 1.0


def test_a_trials_run_has_the_noise_that_is_paid_for():
    best = rgp.tune(whole_run, {"lr": [0.1]}, **CHEAP, score="public", trials=2)
    (event,) = best.result.ledger.events()
    assert (event.noise_multiplier, event.count, event.sampling_rate) == (best.noise_multiplier, 3, 1.0)
    assert best.result.epsilon() < best.epsilon  # one run is not the search


def test_trials_of_a_seeded_search_have_noise_of_their_own():
    seeds = []

    def train(trial):
        seeds.append(trial.seed)
        return None, 0.0

    rgp.tune(train, SPACE, **CHEAP, score="public", trials=3, seed=seed_with(4, Law.named("geometric", 3)))
    assert len(set(seeds)) == 4 and None not in seeds


@pytest.mark.parametrize(
    ("train", "error"),
    [
        (lambda t: whole_run(t, most=2), rgp.WrongUseError),
        (lambda t: (whole_run(t), whole_run(t)), rgp.WrongUseError),
        (lambda t: whole_run(t, noise_multiplier=0.1), ValueError),
        (lambda t: whole_run(t, seed=1), ValueError),
        (lambda t: 1.0, rgp.WrongUseError),
    ],
)
def test_misuse_is_an_error_and_gives_nothing(train, error):
    with pytest.raises(error):
        rgp.tune(train, {"lr": [0.1]}, **CHEAP, score="public", trials=2)


def test_other_rows_than_planned_are_refused():
    with pytest.raises(ValueError, match="50 rows"):
        rgp.tune(whole_run, {"lr": [0.1]}, **{**CHEAP, "dataset_size": 60}, score="public", trials=2)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"score": "private"}, "score_rows"),
        ({"score": "private", "score_rows": 10}, "noise"),
        ({"score": "public", "batch_size": 0}, "batch_size"),
        ({"score": "public", "batch_size": 51}, "batch_size"),
        ({"score": "public", "delta": 0.5}, "delta"),
        ({"score": "public", "trials": 0.5}, "trials"),
        ({"score": "public", "law": "fixed"}, "law"),
    ],
)
def test_arguments_that_cannot_be(wrong, named):
    with pytest.raises(ValueError, match=named):
        rgp.tune(pytest.fail, SPACE, **{**CHEAP, **wrong})


# ---------------------------------------------------------------------- plans


@pytest.mark.slow
def test_settings_of_different_length_are_planned_together():
    said = []
    best = rgp.tune(
        lambda trial: ((trial.batch_size, trial.steps, trial.noise_multiplier), 1.0),
        {"passes": [2, 6]},
        **{**CHEAP, "accountant": "pld", "steps": lambda settings: settings["passes"]},
        score="public",
        trials=2,
        say=said.append,
    )
    assert best.epsilon <= 4.0 and "tuning costs" in said[0]
    assert best.result[:2] == (50, best.settings["passes"])
    fewer, more = (float(line.split()[1]) for line in said[0].splitlines() if line.startswith("noise"))
    assert 1.5 < more / fewer < 2 and best.result[2] in (fewer, more)  # sqrt(3), for Gaussian releases without sampling


def test_a_plan_says_what_tuning_costs_and_can_be_written_and_read():
    plan = make_plan(
        [Shape(50, 3)] * 2,
        space={"lr": [1, 2]},
        dataset_size=50,
        law=Law.named("poisson", 3),
        score=Score(kind="private", rows=10, noise=9.0),
        epsilon=4.0,
        delta=1e-3,
        accountant="rdp",
    )
    assert Plan.from_dict(plan.to_dict()) == plan
    alone = rgp.accounting.calibrate(epsilon=4.0, delta=1e-3, sampling_rate=1.0, steps=3, accountant="rdp")
    assert plan.alone == {Shape(50, 3): alone} and plan.cost == plan.noise[Shape(50, 3)] / alone > 1
    assert plan.trial_epsilon < plan.epsilon <= 4.0
    for word in ("Poisson with mean 3", "0.05", f"{alone:g}", f"{plan.cost:.2f} times"):
        assert word in plan.words()
    assert api.tune is rgp.tune
