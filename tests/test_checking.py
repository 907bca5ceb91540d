"""`rgp.check`: a right model passes, a wrong one is named, and the model is left alone."""

from __future__ import annotations

import copy
import math
from collections import UserDict

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rgp
from helpers import seeded

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


# -------- check


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.body, self.head = nn.Embedding(20, 12), nn.Linear(12, 12), nn.Linear(12, 5)

    def forward(self, ids):
        return self.head(torch.tanh(self.body(self.table(ids))))


def padded() -> dict[str, Tensor]:
    lengths = torch.tensor([6, 2, 4, 1])
    ids = torch.randint(1, 20, (4, 6), generator=seeded(3))
    return {"ids": ids, "mask": torch.arange(6) < lengths[:, None], "tags": ids % 5}


def over_all_tokens(model, batch):
    losses = F.cross_entropy(model(batch["ids"]).transpose(1, 2), batch["tags"], reduction="none")
    return losses[batch["mask"]].mean()


def over_each_example(model, batch):
    losses = F.cross_entropy(model(batch["ids"]).transpose(1, 2), batch["tags"], reduction="none")
    return (losses * batch["mask"]).sum(1) / batch["mask"].sum(1)


def test_check_agrees_with_a_right_model_and_leaves_it_alone():
    model = Tagger()
    state = copy.deepcopy(model.state_dict())
    for method in (None, rgp.DPSGD(), rgp.RGP(rank=2, overrides={"table.weight": "exact"}, head_scale=0.1)):
        result = rgp.check(model, padded(), over_each_example, loss_reduction="none", method=method)
        assert result.ok, result
        assert result.worst < 1e-12
        assert set(result.errors) == {e.name for e in rgp.make_plan(model, method or rgp.RGP()).trained}
        assert "exact" in str(result)
        assert "body.weight" in str(result)
    assert rgp.check(model, padded(), lambda m, b: over_each_example(m, b).mean()).ok
    assert rgp.check(model, padded(), lambda m, b: over_each_example(m, b).sum(), loss_reduction="sum").ok
    assert model.training
    assert all(p.dtype == torch.float32 and p.requires_grad and p.grad is None for p in model.parameters())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_check_catches_a_loss_that_mixes_examples():
    result = rgp.check(Tagger(), padded(), over_all_tokens)
    assert not result.ok
    assert result.worst > 0.1
    assert "WRONG" in str(result)
    assert "NOT exact" in str(result)


def test_check_catches_a_wrong_reduction():
    assert not rgp.check(Tagger(), padded(), lambda m, b: over_each_example(m, b).sum()).ok


def test_check_in_the_models_own_precision():
    assert rgp.check(Tagger(), padded(), lambda m, b: over_each_example(m, b).mean(), double=False).ok


def test_check_with_an_example_without_gradient_and_a_mapping_that_is_no_dict():
    def losses(model, batch):
        return over_each_example(model, batch) * (batch["ids"][:, 0] != padded()["ids"][1, 0])

    assert rgp.check(Tagger(), UserDict(padded()), losses, loss_reduction="none").ok


def test_check_sees_a_parameter_that_goes_around_the_capture():
    model = Tagger()
    model.body.register_forward_hook(lambda layer, inputs, output: output + kept(layer, inputs[0]))

    def kept(layer, x):  # an operation that is hidden from every mode
        with torch._C.DisableTorchFunction():
            return F.linear(x, layer.weight)

    assert not rgp.check(model, padded(), over_each_example, loss_reduction="none").ok


def test_check_does_not_take_nan_for_exact():
    def undefined(model, batch):
        return over_each_example(model, batch) / (batch["ids"][:, 0] != padded()["ids"][1, 0]).double().sqrt() * 0

    result = rgp.check(Tagger(), padded(), undefined, loss_reduction="none")
    assert not result.ok
    assert result.worst == math.inf


def test_check_needs_tensors():
    with pytest.raises(ValueError, match="no tensor"):
        rgp.check(Tagger(), ["text"], over_all_tokens)


class Autoencoder(nn.Module):
    def __init__(self, draw) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.decoder, self.draw = nn.Linear(6, 8), nn.Linear(4, 6), draw

    def forward(self, x: Tensor) -> Tensor:
        mean, log_variance = self.encoder(x).chunk(2, 1)
        return self.decoder(mean + self.draw(mean) * (log_variance / 2).exp())


DRAWS = {
    "randn_like": torch.randn_like,
    "randn": lambda x: torch.randn(x.shape, dtype=x.dtype),
    "in place": lambda x: torch.empty_like(x).normal_(),
    "a distribution": lambda x: torch.distributions.Normal(0, 1).sample(x.shape).to(x),
    "two draws": lambda x: torch.rand_like(x) - torch.randn(len(x), 1, dtype=x.dtype),
    "a mask": lambda x: torch.bernoulli(torch.full_like(x, 0.5)),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_check_of_a_model_that_draws_random_numbers(draw):
    """Each example gets the same ones alone as in the batch."""
    x = torch.randn(5, 6, generator=seeded(1))

    def loss(model, batch):
        return (model(batch) - batch).square().mean()

    assert rgp.check(Autoencoder(draw), x, loss, method=rgp.DPSGD()).worst < 1e-12

    def mixing(model, batch):
        return (model(batch) - batch).square().mean() * model(batch).std().detach()

    assert not rgp.check(Autoencoder(draw), x, mixing, method=rgp.DPSGD()).ok


def test_check_of_a_model_with_constants_in_float32():
    """The model becomes float64, which its constants, casts and class weights do not know."""
    table = torch.randn(4, 4, generator=seeded(2))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(self.layer(x).float() @ torch.ones(4, 4).tril(), table) @ table.to(torch.float32)

    def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], torch.tensor([1.0, 2, 3, 4]), reduction="none").mean()

    torch.manual_seed(0)
    batch = [torch.randn(5, 6), torch.tensor([0, 1, 2, 3, 1])]
    assert rgp.check(Model(), batch, loss, method=rgp.DPSGD()).worst < 1e-12
    assert torch.get_default_dtype() == torch.float32

    def mixing(model: nn.Module, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], torch.tensor([1.0, 2, 3, 4]))

    assert not rgp.check(Model(), batch, mixing, method=rgp.DPSGD()).ok


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
def test_a_model_that_keeps_a_computed_weight():
    """The old weight_norm leaves a tensor in the module that cannot be copied as it is."""
    model = nn.Sequential(torch.nn.utils.weight_norm(nn.Linear(4, 6)), nn.Tanh(), nn.Linear(6, 3))
    batch = (torch.randn(4, 4, generator=seeded(1)), torch.tensor([0, 1, 2, 1]))
    found = rgp.check(model, batch, lambda model, b: F.cross_entropy(model(b[0]), b[1]), method=rgp.DPSGD())
    assert found.ok
    assert len(found.errors) == 5
