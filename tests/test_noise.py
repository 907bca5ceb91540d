"""Noise: the right scale is accepted and wrong ones are rejected, per parameter and jointly; all is independent."""

from __future__ import annotations

import sys
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import rgp
from rgp import noise as noise_module
from rgp.noise import CHUNK, PhiloxNoise
from rgp.observing import Observer
from rgp.streams import PURPOSES, Streams

ACCEPT, REJECT = 1e-5, 1e-12  # p-values; the secure source cannot be seeded, so acceptance leaves it room
SOURCES = ("philox", "secure")


def source(kind: str, seed: int = 0):
    if kind == "philox":
        return PhiloxNoise(Streams.from_seed(seed))
    pytest.importorskip("randomgen")
    from rgp.secure import SecureNoise

    return SecureNoise()


def noise(
    kind: str, size: int, *, std: float = 1.0, step: int = 0, attempt: int = 0, dtype=torch.float32
) -> np.ndarray:
    total = torch.zeros(size, dtype=dtype)
    source(kind).add(total, std=std, step=step, attempt=attempt)
    return total.double().numpy()


def check_scale(x: Tensor | np.ndarray, std: float) -> None:
    """A KS test accepts N(0, std^2) and rejects two thirds and three halves of it."""
    x = np.asarray(x, dtype=np.float64).ravel()
    assert stats.kstest(x / std, "norm").pvalue > ACCEPT
    for wrong in (2 / 3, 3 / 2):
        assert stats.kstest(x / (std * wrong), "norm").pvalue < REJECT


def check_independent(x: np.ndarray, y: np.ndarray) -> None:
    n = min(len(x), len(y))
    assert abs(np.corrcoef(x[:n], y[:n])[0, 1]) < 5 / n**0.5
    assert abs(np.corrcoef(x[:n] ** 2, y[:n] ** 2)[0, 1]) < 5 / n**0.5
    assert len(np.intersect1d(x, y)) < 1e-2 * n  # a shared stretch, shifted or not


# ---------------------------------------------------------------------- the sources


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", SOURCES)
def test_scale(kind, dtype):
    check_scale(noise(kind, 20_000, std=0.37, dtype=dtype), 0.37)


@pytest.mark.parametrize("kind", SOURCES)
def test_noise_is_added_to_what_is_there(kind):
    total = torch.full((20_000,), 7.0)
    source(kind).add(total, std=0.5, step=0, attempt=0)
    check_scale(total - 7, 0.5)


@pytest.mark.parametrize("kind", SOURCES)
def test_moments_and_tails(kind):
    x = noise(kind, 1_000_000)
    assert abs(x.mean()) < 5e-3 and abs(x.var() - 1) < 1e-2
    assert abs(stats.kurtosis(x)) < 0.03  # a sum of too few uniforms, say, would show here
    for k in (3, 4):
        expected = 2 * stats.norm.sf(k) * len(x)
        assert abs((np.abs(x) > k).sum() - expected) < 6 * expected**0.5


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("other", [{"step": 1}, {"attempt": 1}, {"step": 1, "attempt": 1}])
def test_steps_and_attempts_are_independent(kind, other):
    check_independent(noise(kind, 50_000), noise(kind, 50_000, **other))


@pytest.mark.parametrize("kind", SOURCES)
def test_positions_are_independent_across_chunks(kind):
    x = noise(kind, 2 * CHUNK + 1000, dtype=torch.float64)
    check_independent(x[:1000], x[2 * CHUNK :])
    check_independent(x[:CHUNK], x[CHUNK : 2 * CHUNK])
    check_independent(x[:CHUNK:2], x[1:CHUNK:2])


def test_numbers_do_not_depend_on_the_number_of_threads(monkeypatch):
    alone = noise("philox", 2 * CHUNK + 77)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert np.array_equal(alone, noise("philox", 2 * CHUNK + 77))


