"""Checkpoint and resume: bit-identical on CPU, atomic, without pickle, and never a noise used twice."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import stat
import sys
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

import rgp
from rgp import checkpoint
from rgp.checkpoint import decode, encode, resume
from rgp.errors import LedgerError
from rgp.ledger import FILE, Ledger

STEPS, SIZE = 8, 48


class Net(nn.Module):
    """Carried matrices, an exact head, dropout, a norm, a tied pair, a buffer."""

    def __init__(self, seed: int = 0, width: int = 12) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(6, width), nn.Linear(width, width)
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(0.3)
        self.head = nn.Linear(width, 3)
        self.register_buffer("shift", torch.randn(6))

    def forward(self, x):
        h = self.drop(torch.tanh(self.first(x + self.shift)))
        return self.head(self.norm(self.second(h)))


class Tied(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.into, self.out = nn.Linear(6, 3, bias=False), nn.Linear(6, 3, bias=False)
        self.out.weight = self.into.weight

    def forward(self, x):
        return self.into(x) + self.out(torch.tanh(x))


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.02),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.02, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.02),
    "groups": lambda p: torch.optim.Adam([{"params": [next(p)], "lr": 0.1}, {"params": list(p)}], lr=0.01),
}
SCHEDULERS = {
    None: lambda o: None,
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, STEPS),
    "steps": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 5]),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda t: 1 / (1 + t)),
    "onecycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=STEPS + 1),
}


def data(size: int = SIZE, seed: int = 1) -> list:
    x = torch.randn(size, 6, generator=torch.Generator().manual_seed(seed))
    return [(x[i], i % 3) for i in range(size)]


def parts(seed: int = 0, *, net=Net, optimizer: str = "adam", scheduler: str | None = None):
    model = net(seed)
    optim = OPTIMIZERS[optimizer](model.parameters())
    return model, optim, SCHEDULERS[scheduler](optim)


def start(folder=None, *, net=Net, optimizer="adam", scheduler=None, dataset=None, **options) -> rgp.Run:
    model, optim, plan = parts(net=net, optimizer=optimizer, scheduler=scheduler)
    options = {"method": rgp.RGP(rank=2, warmup_steps=2), "noise_multiplier": 1.0, "microbatch_size": 5, **options}
    options = {"batch_size": 12, "steps": STEPS, "seed": 0, **options}
    return rgp.privatize(model, optim, dataset or data(), scheduler=plan, folder=folder, **options)


def again(folder, *, net=Net, optimizer="adam", scheduler=None, dataset=None, **options) -> rgp.Run:
    """Resume with a model and an optimizer of other weights."""
    model, optim, plan = parts(99, net=net, optimizer=optimizer, scheduler=scheduler)
    return resume(folder, model, optim, dataset or data(), scheduler=plan, **options)


def train(run: rgp.Run, until: int | None = None, *, part: int | None = None) -> None:
    """Up to a step; with `part`, up to that micro-batch of it, and then the loop is left as a crash would leave it."""
    if run.step_index == until and part is None:
        return
    seen = 0
    for x, y in run:
        ended = run.step(nn.functional.cross_entropy(run.model(x), y))
        seen = 0 if ended else seen + 1
        if until is not None and run.step_index >= until and (ended if part is None else seen == part):
            return


def weights(run: rgp.Run) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in run.model.state_dict().items()}


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def uninterrupted(**options) -> rgp.Run:
    run = start(**options)
    train(run)
    return run


# ---------------------------------------------------------------------- bit-identical


@pytest.mark.parametrize(
    "options",
    [
        {"scheduler": "cosine"},
        {"optimizer": "momentum", "scheduler": "steps"},
        {"optimizer": "momentum", "method": rgp.RGP(rank=2, source="momentum", warmup_steps=2)},
        {"optimizer": "amsgrad", "scheduler": "lambda"},
        {"optimizer": "adagrad", "method": rgp.RGP(rank={"*": 1, "first*": 3}, sides="alternate")},
        {"optimizer": "groups", "scheduler": "onecycle", "method": rgp.RGP(rank="auto", norm="paper", head_scale=0.1)},
        {
            "optimizer": "sgd",
            "method": rgp.RGP(rank=2, source="random", overrides={"norm*": "frozen", "second.weight": 1}),
        },
        {"method": rgp.DPSGD(), "clip": lambda t: 1 / (1 + t), "noise_multiplier": lambda t: 1.0 + t % 2},
        {"method": rgp.DPSGD(), "net": Tied, "optimizer": "momentum"},
        {"seed": 5, "batch_size": lambda t: 6 + t, "max_batch": 14},
        {"batch_size": 3, "microbatch_size": 1},
    ],
    ids=lambda o: "-".join(f"{k}={v.__class__.__name__ if callable(v) else v}" for k, v in o.items()),
)
def test_resumed_training_is_bit_identical(tmp_path, options):
    """Saved at 3, killed in the middle of 6, resumed; dropout, history, several micro-batches per step."""
    truth = uninterrupted(**options)
    run = start(tmp_path, **options)
    train(run, 3)
    run.save(tmp_path)
    train(run, 5, part=1)
    recorded = run.ledger.count
    assert 3 < recorded < STEPS
    shared = {k: options[k] for k in ("net", "optimizer", "scheduler") if k in options}
    resumed = again(tmp_path, **shared)
    assert (resumed.step_index, resumed.ledger.count) == (3, recorded)
    train(resumed)
    assert same(weights(resumed), weights(truth))
    assert resumed.ledger.count == STEPS and resumed.ledger.events() == truth.ledger.events()
    states = [r.optimizer.state_dict()["state"] for r in (resumed, truth)]
    assert encode(states[0], {}, "") == encode(states[1], {}, "")
    for a, b in zip(*(s.values() for s in states), strict=True):
        assert all(torch.equal(torch.as_tensor(a[k]), torch.as_tensor(b[k])) for k in a)
    if resumed.scheduler is not None:
        assert resumed.scheduler.state_dict().keys() == truth.scheduler.state_dict().keys()
        assert resumed.scheduler.get_last_lr() == truth.scheduler.get_last_lr()


@pytest.mark.parametrize("workers", [0, 2])
def test_bit_identical_with_workers_and_augmentation(tmp_path, workers):
    class Augmented:
        def __len__(self):
            return SIZE

        def __getitem__(self, i):
            x, y = DATA[i]
            return x + 0.1 * torch.randn(6), y

    DATA = data()
    truth = uninterrupted(dataset=Augmented(), workers=workers)
    run = start(tmp_path, dataset=Augmented(), workers=workers)
    train(run, 2)
    run.save(tmp_path)
    train(run, 4, part=1)
    resumed = again(tmp_path, dataset=Augmented(), workers=workers)
    train(resumed)
    assert same(weights(resumed), weights(truth)) and resumed.ledger.count == STEPS


def test_killed_over_and_over(tmp_path):
    truth = uninterrupted()
    run = start(tmp_path)
    run.save(tmp_path)
    for stop in range(1, STEPS):
        train(run, stop, part=1)
        if stop % 2:
            run.save(tmp_path)
        run = again(tmp_path)
    train(run)
    assert same(weights(run), weights(truth)) and run.ledger.count == STEPS


def test_a_run_in_memory_goes_on_disk_when_it_is_saved(tmp_path):
    run = start()
    train(run, 3)
    run.save(tmp_path / "new")
    assert run.ledger.path == tmp_path / "new" / FILE
    train(run, 6)
    resumed = again(tmp_path / "new")
    assert (resumed.step_index, resumed.ledger.count) == (3, 6)
    train(resumed)
    assert same(weights(resumed), weights(uninterrupted())) and resumed.ledger.count == STEPS


def test_saving_in_the_middle_of_a_logical_batch(tmp_path):
    run = start(tmp_path)
    train(run, 3, part=1)
    for i, (x, y) in enumerate(run):
        run.step(nn.functional.cross_entropy(run.model(x), y))
        if i == 0:
            run.save(tmp_path)
            break
    resumed = again(tmp_path)
    train(resumed)
    assert same(weights(resumed), weights(uninterrupted())) and resumed.ledger.count == STEPS


def test_carriers_and_diagnostics_survive(tmp_path):
    run = start(
        tmp_path, dataset=[(torch.full((6,), float("nan")) if i < 20 else x, y) for i, (x, y) in enumerate(data())]
    )
    train(run, 4)
    run.save(tmp_path)
    resumed = again(tmp_path)
    assert run.bad_examples > 0 and resumed.bad_examples == run.bad_examples
    assert resumed.never_used == run.never_used
    assert resumed.carriers.keys() == run.carriers.keys()
    for name, pair in run.carriers.items():
        assert all(torch.equal(a, b) for a, b in zip(pair, resumed.carriers[name], strict=True))
    assert str(resumed.plan) == str(run.plan) and resumed.mechanism == run.mechanism


def test_an_unseeded_run_resumes_too(tmp_path):
    run = start(tmp_path, seed=None)
    train(run, 2)
    run.save(tmp_path)
    train(run, 5)
    at_five = weights(run)
    resumed = again(tmp_path)
    train(resumed, 5)
    assert same(weights(resumed), at_five) and resumed.ledger.count == 5


# ---------------------------------------------------------------------- fresh draws where nothing can be repeated


def crashed(folder: Path, **options) -> rgp.Run:
    """Saved at 3, with releases 3 and 4 on record after that."""
    run = start(folder, **options)
    train(run, 3)
    run.save(folder)
    train(run, 5)
    return run


def check_fresh(run: rgp.Run, charged: int) -> None:
    """The steps after the checkpoint were drawn anew: another attempt, another release, another charge."""
    train(run)
    assert run.step_index == STEPS and run.ledger.count == charged
    for step in (3, 4):
        first, second = run.ledger.of_step(step)
        assert (first["attempt"], second["attempt"]) == (0, 1) and first["digest"] != second["digest"]
    assert [len(run.ledger.of_step(step)) for step in (0, 5, 7)] == [1, 1, 1]


def test_other_micro_batches(tmp_path):
    crashed(tmp_path)
    check_fresh(again(tmp_path, microbatch_size=4), STEPS + 2)


def test_another_number_of_threads(tmp_path, monkeypatch):
    crashed(tmp_path)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    check_fresh(again(tmp_path), STEPS + 2)


def test_secure_noise(tmp_path):
    pytest.importorskip("randomgen")
    crashed(tmp_path, secure_noise=True)
    check_fresh(again(tmp_path), STEPS + 2)


def test_other_data_of_the_same_size(tmp_path):
    """Computed again, compared with the record, found different, discarded: its noise was used on another sum."""
    crashed(tmp_path)
    resumed = again(tmp_path, dataset=data(seed=2))
    drawn, ended = [], []
    add, step = resumed.releases.source.add, resumed.step
    resumed.releases.source.add = lambda total, **at: drawn.append((at["step"], at["attempt"])) or add(total, **at)
    resumed.step = lambda loss: ended.append(step(loss)) or ended[-1]
    check_fresh(resumed, STEPS + 2)
    assert sum(ended) == STEPS - 3  # a discarded batch is no step
    assert drawn == [(3, 0), (3, 1), (4, 0), (4, 1), (5, 0), (6, 0), (7, 0)]


def test_a_second_crash_after_fresh_draws(tmp_path):
    """The second attempts are on record themselves, and are repeated without another charge."""
    crashed(tmp_path)
    run = again(tmp_path, microbatch_size=4)
    train(run, 3, part=1)
    run.save(tmp_path)
    train(run, 6)
    assert run.ledger.count == 8
    at_six = weights(run)
    run = again(tmp_path)
    train(run, 6)
    assert same(weights(run), at_six) and run.ledger.count == 8


def test_an_interrupted_optimizer_step(tmp_path):
    """The release was on record and perhaps half used: what is computed next is the same release, or is charged."""
    run = start(tmp_path, optimizer="sgd")
    train(run, 2)
    real = run.optimizer.step

    def half(*args):
        with torch.no_grad():
            run.model.get_parameter("head.weight").add_(1.0)
        raise KeyboardInterrupt

    run.optimizer.step = half
    with pytest.raises(KeyboardInterrupt):
        train(run)
    run.optimizer.step = real
    assert (run.step_index, run.ledger.count) == (2, 3)
    train(run)
    assert run.ledger.count == STEPS + 1 and [r["attempt"] for r in run.ledger.of_step(2)] == [0, 1]


def test_a_torn_line_is_charged_and_its_step_drawn_anew(tmp_path):
    run = crashed(tmp_path)
    run.ledger.close()
    with open(tmp_path / FILE, "ab") as file:
        file.write(b'{"C": 1.0, "attempt": 0, "bat')
    with pytest.warns(UserWarning, match="was torn; the release that it may stand for is counted"):
        resumed = again(tmp_path)
    assert resumed.ledger.count == 6
    train(resumed)
    assert resumed.ledger.count == STEPS + 1
    assert [[r["attempt"] for r in resumed.ledger.of_step(s)] for s in (3, 4, 5, 7)] == [[0], [0], [2], [2]]


def test_without_its_secret_a_run_goes_on_with_a_new_one(tmp_path):
    crashed(tmp_path)
    (tmp_path / "secret.json").unlink()
    with pytest.warns(UserWarning, match=r"secret\.json is missing.*the 2 releases on record"):
        resumed = again(tmp_path)
    check_fresh(resumed, STEPS + 2)


# ---------------------------------------------------------------------- the budget


def budgeted(folder):
    return start(folder, noise_multiplier=None, budget=rgp.Budget(3.0, 1e-5), scheduler=None)


def test_repeating_the_last_steps_is_not_stopped_by_the_budget(tmp_path):
    run = budgeted(tmp_path)
    train(run, 3)
    run.save(tmp_path)
    train(run)
    assert run.finished and run.ledger.count == STEPS
    resumed = again(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(resumed)
    assert resumed.step_index == STEPS and resumed.ledger.count == STEPS and resumed.epsilon() <= 3.0


def test_doubled_charges_end_the_run_before_the_budget_is_exceeded(tmp_path):
    run = budgeted(tmp_path)
    train(run, 3)
    run.save(tmp_path)
    train(run, 6)
    resumed = again(tmp_path, microbatch_size=4)
    with pytest.warns(UserWarning, match=r"the budget of epsilon 3.0 is spent after \d of 8 steps"):
        train(resumed)
    assert resumed.finished and 3 <= resumed.step_index < STEPS
    assert resumed.epsilon() <= 3.0
    more = [*resumed.ledger.events(), resumed.mechanism.event(resumed.step_index)]
    assert rgp.accounting.epsilon(more, delta=1e-5) > 3.0


# ---------------------------------------------------------------------- refused


class Wider(Net):
    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed, width=13)


class Renamed(Net):
    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.last = self.head
        del self.head


class Halved(Net):
    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.double()


class Shared(Net):
    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.norm.bias = self.second.bias


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset": data(SIZE + 1)}, "dataset size is 49, and was 48"),
        ({"batch_size": 13}, "batch_size at step 0 is 13, and was 12"),
        ({"method": rgp.DPSGD()}, "method is DPSGD, and was RGP"),
        ({"method": rgp.RGP(rank=3, warmup_steps=2)}, "method's rank is 3, and was 2"),
        ({"net": Wider}, r"model's 'first.weight' is \[13, 6\] float32, and was \[12, 6\] float32"),
        ({"net": Renamed}, r"model's 'head.weight' is missing, and was .*'last.weight' is .*, and was missing"),
        ({"net": Halved}, "float64, and was"),
        ({"net": Shared}, "'norm.bias' is .* tied to second.bias, and was"),
        ({"optimizer": "momentum"}, "optimizer is SGD, and was Adam"),
        ({"optimizer": "groups"}, "parameter groups hold other parameters"),
        ({"scheduler": "cosine"}, "scheduler is CosineAnnealingLR, and was None"),
    ],
)
def test_another_run_is_refused_by_name(tmp_path, options, message):
    crashed(tmp_path)
    before = (tmp_path / FILE).read_bytes()
    with pytest.raises(ValueError, match=message):
        again(tmp_path, **options)
    assert (tmp_path / FILE).read_bytes() == before
    again(tmp_path, batch_size=12, method=rgp.RGP(rank=2, warmup_steps=2))  # what was true before still is


def test_settings_that_the_ledger_does_not_know_are_refused(tmp_path):
    run = crashed(tmp_path)
    path = next(tmp_path.glob("checkpoint-*")) / "state.json"
    state = json.loads(path.read_text())
    for key, value in {"delta": 1e-4, "steps": 9, "sigmas": [[2.0, 8]], "batch_sizes": [[9, 8]]}.items():
        path.write_text(json.dumps({**state, "settings": {**state["settings"], key: value}}))
        with pytest.raises((ValueError, IndexError)):
            again(tmp_path)
    path.write_text(json.dumps({**state, "format": 2}))
    with pytest.raises(ValueError, match="has format 2; this version of rgp reads 1"):
        again(tmp_path)
    assert run.step_index == 5


def test_a_public_loss_must_come_along(tmp_path):
    crashed(tmp_path)
    with pytest.raises(ValueError, match="give public_loss"):
        again(tmp_path, public_loss=lambda: torch.zeros(()))


def test_random_numbers_of_a_public_loss_are_the_same_after_a_resume(tmp_path):
    inputs = torch.stack([x for x, _ in data()])[:6]

    def start_or_resume(make, folder, **options):
        def logits():
            return run.model(inputs)

        run = make(folder, public_loss=rgp.without_labels(logits), **options)
        return run

    method = rgp.RGP(rank=2, source="public")
    whole = start_or_resume(start, None, method=method)
    train(whole)
    run = start_or_resume(start, tmp_path, method=method)
    train(run, 4)
    run.save(tmp_path)
    run.close()
    run = start_or_resume(again, tmp_path)
    train(run)
    assert all(torch.equal(a, b) for a, b in zip(weights(whole).values(), weights(run).values(), strict=True))


def test_a_rolled_back_ledger_is_refused(tmp_path):
    run = start(tmp_path)
    train(run, 2)
    shutil.copy(tmp_path / FILE, tmp_path / "old")
    train(run, 4)
    run.save(tmp_path)
    run.ledger.close()
    shutil.move(tmp_path / "old", tmp_path / FILE)
    with pytest.raises(LedgerError, match=r"the checkpoint knows 4 releases.*under-report epsilon"):
        again(tmp_path)


def test_a_missing_ledger_is_refused(tmp_path):
    crashed(tmp_path)
    (tmp_path / FILE).unlink()
    with pytest.raises(LedgerError, match="nobody knows what was released"):
        again(tmp_path)


def test_an_edited_ledger_is_refused(tmp_path):
    crashed(tmp_path)
    text = (tmp_path / FILE).read_text()
    (tmp_path / FILE).write_text(text.replace('"sigma": 1.0', '"sigma": 9.0', 1))
    with pytest.raises(LedgerError, match="line 1"):
        again(tmp_path)


def test_a_folder_without_a_checkpoint_is_refused(tmp_path):
    train(start(tmp_path), 2)
    with pytest.raises(FileNotFoundError, match=r"holds no checkpoint.*were made nevertheless"):
        again(tmp_path)


def test_checkpoints_belong_next_to_their_ledger(tmp_path):
    run = start(tmp_path / "a")
    with pytest.raises(ValueError, match="its checkpoints belong next to it"):
        run.save(tmp_path / "b")
    with pytest.raises(LedgerError, match="another run's releases"):
        start().save(tmp_path / "a")


def test_a_folder_with_another_runs_checkpoint_is_refused(tmp_path):
    crashed(tmp_path)
    (tmp_path / FILE).unlink()
    other = start(tmp_path, seed=1)
    with pytest.raises(LedgerError, match="belongs to another run"):
        other.save(tmp_path)


def test_the_older_run_cannot_go_on_after_it_was_resumed(tmp_path):
    run = crashed(tmp_path)
    again(tmp_path)
    with pytest.raises(LedgerError, match="resumed after this one"):
        train(run)


def test_a_closed_run_is_not_saved(tmp_path):
    run = start(tmp_path)
    run.close()
    with pytest.raises(ValueError, match="save it before closing"):
        run.save(tmp_path)


# ---------------------------------------------------------------------- secrets


def test_the_secret_has_its_own_file_for_the_owner_alone(tmp_path):
    run = crashed(tmp_path)
    secret = run._streams.secret
    path = tmp_path / "secret.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert json.loads(path.read_text())["secret"] == secret.hex()
    keys = [key.tobytes() for key in run._streams._keys.values()]
    for file in (f for f in tmp_path.rglob("*") if f.is_file() and f != path):
        content = file.read_bytes()
        for piece in (secret, secret.hex().encode(), *keys, *(k.hex().encode() for k in keys)):
            assert piece not in content, file


def test_the_secret_goes_when_the_run_is_finished_and_closed(tmp_path):
    run = crashed(tmp_path)
    run.close()
    assert (tmp_path / "secret.json").exists()  # not finished: it can be resumed
    run = again(tmp_path)
    train(run)
    assert (tmp_path / "secret.json").exists()
    run.close()
    assert not (tmp_path / "secret.json").exists()


def test_the_secret_goes_when_a_finished_run_is_saved(tmp_path):
    run = crashed(tmp_path)
    train(run)
    run.save(tmp_path)
    assert not (tmp_path / "secret.json").exists()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed = again(tmp_path)  # to read from it; there is nothing to repeat
    assert resumed.finished and list(resumed) == [] and same(weights(resumed), weights(run))
    assert resumed.epsilon() == run.epsilon()


def test_a_secret_that_others_can_read_is_warned_of(tmp_path):
    crashed(tmp_path)
    (tmp_path / "secret.json").chmod(0o644)
    with pytest.warns(UserWarning, match="chmod 600"):
        again(tmp_path)


# ---------------------------------------------------------------------- files


def test_a_crash_at_any_moment_of_a_save_leaves_the_old_or_the_new_checkpoint(tmp_path, monkeypatch):
    """Every call that changes the disk fails in turn; after each, the run resumes and ends as if nothing had been."""
    truth = weights(uninterrupted(steps=3))

    class Killed(BaseException):
        pass

    outcomes = Counter()
    for victim in range(200):
        folder = tmp_path / str(victim)
        run = start(folder, steps=3)
        train(run, 1)
        run.save(folder)
        train(run, 2)
        calls = iter(range(10**6))

        def dying(function, victim=victim, calls=calls):
            def call(*args, **options):
                if next(calls) == victim:
                    raise Killed
                return function(*args, **options)

            return call

        with monkeypatch.context() as patch:
            for module, name in [
                *((os, n) for n in ("open", "fsync", "rename", "replace", "mkdir", "unlink")),
                (shutil, "rmtree"),
            ]:
                patch.setattr(module, name, dying(getattr(module, name)))
            try:
                run.save(folder)
            except Killed:
                survived = False
            else:
                survived = True
        resumed = again(folder)
        outcomes[resumed.step_index] += 1
        assert resumed.step_index in (1, 2) and not (survived and resumed.step_index == 1)
        resumed.save(folder)  # over whatever the crash left
        train(resumed)
        assert same(weights(resumed), truth) and resumed.ledger.count == 3
        if survived:
            break
    assert survived and outcomes[1] > 10 and outcomes[2] >= 2
    assert [p.name for p in folder.glob("checkpoint-*")] == ["checkpoint-2.1"]


def test_only_the_newest_checkpoint_is_kept_and_other_programs_files_are_left_alone(tmp_path):
    run = start(tmp_path)
    (tmp_path / "checkpoint-2").mkdir()  # a Hugging Face Trainer's, say
    (tmp_path / "checkpoint-2" / "trainer_state.json").write_text("{}")
    for stop in (1, 2, 4):
        train(run, stop)
        run.save(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "checkpoint-2",
        "checkpoint-4",
        "initial.safetensors",
        "latest",
        FILE,
        "secret.json",
    ]


def test_no_pickle(tmp_path, monkeypatch):
    def refuse(*_args, **_options):
        raise AssertionError("pickle was used")

    for module, name in [(torch, "save"), (torch, "load"), (pickle, "dumps"), (pickle, "loads"), (pickle, "Pickler")]:
        monkeypatch.setattr(module, name, refuse)
    run = start(tmp_path, scheduler="steps")
    train(run, 2)
    run.save(tmp_path)
    train(again(tmp_path, scheduler="steps"))
    kinds = {p.suffix for p in tmp_path.rglob("*") if p.is_file()}
    assert kinds == {".json", ".jsonl", ".safetensors", ""}


def test_safetensors_is_asked_for(tmp_path, monkeypatch):
    run = start(tmp_path)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match=r"rgp\[checkpoint\]"):
        run.save(tmp_path)


def test_weights_can_be_read_with_safetensors_alone(tmp_path):
    from safetensors.torch import load_file

    run = crashed(tmp_path)
    run.save(tmp_path)
    (path,) = tmp_path.glob("checkpoint-*/model.safetensors")
    assert same(load_file(path), weights(run))


# ---------------------------------------------------------------------- nested state


def test_nested_state_survives():
    state = {
        "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(3)}, 7: {}},
        "groups": [{"betas": (0.9, 0.99), "lr": 1e-3, "best": float("inf"), "name": "x", "on": True, "no": None}],
        "milestones": Counter({3: 1, 5: 2}),
        "empty": [],
    }
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(encode(state, tensors, "s"))
    found = decode(json.loads(text), tensors)
    assert torch.equal(found["state"][0].pop("exp_avg"), state["state"][0].pop("exp_avg"))
    assert torch.equal(found["state"][0].pop("step"), state["state"][0].pop("step"))
    assert found == state and type(found["milestones"]) is Counter and type(found["groups"][0]["betas"]) is tuple


@pytest.mark.parametrize("value", [object(), {1.5: 2}, {"a": [lambda: 0]}, torch.nn.Linear(1, 1), {"x": {1, 2}}])
def test_state_that_only_pickle_could_hold_is_refused_by_name(value):
    with pytest.raises(ValueError, match=r"thing.* cannot be saved.*no pickle"):
        encode({"a": value}, {}, "thing")


def test_a_scheduler_without_state_is_named(tmp_path):
    class Bare:
        def step(self):
            pass

    run = start(tmp_path)
    run._step.update.scheduler = Bare()
    with pytest.raises(ValueError, match="the scheduler, a Bare, has no state_dict"):
        run.save(tmp_path)


def test_the_functions_are_public():
    assert checkpoint.resume is resume and callable(rgp.Run.save)
    assert Ledger is checkpoint.Ledger
