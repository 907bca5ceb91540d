"""The user's own optimizers and schedulers do in a private run what they do in plain training."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import rgp
from helpers import parameters_of, privatize
from toys import EXAMPLES, examples, loss_of, start, toy

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


def test_without_clip_and_noise_dpsgd_is_plain_training():
    plain, private = toy(), toy()
    data = examples()
    x, y = torch.stack([x for x, _ in data]), torch.tensor([y for _, y in data])
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5, momentum=0.9)
    for _ in range(5):
        optimizer.zero_grad()
        loss_of(plain, (x, y)).backward()
        optimizer.step()
    own = torch.optim.SGD(private.parameters(), lr=0.5, momentum=0.9)
    with privatize(private, data, optimizer=own, method=rgp.DPSGD(), clip=None, steps=5, microbatch_size=5) as run:
        for batch in run:
            run.step(loss_of(private, batch))
    for a, b in zip(plain.parameters(), private.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "AdamW, amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_does_what_it_does_in_plain_training(name):
    plain, private = toy(), toy()
    data = examples()
    batch = torch.stack([x for x, _ in data]), torch.tensor([y for _, y in data])
    ours, theirs = OPTIMIZERS[name](private.parameters()), OPTIMIZERS[name](plain.parameters())
    for _ in range(4):
        theirs.zero_grad()
        loss_of(plain, batch).backward()
        theirs.step()
    with privatize(private, data, optimizer=ours, method=rgp.DPSGD(), clip=None, steps=4, microbatch_size=4) as run:
        for part in run:
            run.step(loss_of(private, part))
    for a, b in zip(plain.parameters(), private.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)


def test_parameter_groups_keep_their_own_rates():
    model = toy()
    before = parameters_of(model)
    groups = [
        {"params": model[0].parameters(), "lr": 0.0},
        {"params": [*model[2].parameters(), *model[4].parameters()]},
    ]
    with privatize(model, examples(), optimizer=torch.optim.SGD(groups, lr=1.0)) as run:
        for batch in run:
            run.step(loss_of(model, batch))
    moved = {name for name, value in parameters_of(model).items() if not torch.equal(value, before[name])}
    assert moved == {"2.weight", "2.bias", "4.weight", "4.bias"}


# -------- optimizers and schedulers


def test_an_optimizer_that_lacks_a_parameter():
    model = toy()
    with pytest.raises(ValueError, match=r"lacks 2 parameters that the plan trains, '4.weight'.*overrides"):
        start(model, optimizer=torch.optim.SGD([*model[0].parameters(), *model[2].parameters()], lr=1))
    with start(
        model,
        optimizer=torch.optim.SGD(model[:3].parameters(), lr=1),
        method=rgp.RGP(rank=2, overrides={"4.*": "frozen"}),
    )[1]:
        pass


def test_an_optimizer_with_a_tensor_of_someone_else():
    model = toy()
    other = nn.Parameter(torch.zeros(3))
    with pytest.raises(ValueError, match="1 tensors that are not parameters of the model"):
        start(model, optimizer=torch.optim.SGD([*model.parameters(), other], lr=1))


def test_an_optimizer_that_gets_another_tensor_later():
    _, run = start()
    run.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    with pytest.raises(ValueError, match="not parameters of the model"):
        next(iter(run))
    run.close()


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.SGD(p, lr=1, weight_decay=0.5, momentum=0.9),
        lambda p: torch.optim.AdamW(p, lr=1, weight_decay=0.5),
    ],
    ids=["SGD", "AdamW"],
)
def test_frozen_parameters_do_not_move(optimizer):
    model = toy()
    model[0].bias.requires_grad_(False)
    before = parameters_of(model)
    method = rgp.RGP(rank=2, overrides={"2.*": "frozen"})
    with start(model, optimizer=optimizer(model.parameters()), method=method, batch_size=1, steps=8)[1] as run:
        for batch in run:
            run.step(loss_of(model, batch))
            assert all(model.get_parameter(n).grad is None for n in ("0.bias", "2.weight", "2.bias"))
    after = parameters_of(model)
    assert {n for n in after if torch.equal(after[n], before[n])} == {"0.bias", "2.weight", "2.bias"}


def test_lbfgs_is_refused():
    model = toy()
    with pytest.raises(ValueError, match="LBFGS"):
        start(model, optimizer=torch.optim.LBFGS(model.parameters()))


def test_the_users_own_scheduler():
    model = toy()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Try method")  # the toy is small
        with start(model, optimizer=optimizer, batch_size=EXAMPLES)[1] as run:
            rates = []
            for batch in run:
                if run.step(loss_of(model, batch)):
                    rates.append(optimizer.param_groups[0]["lr"])
                    scheduler.step()
    assert rates == pytest.approx([1.0, 0.75, 0.25])
