"""Wrong turns inside the loop, and models that change under it: each is an error that says what to do."""

# ruff: noqa: PT012 (the loop is what raises)

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import rgp
from helpers import parameters_of
from toys import EXAMPLES, examples, loss_of, losses_of, start, toy

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


# -------- wrong turns inside the loop


def test_the_next_batch_without_a_step_is_an_error():
    _, run = start()
    with pytest.raises(rgp.WrongUseError, match=r"run\.step"):
        for _ in run:
            pass
    run.close()


def test_a_step_twice_or_outside_the_loop_is_an_error():
    model, run = start()
    with pytest.raises(rgp.WrongUseError, match="outside"):
        run.step(torch.zeros((), requires_grad=True))
    for batch in run:
        loss = loss_of(model, batch)
        run.step(loss)
        with pytest.raises(rgp.WrongUseError, match="twice"):
            run.step(loss)
    run.close()


WRONG_LOSSES = {
    "not scalar": (lambda model, batch: losses_of(model, batch), r"scalar.*shape \(\d,\).*loss_reduction='none'"),
    "detached": (lambda model, batch: loss_of(model, batch).detach(), "not attached"),
    "without graph": (lambda model, batch: torch.tensor(1.0), "not attached"),
    "a number": (lambda model, batch: loss_of(model, batch).item(), "float"),
    "nothing": (lambda model, batch: None, "NoneType"),
    "of another model": (lambda model, batch: loss_of(toy(), batch), "not attached to the model"),
    "of the input only": (lambda model, batch: batch[0].requires_grad_().sum(), "not attached to the model"),
}


@pytest.mark.parametrize("name", WRONG_LOSSES)
def test_wrong_losses(name):
    make, message = WRONG_LOSSES[name]
    model, run = start()
    before = parameters_of(model)
    with pytest.raises(rgp.WrongUseError, match=message):
        for batch in run:
            run.step(make(model, batch))
    assert run.epsilon() == 0
    assert all(torch.equal(a, b) for a, b in zip(before.values(), parameters_of(model).values(), strict=True))
    run.close()


def test_a_loss_per_example_must_have_their_number():
    model, run = start(loss_reduction="none")
    with pytest.raises(rgp.WrongUseError, match=r"'none'.*shape \(\d,\); got shape \(\)"):
        for batch in run:
            run.step(loss_of(model, batch))
    run.close()


def test_a_wrong_loss_can_be_corrected_on_the_spot():
    model, run = start()
    for batch in run:
        with pytest.raises(rgp.WrongUseError):
            run.step(losses_of(model, batch))
        run.step(loss_of(model, batch))
    assert run.step_index == 3
    run.close()


def test_a_loss_from_before_the_loop_is_refused():
    model, run = start()
    early = loss_of(model, next(iter(DataLoader(examples(), 4))))
    with pytest.raises(rgp.WrongUseError, match="outside the capture"):
        for _ in run:
            run.step(early)
    assert all(p.grad is None for p in model.parameters())
    run.close()


def test_a_parameter_that_goes_around_the_capture_is_refused():
    class Hidden(nn.Linear):
        def forward(self, x):
            with torch._C.DisableTorchFunction():
                return super().forward(x)

    model = nn.Sequential(nn.Linear(8, 16), Hidden(16, 3)).double()
    model, run = start(model)
    with pytest.raises(rgp.WrongUseError, match=r"'1.weight' was used outside the capture"):
        for batch in run:
            run.step(loss_of(model, batch))
    assert run.epsilon() == 0
    run.close()


def test_the_loss_of_the_last_batch_is_refused():
    model, run = start(batch_size=EXAMPLES)
    with pytest.raises((rgp.WrongUseError, RuntimeError)):
        kept = None
        for batch in run:
            kept = loss_of(model, batch) if kept is None else kept
            run.step(kept)
    assert run.epsilon() == 0
    run.close()


