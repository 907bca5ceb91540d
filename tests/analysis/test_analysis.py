"""`rgp analyze`: numbers compared with an independent computation, marked as private, kept out of model/."""

import json
import math
import stat

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("yaml")
pytest.importorskip("typer")
pytest.importorskip("safetensors")
pytest.importorskip("sklearn")
from typer.testing import CliRunner

from rgp import accounting, cli
from rgp.analysis import NOT_PRIVATE, least_squares, spectra
from rgp.analysis.follow import Probe, follow
from rgp.analysis.least_squares import Problem
from rgp.train import config, setup

SMALL = [
    "model.name=mlp",
    "model.width=24",
    "method.source=history",
    "method.rank=3",
    "method.warmup_steps=2",
    "budget.noise_multiplier=0.5",
    "training.steps=12",
    "training.batch_size=360",
    "training.microbatch_size=120",
    "run.seed=3",
    "run.threads=1",
]


def rgp(*words):
    return CliRunner().invoke(cli.app, [str(word) for word in words])


def sets(*changes):
    return [word for change in (*SMALL, *changes) for word in ("--set", change)]


def a_gradient(p, d, seed=0):
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.standard_normal((p, d)) @ np.diag(0.8 ** np.arange(d)))


# ---------------------------------------------------------------------- one matrix


@pytest.mark.parametrize(("p", "d"), [(6, 11), (11, 6), (7, 7)])
def test_spectra_agree_with_a_singular_value_decomposition(p, d):
    G = a_gradient(p, d)
    left, values, right = np.linalg.svd(G.numpy(), full_matrices=False)
    assert spectra.stable_rank(G) == pytest.approx((values**2).sum() / values[0] ** 2)
    U, V = spectra.principal(G, 3)
    assert torch.allclose(U @ U.T, torch.from_numpy(left[:, :3] @ left[:, :3].T), atol=1e-10)
    assert torch.allclose(V @ V.T, torch.from_numpy(right[:3].T @ right[:3]), atol=1e-10)
    assert spectra.residual(G, U, V) == pytest.approx(math.sqrt((values[3:] ** 2).sum() / (values**2).sum()))
    assert spectra.residual(G, U, None) == pytest.approx(spectra.residual(G, U, V))  # its own: one side is enough


def test_residual_is_what_rgp_leaves_out():
    G, rng = a_gradient(9, 14), np.random.default_rng(1)
    L, R = (torch.linalg.qr(torch.from_numpy(rng.standard_normal((n, 2)))).Q for n in (9, 14))
    R = R.T
    dL, dR = G @ R.T, L.T @ G
    rebuilt = dL @ R + L @ dR - L @ (L.T @ dL) @ R
    assert spectra.residual(G, L, R.T) == pytest.approx((torch.linalg.norm(G - rebuilt) / torch.linalg.norm(G)).item())
    assert spectra.residual(G, None, R.T) == pytest.approx(
        (torch.linalg.norm(G - dL @ R) / torch.linalg.norm(G)).item()
    )


def test_random_control():
    rng, G = np.random.default_rng(2), a_gradient(8, 12)
    found = []
    for _ in range(400):
        U, V = (torch.linalg.qr(torch.from_numpy(rng.standard_normal((n, 3)))).Q for n in (8, 12))
        found.append(spectra.residual(G, U, V) ** 2)
    assert math.sqrt(np.mean(found)) == pytest.approx(spectra.random_residual(8, 12, 3), rel=0.03)
    assert spectra.random_residual(8, 12, 30) == 0


def test_gradients_of_zero_and_of_low_rank():
    zero = torch.zeros(4, 6)
    U, V = spectra.principal(zero, 2)
    assert spectra.stable_rank(zero) is None and spectra.residual(zero, U, V) is None
    G = (torch.arange(1.0, 5)[:, None] * torch.arange(1.0, 7)[None]) * 1e-25  # rank 1, and small
    U, V = spectra.principal(G, 3)
    assert U.shape == (4, 1) and V.shape == (6, 1)
    assert spectra.stable_rank(G) == pytest.approx(1) and spectra.residual(G, U, V) < 1e-7


