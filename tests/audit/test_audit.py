"""Audits: the bounds against closed forms, published values and simulated audits; and the real engine, whole and broken."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import beta, binom

pytest.importorskip("yaml")
pytest.importorskip("typer")
pytest.importorskip("safetensors")
pytest.importorskip("sklearn")
from typer.testing import CliRunner

from rgp import cli
from rgp.audit import bounds
from rgp.audit.auditing import AuditSettings, audit
from rgp.audit.bounds import Event, Guessed, gaussian, gaussian_epsilon, guess, guesses_epsilon, lower_bounds, refuted
from rgp.audit.canaries import blank, made_input
from rgp.clipping import Gradients
from rgp.clips import Bound
from rgp.release import Releases
from rgp.train import config
from rgp.train.progress import Silent

# ---------------------------------------------------------------------- the bounds


def guessed(canaries, guesses, correct):
    return Guessed(canaries=canaries, guesses=guesses, correct=correct)


@pytest.mark.parametrize(("guesses", "correct"), [(100, 75), (1000, 900), (40, 40), (500, 260)])
def test_without_delta_the_counting_bound_is_the_clopper_pearson_limit(guesses, correct):
    share = beta.ppf(0.05, correct, guesses - correct + 1)
    expected = max(0.0, math.log(share / (1 - share)))
    assert guesses_epsilon(guessed(1000, guesses, correct), delta=0, level=0.05) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    # epsilon_one_run in the tests of google-deepmind/jax_privacy: 10,000 canaries in and out, significance 0.05, delta 1e-6,
    # normal scores with a shift of 1, 2 and 4; the best threshold of each, at its Bonferroni level
    ("guesses", "correct", "tries", "published"),
    [(3376, 2807, 386, 1.13346), (4666, 4499, 374, 2.311945), (8233, 8223, 140, 4.395568)],
)
def test_the_counting_bound_equals_published_values(guesses, correct, tries, published):
    found = guesses_epsilon(guessed(20000, guesses, correct), delta=1e-6, level=0.05 / tries)
    assert found == pytest.approx(published, abs=2e-6)


@pytest.mark.parametrize(
    # epsilon_one_run_fdp in the same tests
    ("guesses", "correct", "tries", "published"),
    [(406, 379, 386, 2.164749), (938, 934, 374, 4.7218075), (5436, 5436, 140, 9.133752)],
)
def test_the_f_dp_bound_equals_published_values(guesses, correct, tries, published):
    tried = [guessed(20000, guesses, correct)]
    scale, _ = bounds.refuted_scale((Event(1.0, 1.0),), tried, delta=1e-6, level=0.05 / tries)
    assert published * 0.998 < gaussian_epsilon(1 / scale, 1e-6) <= published


def test_epsilon_of_a_gaussian_is_what_the_accountant_says():
    from rgp.accounting import epsilon

    for mean in (0.3, 1.0, 3.0):
        assert gaussian_epsilon(mean, 1e-5) == pytest.approx(epsilon([Event(1.0, 1 / mean)], delta=1e-5), rel=2e-3)


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_randomized_response_is_never_refuted_below_its_own_probability(epsilon):
    """The mechanism for which the number of right guesses is known exactly: every bound must stay below its tail."""
    share, canaries = 1 / (1 + math.exp(-epsilon)), 30
    curve = bounds.by_profile(np.array([epsilon]), np.array([0.0]))
    for correct in range(canaries + 1):
        level = binom.sf(correct - 1, canaries, share) * 0.999
        assert not refuted(curve, guessed(canaries, canaries, correct), level=level)
        if correct > 1:
            assert guesses_epsilon(guessed(canaries, canaries, correct), delta=0, level=level) <= epsilon + 1e-6


@pytest.mark.parametrize("mean", [0.5, 2.0])
def test_no_more_than_5_percent_of_simulated_audits_exceed_the_truth(mean):
    """A bound above the truth means that the truth was refuted, at the level of one of the numbers of guesses."""
    rng, audits, canaries = np.random.default_rng(1), 2000, 200
    level, truth, wrong = 0.05 / len(bounds.SHARES), gaussian_epsilon(mean, 1e-5), {"guesses": 0, "f-dp": 0}
    known: dict = {}
    for _ in range(audits):
        included = rng.random(canaries) < 0.5
        scores = rng.standard_normal(canaries) + mean * included
        tried = [guess(scores, included, round(share * canaries)) for share in bounds.SHARES]
        for g in set(tried) - set(known):
            known[g] = (guesses_epsilon(g, delta=1e-5, level=level) > truth, refuted(gaussian(mean), g, level=level))
        wrong["guesses"] += any(known[g][0] for g in tried)
        wrong["f-dp"] += any(known[g][1] for g in tried)
    assert all(count <= 0.05 * audits for count in wrong.values()), wrong


def test_the_counting_bound_is_wrong_as_often_as_it_may_be_where_it_is_tight():
    rng, epsilon = np.random.default_rng(2), 1.0
    correct = rng.binomial(100, 1 / (1 + math.exp(-epsilon)), 3000)
    limits = {int(c): guesses_epsilon(guessed(100, 100, int(c)), delta=0, level=0.05) for c in set(correct.tolist())}
    assert 0.02 < np.mean([limits[int(c)] > epsilon for c in correct]) < 0.06


def test_the_f_dp_bound_reaches_half_of_a_gaussian_mechanism_and_more_than_counting():
    rng, found = np.random.default_rng(3), []
    for _ in range(5):
        included = rng.random(4000) < 0.5
        scores = rng.standard_normal(4000) + 1.67 * included
        found.append(lower_bounds(scores, included, [Event(1.0, 1 / 1.67)], delta=1e-5))
    sharper, simpler = (np.mean([f[name].epsilon for f in found]) for name in ("f-dp", "guesses"))
    assert gaussian_epsilon(1.67, 1e-5) / 2 < sharper < gaussian_epsilon(1.67, 1e-5) and simpler < 0.8 * sharper


def test_coins_alone_give_no_bound():
    rng = np.random.default_rng(4)
    found = lower_bounds(rng.standard_normal(500), rng.random(500) < 0.5, [Event(1.0, 1.0)], delta=1e-5)
    assert all(bound.epsilon < 0.5 for bound in found.values())


def test_with_sampling_the_curve_is_that_of_the_sampled_mechanism():
    rng, rate, sigma, steps = np.random.default_rng(5), 0.5, 2.0, 20
    included = rng.random(1500) < 0.5
    signal, noise = rng.binomial(steps, rate, 1500) * included, sigma * steps**0.5 * rng.standard_normal(1500)
    claim = (Event(rate, sigma, steps),)
    as_claimed = bounds.trade_off(claim, 1.0, 1e-5)
    assert not refuted(as_claimed, guess(signal + noise, included, 150), level=0.05)
    assert refuted(as_claimed, guess(signal + noise / 3, included, 750), level=0.05)
    assert refuted(bounds.trade_off(claim, 4.0, 1e-5), guess(signal + noise, included, 150), level=0.05)


def test_wrong_counts_and_levels_are_refused():
    with pytest.raises(ValueError, match="each must be at most the next"):
        guessed(10, 5, 6)
    with pytest.raises(ValueError, match="confidence"):
        lower_bounds([1.0], [True], [Event(1.0, 1.0)], delta=1e-5, confidence=1.5)
    with pytest.raises(ValueError, match="NaN"):
        guess([math.nan, 1.0], [True, False], 2)
    with pytest.raises(ValueError, match="from 1 to 2"):
        lower_bounds([1.0, 2.0], [True, False], [Event(1.0, 1.0)], delta=1e-5, guesses=3)


# ---------------------------------------------------------------------- the engine, audited

TINY = ("model.name=mlp", "model.width=32", "run.threads=1", "training.microbatch_size=300")


def settings(*changes, preset="digits-dpsgd"):
    return config.load(None, preset=preset, changes=[*TINY, *changes])


def scores_of(monkeypatch, conf, tmp_path, **options):
    """(scores, included, rows, real rows) of an audit with next to no noise, for which there is no useful epsilon."""
    seen = []

    def keep(config, settings, run, coins, scores, *, private_rows):
        seen.extend([scores, coins.included, run.mechanism.dataset_size, private_rows])
        return {}

    class Unknown:
        def __init__(self, run): ...
        def after(self, run): ...

    monkeypatch.setattr("rgp.audit.auditing._result", keep)
    monkeypatch.setattr("rgp.audit.auditing.EpsilonSoFar", Unknown)
    audit(conf, AuditSettings(seed=1, **options), tmp_path / "audit", progress=Silent())
    return seen


@pytest.mark.parametrize(
    "changes",
    [
        ("method.name=dpsgd",),
        ("method.name=dpsgd", "method.head_scale=0.1"),
        ("method.name=dpsgd", "model.width=160"),  # a weight large enough to be deferred
        ("method.name=rgp", "method.rank=4", "method.sides=left"),
        ("method.name=rgp", "method.rank=4", "method.norm=paper"),
    ],
    ids=["exact", "scaled", "deferred", "left", "both"],
)
def test_a_canary_moves_the_release_by_exactly_its_norm_whenever_it_is_drawn(monkeypatch, tmp_path, changes):
    conf = settings(*changes, "budget.noise_multiplier=1e-4", "training.clip=0.5")
    options = {"canaries": 24, "steps": 3, "sampling_rate": 1.0, "rows": 0}
    scores, included, rows, real = scores_of(monkeypatch, conf, tmp_path, **options)
    assert np.allclose(scores, 3.0 * included, atol=5e-3) and 0 < included.sum() < 24
    assert (rows, real) == (24, 0)


def test_a_canary_is_sampled_like_any_row_and_a_long_one_is_clipped(monkeypatch, tmp_path):
    conf = settings("budget.noise_multiplier=1e-4")
    options = {"canaries": 60, "steps": 12, "sampling_rate": 0.5, "canary_norm": 7.0}
    scores, included, *_ = scores_of(monkeypatch, conf, tmp_path, **options)
    drawn = np.round(scores)
    assert np.allclose(scores, drawn, atol=5e-3) and not drawn[~included].any()
    assert abs(drawn[included].mean() - 6) < 5 * math.sqrt(3 / included.sum()) and drawn[included].std() > 0.5


def correct(**options):
    """q = 1, mu = sqrt(8) / 3.5 = 0.81, epsilon 3.4: small, and still many canaries to tell from each other."""
    return settings("budget.noise_multiplier=3.5", "run.seed=7"), AuditSettings(
        **{"canaries": 600, "steps": 8, "sampling_rate": 1.0, "rows": 50, "seed": 2, **options}
    )


def test_an_audit_of_the_engine_as_it_is_stays_below_the_proven_epsilon(tmp_path):
    result = audit(*correct(), tmp_path / "audit", progress=Silent())
    assert 0.5 < result["epsilon_lower"] < result["epsilon_proven"] and not result["broken"]
    assert result["epsilon_proven"] == pytest.approx(gaussian_epsilon(8**0.5 / 3.5, result["delta"]), rel=0.01)
    assert result == json.loads((tmp_path / "audit" / "audit.json").read_text())
    assert result["rows"] == 650 and result["private_rows"] == 50


def test_an_audit_finds_noise_that_is_a_third_of_what_the_ledger_says(tmp_path, monkeypatch):
    whole = Releases._add_noise

    def weaker(releases, step, clipped):
        noise = releases.source.add
        releases.source.add = lambda total, *, std, **rest: noise(total, std=std / 3, **rest)
        try:
            return whole(releases, step, clipped)
        finally:
            releases.source.add = noise

    monkeypatch.setattr(Releases, "_add_noise", weaker)
    result = audit(*correct(), tmp_path / "audit", progress=Silent())
    assert result["broken"] and result["epsilon_lower"] > result["epsilon_proven"] > 3


def correlated(**options):
    """Four bands and q' = 1: each canary takes part in two of eight steps, mu = sqrt(2) / 1.75 = 0.81 as above."""
    conf = settings(
        "budget.noise_multiplier=1.75", "run.seed=7", "method.name=dpsgd", "method.rank=null", "training.bands=4"
    )
    return conf, AuditSettings(**{"canaries": 600, "steps": 8, "sampling_rate": 0.25, "rows": 0, "seed": 2, **options})


