"""Every row of docs/faults.md. A row without a test fails, and so does a test without a row.

Where a row names an error or a warning, the test below must end in it, with the words that the row quotes.
"""

from __future__ import annotations

import builtins
import errno
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import rgp
from rgp import checkpoint, ledger
from rgp.ledger import FILE, Ledger

TABLE = Path(__file__).parents[1] / "docs" / "faults.md"
ROWS = [
    [cell.strip() for cell in line.strip("|\n").split("|")]
    for line in TABLE.read_text().splitlines()
    if line.startswith("|") and not line.startswith(("|-", "| fault"))
]
FAULTS: dict[str, Callable[[Path], None]] = {}


def fault(function: Callable[[Path], None]) -> Callable[[Path], None]:
    FAULTS[function.__name__] = function
    return function


def test_the_table_and_the_tests_are_the_same():
    names = [row[2] for row in ROWS]
    assert len(names) >= 20 and len(set(names)) == len(names)
    assert set(names) == set(FAULTS)


@pytest.mark.parametrize(("what", "gives", "name"), ROWS, ids=[row[2] for row in ROWS])
@pytest.mark.filterwarnings("ignore:noise_multiplier is 0")
def test_fault(what, gives, name, tmp_path):
    named = re.fullmatch(r'`(\w+)` "(.*)"', gives)
    if named is None:
        FAULTS[name](tmp_path)
        return
    kind = getattr(rgp, named[1], None) or getattr(builtins, named[1])
    expect = pytest.warns if issubclass(kind, Warning) else pytest.raises
    with expect(kind, match=re.escape(named[2])):
        FAULTS[name](tmp_path)


# ---------------------------------------------------------------------- a small run

SIZE, STEPS = 40, 6


def data(size: int = SIZE, seed: int = 0) -> list:
    x = torch.randn(size, 3, generator=torch.Generator().manual_seed(seed))
    return [(x[i], i % 2) for i in range(size)]


def small_model(width: int = 5) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2))


def start(folder=None, *, model=None, dataset=None, optimizer=torch.optim.SGD, **options) -> rgp.Run:
    model = small_model() if model is None else model
    options = {"method": rgp.RGP(rank=2), "batch_size": 8, "steps": STEPS, "microbatch_size": 5, "seed": 0, **options}
    if "budget" not in options:
        options = {"noise_multiplier": 1.0, **options}
    dataset = data() if dataset is None else dataset
    return rgp.privatize(model, optimizer(model.parameters(), lr=0.1), dataset, folder=folder, **options)


def again(folder, *, model=None, dataset=None, optimizer=torch.optim.SGD, **options) -> rgp.Run:
    model = small_model() if model is None else model
    optim = optimizer(model.parameters(), lr=0.1)
    return checkpoint.resume(folder, model, optim, data() if dataset is None else dataset, **options)


def loss_of(run: rgp.Run, batch) -> torch.Tensor:
    return nn.functional.cross_entropy(run.model(batch[0]), batch[1])


def train(run: rgp.Run, until: int | None = None) -> rgp.Run:
    for batch in run:
        if run.step(loss_of(run, batch)) and run.step_index == until:
            break
    return run


def saved(folder: Path, **options) -> rgp.Run:
    """Saved at 2, with releases 2 and 3 on record after that."""
    run = train(start(folder, **options), 2)
    run.save(folder)
    return train(run, 4)


def weight(run: rgp.Run) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in run.model.parameters()])


def check_as_if_nothing_had_been(run: rgp.Run) -> None:
    assert torch.equal(weight(train(run)), weight(train(start())))
    assert run.ledger.count == STEPS


def check_charged_again(run: rgp.Run) -> None:
    train(run)
    assert run.step_index == STEPS and run.ledger.count == STEPS + 2
    for step in (2, 3):
        digests = {r["digest"] for r in run.ledger.of_step(step)}
        assert len(digests) == 2


# ---------------------------------------------------------------------- the loop


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
    run = start()

    def fail(*_args):
        raise torch.OutOfMemoryError

    run._gradients.clip_and_add = fail
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
        run.step(nn.functional.cross_entropy(run.model(x), y, reduction="sum") / (y >= 0).sum())


