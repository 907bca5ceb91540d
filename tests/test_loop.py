"""The training loop as users write it, seen from outside."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rgp
from helpers import seeded
from toys import EXAMPLES, examples, loss_of, start, toy

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


# -------- the loop as it should be


def test_step_tells_where_a_logical_batch_ends():
    model, run = start(batch_size=EXAMPLES)
    ends, sizes, rehearsed = [], [], []
    for batch in run:
        ended = run.step(loss_of(model, batch))
        if run.rehearsing:
            rehearsed.append((len(batch[0]), ended))
            continue
        sizes.append(len(batch[0]))
        ends.append(ended)
    assert 0 < len(rehearsed) < 20 and all(size <= 4 and not ended for size, ended in rehearsed)
    assert ends == [False, False, True] * 3
    assert sizes == [4] * 9
    assert run.finished
    assert run.step_index == 3
    run.close()


def test_one_optimizer_step_per_logical_batch_and_the_model_stays_itself():
    model = toy()
    keys, ids, kind = list(model.state_dict()), [id(p) for p in model.parameters()], type(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    steps = []
    optimizer.register_step_post_hook(lambda *_: steps.append([p.grad is not None for p in model.parameters()]))
    with start(model, optimizer=optimizer, batch_size=EXAMPLES)[1] as run:
        for batch in run:
            run.step(loss_of(model, batch))
            assert all(p.grad is None for p in model.parameters())
            assert (type(model), list(model.state_dict()), [id(p) for p in model.parameters()]) == (kind, keys, ids)
    assert steps == [[True] * 6] * 3
    assert (type(model), list(model.state_dict()), [id(p) for p in model.parameters()]) == (kind, keys, ids)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert not optimizer._optimizer_step_pre_hooks


def test_epsilon_grows_from_zero():
    model, run = start(batch_size=2, steps=2)
    spent = [run.epsilon()]
    for batch in run:
        if run.step(loss_of(model, batch)):
            spent.append(run.epsilon())
            assert spent[-1] <= run.epsilon(quick=True) <= 1.02 * spent[-1]
    assert spent[0] == 0
    assert spent == sorted(set(spent))
    assert run.epsilon(delta=1e-3) < spent[-1]
    run.close()


def test_a_budget_is_met_and_not_exceeded():
    model, run = start(noise_multiplier=None, budget=rgp.Budget(epsilon=5.0, delta=1e-3), steps=4)
    for batch in run:
        run.step(loss_of(model, batch))
    assert 4.9 < run.epsilon() <= 5.0
    with pytest.raises(rgp.WrongUseError, match="nothing left for another"):
        iter(run)
    run.close()


@pytest.mark.parametrize(
    ("epochs", "batch_size", "steps"), [(3, 6, 6), (1, 5, 2), (0.5, 12, 1), (0.1, 1, 1), (2, 7, 3)]
)
def test_epochs_become_steps(epochs, batch_size, steps):
    _, run = start(epochs=epochs, steps=None, batch_size=batch_size)
    assert run.mechanism.steps == steps
    run.close()


def test_a_seed_repeats_a_run_and_no_seed_does_not():
    def train(**options):
        model, run = start(**options)
        with run:
            for batch in run:
                run.step(loss_of(model, batch))
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(train(seed=3), train(seed=3))
    assert not torch.equal(train(seed=3), train(seed=3 + 2**32))
    assert not torch.equal(train(seed=None), train(seed=None))


def test_dropout_differs_between_micro_batches_and_the_users_random_numbers_are_untouched():
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 3)).double()
    model, run = start(model, batch_size=EXAMPLES, probe=False)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    masks = []
    for batch in run:
        masks.append(F.dropout(torch.ones(64), 0.5))
        run.step(loss_of(model, batch))
    assert torch.equal(torch.rand(3), expected)
    assert len({tuple(m.tolist()) for m in masks}) == len(masks)
    run.close()


def test_both_carriers_are_shown_for_every_method():
    for sides in ("both", "left", "right", "alternate"):
        model, run = start(method=rgp.RGP(rank=2, sides=sides))
        for batch in run:
            assert set(run.carriers) == {"0.weight", "2.weight"}
            L, R = run.carriers["0.weight"]
            assert L.shape == (16, 2)
            assert R.shape == (2, 8)
            assert L.dtype == R.dtype == torch.float64
            run.step(loss_of(model, batch))
        run.close()
        assert run.carriers["2.weight"][0].shape == (12, 2)


def test_a_context_manager_closes_and_everything_is_as_it_was_found():
    model = toy()
    model[0].weight.requires_grad_(False)
    flags = [p.requires_grad for p in model.parameters()]
    with start(model, method=rgp.RGP(rank=2, overrides={"2.*": "frozen"}))[1] as run:
        assert [p.requires_grad for p in model.parameters()] == [False, True, False, False, True, True]
        for batch in run:
            run.step(loss_of(model, batch))
    assert [p.requires_grad for p in model.parameters()] == flags
    assert all(p.grad is None for p in model.parameters())
    run.optimizer.step()  # the user's own again
    run.close()


def test_a_closed_run_refuses_to_go_on():
    model, run = start()
    run.close()
    with pytest.raises(rgp.WrongUseError, match="closed"):
        iter(run)
    with pytest.raises(rgp.WrongUseError, match="closed"):
        run.step(torch.zeros(()))
    model, run = start()
    loop = iter(run)
    batch = next(loop)
    run.close()
    with pytest.raises(rgp.WrongUseError, match="closed"):
        run.step(loss_of(model, batch))
    with pytest.raises((rgp.WrongUseError, StopIteration)):
        next(loop)


def test_a_second_run_needs_the_first_one_closed():
    model = toy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = start(model, optimizer=optimizer)[1]
    with pytest.raises(rgp.WrongUseError, match=r"another run.*close"):
        start(model, optimizer=optimizer)
    first.close()
    with start(model, optimizer=optimizer)[1] as second:
        for batch in second:
            second.step(loss_of(model, batch))
    assert second.step_index == 3


# -------- no privacy


def test_without_noise_it_says_loudly_that_nothing_is_private():
    model = toy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="NOTHING IS PRIVATE"):
        run = rgp.privatize(model, optimizer, examples(), noise_multiplier=0.0, batch_size=4, steps=2)
    for batch in run:
        run.step(loss_of(model, batch))
    assert run.epsilon() == math.inf
    run.close()


# -------- evaluation


def test_evaluation_in_the_middle_just_works():
    def train(evaluate: bool):
        model, run = start(batch_size=EXAMPLES)
        x = torch.randn(7, 8, generator=seeded(4), dtype=torch.float64)
        for batch in run:
            if evaluate:
                with torch.no_grad():
                    inside = model(x)
                assert not inside.requires_grad
            run.step(loss_of(model, batch))
            if evaluate:
                model.eval()
                with torch.inference_mode():
                    model(x)
                x = x.detach().requires_grad_()
                (slope,) = torch.autograd.grad(model(x).sum(), x)  # with gradients, after the step
                assert slope.any()
                model.train()
        run.close()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(train(True), train(False))


def test_forward_passes_outside_the_loop_are_plain():
    model, run = start()
    y = model(torch.randn(5, 8, dtype=torch.float64))
    assert type(y.grad_fn).__name__ == "AddmmBackward0"
    for batch in run:
        run.step(loss_of(model, batch))
    assert type(model(batch[0]).grad_fn).__name__ == "AddmmBackward0"
    run.close()