def test_with_correlated_noise_a_canary_is_found_in_the_turns_of_its_group(monkeypatch, tmp_path):
    conf, _ = correlated()
    conf = replace(conf, budget=replace(conf.budget, noise_multiplier=1e-4))
    scores, included, *_ = scores_of(monkeypatch, conf, tmp_path, canaries=24, steps=16, sampling_rate=0.25, rows=0)
    # the last turn's rows are cut off at the end of the run; all others add up to the whole canary
    assert (
        np.all(scores[included] > 3)
        and np.all(scores[included] < 4.01)
        and np.allclose(scores[~included], 0, atol=0.02)
    )


def test_an_audit_of_correlated_noise_stays_below_the_proven_epsilon_and_finds_a_third_of_it(tmp_path):
    result = audit(*correlated(), tmp_path / "audit", progress=Silent())
    assert 0.3 < result["epsilon_lower"] < result["epsilon_proven"] and not result["broken"]
    assert result["epsilon_proven"] == pytest.approx(gaussian_epsilon(2**0.5 / 1.75, result["delta"]), rel=0.01)
    weaker = audit(*correlated(weaken_noise=1 / 3), tmp_path / "weaker", progress=Silent())
    assert weaker["broken"] and weaker["epsilon_lower"] > weaker["epsilon_proven"] > 3