def test_parallel_work_is_all_done(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    done = []
    noise_module.parallel(done.append, range(17))
    assert sorted(done) == list(range(17))


# ---------------------------------------------------------------------- streams


def test_keys_have_128_bits_and_every_purpose_its_own():
    keys = [tuple(Streams.from_seed(s)._keys[p]) for s in (0, 1, 2**32, 2**64, 2**200) for p in PURPOSES]
    assert len(set(keys)) == len(keys)
    assert all(len(key) == 2 and max(map(int, key)) > 2**32 for key in keys)
    assert len({Streams.from_system().secret for _ in range(5)}) == 5
    assert len(Streams.from_system().secret) == 32


@pytest.mark.parametrize("distance", [1, 2**32, 2**64, 2**128])
def test_seeds_that_torch_would_confuse_give_other_streams(distance):
    a, b = Streams.from_seed(5), Streams.from_seed(5 + distance)
    for purpose in PURPOSES:
        x, y = (s.generator(purpose, 0).standard_normal(10_000) for s in (a, b))
        check_independent(x, y)


def test_every_address_of_a_stream_is_its_own():
    streams = Streams.from_seed(0)
    places = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (2**32, 0, 0), (0, 0, 2**32), (0, 2**40, 0), (1, 1, 1)]
    draws = [tuple(streams.generator("noise", *place).integers(0, 2**63, 4)) for place in places]
    assert len(set(draws)) == len(places)
    assert draws[0] == tuple(streams.generator("noise", 0, 0, 0).integers(0, 2**63, 4))


@pytest.mark.parametrize("seed", [-1, 1.5, True, "7"])
def test_a_wrong_seed_is_refused(seed):
    with pytest.raises(ValueError, match="seed must be a non-negative integer"):
        Streams.from_seed(seed)


# ---------------------------------------------------------------------- secure noise


def test_secure_noise_is_never_repeated():
    secure = source("secure")
    x, y = torch.zeros(50_000), torch.zeros(50_000)
    secure.add(x, std=1.0, step=3, attempt=0)
    secure.add(y, std=1.0, step=3, attempt=0)
    assert not secure.replayable
    check_independent(x.double().numpy(), y.double().numpy())


def test_the_generator_is_aes():
    """NIST SP 800-38A, F.5.1: AES-128 in counter mode, its first block."""
    randomgen = pytest.importorskip("randomgen")
    key = bytes.fromhex("2b7e151628aed2a6abf7158809cf4f3c")
    counter = bytes.fromhex("f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff")
    bits = randomgen.AESCounter(key=int.from_bytes(key, "little"), counter=int.from_bytes(counter, "little"))
    assert bits.random_raw(2).tobytes().hex() == "ec8cdf7398607cb0f2d21675ea9ea1e4"


def test_every_chunk_takes_256_bits_from_the_system(monkeypatch):
    pytest.importorskip("randomgen")
    from rgp import secure

    taken = []
    token_bytes = secure.secrets.token_bytes
    monkeypatch.setattr(secure.secrets, "token_bytes", lambda n: taken.append(n) or token_bytes(n))
    secure.SecureNoise().add(torch.zeros(2 * CHUNK + 1), std=1.0, step=0, attempt=0)
    assert sum(taken) == 3 * 32


def test_secure_noise_is_a_sum_of_four(monkeypatch):
    """With every normal equal to 1 the noise is 4 / 2 times std: the construction, and its scale."""
    pytest.importorskip("randomgen")
    from rgp import secure

    class Ones:
        def __init__(self, _bits):
            pass

        def standard_normal(self, out):
            out[:] = 1.0

    monkeypatch.setattr(secure.np.random, "Generator", Ones)
    total = torch.zeros(100_000)
    secure.SecureNoise().add(total, std=3.0, step=0, attempt=0)
    assert torch.equal(total, torch.full_like(total, 6.0))


def test_missing_randomgen_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "randomgen", None)
    from rgp.secure import SecureNoise

    with pytest.raises(ImportError, match=r"rgp\[secure\]"):
        SecureNoise()


# ---------------------------------------------------------------------- whole runs


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(50, 100), nn.Tanh(), nn.Linear(100, 80), nn.Tanh(), nn.Linear(80, 60))


