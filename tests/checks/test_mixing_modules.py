"""Models that mix examples are refused, and batch norm is replaced on request."""

# ruff: noqa: PT012 (the loop is what raises)

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rgp
from helpers import check_exact, seeded
from toys import EXAMPLES, captures, examples, loss_of, losses_of, start, toy

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


# -------- modules that mix examples


def norm_model(norm: nn.Module) -> nn.Sequential:
    return nn.Sequential(
        nn.Unflatten(1, (2, 4)), nn.Conv1d(2, 6, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(12, 3)
    ).double()


def test_batch_norm_is_refused_and_fixed_on_request():
    model = norm_model(nn.BatchNorm1d(6))
    model[2].weight.data.uniform_(generator=seeded(1))
    with pytest.raises(rgp.UnsupportedError, match=r"rgp\.fix.*'2' is BatchNorm1d"):
        start(model)
    weight = model[2].weight
    assert rgp.fix(model) is model
    assert isinstance(model[2], nn.GroupNorm)
    assert model[2].weight is weight
    check_exact(model, examples(), losses_of, microbatch_size=5)


def test_fix_finds_every_kind_at_any_depth():
    model = nn.ModuleDict(
        {
            "a": nn.Sequential(nn.Sequential(nn.BatchNorm2d(48))),
            "b": nn.BatchNorm3d(7, affine=False),
            "c": nn.SyncBatchNorm(64),
        }
    )
    rgp.fix(model, groups=32)
    assert (model["a"][0][0].num_groups, model["b"].num_groups, model["c"].num_groups) == (24, 7, 32)
    assert model["b"].weight is None
    assert not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())
    assert rgp.fix(nn.Linear(2, 2)) is not None
    with pytest.raises(rgp.UnsupportedError):
        rgp.fix(nn.BatchNorm1d(3))


def test_batch_norm_switched_to_training_later_is_refused():
    model = norm_model(nn.BatchNorm1d(6))
    model[2].eval()
    model, run = start(model)
    model.train()
    with pytest.raises(rgp.UnsupportedError, match="batch norm"):
        for batch in run:
            run.step(loss_of(model, batch))
    assert run.epsilon() == 0
    run.close()


def test_a_model_that_mixes_examples_is_refused():
    class Centred(nn.Module):
        def forward(self, x):
            return x - x.mean(0)

    model = nn.Sequential(nn.Linear(8, 16), Centred(), nn.Linear(16, 3)).double()
    model, run = start(model, batch_size=EXAMPLES)
    with pytest.raises(rgp.UnsupportedError, match="the model mixes the examples"):
        for batch in run:
            run.step(loss_of(model, batch))
    assert run.epsilon() == 0
    run.close()


@pytest.mark.parametrize("bad", [0, 1, EXAMPLES - 1])
def test_an_example_that_is_not_finite_does_not_hide_the_mixing(bad):
    class Centred(nn.Module):
        def forward(self, x):
            return x - x.mean(0)

    model = nn.Sequential(nn.Linear(8, 16), Centred(), nn.Linear(16, 3)).double()
    data = [(x * math.nan if i == bad else x, y) for i, (x, y) in enumerate(examples())]
    model, run = start(model, data=data, batch_size=EXAMPLES)
    with pytest.raises(rgp.UnsupportedError, match="the model mixes the examples"):
        for batch in run:
            run.step(loss_of(model, batch))
    assert run.epsilon() == 0
    run.close()


def test_several_rows_for_each_example_are_not_guessed():
    """Two views of each example: cat puts them far apart, stack and flatten next to each other. Shapes cannot tell."""
    views = {"apart": lambda x: torch.cat([x, 2 * x]), "together": lambda x: torch.stack([x, 2 * x], 1).flatten(0, 1)}
    for name, both in views.items():

        def losses(model, batch, name=name, both=both):
            found = F.cross_entropy(model(both(batch[0])), both(batch[1]) // 2 % 3, reduction="none")
            return found.view(2, -1).sum(0) if name == "apart" else found.view(-1, 2).sum(1)

        if name == "together":
            check_exact(toy(), examples(), losses, microbatch_size=4)
        else:
            with pytest.raises(rgp.UnsupportedError, match="when only other examples"):
                check_exact(toy(), examples(), losses, microbatch_size=4)
    assert captures() == 0