def test_an_audit_with_long_canaries_finds_clipping_that_is_left_out(tmp_path, monkeypatch):
    clip = Gradients.clip_and_add

    def unclipped(gradients):
        bound, gradients._bound = gradients._bound, Bound((3.0,))
        try:
            clip(gradients)
        finally:
            gradients._bound = bound

    monkeypatch.setattr(Gradients, "clip_and_add", unclipped)
    assert not audit(*correct(), tmp_path / "exact", progress=Silent())["broken"]  # norm C: there is nothing to clip
    assert audit(*correct(canary_norm=3.0), tmp_path / "long", progress=Silent())["broken"]


def test_black_box_canaries_that_were_trained_on_lose_more_loss(monkeypatch, tmp_path):
    conf = settings("budget.noise_multiplier=1e-3", "optimizer.lr=2")
    options = {"canaries": 60, "steps": 40, "sampling_rate": 1.0, "rows": 40, "kind": "black-box"}
    scores, included, rows, real = scores_of(monkeypatch, conf, tmp_path, **options)
    assert scores[included].mean() > scores[~included].mean() + 3 * scores.std() / math.sqrt(60)
    assert (rows, real) == (100, 40)


def test_canaries_of_text_have_the_shape_of_a_row_and_nothing_of_it():
    ids = torch.tensor([5, 6, 7])
    row = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.tensor(1)}
    empty = blank(row, 4)
    assert (
        empty["input_ids"].tolist() == [0] * 4 and empty["attention_mask"].tolist() == [1] * 4 and empty["labels"] == 0
    )
    made = [made_input(empty, 2, np.random.default_rng(i), 100) for i in range(20)]
    assert {int(m["labels"]) for m in made} == {0, 1} and len({tuple(m["input_ids"].tolist()) for m in made}) == 20
    spoken = made_input(blank({**row, "labels": ids.clone()}, 4), 2, np.random.default_rng(0), 100)
    assert torch.equal(spoken["labels"], spoken["input_ids"])