def test_cosines_and_overlap():
    space = torch.eye(6, dtype=torch.float64)
    turned = torch.stack([space[0], (space[1] + space[4]) / math.sqrt(2)], dim=1)
    angles = spectra.cosines(space[:, :2], turned)
    assert angles == pytest.approx([1, math.sqrt(0.5)])
    assert spectra.overlap(angles, 2) == pytest.approx(0.75)
    assert spectra.overlap(spectra.cosines(space[:, :2], space[:, 4:]), 2) == 0


# ---------------------------------------------------------------------- a training


@pytest.fixture(scope="module")
def found():
    return follow(config.load(preset="digits-rgp", changes=SMALL), rank=4, batch=200)


def test_first_measurement_is_the_gradient_of_the_initial_weights(found):
    settings = config.load(preset="digits-rgp", changes=SMALL)
    parts = setup.make(settings)
    rows = Probe(parts, rank=4, batch=200, part=50).rows
    x, y = torch.stack([row[0] for row in rows]), torch.tensor([int(row[1]) for row in rows])
    F.cross_entropy(parts.model(x), y).backward()
    assert found["steps"][0] == 0 and len(found["matrices"]) == 3
    for row in found["matrices"]:
        G = dict(parts.model.named_parameters())[row["name"]].grad.double().numpy()
        values = np.linalg.svd(G, compute_uv=False)
        assert row["shape"] == list(G.shape)
        assert row["stable_rank"][0] == pytest.approx((values**2).sum() / values[0] ** 2, rel=1e-4)
        left = math.sqrt((values[4:] ** 2).sum() / (values**2).sum())
        assert row["residual"]["self"][0] == pytest.approx(left, rel=1e-3, abs=1e-6)


def test_every_epoch_is_measured_and_no_subspace_beats_the_gradients_own(found):
    assert found["steps"] == [0, 4, 8, 12] and found["epochs"] == [0, 1, 2, 3]
    for row in found["matrices"]:
        residual = row["residual"]
        assert residual["historical"][0] is None and residual["update"][0] is None  # no past yet
        for kind in ("historical", "update"):
            for own, other in zip(residual["self"][1:], residual[kind][1:], strict=True):
                assert own <= other + 1e-9 and other <= 1
    carried = [row for row in found["matrices"] if row["treatment"] == "carried"]
    assert len(carried) == 2
    for row in carried:
        assert row["residual"]["carriers"][-1] is None  # no step follows the last
        assert all(0 < value < 1 for value in row["residual"]["carriers"][:-1])
        assert all(len(angles) == 3 for angles in row["cosines"]["left"][:-1])  # rank 3 carriers against rank 4 spaces
    exact = next(row for row in found["matrices"] if row["treatment"] == "exact")
    assert set(exact["residual"]["carriers"]) == {None} and set(exact["overlap"]["left"]) == {None}


def test_measuring_does_not_change_the_training_and_lands_beside_the_model(tmp_path):
    out = tmp_path / "run"
    assert rgp("train", "--preset", "digits-rgp", *sets(), "--out", out).exit_code == 0
    before = {path: path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}
    result = rgp("analyze", out, "--batch", 100)
    assert result.exit_code == 0, result.output
    assert NOT_PRIVATE in result.output and "gave the weights of the run" in result.output
    assert before == {path: path.read_bytes() for path in before}
    made = {str(p.relative_to(out)) for p in out.rglob("*") if p.is_file() and p not in before}
    pictures = ("stable_rank", "projection_residual", "overlap")
    assert made == {"analysis/analysis.json", *(f"analysis/{name}.png" for name in pictures)}
    assert stat.S_IMODE((out / "analysis").stat().st_mode) == 0o700
    numbers = json.loads((out / "analysis" / "analysis.json").read_text())
    assert numbers["covered_by_guarantee"] is False and numbers["warning"] == NOT_PRIVATE
    assert numbers["same_weights_as_run"] is True and numbers["batch"] == 100


