"""Turning: past noise in new coordinates, against dense matrices in float64; never longer than it was."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from rgp.turning import Frame, Turn, Turning

SIDES = ("both", "left", "right")
P, D = 9, 7


def frame(seed: int, rank: int = 2, sides: str = "both", dtype=torch.float64, p: int = P, d: int = D) -> Frame:
    g = torch.Generator().manual_seed(seed)
    Lt, R = (torch.linalg.qr(torch.randn(n, rank, generator=g, dtype=torch.float64)).Q.T for n in (p, d))
    return Frame(Lt=Lt.to(dtype).contiguous(), R=R.to(dtype).contiguous(), sides=sides)


def dense_J(frame: Frame) -> Tensor:
    """J as a (p d, width) matrix, column by column from its definition with p x p projectors."""
    L, R = frame.Lt.double().T, frame.R.double()
    outside = torch.eye(len(L), dtype=torch.float64) - L @ L.T
    columns = []
    for unit in torch.eye(frame.width, dtype=torch.float64):
        cut = L.numel() if frame.sides != "right" else 0
        G = torch.zeros(L.shape[0], R.shape[1], dtype=torch.float64)
        if frame.sides != "right":
            A = unit[:cut].view(L.shape[1], L.shape[0]).T
            G += (outside @ A if frame.sides == "both" else A) @ R
        if frame.sides != "left":
            G += L @ unit[cut:].view_as(R)
        columns.append(G.flatten())
    return torch.stack(columns, 1)


def matrix(turn: Turn, dtype=torch.float64) -> Tensor:
    return torch.stack([turn(unit) for unit in torch.eye(turn.width_before, dtype=dtype)], 1).double()


@pytest.mark.parametrize(("before", "after"), list(itertools.product(SIDES, SIDES)))
@pytest.mark.parametrize("ranks", [(2, 2), (3, 1), (1, 4)])
def test_it_is_the_dense_formula(before, after, ranks):
    a, b = frame(1, ranks[0], before), frame(2, ranks[1], after)
    expected = dense_J(b).T @ dense_J(a)
    found = matrix(Turn(a, b))
    assert found.shape == expected.shape == (b.width, a.width)
    assert (found - expected).abs().max() < 5e-12
    assert expected.abs().max() > 0.1
    assert torch.linalg.matrix_norm(found, 2) <= 1


@pytest.mark.parametrize("sides", SIDES)
def test_noise_in_the_weights_is_what_the_new_carriers_can_hold_of_it(sides):
    """J_t P w is the projection of J_s w: for either norm, because `rebuild` is J for both."""
    a, b = frame(1, 3), frame(2, 3, sides)
    w = torch.randn(a.width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    J = dense_J(b)
    projected = J @ torch.linalg.lstsq(J, dense_J(a) @ w, driver="gelsd").solution
    assert torch.allclose(J @ Turn(a, b)(w), projected, atol=1e-10)


def test_turned_there_and_back_within_one_subspace_nothing_is_lost():
    """Carriers that rotate within their own span: the noise in the weights is the same matrix afterwards."""
    a = frame(1, 3)
    g = torch.Generator().manual_seed(3)
    turns = [torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64, generator=g)).Q for _ in range(2)]
    b = Frame(Lt=turns[0] @ a.Lt, R=turns[1] @ a.R)
    w = torch.randn(a.width, dtype=torch.float64, generator=g)
    assert torch.allclose(dense_J(b) @ Turn(a, b)(w), dense_J(a) @ w, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sides", SIDES)
def test_it_is_the_identity_to_the_bit_where_carriers_stay(sides, dtype):
    a = frame(1, sides=sides, dtype=dtype)
    w = torch.randn(a.width, dtype=dtype)
    assert torch.equal(Turn(a, frame(1, sides=sides, dtype=dtype))(w), w)
    moved = Frame(Lt=frame(2, dtype=dtype).Lt, R=a.R, sides=sides)  # L alone turns: only R enters what `left` releases
    assert torch.equal(Turn(a, moved)(w), w) == (sides == "left")
    moved = Frame(Lt=a.Lt, R=frame(2, dtype=dtype).R, sides=sides)
    assert torch.equal(Turn(a, moved)(w), w) == (sides == "right")


@pytest.mark.parametrize(("before", "after"), list(itertools.product(SIDES, SIDES)))
@pytest.mark.parametrize("skew", [0.0, 1e-6, 1e-2, 0.1, 0.3])
def test_nothing_is_lengthened_by_carriers_that_are_not_orthonormal(before, after, skew):
    """The largest singular value, in float32 arithmetic from end to end, and the vector that it belongs to."""
    g = torch.Generator().manual_seed(5)

    def skewed(f: Frame) -> Frame:
        def bend(rows: Tensor) -> Tensor:
            return (rows * (1 + skew) + skew * 0.3 * torch.randn(rows.shape, generator=g)).float()

        return Frame(Lt=bend(f.Lt.float()), R=bend(f.R.float()), sides=f.sides)

    # nearly the same carriers: then P is nearly an isometry, and too long if anything is
    a, b = frame(1, 2, before, torch.float32), frame(1, 2, after, torch.float32)
    turn = Turn(skewed(a), skewed(b))
    P_matrix = matrix(turn, torch.float32)
    _, values, Vt = torch.linalg.svd(P_matrix)
    assert values[0] <= 1
    for direction in (Vt[0], torch.randn(a.width, generator=g, dtype=torch.float64)):
        w = (1000 * direction).float()
        assert turn(w).double().norm() <= w.double().norm()
    if skew >= 0.3:
        assert values[0] == 0  # forgotten
    elif before == after and skew <= 1e-2:
        assert values[0] > 0.9


def test_the_plain_formula_would_lengthen():
    """What the guard is for: J_t^T J_s with carriers 0.1% too long is longer than 1."""
    a = frame(1)
    long = Frame(Lt=a.Lt * 1.001, R=a.R * 1.001)
    turned = Frame(Lt=long.Lt[[1, 0]], R=long.R[[1, 0]])
    assert torch.linalg.matrix_norm(dense_J(turned).T @ dense_J(long), 2) > 1.0005
    assert torch.linalg.matrix_norm(matrix(Turn(long, turned)), 2) <= 1


def test_carriers_that_are_not_finite_forget():
    a = frame(1)
    bad = Frame(Lt=a.Lt * float("nan"), R=a.R)
    assert not Turn(a, bad)(torch.ones(a.width, dtype=torch.float64)).any()


def test_many_turns_in_bfloat16_never_lengthen():
    w = torch.randn(frame(0).width, generator=torch.Generator().manual_seed(1))
    norms, before = [float(w.double().norm())], frame(0, dtype=torch.bfloat16)
    for seed in range(1, 30):
        after = frame(seed % 2, dtype=torch.bfloat16)
        w, before = Turn(before, after)(w), after
        norms.append(float(w.double().norm()))
    assert all(b <= a for a, b in itertools.pairwise(norms))


def test_a_whole_vector():
    a, b, c = frame(1), frame(2), frame(3, sides="left")
    same_width, other = Turn(a, b), Turn(a, c)
    g = torch.Generator().manual_seed(0)
    w = torch.randn(3 + a.width + 2, generator=g, dtype=torch.float64)
    expected = torch.cat([w[:3], same_width(w[3:-2]), w[-2:]])
    turning = Turning([3, same_width, 2])
    kept = w.clone()
    assert turning(kept) is kept  # in place
    assert torch.equal(kept, expected)
    changed = Turning([3, other, 2])(w)
    assert changed.shape == (3 + c.width + 2,)
    assert torch.equal(changed, torch.cat([w[:3], other(w[3:-2]), w[-2:]]))
    assert Turning([3, Turn(a, a)]).stays and not turning.stays


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="9 x 7 matrix cannot turn into those of a 8 x 7"):
        Turn(frame(1), frame(1, p=8))
    with pytest.raises(ValueError, match="sides='top'"):
        frame(1, sides="top")
    with pytest.raises(ValueError, match="32 numbers"):
        Turn(frame(1), frame(2))(torch.ones(5))
    with pytest.raises(ValueError, match="layout has 4"):
        Turning([4])(torch.ones(5))
