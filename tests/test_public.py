"""Carriers from public inputs without labels: where they point, and that their random numbers are nobody else's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rgp
from helpers import privatize, seeded


def net(classes: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 10), nn.Tanh(), nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, classes)).double()


def rows(count: int, *, seed: int = 0) -> Tensor:
    return torch.randn(count, 12, generator=seeded(seed), dtype=torch.float64)


def outside(gradient: Tensor, L: Tensor, R: Tensor) -> float:
    """Share of the gradient's energy that neither carrier reaches."""
    left = gradient - L @ (L.T @ gradient)
    rest = left - (left @ R.T) @ R
    return float(rest.square().sum() / gradient.square().sum())


@pytest.mark.parametrize("label", [0, 1])
def test_with_two_classes_an_input_shows_its_gradient_whatever_its_label(label):
    model, x = net(2), rows(1)
    loss = rgp.without_labels(lambda: model(x))
    data = [(rows(1, seed=3)[0], 0)] * 8
    run = privatize(model, data, method=rgp.RGP(rank=1, source="public"), steps=1, public_loss=loss)
    next(iter(run))
    with torch._C.DisableTorchFunction():
        (gradient,) = torch.autograd.grad(F.cross_entropy(model(x), torch.tensor([label])), [model[2].weight])
    assert outside(gradient, *run.carriers["2.weight"]) < 1e-12
    run.close()


def test_inputs_of_the_same_kind_show_more_than_weights_and_chance():
    """Inputs on a plane: their gradients share its few directions."""
    plane = torch.randn(2, 12, generator=seeded(5), dtype=torch.float64)

    def on_plane(count, seed):
        return torch.randn(count, 2, generator=seeded(seed), dtype=torch.float64) @ plane

    public, private = on_plane(16, 1), on_plane(64, 2)
    left = {}
    for source in ("public", "weight", "random"):
        model = net()
        loss = rgp.without_labels(lambda model=model: model(public)) if source == "public" else None
        data = [(x, i % 3) for i, x in enumerate(private)]
        run = privatize(model, data, method=rgp.RGP(rank=2, source=source), steps=1, public_loss=loss)
        next(iter(run))
        with torch._C.DisableTorchFunction():
            labels = torch.arange(64) % 3
            (gradient,) = torch.autograd.grad(F.cross_entropy(model(private), labels), [model[0].weight])
        left[source] = outside(gradient, *run.carriers["0.weight"])
        run.close()
    assert left["public"] < 1e-12
    assert min(left["weight"], left["random"]) > 0.1


def test_no_class_is_preferred_and_what_all_share_cancels():
    model = net()
    (gradient,) = torch.autograd.grad(rgp.without_labels(lambda: model(rows(4)))(), [model[4].bias])
    assert gradient.abs().max() > 0.01 and abs(float(gradient.sum())) < 1e-12
    single = net(1)
    (gradient,) = torch.autograd.grad(rgp.without_labels(lambda: single(rows(4)))(), [single[4].bias])
    assert float(gradient.abs()) > 0.01  # one output: nothing to share


def test_random_numbers_are_fresh_at_every_step_repeatable_and_leave_the_users_alone():
    def carriers():
        model, seen = net(), []
        data = [(x, i % 3) for i, x in enumerate(rows(64, seed=2))]
        loss = rgp.without_labels(lambda: model(rows(6, seed=4)))
        method = rgp.RGP(rank=1, source="public")
        run = privatize(model, data, method=method, steps=3, batch_size=16, public_loss=loss)
        for group in run.optimizer.param_groups:
            group["lr"] = 0.0  # the same weights: what differs between steps is the random weights
        drawn = torch.get_rng_state()
        for x, y in run:
            seen.append(run.carriers["2.weight"][0].clone())
            run.step(F.cross_entropy(model(x), y))
        assert torch.equal(torch.get_rng_state(), drawn)
        run.close()
        return seen

    first, again = carriers(), carriers()
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.allclose(first[0].abs(), first[-1].abs(), atol=1e-3)


@pytest.mark.parametrize("found", [torch.tensor(1.0), None, [1.0]])
def test_what_is_not_logits_is_refused(found):
    with pytest.raises(TypeError, match="logits must return a tensor"):
        rgp.without_labels(lambda: found)()