def test_preset_json_and_early_stop(tmp_path):
    changes = sets("method.sides=left")
    result = rgp("analyze", "--preset", "digits-rgp", *changes, "--steps", 2, "--out", tmp_path / "a", "--json")
    assert result.exit_code == 0, result.output
    numbers = json.loads(result.stdout)
    assert numbers["steps"] == [0, 2] and numbers["same_weights_as_run"] is None
    assert numbers["config"]["method"]["sides"] == "left"


def test_a_training_that_diverges_has_nothing_to_measure(tmp_path):
    result = rgp("analyze", "--preset", "digits-rgp", *sets("optimizer.lr=1e30"), "--steps", 5, "--out", tmp_path / "a")
    assert result.exit_code == 0, result.output
    numbers = json.loads((tmp_path / "a" / "analysis.json").read_text())
    assert numbers["matrices"][0]["stable_rank"][0] > 1 and numbers["matrices"][0]["stable_rank"][-1] is None


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "give one of"),
        (["x", "--least-squares"], "give one of"),
        (["x", "--set", "method.rank=2"], "--set changes a preset"),
        (["--preset", "digits-rgp", "--quick"], "--quick goes with"),
        (["--preset", "digits-rgp", "--rank", "0", "--out", "a"], "--rank must be an integer of at least 1; got 0"),
        (["--preset", "digits-rgp", "--out", "run/model"], "for publishing"),
        (["--preset", "digits-rgp", "--out", "run/model/analysis"], "for publishing"),
        (["nowhere", "--out", "a"], "no config.yaml"),
    ],
)
def test_wrong_use(words, complaint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = rgp("analyze", *words)
    assert result.exit_code == 2 and complaint in result.output
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------------- least squares


def test_proposition():
    rows = {row["case"]: row for row in least_squares.proposition()}
    for name in ("features", "isotropic"):
        assert rows[name]["rank_of_first_gradient"] == 3 and rows[name]["gradient_shrank_to"] < 1e-3
        assert max(rows[name][side] for side in ("left", "right", "both")) < 1e-13
        assert max(rows[name][f"{side}_relative"] for side in ("left", "right", "both")) < 1e-8
    other = rows[
        "targets"
    ]  # the second half needs that H keeps the row space; what RGP projects away is zero all the same
    assert other["rank_of_first_gradient"] == 3
    assert other["left"] < 1e-13 and other["both"] < 1e-13 and other["right_relative"] > 0.1


@pytest.mark.parametrize("epsilon", [0.5, 8.0])
def test_noise_of_the_study_is_the_accountants(epsilon):
    problem = Problem(n=400, epsilon=epsilon, steps="remark")
    sigma = accounting.calibrate(epsilon=epsilon, delta=problem.delta, sampling_rate=1, steps=problem.T)
    assert problem.noise * problem.n == pytest.approx(sigma, rel=2e-3)


def test_simulation_agrees_with_theory_and_the_subspace_limits_the_noise():
    problem = Problem(n=1024)
    runs, clipped = least_squares.excess_risk(problem, repeats=64)
    assert clipped < 0.01
    assert runs.mean() == pytest.approx(problem.expected(problem.curvature), rel=0.1)
    whole = Problem(n=1024, r=16)  # p = 16: every direction of W is noisy
    assert least_squares.excess_risk(whole, repeats=64)[0].mean() > 1.5 * runs.mean()


def test_quick_study(tmp_path):
    result = rgp("analyze", "--least-squares", "--quick", "--out", tmp_path / "study", "--json")
    assert result.exit_code == 0, result.output
    numbers = json.loads(result.stdout)
    assert numbers["covered_by_guarantee"] is False and "oracle" in numbers["warning"]
    assert (tmp_path / "study" / "rate.png").stat().st_size > 10_000
    slopes = {(row["setting"], row["sweep"]): row["slope"] for row in numbers["rate"]}
    assert slopes["hard, T balanced", "n"] == pytest.approx(-1, abs=0.2)
    assert slopes["easy, T of the remark", "n"] == pytest.approx(-2, abs=0.25)
    assert slopes["hard, T of the remark", "r"] > slopes["hard, T balanced", "r"] + 0.2
    assert all(
        p["clipped_share"] < 0.01 for row in numbers["rate"] if "balanced" in row["setting"] for p in row["points"]
    )
