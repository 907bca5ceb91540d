"""Rules that users register for operations of their own."""

# ruff: noqa: PT012 (the loop is what raises)

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import rgp
from helpers import check_exact, seeded
from toys import examples, loss_of, losses_of, start

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


# -------- a rule of the user's own


class Outer(torch.autograd.Function):
    """y = x W^T by an operation of the user's own, which no built-in rule knows."""

    @staticmethod
    def forward(ctx, x, W):
        ctx.save_for_backward(x, W)
        return x @ W.T

    @staticmethod
    def backward(ctx, g):
        x, W = ctx.saved_tensors
        return g @ W, g.flatten(0, -2).T @ x.flatten(0, -2)


def own_product(x: Tensor, W: Tensor) -> Tensor:
    if torch.overrides.has_torch_function((x, W)):
        return torch.overrides.handle_torch_function(own_product, (x, W), x, W)
    return Outer.apply(x, W)


class OwnLayer(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.randn(size, size, generator=seeded(2)) / size**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return own_product(x, self.W)


@pytest.fixture
def own_rule():
    from rgp.rules import RULES, register

    @register(own_product)
    def gradients(m, grad, x, W):
        return {1: torch.einsum("mp,md->mpd", grad, x)}

    yield
    del RULES[own_product]


@pytest.mark.parametrize("deferred", [False, True], ids=["dense", "deferred"])
@pytest.mark.parametrize(
    "method", [rgp.RGP(rank=2), rgp.RGP(rank=2, sides="left"), rgp.DPSGD()], ids=["rgp", "left", "dpsgd"]
)
def test_a_registered_rule(own_rule, method, deferred, monkeypatch):
    if deferred:
        monkeypatch.setattr("rgp.slots.LARGEST_DENSE", 0)
    model = nn.Sequential(nn.Linear(8, 8), OwnLayer(8), nn.Tanh(), OwnLayer(8), nn.Linear(8, 3)).double()
    plan = check_exact(model, examples(), losses_of, method=method, microbatch_size=5, family="a registered rule")
    assert plan["1.W"].treatment == ("exact" if isinstance(method, rgp.DPSGD) else "carried")


def test_without_a_rule_the_parameter_is_named():
    model = nn.Sequential(nn.Linear(8, 8), OwnLayer(8), nn.Linear(8, 3)).double()
    model, run = start(model, method=rgp.RGP(rank=2, fallback="error"))
    with pytest.raises(rgp.UnsupportedError, match=r"'1.W'.*own_product.*overrides.*register a rule"):
        for batch in run:
            run.step(loss_of(model, batch))
    run.close()
    check_exact(model, examples(), losses_of, method=rgp.RGP(rank=2, overrides={"1.W": "frozen"}))


def test_a_rule_with_the_wrong_shape_is_told_so(own_rule):
    from rgp.rules import register

    register(own_product)(lambda m, grad, x, W: {1: grad})
    model, run = start(nn.Sequential(nn.Linear(8, 8), OwnLayer(8), nn.Linear(8, 3)).double())
    with pytest.raises(ValueError, match=r"own_product.*'1.W'.*must be \(\d, 8, 8\)"):
        for batch in run:
            run.step(loss_of(model, batch))
    run.close()
