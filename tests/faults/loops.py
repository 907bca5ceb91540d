"""Faults in the loop."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import nn

import rgp
from faults.small import (
    SIZE,
    STEPS,
    TABLE,
    check_as_if_nothing_had_been,
    fault,
    loss_of,
    start,
    train,
)
from rgp.ledger import Ledger


@fault
def backward(_):
    run = start()
    for batch in run:
        loss_of(run, batch).backward()


@fault
def optimizer_step(_):
    run = start()
    for batch in run:
        run.step(loss_of(run, batch))
        run.optimizer.step()


@fault
def skipped_batch(_):
    for _batch in start():
        continue


@fault
def swallowed_error(_):
    run = start(probe=False)

    def fail(*_args):
        raise torch.OutOfMemoryError

    run._step.gradients.clip_and_add = fail
    for batch in run:
        with pytest.raises(torch.OutOfMemoryError):
            run.step(loss_of(run, batch))


@fault
def step_twice(_):
    run = start()
    for batch in run:
        loss = loss_of(run, batch)
        run.step(loss)
        run.step(loss)


@fault
def detached_loss(_):
    run = start()
    for batch in run:
        with torch.no_grad():
            loss = loss_of(run, batch)
        run.step(loss)


@fault
def unreduced_loss(_):
    run = start()
    for x, y in run:
        run.step(nn.functional.cross_entropy(run.model(x), y, reduction="none"))


@fault
def coupled_loss(_):
    run = start(batch_size=SIZE)
    for batch in run:
        run.step(loss_of(run, batch) ** 2)


@fault
def ranking_loss(_):
    run = start(batch_size=SIZE)
    for x, _y in run:
        scores = run.model(x)[:, 0]
        run.step((1 - (scores[:, None] - scores)).relu().mean())


@fault
def foreign_parameter(_):
    centres, run = nn.Parameter(torch.ones(2, 2)), start(batch_size=SIZE)
    for x, y in run:
        run.step(nn.functional.cross_entropy(run.model(x) @ centres, y))


@fault
def uneven_mean(_):
    run = start(batch_size=SIZE)
    for x, y in run:
        run.step(nn.functional.cross_entropy(run.model(x), y, weight=torch.tensor([1.0, 2.0])))


@fault
def counted_divisor(_):
    run = start(batch_size=SIZE)
    for x, y in run:
        run.step(nn.functional.cross_entropy(run.model(x), y, reduction="sum") / (y > 0).sum())


@fault
def clip_grad(_):
    run = start()
    for batch in run:
        run.step(loss_of(run, batch))
        nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)


@fault
def left_loop(_):
    run = train(start(), 2)
    for batch in run:
        assert not run.step(loss_of(run, batch))  # one micro-batch of several
        break
    check_as_if_nothing_had_been(run)


@fault
def second_loop(_):
    run = train(start(), 2)
    first = iter(run)
    assert not run.step(loss_of(run, next(first)))
    check_as_if_nothing_had_been(run)
    with pytest.raises(rgp.WrongUseError, match="another loop"):
        next(first)
    run = start(microbatch_size=2)
    first, second = iter(run), iter(run)
    run.step(loss_of(run, next(second)))
    with pytest.raises(rgp.WrongUseError, match="another loop"):
        next(first)  # which had not begun yet


@fault
def forked(_):
    run = start()
    with mock.patch("os.getpid", return_value=-1):
        train(run)


@fault
def unfrozen_in_the_loop(_):
    model = nn.Sequential(nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 2))
    run = start(model=model, batch_size=SIZE, microbatch_size=2)
    for i, batch in enumerate(run):
        model[0].weight.requires_grad_(i == 1)
        run.step(loss_of(run, batch))


@fault
def after_close(_):
    run = train(start(), 2)
    run.close()
    train(run)


@fault
def replaced_parameter(_):
    run = train(start(), 2)
    run.model[0].weight = nn.Parameter(torch.zeros(5, 3))
    train(run)


@fault
def frozen_later(_):
    run = train(start(), 2)
    run.model[0].requires_grad_(False)
    train(run)


@fault
def tuning(tmp_path):
    """What the table says: two runs, two ledgers. The text about it is in SECURITY.md."""
    runs = [train(start(tmp_path / str(i), seed=i)) for i in range(2)]
    assert [Ledger.open(tmp_path / str(i)).count for i in range(2)] == [STEPS, STEPS]
    assert runs[0].epsilon() == runs[1].epsilon()
    assert "tuning" in (TABLE.parents[1] / "SECURITY.md").read_text().lower()
