"""Carriers: orthonormal whatever they are found from, spanning what they should, and made from released state only."""

from __future__ import annotations

import dataclasses
import inspect

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rgp
from helpers import privatize, seeded
from rgp.carriers import Released, find_carriers

SOURCES = ("history", "weight", "random", "momentum", "public")
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


def find(*matrices: Tensor, rank: int, source: str = "weight", iterations: int = 1, seed: int = 0):
    """L (n, p, r) and R (n, r, d)."""
    released = [
        Released(weight=m, initial=torch.zeros_like(m), momentum=m, public=m)
        if source != "weight"
        else Released(weight=m)
        for m in matrices
    ]
    Lt, R = find_carriers(released, source=source, rank=rank, iterations=iterations, rng=np.random.default_rng(seed))
    return Lt.mT, R


def deviation(L: Tensor, R: Tensor) -> float:
    """From orthonormal columns of L and rows of R."""
    one = torch.eye(L.shape[-1], dtype=torch.float64)
    L, R = L.double(), R.double()
    return max(float((L.mT @ L - one).abs().max()), float((R @ R.mT - one).abs().max()))


def gaussian(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64).to(dtype)


def inputs(dtype: torch.dtype) -> dict[str, Tensor]:
    smallest, largest = (1e-38, 1e38) if dtype == torch.float32 else (1e-300, 1e300)
    plain = gaussian(24, 40)
    steep = torch.linalg.svd(plain, full_matrices=False)
    found = {
        "plain": plain,
        "zero": torch.zeros(24, 40),
        "tiny": smallest * plain,
        "subnormal": torch.finfo(dtype).tiny / 100 * plain,
        "huge": largest * plain.clamp(-1, 1),
        "rank 1": torch.outer(gaussian(24), gaussian(40, seed=1)),
        "rank 2": gaussian(24, 2) @ gaussian(2, 40, seed=1),
        "steep spectrum": steep.U @ torch.diag(torch.logspace(0, -40, 24, dtype=torch.float64)) @ steep.Vh,
        "one entry": torch.zeros(24, 40).index_put((torch.tensor(3), torch.tensor(5)), torch.tensor(2.0)),
        "one row": torch.zeros(24, 40).index_copy(0, torch.tensor([3]), torch.randn(1, 40, generator=seeded(1))),
        "equal rows": torch.ones(24, 40),
        "identity": torch.eye(24, 40),
        "not finite": torch.full((24, 40), float("nan")),
        "half not finite": plain.clone().index_fill(0, torch.arange(12), float("inf")),
        "rows of all sizes": torch.logspace(-30, 30, 24, dtype=torch.float64)[:, None] * plain,
    }
    return {name: m.to(dtype) for name, m in found.items()}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rank", [1, 4, 24])
@pytest.mark.parametrize("iterations", [1, 3])
def test_orthonormal_whatever_the_input(dtype, rank, iterations):
    """Rank 24 is all of min(p, d). Alone, and in one batch with the others: a bad one must not spoil its neighbours."""
    matrices = inputs(dtype)
    for name, matrix in matrices.items():
        assert deviation(*find(matrix, rank=rank, iterations=iterations)) < TOLERANCE[dtype], name
        assert deviation(*find(matrix.T.contiguous(), rank=rank, iterations=iterations)) < TOLERANCE[dtype], name
    L, R = find(*matrices.values(), rank=rank, iterations=iterations)
    assert L.shape == (len(matrices), 24, rank)
    assert R.shape == (len(matrices), rank, 40)
    assert L.dtype == R.dtype == dtype
    assert deviation(L, R) < TOLERANCE[dtype]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_every_source_gives_orthonormal_carriers(source, dtype):
    for shape in ((24, 40), (40, 24), (8, 4, 3, 3), (5, 1), (1, 7)):
        rank = min(3, shape[0], int(np.prod(shape[1:])))
        L, R = find(gaussian(*shape, dtype=dtype), rank=rank, source=source)
        assert deviation(L, R) < TOLERANCE[dtype]
        assert L.shape[1] == shape[0]
        assert R.shape[2] == np.prod(shape[1:])


def test_carriers_in_the_weights_dtype():
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        L, R = find(gaussian(24, 40, dtype=dtype), rank=3)
        assert L.dtype == R.dtype == dtype
        assert deviation(L, R) < 10 * torch.finfo(dtype).eps


