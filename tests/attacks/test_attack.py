"""Membership attacks, against answers known in closed form; and `rgp attack` as people meet it."""

import json
import math

import numpy as np
import pytest
import torch
from scipy.stats import binomtest

from rgp.attacks import shadows as shadow_models
from rgp.attacks.lira import lira
from rgp.attacks.metrics import clopper_pearson, judge, roc
from rgp.attacks.rmia import rmia
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


# ---------------------------------------------------------------------- intervals and curves


@pytest.mark.parametrize(("right", "count"), [(0, 20), (7, 20), (20, 20), (512, 1000)])
def test_clopper_pearson_is_the_exact_interval(right, count):
    expected = binomtest(right, count).proportion_ci(0.95, method="exact")
    assert clopper_pearson(right, count) == pytest.approx([expected.low, expected.high], abs=1e-9)


def test_intervals_hold_the_truth_in_95_of_100_repetitions():
    truth = {"auc": 0.5 * math.erfc(-0.5), "success_rate": 0.5 * math.erfc(-0.5 / math.sqrt(2))}
    truth["tpr_at_0.01"] = 0.5 * math.erfc(-(1 - 2.3263) / math.sqrt(2))
    held = dict.fromkeys(truth, 0)
    for i in range(30):
        found = judge(normal(250, 0, 1000 + i), normal(250, 1, 2000 + i), seed=i)
        for name, value in truth.items():
            low, high = found["intervals"][name]
            assert low <= found[name] <= high
            held[name] += low <= value <= high
    assert held["auc"] > 25 and held["tpr_at_0.01"] > 25, held
    assert held["success_rate"] > 24, held  # its threshold is chosen, so it lies a little below the best rate


def test_the_roc_curve_is_that_of_the_normal_distribution():
    curve = roc(normal(20000, 0, 8), normal(20000, 1, 9))
    rates, found = np.array(curve).T
    assert (np.diff(rates) > 0).all() and (np.diff(found) >= 0).all() and curve[-1] == [1.0, 1.0]
    from scipy.special import ndtr, ndtri

    inner = (rates > 0) & (rates < 1)
    assert np.abs(found[inner] - ndtr(ndtri(rates[inner]) + 1)).max() < 0.02
    assert roc(np.array([1.0]), np.array([1.0, 1.0]))[0] == [0.0, 0.0]  # ties are no finds


# ---------------------------------------------------------------------- LiRA and RMIA


def world(*, models, rows=3000, effect=1.0, spread=5.0, seed=0):
    """Rows that are easy or hard by themselves, by much more than training on them changes."""
    rng = np.random.default_rng(seed)
    ease = spread * rng.standard_normal(rows)
    inside = np.stack([shadow_models.halves(rows, i, seed) for i in range(models)])
    shadows = ease + effect * inside + rng.standard_normal((models, rows))
    member = np.arange(rows) < rows // 2
    return ease + effect * member + rng.standard_normal(rows), shadows, inside, member


@pytest.mark.parametrize("models", [32, 128], ids=["shared variance", "own variances"])
def test_lira_is_nearly_the_best_test_where_a_threshold_on_the_loss_sees_nothing(models):
    target, shadows, inside, member = world(models=models)
    score = lira(target, shadows, inside)
    best = 0.5 * math.erfc(-1 / 2)  # AUC of two unit normals one apart
    found = judge(-score[member], -score[~member])["auc"]
    assert best - 0.04 < found < best + 0.02
    assert abs(judge(-target[member], -target[~member])["auc"] - 0.5) < 0.08


def test_lira_without_an_effect_is_a_coin_and_needs_two_models_of_each_kind():
    target, shadows, inside, member = world(models=32, effect=0.0)
    score = lira(target, shadows, inside)
    assert abs(judge(-score[member], -score[~member])["auc"] - 0.5) < 0.04
    with pytest.raises(ValueError, match="two shadow models"):
        lira(target, shadows[:2], inside[:2])


def test_rmia_sees_members_too_and_never_compares_a_row_with_itself():
    target, shadows, _, member = world(models=32, spread=2.0)
    score = rmia(target, shadows, np.flatnonzero(~member))
    assert judge(-score[member], -score[~member])["auc"] > 0.68
    ratio = {"a": 3.0, "b": 2.0, "c": 1.0}
    confidence = np.array(list(ratio.values()))
    flat = np.full((4, 3), 0.0)
    assert rmia(confidence, flat, np.array([1, 2])) == pytest.approx(
        [1.0, 1.0, 0.0], abs=1e-6
    )  # b beats c, c beats none
    order = rmia(confidence, flat, np.array([1, 2]))
    assert order[0] > order[1] > order[2]


