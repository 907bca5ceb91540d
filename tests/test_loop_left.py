"""Loops that are left early, by break, by an error or by Ctrl-C, and entered again."""

# ruff: noqa: PT012 (the loop is what raises)

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import rgp
from helpers import parameters_of
from toys import EXAMPLES, captures, examples, loss_of, start, toy

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


# -------- loops that are left early


def left_by_break(model, run):
    seen = []
    for batch in run:
        seen.append(batch[0].clone())
        run.step(loss_of(model, batch))
        break
    return seen


def left_before_step(model, run):
    seen = []
    for batch in run:
        seen.append(batch[0].clone())
        loss_of(model, batch)
        break
    return seen


def left_by_error(model, run, error: type[BaseException] = ValueError):
    seen = []
    try:
        for batch in run:
            seen.append(batch[0].clone())
            if len(seen) == 2:
                raise error("in the loop")
            run.step(loss_of(model, batch))
    except error:
        pass
    return seen


def left_by_interrupt(model, run):
    return left_by_error(model, run, KeyboardInterrupt)


class Interrupt(nn.Module):
    """Raises in the second forward pass of the loop, or in its backward pass."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.calls = where, 0

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.calls += 1
            if self.calls == 2:
                if self.where == "forward":
                    raise KeyboardInterrupt
                x.register_hook(self.stop)
        return x

    def stop(self, grad: Tensor) -> None:
        raise KeyboardInterrupt


@pytest.mark.parametrize("leave", [left_by_break, left_before_step, left_by_error, left_by_interrupt])
def test_a_loop_left_inside_a_logical_batch_releases_nothing_and_draws_the_same_again(leave):
    model, run = start(batch_size=EXAMPLES)
    before = parameters_of(model)
    seen = leave(model, run)
    assert captures() == 0
    assert run.epsilon() == 0
    assert run.ledger.count == run.step_index == 0
    assert all(torch.equal(a, b) for a, b in zip(before.values(), parameters_of(model).values(), strict=True))
    loss_of(model, next(iter(DataLoader(examples(), 4)))).backward()  # the model is an ordinary model meanwhile
    assert all(p.grad is not None for p in model.parameters())

    again = []
    for batch in run:
        again.append(batch[0].clone())
        run.step(loss_of(model, batch))
    assert all(torch.equal(a, b) for a, b in zip(seen, again, strict=False))
    assert run.step_index == run.ledger.count == 3
    run.close()

    undisturbed, other = start(batch_size=EXAMPLES)
    for batch in other:
        other.step(loss_of(undisturbed, batch))
    other.close()
    for a, b in zip(model.parameters(), undisturbed.parameters(), strict=True):
        assert torch.equal(a, b), "the partial sum of the loop that was left came back"


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_ctrl_c_inside_the_model(where):
    model = nn.Sequential(nn.Linear(8, 16), Interrupt(where), nn.Linear(16, 3)).double()
    model, run = start(model, batch_size=EXAMPLES, probe=False)
    with pytest.raises(KeyboardInterrupt):
        for batch in run:
            run.step(loss_of(model, batch))
    assert captures() == 0
    assert run.ledger.count == 0
    for batch in run:
        run.step(loss_of(model, batch))
    assert run.ledger.count == 3
    run.close()


def test_capture_is_off_after_an_exception_while_its_traceback_is_kept():
    model, run = start()

    def train():
        for batch in run:
            loss_of(model, batch)
            raise ValueError

    kept = None
    try:
        train()
    except ValueError as error:
        kept = error
    assert kept.__traceback__ is not None
    assert captures() == 0
    run.close()


def test_a_swallowed_failure_does_not_leave_a_batch_out():
    """An example that makes its micro-batch fail would decide over the others of that micro-batch."""
    model, run = start(batch_size=EXAMPLES)
    with pytest.raises(rgp.WrongUseError, match="Start the loop again"):
        for i, batch in enumerate(run):
            try:
                run.step(loss_of(model, batch) if i != 1 else loss_of(toy(), batch))
            except rgp.WrongUseError:
                continue
    assert run.ledger.count == 0
    for batch in run:
        run.step(loss_of(model, batch))
    assert run.ledger.count == 3
    run.close()


def test_a_loop_in_pieces_is_the_same_run():
    def train(pieces: bool):
        model, run = start(batch_size=EXAMPLES)
        while not run.finished:
            for batch in run:
                if run.step(loss_of(model, batch)) and pieces:
                    break
        run.close()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(train(True), train(False))


def test_a_second_loop_ends_the_first():
    model, run = start(batch_size=EXAMPLES)
    first = iter(run)
    next(first)
    second = iter(run)
    batch = next(second)
    with pytest.raises(rgp.WrongUseError, match="another loop"):
        next(first)
    run.step(loss_of(model, batch))
    assert next(second) is not None
    del second
    gc.collect()
    assert captures() == 0
    run.close()