def planted(p: int, d: int, values: Tensor, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    U, V = (
        torch.linalg.qr(gaussian(p, len(values), seed=seed)).Q,
        torch.linalg.qr(gaussian(d, len(values), seed=seed + 1)).Q,
    )
    return U @ torch.diag(values) @ V.T, U, V


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_many_iterations_find_the_top_subspace(scale):
    matrix, U, V = planted(24, 40, scale * torch.tensor([5.0, 4.0, 3.0, 0.5, 0.4, 0.1], dtype=torch.float64))
    L, R = (x[0] for x in find(matrix, rank=3, iterations=40))
    assert (L @ L.T - U[:, :3] @ U[:, :3].T).norm() < 1e-9
    assert (R.T @ R - V[:, :3] @ V[:, :3].T).norm() < 1e-9


def test_one_iteration_is_algorithm_2():
    """L = orthonormal columns of W R_0, R = orthonormal rows of L^T W, and more iterations do better."""
    matrix, U, _ = planted(24, 40, torch.tensor([5.0, 4.0, 3.0, 1.0, 1.0, 1.0], dtype=torch.float64))
    captured = []
    for iterations in (1, 2, 4, 8):
        L, R = (x[0] for x in find(matrix, rank=3, iterations=iterations))
        rows = torch.linalg.qr((L.T @ matrix).T).Q
        assert (R.T @ R - rows @ rows.T).norm() < 1e-10
        columns = U @ U.T
        assert (columns @ L - L).norm() < 1e-10
        captured.append(float((L.T @ matrix).norm()))
    assert captured == sorted(captured)
    assert captured[-1] == pytest.approx(float(torch.tensor([5.0, 4.0, 3.0]).norm()), rel=1e-5)


def test_a_low_rank_matrix_is_in_the_span():
    """What is there is kept, and what is missing is random and not a coordinate axis."""
    matrix = gaussian(24, 2) @ gaussian(2, 40, seed=1)
    L, R = (x[0] for x in find(matrix, rank=5))
    assert (L @ L.T @ matrix - matrix).norm() < 1e-9 * matrix.norm()
    assert (matrix @ R.T @ R - matrix).norm() < 1e-9 * matrix.norm()
    L, R = (x[0] for x in find(torch.zeros(24, 40, dtype=torch.float64), rank=5))
    assert L.abs().max() < 0.95
    assert R.abs().max() < 0.95
    assert not torch.equal(L, find(torch.zeros(24, 40, dtype=torch.float64), rank=5, seed=1)[0][0])


def test_deterministic_under_a_seed():
    matrices = [gaussian(24, 40, seed=i) for i in range(3)]
    for source in SOURCES:
        for a, b in zip(find(*matrices, rank=3, source=source), find(*matrices, rank=3, source=source), strict=True):
            assert torch.equal(a, b)
        assert not torch.equal(
            find(*matrices, rank=3, source=source)[0], find(*matrices, rank=3, source=source, seed=1)[0]
        )


def test_sources_look_where_they_say():
    weight, initial, momentum, public = (
        planted(24, 40, torch.tensor([3.0, 2.0]).double(), seed=7 * i) for i in range(4)
    )
    wanted = {"weight": weight, "momentum": momentum, "public": public}
    released = Released(weight=weight[0], initial=initial[0], momentum=momentum[0], public=public[0])
    for source, (_, U, V) in wanted.items():
        Lt, R = find_carriers([released], source=source, rank=2, iterations=1, rng=np.random.default_rng(0))
        assert (Lt[0].T @ Lt[0] - U @ U.T).norm() < 1e-9, source
        assert (R[0].T @ R[0] - V @ V.T).norm() < 1e-9, source
    Lt, _ = find_carriers([released], source="history", rank=4, iterations=1, rng=np.random.default_rng(0))
    both = torch.linalg.qr(torch.cat([weight[1], initial[1]], 1)).Q
    assert (Lt[0].T @ Lt[0] - both @ both.T).norm() < 1e-9


# -------- nothing private gets in


def test_released_has_no_place_for_private_gradients():
    fields = {field.name for field in dataclasses.fields(Released)}
    assert fields == {"weight", "initial", "momentum", "public", "history"}
    assert set(inspect.signature(find_carriers).parameters) == {"released", "source", "rank", "iterations", "rng"}
    released = Released(weight=torch.zeros(2, 2))
    with pytest.raises(dataclasses.FrozenInstanceError):
        released.gradient = torch.zeros(2, 2)
    with pytest.raises(TypeError):
        Released(weight=torch.zeros(2, 2), gradient=torch.zeros(2, 2))
    with pytest.raises(ValueError, match="source"):
        rgp.RGP(source="gradient")


def toy() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 3)).double()