@fault
def parts_called(_):
    run = start(batch_size=SIZE)
    for x, y in run:
        run.step(nn.functional.cross_entropy(run.model[2](run.model[0](x)), y))


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


# ---------------------------------------------------------------------- data


@fault
def iterable_dataset(_):
    class Endless(IterableDataset):
        def __iter__(self):
            yield from data()

    start(dataset=Endless())


@fault
def dataloader(_):
    start(dataset=DataLoader(data(), batch_size=4, shuffle=True))


@fault
def empty_dataset(_):
    start(dataset=[])


@fault
def large_batch(_):
    start(batch_size=41)


@fault
def empty_draw(_):
    run = start(batch_size=1, steps=12)
    steps, drawn = [], set()
    run.optimizer.register_step_post_hook(lambda *_args: steps.append(weight(run)))
    for batch in run:
        drawn.add(run.step_index)
        run.step(loss_of(run, batch))
    assert 0 < len(drawn) < 12  # a third of the draws or so is empty
    assert run.step_index == run.ledger.count == len(steps) == 12
    assert all(not torch.equal(a, b) for a, b in pairwise(steps))


@fault
def nan_example(_):
    bad = [(x if i % 2 else x * float("nan"), y) for i, (x, y) in enumerate(data())]
    run = train(start(dataset=bad))
    assert run.bad_examples > 0 and weight(run).isfinite().all()


@fault
def huge_example(_):
    def moved(scale):
        rows = [(x * scale if i == 0 else x * 0, y) for i, (x, y) in enumerate(data())]
        run = start(
            dataset=rows, batch_size=SIZE, steps=1, noise_multiplier=0.0, clip=0.5, method=rgp.DPSGD(), probe=False
        )
        before = weight(run)
        for x, _y in run:
            run.step(run.model[0](x).sum() / len(x))  # the gradient of one row, and biases
        return float((weight(train(run)) - before).norm()) * SIZE / 0.1

    assert moved(1e30) <= moved(0.0) + 0.5 * 1.0001


@fault
def mixup(_):
    def collate(items):
        x, y = torch.utils.data.default_collate(items)
        return 0.7 * x + 0.3 * x.roll(1, 0), y

    train(start(collate_fn=collate))


@fault
def raising_dataset(_):
    class Moody(list):
        angry = True

        def __getitem__(self, i):
            if self.angry and i == 7:
                raise OSError("unreadable image")
            return super().__getitem__(i)

    rows = Moody(data())
    run = start(dataset=rows)
    with pytest.raises(OSError, match="unreadable image"):
        train(run)
    assert run.ledger.count == run.step_index
    rows.angry = False
    check_as_if_nothing_had_been(run)


# ---------------------------------------------------------------------- models and optimizers


@fault
def batch_norm(_):
    start(model=nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)))


@fault
def own_statistics(_):
    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)
            self.register_buffer("mean", torch.zeros(3))

        def forward(self, x):
            self.mean.lerp_(x.mean(0), 0.1)
            return self.layer(x - self.mean)

    train(start(model=Centred(), probe=False))


@fault
def hidden_statistics(_):
    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)
            self.register_buffer("mean", torch.zeros(3))

        def forward(self, x):
            self.mean.data.lerp_(x.mean(0), 0.1)
            return self.layer(x - self.mean)

    train(start(model=Centred(), probe=False))


@fault
def changed_input(_):
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.layer = nn.RMSNorm(3), nn.Linear(3, 2)

        def forward(self, x):
            x = x.clone()
            x += self.norm(x)
            return self.layer(x)

    train(start(model=Residual()))


@fault
def complex_parameter(_):
    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.phase = nn.Linear(3, 2), nn.Parameter(torch.ones(3, dtype=torch.complex64))

        def forward(self, x):
            return self.layer((x * self.phase).real)

    train(start(model=Turned()))


