"""Correlated noise: a chain's noise has the matrix mechanism's covariance, and whitening it leaves sensitivity 1."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.linalg import toeplitz

from rgp import noise
from rgp.bands import coefficients
from rgp.correlated import Chain
from rgp.errors import WrongUseError
from rgp.turning import Frame, Turn, Turning

ACCEPT, REJECT = 1e-4, 1e-12  # p-values
SIGMA = 0.7


def mechanism(c: np.ndarray, steps: int) -> np.ndarray:
    """C of the matrix mechanism, (steps, steps)."""
    column = np.zeros(steps)
    column[: len(c)] = c[:steps]
    return toeplitz(column, np.zeros(steps))


def chain_noise(c: np.ndarray, steps: int, size: int, forget_at: int | None = None) -> np.ndarray:
    """(steps, size): every column is one independent run of the chain."""
    rng = np.random.default_rng(0)
    chain, rows = Chain(c), []
    for t in range(steps):
        if t == forget_at:
            chain.forget()
        z = torch.from_numpy(SIGMA * rng.standard_normal(size))
        rows.append(chain.next(z).numpy().copy())
    return np.stack(rows)


def p_value(noise: np.ndarray, covariance: np.ndarray) -> float:
    """Likelihood-ratio test that the columns are N(0, covariance)."""
    steps, n = noise.shape
    whitened = np.linalg.solve(np.linalg.cholesky(covariance), noise)
    sample = whitened @ whitened.T / n
    ratio = n * (np.trace(sample) - np.linalg.slogdet(sample)[1] - steps)
    return float(stats.chi2.sf(ratio, steps * (steps + 1) / 2))


@pytest.mark.parametrize("bands", [2, 5, 12])
def test_the_covariance_is_the_matrix_mechanisms(bands):
    steps, size = 18, 100_000
    c = coefficients(bands, steps)
    inverse = np.linalg.inv(mechanism(c, steps))
    right = SIGMA**2 * inverse @ inverse.T
    found = chain_noise(c, steps, size)
    assert p_value(found, right) > ACCEPT
    for wrong in (2 / 3, 3 / 2):
        assert p_value(found, wrong**2 * right) < REJECT
    assert p_value(found, np.diag(np.diag(right))) < REJECT  # independent, with the same variances
    for k in range(1, bands):
        left_out = c.copy()
        left_out[k] = 0
        inverse = np.linalg.inv(mechanism(left_out, steps))
        assert p_value(found, SIGMA**2 * inverse @ inverse.T) < REJECT
    flipped = np.linalg.inv(mechanism(c * np.where(np.arange(bands) > 0, -1, 1), steps))
    assert p_value(found, SIGMA**2 * flipped @ flipped.T) < REJECT


def test_after_forgetting_a_new_chain_begins():
    steps, at, c = 10, 6, coefficients(4, 10)
    C = mechanism(c, steps)
    unbroken = np.linalg.inv(C)
    C[at:, :at] = 0
    inverse = np.linalg.inv(C)
    found = chain_noise(c, steps, 20_000, forget_at=at)
    assert p_value(found, SIGMA**2 * inverse @ inverse.T) > ACCEPT
    assert p_value(found, SIGMA**2 * unbroken @ unbroken.T) < REJECT


def test_one_band_is_independent_noise_and_keeps_nothing():
    chain, z = Chain([1.0]), torch.randn(5)
    expected = z.clone()
    assert chain.next(z) is z
    assert torch.equal(z, expected) and chain.length == 0


# ---------------------------------------------------------------------- privacy: whitened rows


def carriers(seed: int, sides: str, rank: int, dtype=torch.float64) -> Frame:
    g = torch.Generator().manual_seed(seed)
    Lt, R = (torch.linalg.qr(torch.randn(n, rank, generator=g, dtype=torch.float64)).Q.T for n in (6, 5))
    return Frame(Lt=Lt.to(dtype).contiguous(), R=R.to(dtype).contiguous(), sides=sides)


def frames_of(run: str, steps: int, dtype=torch.float64) -> list[Frame]:
    if run == "turning":
        return [carriers(t // 3, "both", 2, dtype) for t in range(steps)]
    if run == "alternate":
        return [carriers(t // 4, ("left", "right")[t % 2], 2, dtype) for t in range(steps)]
    return [carriers(t // 3, "both", 1 + t // 3 % 3, dtype) for t in range(steps)]  # ranks


RUNS = ("turning", "alternate", "ranks")


def turnings(run: str, steps: int, dtype=torch.float64) -> list[Turning]:
    """P from the step before, with an exact parameter of three numbers in front."""
    frames = frames_of(run, steps, dtype)
    return [Turning([3, Turn(frames[max(t - 1, 0)], frames[t])]) for t in range(steps)]


@pytest.mark.parametrize("run", RUNS)
def test_whoever_whitens_the_releases_sees_rows_with_independent_noise(run):
    """sum_k c_k P (x + s w) / s = sum_k c_k P x / s + z, for releases with a sensitivity s that changes."""
    steps, c = 14, coefficients(5, 14)
    g = torch.Generator().manual_seed(0)
    chain = Chain(c)
    releases: list[torch.Tensor] = []  # all in the coordinates of the latest step, in units of their sensitivity
    signals: list[torch.Tensor] = []
    for t, turning in enumerate(turnings(run, steps)):
        chain.move(turning)
        releases, signals = [turning(r.clone()) for r in releases], [turning(x.clone()) for x in signals]
        z = torch.randn(turning.width_after, generator=g, dtype=torch.float64)
        x = torch.randn(turning.width_after, generator=g, dtype=torch.float64)
        sensitivity = 1.0 + t % 3
        released = x + sensitivity * chain.next(z.clone())
        releases, signals = [released / sensitivity, *releases], [x / sensitivity, *signals]
        row = sum(ck * r for ck, r in zip(c, releases, strict=False))
        expected = sum(ck * s for ck, s in zip(c, signals, strict=False)) + z
        assert (row - expected).abs().max() < 1e-10
    assert chain.length == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("run", RUNS)
def test_one_participation_moves_the_rows_by_at_most_its_norm(run, dtype):
    """For random gradients, and for the one that the rows of its step amplify most."""
    steps, bands = 14, 5
    c, moves = coefficients(bands, steps), turnings(run, steps, dtype)

    def rows(g: torch.Tensor, at: int) -> torch.Tensor:
        pieces, vector = [], g.clone()
        for k in range(min(bands, steps - at)):
            vector = vector if k == 0 else moves[at + k](vector)
            pieces.append(c[k] * vector.double())
        return torch.cat(pieces)

    for at in (0, 4, 7, 13):
        width = moves[at].width_after
        response = torch.stack([rows(unit, at) for unit in torch.eye(width, dtype=dtype)], 1)
        worst = torch.linalg.svd(response)[2][0]
        directions = [worst, *torch.randn(5, width, dtype=torch.float64, generator=torch.Generator().manual_seed(at))]
        for g in directions:
            g = (g / g.norm()).to(dtype)
            assert rows(g, at).norm() <= g.double().norm() * (1 + 1e-6)


# ---------------------------------------------------------------------- the kept vectors


def test_a_map_that_lengthens_is_refused_and_the_past_forgotten():
    chain = Chain(coefficients(4, 10))
    chain.next(torch.ones(8))
    chain.move(lambda w: w.mul_(0.999))
    with pytest.raises(WrongUseError, match="made past noise longer"):
        chain.move(lambda w: w.mul_(1.001))
    assert chain.length == 0
    chain.next(torch.ones(8))
    with pytest.raises(WrongUseError, match="longer"):
        chain.move(lambda w: w * float("nan"))


def test_a_layout_that_changed_without_a_move_is_refused():
    chain = Chain(coefficients(4, 10))
    chain.next(torch.ones(8))
    for z in (torch.ones(9), torch.ones(8, dtype=torch.float64)):
        with pytest.raises(WrongUseError, match="layout changed"):
            chain.next(z)
    chain.move(lambda w: w[:5].clone())
    assert chain.next(torch.ones(5)).shape == (5,)


def test_it_keeps_b_minus_1_vectors_and_reuses_their_memory():
    chain = Chain(coefficients(4, 20))
    lengths, places = [], []
    for _ in range(9):
        chain.next(torch.randn(16))
        lengths.append(chain.length)
        places.append({w.data_ptr() for w in chain._past})
    assert lengths == [1, 2, 3, 3, 3, 3, 3, 3, 3]
    assert all(place == places[2] for place in places[2:])


def test_threads_and_chunks_do_not_change_the_numbers(monkeypatch):
    c, g = coefficients(4, 10), torch.Generator().manual_seed(0)
    zs = [torch.randn(1000, generator=g) for _ in range(8)]

    def run() -> list[torch.Tensor]:
        chain = Chain(c)
        return [chain.next(z.clone()) for z in zs]

    whole = run()
    monkeypatch.setattr(noise, "CHUNK", 300)
    monkeypatch.setattr("rgp.correlated.CHUNK", 300)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert all(torch.equal(a, b) for a, b in zip(whole, run(), strict=True))
    finally:
        torch.set_num_threads(threads)


def test_rounding_in_float32_does_not_add_up():
    c, g = coefficients(32, 300), torch.Generator().manual_seed(0)
    zs = torch.randn(300, 50, generator=g)
    single, double = Chain(c), Chain(c)
    for z in zs:
        a, b = single.next(z.clone()), double.next(z.double())
    assert (a.double() - b).abs().max() < 1e-5


def test_the_callers_tensor_may_be_overwritten_later():
    c = coefficients(3, 5)
    a, b = Chain(c), Chain(c)
    for _ in range(4):
        kept = a.next(torch.ones(4)).clone()
        z = b.next(torch.ones(4))
        assert torch.equal(z, kept)
        z.fill_(1e9)


@pytest.mark.parametrize("save", [pickle.dumps, copy.copy, copy.deepcopy])
def test_past_noise_cannot_be_saved_or_copied(save):
    with pytest.raises(WrongUseError, match="cannot be saved or copied"):
        save(Chain([0.8, 0.6]))


def test_forgotten_noise_is_wiped():
    chain = Chain([0.8, 0.6])
    chain.next(torch.ones(4))
    (past,) = chain._past
    chain.forget()
    assert not past.any()


@pytest.mark.parametrize("bad", [[], [0.8, 0.7], [-0.8, 0.6], [float("nan")], [0.0, 1.0]])
def test_coefficients_that_would_change_the_sensitivity_are_refused(bad):
    with pytest.raises(ValueError, match="squares sum to 1"):
        Chain(bad)