def user_clips(model, optimizer, loss):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def user_clips_values(model, optimizer, loss):
    torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)


def user_backward(model, optimizer, loss):
    loss.backward()


def user_autograd_backward(model, optimizer, loss):
    torch.autograd.backward(loss)


def user_optimizer_step(model, optimizer, loss):
    optimizer.step()


def user_scaler(model, optimizer, loss):
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss).backward()


def user_scaler_step(model, optimizer, loss):
    torch.amp.GradScaler("cpu", enabled=False).step(optimizer)


def user_scales(model, optimizer, loss):
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss)
    scaler.step(optimizer)


HABITS = [
    user_scales,
    user_clips,
    user_clips_values,
    user_backward,
    user_autograd_backward,
    user_optimizer_step,
    user_scaler,
    user_scaler_step,
]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("habit", HABITS)
def test_habits_from_plain_loops_get_an_error_that_names_run_step(habit, when):
    model, run = start()
    before = parameters_of(model)
    with pytest.raises(rgp.WrongUseError, match=r"run\.step"):
        for batch in run:
            loss = loss_of(model, batch)
            if when == "before":
                habit(model, run.optimizer, loss)
            run.step(loss)
            habit(model, run.optimizer, loss)
            if run.step_index:
                break
    if when == "before":
        assert run.epsilon() == 0
        assert all(torch.equal(a, b) for a, b in zip(before.values(), parameters_of(model).values(), strict=True))
    run.close()


def test_a_gradient_of_the_loss_taken_by_hand_does_not_count_twice():
    """Adversarial training and the like: what an earlier backward pass over this batch found must not be added up."""
    norms = []
    for by_hand in (False, True):
        model, run = start(seed=1)
        for x, y in run:
            x = x.requires_grad_()
            loss = loss_of(model, (x, y))
            if by_hand:
                torch.autograd.grad(loss, x, retain_graph=True)
            run.step(loss)
        norms.append(run.norms)
        run.close()
    assert torch.equal(*norms)


def test_zero_grad_by_habit_is_harmless():
    model, run = start()
    for batch in run:
        run.optimizer.zero_grad()
        run.step(loss_of(model, batch))
        run.optimizer.zero_grad(set_to_none=False)
    assert run.step_index == 3
    run.close()


# -------- models that change


def test_a_parameter_added_replaced_or_frozen_after_privatize():
    def added(model):
        model.extra = nn.Linear(3, 3)

    def replaced(model):
        model[0].weight = nn.Parameter(model[0].weight.detach().clone())

    def removed(model):
        model[0].bias = None

    def frozen(model):
        model[2].weight.requires_grad_(False)

    cases = {
        added: "'extra.weight' was added",
        replaced: "'0.weight' was replaced",
        removed: "'0.bias' was replaced or removed",
        frozen: "requires_grad of parameter '2.weight'",
    }
    for change, message in cases.items():
        model, run = start()
        change(model)
        with pytest.raises(rgp.WrongUseError, match=message):
            next(iter(run))
        assert run.epsilon() == 0
        run.close()
        model, run = start()
        with pytest.raises(rgp.WrongUseError, match=message):
            for batch in run:
                if run.step(loss_of(model, batch)):
                    change(model)
        assert run.ledger.count == 1
        run.close()


def test_load_state_dict_between_steps_is_fine():
    model, run = start()
    for batch in run:
        if run.step(loss_of(model, batch)):
            model.load_state_dict(toy().state_dict())
    assert run.step_index == 3
    run.close()


def test_a_parameter_that_no_step_used_is_reported():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle = nn.Linear(8, 3).double(), nn.Linear(8, 3).double()

        def forward(self, x):
            return self.used(x)

    model, run = start(Half())
    for batch in run:
        run.step(loss_of(model, batch))
    assert run.never_used == ("idle.weight", "idle.bias")
    with pytest.warns(UserWarning, match="idle.weight"):
        run.close()