def noise_of_run(method, *, steps=1, size=64, batch_size=16, lr=1.0, **options) -> list[dict[str, np.ndarray]]:
    """Per step and parameter: the released vector of a run whose examples have no gradient, times nothing."""
    model = small_model()
    data = [(torch.randn(50), 0) for _ in range(size)]
    options = {"noise_multiplier": 1.3, "clip": 0.7, "seed": 0, **options}
    run = rgp.privatize(
        model,
        torch.optim.SGD(model.parameters(), lr=lr),
        data,
        method=method,
        batch_size=batch_size,
        steps=steps,
        **options,
    )
    found = []

    class Spy(Observer):
        def released(self, step, noisy):
            where = run._step.gradients.where
            found.append({name: noisy[columns].double().numpy().copy() for name, columns in where.items()})

    run.observe(Spy())
    for x, _ in run:
        run.step(0.0 * model(x).sum())
    run.close()
    assert len(found) == steps == run.ledger.count
    return found


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("method", [rgp.DPSGD(), rgp.RGP(rank=4), rgp.RGP(rank=4, norm="paper"), rgp.RGP(sides="left")])
def test_released_noise_has_sigma_C_per_parameter_and_jointly(method, secure):
    if secure:
        pytest.importorskip("randomgen")
    steps = noise_of_run(method, steps=40, secure_noise=secure)
    for name in steps[0]:  # over the steps, so that the shortest bias has enough entries to reject wrong scales
        check_scale(np.concatenate([step[name] for step in steps]), 1.3 * 0.7)
    for step in steps[:3]:
        check_scale(np.concatenate(list(step.values())), 1.3 * 0.7)


def test_what_the_optimizer_gets_is_that_noise_over_the_batch_size():
    model = small_model()
    before = [p.detach().clone() for p in model.parameters()]
    data = [(torch.randn(50), 0) for _ in range(64)]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    run = rgp.privatize(
        model, optimizer, data, method=rgp.DPSGD(), batch_size=16, steps=1, noise_multiplier=1.3, clip=0.7, seed=0
    )
    for x, _ in run:
        run.step(0.0 * model(x).sum())
    moved = [(p.detach() - b).flatten() for p, b in zip(model.parameters(), before, strict=True)]
    check_scale(torch.cat(moved), 1.3 * 0.7 / 16)
    check_scale(moved[0], 1.3 * 0.7 / 16)


def test_the_head_has_its_noise_divided_by_its_scale():
    model = small_model()
    before = model[4].weight.detach().clone()
    data = [(torch.randn(50), 0) for _ in range(64)]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    method = rgp.DPSGD(head_scale=0.1)
    run = rgp.privatize(model, optimizer, data, method=method, batch_size=16, steps=1, noise_multiplier=1.0, seed=0)
    for x, _ in run:
        run.step(0.0 * model(x).sum())
    check_scale((model[4].weight.detach() - before).flatten(), 1.0 / 16 / 0.1)


def test_a_clip_schedule_carries_the_noise_with_it():
    """The trap of two copies of C: noise of the wrong step's C."""
    clips, sigmas = [1.0, 0.01, 5.0], [1.0, 2.0, 0.5]
    options = {"clip": lambda t: clips[t], "noise_multiplier": lambda t: sigmas[t]}
    found = noise_of_run(rgp.DPSGD(), steps=3, **options)
    for t, step in enumerate(found):
        check_scale(np.concatenate(list(step.values())), sigmas[t] * clips[t])


def test_empty_batches_have_the_same_noise():
    """One example per batch on average: a third of the draws is empty, and each is a release like any other."""
    found = noise_of_run(rgp.DPSGD(), steps=8, batch_size=1)
    for step in found:
        check_scale(np.concatenate(list(step.values())), 1.3 * 0.7)


def test_steps_and_parameters_of_a_run_are_independent():
    first, second = noise_of_run(rgp.RGP(rank=8), steps=2)
    names = list(first)
    for name in names:
        if len(first[name]) > 500:
            check_independent(first[name], second[name])
    big = [name for name in names if len(first[name]) > 500]
    for a, b in pairwise(big):
        check_independent(first[a], first[b])


def test_the_noise_of_L_and_R_is_independent():
    (step,) = noise_of_run(rgp.RGP(rank=8))
    for name, p, d in (("0.weight", 100, 50), ("2.weight", 80, 100)):
        both = step[name]
        assert len(both) == 8 * (p + d)
        check_independent(both[: 8 * p], both[8 * p :])


def test_seeds_and_secure_noise():
    a, b, c = (noise_of_run(rgp.DPSGD(), seed=s)[0]["0.weight"] for s in (1, 1, 2))
    assert np.array_equal(a, b)
    check_independent(a, c)
    x, y = (noise_of_run(rgp.DPSGD(), seed=None)[0]["0.weight"] for _ in range(2))
    check_independent(x, y)
    pytest.importorskip("randomgen")
    x, y = (noise_of_run(rgp.DPSGD(), seed=1, secure_noise=True)[0]["0.weight"] for _ in range(2))
    check_independent(x, y)