def data(seed: int) -> list[tuple[Tensor, int]]:
    return [(x, i % 3) for i, x in enumerate(gaussian(10, 20, seed=seed))]


def train(model: nn.Module, examples, **options) -> list[dict[str, tuple[Tensor, Tensor]]]:
    """The carriers of every step."""
    found = []
    with privatize(model, examples, **{"steps": 4, "probe": False, **options}) as run:
        for x, y in run:
            run.step(F.cross_entropy(model(x), y))
            found.append({name: (L.clone(), R.clone()) for name, (L, R) in run.carriers.items()})
    return found


@pytest.mark.parametrize("source", ["history", "weight", "random", "momentum"])
def test_the_first_carriers_do_not_depend_on_the_data(source):
    method = rgp.RGP(rank=2, source=source, warmup_steps=0)
    one, two = train(toy(), data(1), method=method), train(toy(), data(2), method=method)
    for name in one[0]:
        assert torch.equal(one[0][name][0], two[0][name][0])
        assert torch.equal(one[0][name][1], two[0][name][1])


def test_carriers_are_in_place_before_a_batch_is_loaded():
    seen = []

    def collate(batch):
        seen.append({name: L.clone() for name, (L, _) in run.carriers.items()})
        return torch.utils.data.default_collate(batch)

    model = toy()
    run = privatize(model, data(1), method=rgp.RGP(rank=2), steps=3, collate_fn=collate, probe=False)
    for x, y in run:
        run.step(F.cross_entropy(model(x), y))
        for name, (L, _) in run.carriers.items():
            assert torch.equal(seen[-1][name], L)
    assert len(seen) == 3
    run.close()


def top(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    U, _, Vh = torch.linalg.svd(matrix)
    return U[:, :rank] @ U[:, :rank].T, Vh[:rank].T @ Vh[:rank]


@pytest.mark.parametrize("source", ["history", "weight", "momentum"])
def test_warm_up_then_the_source(source):
    """With many power iterations the carriers of every step span what the source says, seen from outside."""
    model = toy()
    with torch.no_grad():  # gaps in the spectrum, so that the top subspace is well defined
        U, _, Vh = torch.linalg.svd(model[2].weight)
        model[2].weight.copy_(U @ torch.diag(0.5 ** torch.arange(24, dtype=torch.float64)) @ Vh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    initial = model[2].weight.detach().clone()
    method = rgp.RGP(rank=1, source=source, warmup_steps=2, power_iterations=60)
    run = privatize(model, data(1), optimizer=optimizer, method=method, steps=5, clip=None, probe=False)
    for step, (x, y) in enumerate(run):
        weight = model[2].weight.detach().clone()
        expected = weight
        if step >= 2 and source == "history":
            expected = weight - initial
        elif step >= 2 and source == "momentum":
            expected = optimizer.state[model[2].weight]["momentum_buffer"].clone()
        L, R = run.carriers["2.weight"]
        left, right = top(expected, 1)
        assert (L @ L.T - left).norm() < 1e-6, step
        assert (R.T @ R - right).norm() < 1e-6, step
        run.step(F.cross_entropy(model(x), y))
    run.close()


def test_public_carriers():
    model, public = toy(), gaussian(6, 20, seed=9)
    labels = torch.arange(6) % 3

    def public_loss():
        return F.cross_entropy(model(public), labels)

    method = rgp.RGP(rank=1, source="public", power_iterations=200)
    run = privatize(model, data(1), method=method, steps=2, public_loss=public_loss)
    for x, y in run:
        with torch._C.DisableTorchFunction():  # not part of this batch
            (gradient,) = torch.autograd.grad(public_loss(), [model[2].weight])
        left, right = top(gradient, 1)
        L, R = run.carriers["2.weight"]
        assert (L @ L.T - left).norm() < 1e-4
        assert (R.T @ R - right).norm() < 1e-4
        run.step(F.cross_entropy(model(x), y))
    run.close()


def test_random_carriers_turn_every_step():
    steps = train(toy(), data(1), method=rgp.RGP(rank=2, source="random"))
    assert not torch.equal(steps[0]["2.weight"][0], steps[1]["2.weight"][0])
    again = train(toy(), data(1), method=rgp.RGP(rank=2, source="random"))
    assert torch.equal(steps[3]["2.weight"][0], again[3]["2.weight"][0])