@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        (("method.name=rgp", "method.sides=alternate"), {}, "sides"),
        ((), {"canaries": 5000}, "released coordinates"),
        ((), {"rows": 10**6}, "at most 1438"),
        ((), {"kind": "grey-box"}, "white-box"),
        ((), {"sampling_rate": 1.5}, "above 0"),
    ],
)
def test_what_cannot_be_audited_is_refused(tmp_path, changes, options, words):
    conf = settings("budget.noise_multiplier=1", *changes)
    options = {"canaries": 20, "steps": 1, **options}
    with pytest.raises(ValueError, match=words):
        audit(conf, AuditSettings(**options), tmp_path / "audit", progress=Silent())


def test_training_without_privacy_is_not_audited(tmp_path):
    with pytest.raises(ValueError, match="nothing to audit"):
        audit(settings(preset="digits-nonprivate"), AuditSettings(), tmp_path / "audit", progress=Silent())


# ---------------------------------------------------------------------- the command


def rgp(*words):
    return CliRunner().invoke(cli.app, [str(word) for word in words])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "a"
    changes = [*TINY, "budget.noise_multiplier=3", "training.steps=3", "training.batch_size=300"]
    sets = [word for change in changes for word in ("--set", change)]
    assert rgp("train", "--preset", "digits-dpsgd", *sets, "--out", out).exit_code == 0
    return out


