"""Checkpoint and resume: bit-identical on CPU, and never a noise used twice."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import rgp
from resuming import (
    SIZE,
    STEPS,
    Tied,
    again,
    crashed,
    data,
    same,
    start,
    train,
    uninterrupted,
    weights,
)
from rgp.encoding import encode
from rgp.ledger import FILE

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


@pytest.mark.parametrize("bands", [1, 2])
def test_saved_again_before_what_is_on_record_was_repeated(tmp_path, bands):
    """`rgp train` saves as soon as it has resumed; a second kill right after that charges nothing twice either."""
    options = {"bands": bands, "method": rgp.RGP(rank=2, keep=1 if bands == 1 else 4)}
    truth = uninterrupted(**options)
    crashed(tmp_path, **options)
    for _ in range(2):
        again(tmp_path).save(tmp_path)
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


@pytest.mark.parametrize("sides", ["both", "left", "alternate"])
def test_carriers_that_stay_are_the_same_to_the_bit_after_a_resume(tmp_path, sides):
    """In their layout too: products depend on it."""
    options = {"method": rgp.RGP(rank=2, keep=5, warmup_steps=2, sides=sides)}
    truth = uninterrupted(**options)
    run = crashed(tmp_path, **options)
    resumed = again(tmp_path)
    train(resumed)
    assert same(weights(resumed), weights(truth)) and run.ledger.count == 5
    assert resumed.ledger.count == STEPS
