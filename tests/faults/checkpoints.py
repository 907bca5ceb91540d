"""Faults of checkpoints: killed runs, and runs that do not belong to them."""

from __future__ import annotations

import shutil

import pytest
import torch

import rgp
from faults.small import (
    STEPS,
    again,
    check_as_if_nothing_had_been,
    check_charged_again,
    data,
    fault,
    loss_of,
    saved,
    small_model,
    start,
    train,
)
from rgp import checkpoint
from rgp.ledger import FILE


@fault
def killed(tmp_path):
    """In process here; tests/repository/test_torture.py does it with SIGKILL."""
    run = saved(tmp_path)
    for batch in run:
        run.step(loss_of(run, batch))
        break
    check_as_if_nothing_had_been(again(tmp_path))


@fault
def killed_before_use(tmp_path):
    run = saved(tmp_path)

    def die(*_args):
        raise KeyboardInterrupt

    run.optimizer.step = die
    with pytest.raises(KeyboardInterrupt):
        train(run)
    assert run.ledger.count == run.step_index + 1
    check_as_if_nothing_had_been(again(tmp_path))


@fault
def killed_while_saving(tmp_path):
    for name in ("rename", "replace"):
        folder = tmp_path / name
        run = saved(folder)

        def die(*_args):
            raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoint.os, name, die)
            with pytest.raises(KeyboardInterrupt):
                run.save(folder)
        resumed = again(folder)
        assert resumed.step_index == 2
        check_as_if_nothing_had_been(resumed)


@fault
def no_checkpoint(tmp_path):
    train(start(tmp_path), 2)
    again(tmp_path)


@fault
def missing_ledger(tmp_path):
    saved(tmp_path)
    (tmp_path / FILE).unlink()
    again(tmp_path)


@fault
def rollback(tmp_path):
    run = train(start(tmp_path), 1)
    shutil.copy(tmp_path / FILE, tmp_path / "copy")
    train(run, 3).save(tmp_path)
    shutil.move(tmp_path / "copy", tmp_path / FILE)
    again(tmp_path)


@fault
def other_size(tmp_path):
    saved(tmp_path)
    again(tmp_path, dataset=data(39))


@fault
def other_batch_size(tmp_path):
    saved(tmp_path)
    again(tmp_path, batch_size=9)


@fault
def other_method(tmp_path):
    saved(tmp_path)
    again(tmp_path, method=rgp.DPSGD())


@fault
def other_model(tmp_path):
    saved(tmp_path)
    again(tmp_path, model=small_model(6))


@fault
def other_optimizer(tmp_path):
    saved(tmp_path)
    again(tmp_path, optimizer=torch.optim.Adam)


@fault
def other_microbatch(tmp_path):
    saved(tmp_path)
    check_charged_again(again(tmp_path, microbatch_size=3))


@fault
def other_data(tmp_path):
    saved(tmp_path)
    check_charged_again(again(tmp_path, dataset=data(seed=5)))


@fault
def secure_noise(tmp_path):
    pytest.importorskip("randomgen")
    saved(tmp_path, secure_noise=True)
    check_charged_again(again(tmp_path))


@fault
def spent_early(tmp_path):
    saved(tmp_path, budget=rgp.Budget(3.0, 1e-5))
    run = train(again(tmp_path, microbatch_size=3))
    assert run.step_index < STEPS and run.epsilon() <= 3.0


@fault
def secret_missing(tmp_path):
    saved(tmp_path)
    (tmp_path / "secret.json").unlink()
    check_charged_again(again(tmp_path))


@fault
def secret_readable(tmp_path):
    saved(tmp_path)
    (tmp_path / "secret.json").chmod(0o644)
    check_as_if_nothing_had_been(again(tmp_path))


@fault
def old_run(tmp_path):
    run = saved(tmp_path)
    again(tmp_path)
    train(run)


@fault
def other_folder(tmp_path):
    saved(tmp_path / "a").save(tmp_path / "b")