FIELDS = {
    *("epsilon_lower", "epsilon_proven", "delta", "confidence", "canaries", "guesses", "correct", "method", "bound"),
    "kind",
}


def test_the_audit_of_a_run_is_on_its_card_and_in_its_report(run):
    card = json.loads((run / "model" / "privacy_card.json").read_text())
    assert card["audit"] is None and card["attack_run"] is False
    assert "none was run" in (run / "model" / "privacy_card.md").read_text()
    result = rgp("audit", "--run", run, "--canaries", 100, "--sampling-rate", 1, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert set(found) >= FIELDS and found == json.loads((run / "audit.json").read_text())
    card = json.loads((run / "model" / "privacy_card.json").read_text())
    assert card["audit"]["epsilon_lower"] == found["epsilon_lower"] and card["ledger"]["head"]
    assert "epsilon is at least" in (run / "model" / "privacy_card.md").read_text()
    assert "audited lower bound" in (run / "report.html").read_text()
    assert (run / "audit" / "ledger.jsonl").exists() and (run / "ledger.jsonl").exists()


def test_a_broken_mechanism_is_said_out_loud(tmp_path):
    sets = [word for change in (*TINY, "budget.noise_multiplier=3.5", "run.seed=7") for word in ("--set", change)]
    words = [
        "audit",
        "--preset",
        "digits-dpsgd",
        *sets,
        "--canaries",
        600,
        "--steps",
        8,
        "--sampling-rate",
        1,
        "--seed",
        3,
    ]
    result = rgp(*words, "--weaken-noise", 0.33, "--out", tmp_path / "weak", "--json")
    assert result.exit_code == 4 and "THE MECHANISM IS BROKEN" in result.stderr
    found = json.loads(result.stdout)
    assert found["broken"] and found["weakened_noise"] == 0.33


def test_an_audit_that_used_private_rows_is_not_on_the_card(run):
    before = (run / "model" / "privacy_card.json").read_bytes()
    result = rgp("audit", "--run", run, "--canaries", 50, "--rows", 20, "--steps", 2)
    assert result.exit_code == 0 and "spent the proven epsilon on them once more" in " ".join(result.stdout.split())
    assert (run / "model" / "privacy_card.json").read_bytes() == before


def test_run_and_a_config_exclude_each_other(run):
    assert rgp("audit", "--run", run, "--preset", "digits-rgp").exit_code == 2