@fault
def no_rule(_):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 2))

        def forward(self, x):
            return torch.cdist(x.unsqueeze(1), self.weight.T).squeeze(1)

    train(start(model=Odd(), method=rgp.DPSGD(fallback="error")))


@fault
def lstm(_):
    start(model=nn.Sequential(nn.LSTM(3, 2)))


@fault
def optimizer_lacks(_):
    model = small_model()
    rgp.privatize(model, torch.optim.SGD(model[0].parameters()), data(), batch_size=8, steps=2, noise_multiplier=1.0)


@fault
def lbfgs(_):
    start(optimizer=torch.optim.LBFGS)


# ---------------------------------------------------------------------- settings


@fault
def large_delta(_):
    start(delta=1 / SIZE)


@fault
def budget_and_noise(_):
    start(budget=rgp.Budget(8.0), noise_multiplier=1.0)


@fault
def no_clip(_):
    start(clip=None)


@fault
def no_noise(_):
    run = train(start(noise_multiplier=0.0))
    assert run.epsilon() == float("inf")


@fault
def reacting_schedule(_):
    levels = {"sigma": 2.0}
    run = start(noise_multiplier=lambda t: levels["sigma"])
    levels["sigma"] = 0.1
    train(run)
    assert {r["sigma"] for r in run.ledger.records} == {2.0} and run.noise_multiplier == 2.0


@fault
def plateau(_):
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    rgp.privatize(model, optimizer, data(), noise_multiplier=1.0, batch_size=8, steps=2, scheduler=scheduler)


@fault
def known_seed(tmp_path):
    start(tmp_path / "a", seed=3)
    start(tmp_path / "b", seed=None)
    assert Ledger.open(tmp_path / "a").header["seed_known"] and not Ledger.open(tmp_path / "b").header["seed_known"]


@fault
def past_budget(_):
    run = train(start(budget=rgp.Budget(3.0, 1e-5)))
    assert list(run) == [] and run.finished and run.step_index == STEPS and run.epsilon() <= 3.0


# ---------------------------------------------------------------------- the ledger


@fault
def folder_in_use(tmp_path):
    start(tmp_path)
    start(tmp_path)


@fault
def disk_full(tmp_path):
    run = train(start(tmp_path), 2)
    before = weight(run)

    def full(_handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ledger.os, "fsync", full)
        try:
            train(run)
        finally:
            assert torch.equal(weight(run), before)


@fault
def ledger_removed(tmp_path):
    run = train(start(tmp_path), 2)
    (tmp_path / FILE).unlink()
    train(run)


@fault
def torn_line(tmp_path):
    saved(tmp_path).close()
    with open(tmp_path / FILE, "ab") as file:
        file.write(b'{"C": 1.0, "atte')
    run = train(again(tmp_path))
    assert run.ledger.count == STEPS + 1


def rewrite(folder: Path, change: Callable[[list[str]], list[str]]) -> None:
    path = folder / FILE
    path.write_text("".join(change(path.read_text().splitlines(keepends=True))))


@fault
def edited_line(tmp_path):
    saved(tmp_path).close()
    rewrite(tmp_path, lambda lines: [line.replace('"sigma": 1.0', '"sigma": 5.0') for line in lines])
    again(tmp_path)


@fault
def repeated_line(tmp_path):
    saved(tmp_path).close()
    rewrite(tmp_path, lambda lines: [*lines[:2], lines[1], *lines[2:]])
    again(tmp_path)


@fault
def removed_line(tmp_path):
    saved(tmp_path).close()
    rewrite(tmp_path, lambda lines: [*lines[:2], *lines[3:]])
    again(tmp_path)


@fault
def two_processes(tmp_path):
    run = saved(tmp_path)
    code = "import sys; from rgp import ledger; ledger.PATIENCE = 0.1; ledger.Ledger.open(sys.argv[1], append=True)"
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True)
    assert run.ledger.count == 4 and done.returncode != 0
    raise rgp.LedgerError(done.stderr)


# ---------------------------------------------------------------------- checkpoints


@fault
def killed(tmp_path):
    """In process here; tests/test_torture.py does it with SIGKILL."""
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
