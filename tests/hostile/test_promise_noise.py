"""No noise on two sums: exceptions between noise and ledger, a second loop, forks, copies, other data after a crash."""

from __future__ import annotations

import copy
import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_silent_ways import data, mean, net, private
from torch import Tensor

import rgp
from rgp.ledger import Ledger
from rgp.noise import PhiloxNoise
from rgp.observing import Observer


class Watch(Observer):
    """Every noisy sum that was used, with the noise in it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.added: list[tuple[Tensor, Tensor]] = []  # the sum before noise, the noise
        self.used: list[tuple[Tensor, Tensor]] = []
        add = PhiloxNoise.add

        def spy(source: PhiloxNoise, total: Tensor, **options: Any) -> None:
            before = total.clone()
            add(source, total, **options)
            self.added.append((before, total - before))

        monkeypatch.setattr(PhiloxNoise, "add", spy)

    def released(self, step: int, noisy: Tensor) -> None:
        self.used.append(self.added[-1])

    def check(self) -> None:
        """Noise that was used on two sums that are not the same sum."""
        for i, (sum_a, noise_a) in enumerate(self.used):
            for sum_b, noise_b in self.used[:i]:
                alike = torch.allclose(noise_a, noise_b, atol=1e-4)
                assert not alike or torch.equal(sum_a, sum_b), "one noise on two sums"


def loop(run: rgp.Run, until: int | None = None, scale: float = 1.0) -> None:
    for x, y in run:
        run.step(mean(run.model, scale * x, y))
        if run.step_index == until:
            break


def resumed(folder: Path, rows: Any = None, **options: Any) -> rgp.Run:
    model = net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return rgp.resume(
            folder, model, torch.optim.SGD(model.parameters(), lr=0.1), data() if rows is None else rows, **options
        )


def fail_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, *, after: bool, at: int = 3) -> None:
    """The call number `at` raises, before or after its work."""
    whole, calls = getattr(owner, name), [0]

    def failing(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == at and not after:
            raise OSError("no more")
        found = whole(*args, **kwargs)
        if calls[0] == at:
            raise OSError("no more")
        return found

    monkeypatch.setattr(owner, name, failing)


@pytest.mark.parametrize("bands", [1, 3])
@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("where", ["ledger", "optimizer", "write"])
def test_an_error_around_the_release_and_another_loss(where, after, on_disk, bands, monkeypatch, tmp_path):
    """The loop is begun again with other inputs, so that the step comes out differently."""
    watch, model = Watch(monkeypatch), net()
    run = private(model, steps=6, batch_size=6, bands=bands, folder=tmp_path if on_disk else None, probe=False)
    run.observe(watch)
    owner, name = {
        "ledger": (Ledger, "append"),
        "optimizer": (type(run.optimizer), "step"),
        "write": (Ledger, "_put") if on_disk else (Ledger, "_write"),
    }[where]
    fail_once(monkeypatch, owner, name, after=after)
    failed = False
    try:
        loop(run)
    except (OSError, rgp.LedgerError):
        failed = True
    loop(run, scale=2.0)
    assert failed and run.step_index == 6
    assert len(watch.used) <= run.ledger.count, "whatever was used is on record"
    watch.check()


@pytest.mark.parametrize("bands", [1, 3])
def test_other_data_and_another_loss_after_a_crash(bands, monkeypatch, tmp_path):
    watch = Watch(monkeypatch)
    run = private(net(), steps=6, batch_size=6, bands=bands, folder=tmp_path, probe=False)
    run.observe(watch)
    run.save(tmp_path)
    loop(run, until=4)
    run.ledger.close()
    again = resumed(tmp_path, [(x + 1, y) for x, y in data()], probe=False)
    again.observe(watch)
    loop(again, scale=0.5)
    assert again.step_index == 6
    assert again.ledger.count == 4 + 6, "four were charged twice"
    watch.check()


def test_a_second_loop_with_another_loss(monkeypatch):
    watch = Watch(monkeypatch)
    run = private(net(), steps=6, probe=False)
    run.observe(watch)
    for scale in (1.0, 2.0, 3.0):
        for number, (x, y) in enumerate(run):
            run.step(mean(run.model, scale * x, y))
            if number == 2:
                break
    loop(run)
    watch.check()
    assert len(watch.used) == run.ledger.count == 6


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_fork_releases_nothing(on_disk, tmp_path):
    run = private(net(), steps=6, folder=tmp_path if on_disk else None, probe=False)
    loop(run, until=1)
    child = os.fork()
    if child == 0:
        try:
            loop(run)
        except rgp.LedgerError:
            os._exit(7)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    assert run.ledger.count == 1


PARTS: dict[str, Callable[[rgp.Run], Any]] = {
    "streams": lambda run: run._streams,
    "noise source": lambda run: run.releases.source,
    "releases": lambda run: run.releases,
    "chain": lambda run: run.releases.chain,
    "step": lambda run: run._step,
    "loop": lambda run: run._loop,
    "epoch": lambda run: next(run.epochs()),
}


@pytest.mark.parametrize("part", PARTS)
def test_no_part_that_makes_noise_can_be_copied(part):
    run = private(net(), steps=4, batch_size=6, bands=2)
    loop(run, until=2)
    for how in (copy.deepcopy, pickle.dumps):
        with pytest.raises((rgp.WrongUseError, TypeError, AttributeError)):
            how(PARTS[part](run))


def test_two_runs_from_the_system_share_no_noise(monkeypatch):
    watch = Watch(monkeypatch)
    for _ in range(2):
        run = private(net(), seed=None, steps=3, probe=False)
        run.observe(watch)
        loop(run)
    noises = torch.stack([noise for _, noise in watch.used])
    together = torch.corrcoef(noises) - torch.eye(len(noises))
    assert together.abs().max() < 6 / noises.shape[1] ** 0.5
