"""AdamCorrected: the noise it is told of, and the signal it sees under it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import rgp
from helpers import seeded
from rgp.optimizers import AdamCorrected
from rgp.reconstruct import factors, noise_variance

# ---------------------------------------------------------------------- optimizers


def rebuild(Lt, R, At, dR):
    """dL R + L dR - L L^T dL R, the paper's Corollary 1; with one side released, dL R or L dR."""
    if At is None:
        return Lt.T @ dR
    return At.T @ R if dR is None else At.T @ R + Lt.T @ dR - Lt.T @ Lt @ At.T @ R


def test_noise_variance_of_rebuilt_gradients_by_simulation():
    generator = seeded(0)
    Lt = torch.linalg.qr(torch.randn(7, 2, generator=generator, dtype=torch.float64)).Q.T.contiguous()
    R = torch.linalg.qr(torch.randn(5, 2, generator=generator, dtype=torch.float64)).Q.T.contiguous()
    draws = 20000
    for left, right in ((True, True), (True, False), (False, True)):
        At = torch.randn(draws, 2, 7, generator=generator, dtype=torch.float64)
        dR = torch.randn(draws, 2, 5, generator=generator, dtype=torch.float64)
        if left and right:
            made = torch.vmap(lambda a, d: rebuild(Lt, R, a, d))(At, dR)
        elif left:
            made = torch.vmap(lambda a: rebuild(Lt, R, a, None))(At)
        else:
            made = torch.vmap(lambda d: rebuild(Lt, R, None, d))(dR)
        given = (At[0] if left else None, dR[0] if right else None)
        one, other = factors(Lt, R, *given)
        torch.testing.assert_close(one @ other, rebuild(Lt, R, *given))
        known = noise_variance(Lt, R, left=left, right=right)
        measured = made.square().mean(0)
        # 5 standard errors of a variance; a formula without the product term, or with l and q swapped, is far outside
        assert (measured / known - 1).abs().max() < 5 * (2 / draws) ** 0.5


def test_adam_corrected_is_adamw_where_there_is_no_noise():
    torch.manual_seed(0)
    ours, theirs = nn.Linear(5, 3), nn.Linear(5, 3)
    theirs.load_state_dict(ours.state_dict())
    a = AdamCorrected(ours.parameters(), lr=0.01, weight_decay=0.1)
    b = torch.optim.AdamW(theirs.parameters(), lr=0.01, weight_decay=0.1)
    for _ in range(20):
        x = torch.randn(8, 5)
        for model, optimizer in ((ours, a), (theirs, b)):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
    assert torch.allclose(ours.weight, theirs.weight, atol=1e-6)


def test_adam_corrected_sees_the_signal_under_the_noise():
    """Two entries with gradients 1 and 0.1 under noise of variance 4: the second moments come out as 1 and 0.01."""
    weight = nn.Parameter(torch.zeros(2, 2000))
    optimizer = AdamCorrected([weight], lr=1e-4, betas=(0.9, 0.99))
    signal = torch.tensor([1.0, 0.1])[:, None].expand(2, 2000)
    optimizer.noise = lambda _: 4.0
    for _ in range(600):
        weight.grad = signal + 2.0 * torch.randn(2, 2000)
        optimizer.step()
    second = optimizer.state[weight]["exp_avg_sq"].mean(1)
    assert second[0] == pytest.approx(1.0, abs=0.1) and second[1] == pytest.approx(0.01, abs=0.1)
    uncorrected = torch.optim.Adam([weight], lr=1e-4, betas=(0.9, 0.99))
    for _ in range(600):
        weight.grad = signal + 2.0 * torch.randn(2, 2000)
        uncorrected.step()
    assert uncorrected.state[weight]["exp_avg_sq"].mean(1)[1] > 3


@pytest.mark.parametrize("sides", ["both", "left", "right"])
def test_adam_corrected_is_told_the_noise_of_a_run(sides):
    """With no examples' gradient (all zero), what is left of the squares after correction is near zero on average."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 40, bias=False), nn.Linear(40, 9))
    for p in model.parameters():
        p.data *= 0.1
    optimizer = AdamCorrected(model.parameters(), lr=0.0, betas=(0.0, 0.999))
    data = [(torch.zeros(40), 0)] * 50
    method = rgp.RGP(rank=3, sides=sides, source="random", head_scale=0.5)
    run = rgp.privatize(
        model, optimizer, data, method=method, noise_multiplier=2.0, clip=3.0, batch_size=20, steps=40, seed=0
    )
    squares = {}
    for x, y in run:
        if not run.step(nn.functional.cross_entropy(model(x), y) * 0):
            continue
        for name, p in model.named_parameters():
            squares[name] = squares.get(name, 0) + optimizer.state[p]["exp_avg"].square()
    run.close()
    for name, p in model.named_parameters():
        noise = (squares[name] / 40).mean()
        left = optimizer.state[p]["exp_avg_sq"].mean() / (1 - 0.999**40)  # a plain mean over the steps, nearly
        assert noise > 0 and abs(left) < 0.25 * noise, name


@pytest.mark.parametrize(("option", "value"), [("lr", -1.0), ("floor", 0.0), ("floor", 2.0), ("betas", (0.9, 1.0))])
def test_adam_corrected_refuses(option, value):
    with pytest.raises(ValueError, match=option):
        AdamCorrected([nn.Parameter(torch.zeros(2))], **{option: value})