def test_every_row_is_in_half_of_the_shadows():
    inside = np.stack([shadow_models.halves(101, i, seed=4) for i in range(8)])
    assert (inside.sum(0) == 4).all() and set(inside.sum(1).tolist()) == {50, 51}
    assert (inside[0] != inside[2]).any() and not (inside[0] == shadow_models.halves(101, 0, seed=5)).all()


# ---------------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    for module in ("yaml", "typer", "safetensors", "sklearn"):
        pytest.importorskip(module)
    folder = tmp_path_factory.mktemp("runs")
    out, rng = folder / "a", np.random.default_rng(0)
    x = rng.standard_normal((240, 8, 8), dtype=np.float32)  # nothing to learn here: what the model knows, it has seen
    np.savez(folder / "noise.npz", x=x, y=rng.integers(0, 4, 240))
    changes = [f"data.name={folder / 'noise.npz'}", "data.held_out=0.5", "model.name=mlp", "model.width=32"]
    changes += ["training.epochs=null", "training.steps=30", "training.batch_size=120", "training.microbatch_size=120"]
    changes += ["optimizer.lr=0.2", "run.threads=1", "run.seed=1"]
    sets = [word for change in changes for word in ("--set", change)]
    result = rgp("train", "--preset", "digits-nonprivate", *sets, "--out", out)
    assert result.exit_code == 0, result.output
    return out


def rgp(*words):
    from typer.testing import CliRunner

    from rgp import cli

    return CliRunner().invoke(cli.app, [str(word) for word in words])


def test_rgp_attack_runs_all_three_and_keeps_the_results_out_of_the_model(run, monkeypatch):
    before = {p.name: p.read_bytes() for p in (run / "model").iterdir()}
    result = rgp("attack", run, "--shadows", 4, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert list(found["attacks"]) == ["loss threshold", "LiRA", "RMIA"] and found["shadows"] == 4
    assert found["covered_by_the_guarantee"] is False and found["promised"] is None
    for one in found["attacks"].values():
        assert set(one["intervals"]) == {"success_rate", "auc", "tpr_at_0.001", "tpr_at_0.01"}
        assert one["members"] + one["nonmembers"] == 240
        assert one["auc"] > 0.75
    assert found["auc"] == found["attacks"]["loss threshold"]["auc"]
    assert (run / "attack.json").stat().st_mode & 0o077 == 0 and (run / "attack.png").stat().st_size > 1000
    for path in (run / "model").iterdir():
        if path.name not in ("privacy_card.json", "privacy_card.md"):
            assert path.read_bytes() == before[path.name]
    card = json.loads((run / "model" / "privacy_card.json").read_text())
    assert card["attack_run"] is True
    assert {k: v for k, v in card.items() if k != "attack_run"} == {
        k: v for k, v in json.loads(before["privacy_card.json"]).items() if k != "attack_run"
    }
    page = (run / "report.html").read_text()
    assert "LiRA" in page[page.index("Not covered by the guarantee") :] and "logarithmic axes" in page

    trained = []
    train = shadow_models._train_one
    monkeypatch.setattr(shadow_models, "_train_one", lambda *a: trained.append(a[-1].name) or train(*a))
    cache = next((run / "attack").iterdir())
    sorted(cache.glob("*.npy"))[3].unlink()  # an attack that was stopped goes on with what is missing, and nothing else
    again = json.loads(rgp("attack", run, "--shadows", 4, "--json").stdout)
    assert trained == ["shadow-0-003"] and again["attacks"] == found["attacks"]
    assert [p.suffix for p in cache.iterdir()] == [".npy"] * 4


def test_without_shadows_the_loss_threshold_alone_is_run(run):
    result = rgp("attack", run)
    words = " ".join(result.stdout.split())
    assert result.exit_code == 0 and "NOT COVERED BY THE GUARANTEE" in words and "LiRA" not in words


@pytest.mark.parametrize("number", [2, 7])
def test_a_number_of_shadows_that_cannot_be_halved_is_refused(run, number):
    result = rgp("attack", run, "--shadows", number)
    assert result.exit_code == 2 and "even number" in result.stderr
