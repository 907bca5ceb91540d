"""The training loop as users write it, and the ways in which they get it wrong, seen from outside."""

# ruff: noqa: PT012 (the loop is what raises)

from __future__ import annotations

import copy
import gc
import math
import warnings
from collections import UserDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import rgp
from helpers import Expected, check_exact, check_step, parameters_of, per_example_gradients, privatize, seeded, spread

EXAMPLES = 12


def toy() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 3)).double()


def examples(count: int = EXAMPLES) -> list[tuple[Tensor, int]]:
    x = torch.randn(count, 8, generator=seeded(1), dtype=torch.float64)
    return [(x[i], i % 3) for i in range(count)]


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def losses_of(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def start(model: nn.Module | None = None, **options: Any) -> tuple[nn.Module, rgp.Run]:
    """A run with noise on a toy; 3 logical steps of about 6 examples in micro-batches of at most 4."""
    model = toy() if model is None else model
    options = {
        "batch_size": 6,
        "steps": 3,
        "noise_multiplier": 1.0,
        "microbatch_size": 4,
        "method": rgp.RGP(rank=2),
        **options,
    }
    return model, privatize(model, options.pop("data", None) or examples(), **options)


def captures() -> int:
    """Modes that watch operations; 0 outside of loops."""
    return torch._C._len_torch_function_stack()


@pytest.fixture(autouse=True)
def nothing_left_behind():
    yield
    gc.collect()
    assert captures() == 0


# -------- the loop as it should be


def test_step_tells_where_a_logical_batch_ends():
    model, run = start(batch_size=EXAMPLES)
    ends, sizes = [], []
    for batch in run:
        sizes.append(len(batch[0]))
        ends.append(run.step(loss_of(model, batch)))
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
    assert spent[0] == 0
    assert spent == sorted(set(spent))
    assert run.epsilon(delta=1e-3) < spent[-1]
    run.close()


def test_a_budget_is_met_and_not_exceeded():
    model, run = start(noise_multiplier=None, budget=rgp.Budget(epsilon=5.0, delta=1e-3), steps=4)
    for batch in run:
        run.step(loss_of(model, batch))
    assert 4.9 < run.epsilon() <= 5.0
    assert list(run) == []
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
    model, run = start(model, batch_size=EXAMPLES)
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


HABITS = [
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
    model, run = start()
    with pytest.raises(rgp.WrongUseError, match=r"run\.step"):
        for x, y in run:
            x = x.requires_grad_()
            loss = loss_of(model, (x, y))
            torch.autograd.grad(loss, x, retain_graph=True)
            run.step(loss)
    assert run.epsilon() == 0
    run.close()


def test_zero_grad_by_habit_is_harmless():
    model, run = start()
    for batch in run:
        run.optimizer.zero_grad()
        run.step(loss_of(model, batch))
        run.optimizer.zero_grad(set_to_none=False)
    assert run.step_index == 3
    run.close()


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


# -------- odd batches


def test_empty_draws_are_steps_like_any_other():
    model = toy()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    taken = []
    optimizer.register_step_post_hook(lambda *_: taken.append(run.step_index))
    run = privatize(
        model,
        examples(200),
        optimizer=optimizer,
        scheduler=scheduler,
        batch_size=1,
        steps=20,
        noise_multiplier=1.0,
        seed=1,
        method=rgp.RGP(rank=2),
    )
    yielded, states = [], []
    for batch in run:
        yielded.append(run.step_index)
        states.append(parameters_of(model))
        run.step(loss_of(model, batch))
    empty = sorted(set(range(20)) - set(yielded))
    assert len(empty) >= 4
    assert taken == list(range(20))
    assert run.ledger.count == run.step_index == 20
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.9**20)
    assert 0 < run.epsilon() < math.inf
    run.close()


def test_an_empty_draw_is_noise_of_the_right_size():
    """Every entry of what is released gets N(0, (sigma C)^2); the update is that divided by the public batch size."""
    data = [(torch.zeros(300, dtype=torch.float64), 0)] * 100
    sigma, C, batch_size = 2.0, 3.0, 2
    options = {"noise_multiplier": sigma, "clip": C, "batch_size": batch_size, "method": rgp.DPSGD(head_scale=0.5)}
    for seed in range(100):
        model = nn.Linear(300, 300).double()
        before = parameters_of(model)
        run = privatize(model, data, seed=seed, **options)
        if next(iter(run), None) is None:
            break
        run.close()
    assert run.ledger.count == run.step_index == 1
    with pytest.warns(UserWarning, match="never used"):
        run.close()
    moved = {name: value - before[name] for name, value in parameters_of(model).items()}
    expected = sigma * C / batch_size
    assert float(moved["bias"].std()) == pytest.approx(expected, rel=0.2)
    assert float(moved["weight"].std()) == pytest.approx(expected / 0.5, rel=0.015)
    assert abs(float(moved["weight"].mean())) < 5 * expected / 0.5 / 300


def test_the_divisor_is_the_public_batch_size_whatever_was_drawn():
    """Draws of all sizes, some much larger than expected: each update is the sum of the drawn over batch_size."""
    data = [(x, y, i) for i, (x, y) in enumerate(examples(30))]
    model = toy()
    initial = copy.deepcopy(model)
    drawn, states, carriers = [[]], [parameters_of(model)], []
    with privatize(
        model, data, batch_size=3, steps=12, microbatch_size=2, clip=0.8, lr=0.1, seed=2, method=rgp.RGP(rank=2)
    ) as run:
        for batch in run:
            while len(states) <= run.step_index:  # empty draws before this one
                carriers.append({})
                states.append(parameters_of(model))
                drawn.append([])
            drawn[-1] += batch[2].tolist()
            if run.step(loss_of(model, batch)):
                carriers.append({n: (L.clone(), R.clone()) for n, (L, R) in run.carriers.items()})
                states.append(parameters_of(model))
                drawn.append([])
        plan = run.plan
    assert max(map(len, drawn)) >= 6
    for step, indices in enumerate(drawn):
        if not indices:
            continue
        assert len(set(indices)) == len(indices)
        for name, parameter in initial.named_parameters():
            parameter.data.copy_(states[step][name])
        truth = per_example_gradients(initial, [data[i] for i in indices], losses_of)
        expected = Expected(truth, plan, carriers[step], step, 0.8, 3)
        expected.update = {name: 0.1 * update for name, update in expected.update.items()}
        assert check_step(expected, states[step], states[step + 1]) < 1e-9


def test_a_dataset_of_one_example():
    check_exact(toy(), examples(1), losses_of, steps=2)
    model, run = start(data=examples(1), batch_size=1)
    for batch in run:
        run.step(loss_of(model, batch))
    assert run.step_index == 3
    run.close()


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e200])
@pytest.mark.parametrize("deferred", [False, True], ids=["dense", "deferred"])
@pytest.mark.parametrize("method", [rgp.RGP(rank=2), rgp.DPSGD()], ids=["rgp", "dpsgd"])
def test_an_example_without_a_finite_gradient_contributes_nothing(value, deferred, method, monkeypatch):
    if deferred:
        monkeypatch.setattr("rgp.slots.LARGEST_DENSE", 0)
    model = nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 3)
    ).double()
    data = [(x, y, w) for (x, y), w in zip(examples(6), spread(6), strict=True)]
    broken = list(data)
    broken[2] = (
        torch.full((8,), value, dtype=torch.float64) if value != 1e200 else data[2][0],
        data[2][1],
        torch.tensor(value),
    )

    def losses(model, batch):
        return losses_of(model, batch) * batch[2]

    initial, before = copy.deepcopy(model), parameters_of(model)
    with privatize(model, broken, method=method, microbatch_size=4, clip=0.5) as run:
        for batch in run:
            run.step(losses(model, batch).mean())
        assert run.bad_examples == 1
        plan, carriers = run.plan, run.carriers
    after = parameters_of(model)
    assert all(value.isfinite().all() for value in after.values())
    rest = data[:2] + data[3:]
    expected = Expected(per_example_gradients(initial, rest, losses), plan, carriers, 0, 0.5, 6)
    assert expected.clipped > 0
    assert check_step(expected, before, after) < 1e-9


def test_bad_examples_add_up_over_steps():
    data = examples()
    data[0] = (data[0][0] * math.nan, 0)
    model = toy()
    with privatize(model, data, steps=3, microbatch_size=5) as run:
        for batch in run:
            run.step(loss_of(model, batch))
        assert run.bad_examples == 3
    assert all(p.isfinite().all() for p in model.parameters())


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
        with start(model, optimizer=optimizer, batch_size=EXAMPLES)[1] as run:
            rates = []
            for batch in run:
                if run.step(loss_of(model, batch)):
                    rates.append(optimizer.param_groups[0]["lr"])
                    scheduler.step()
    assert rates == pytest.approx([1.0, 0.75, 0.25])


# -------- wrong arguments

WRONG_ARGUMENTS = {
    "method": ({"method": "rgp"}, TypeError, "method.*'rgp'"),
    "budget": ({"noise_multiplier": None, "budget": 8.0}, (TypeError, ValueError), r"budget.*8\.0"),
    "both": ({"budget": rgp.Budget(8.0, 1e-5)}, ValueError, "budget.*noise_multiplier"),
    "neither": ({"noise_multiplier": None}, ValueError, "budget.*noise_multiplier"),
    "two deltas": (
        {"noise_multiplier": None, "budget": rgp.Budget(8.0, 1e-5), "delta": 1e-5},
        ValueError,
        "delta.*Budget",
    ),
    "delta": ({"delta": 0.5}, ValueError, r"delta=0\.5"),
    "delta 0": ({"delta": 0.0}, ValueError, r"delta.*0\.0"),
    "negative noise": ({"noise_multiplier": -1.0}, ValueError, r"noise_multiplier.*-1\.0"),
    "noise not a number": ({"noise_multiplier": "1"}, ValueError, "noise_multiplier.*'1'"),
    "noise nan": ({"noise_multiplier": math.nan}, ValueError, "noise_multiplier.*nan"),
    "noise schedule": (
        {"noise_multiplier": lambda t: -1.0 if t else 1.0},
        ValueError,
        r"noise_multiplier at step 1.*-1\.0",
    ),
    "epochs and steps": ({"epochs": 3}, ValueError, "epochs=3.*steps=3"),
    "no length": ({"steps": None}, ValueError, "epochs=None.*steps=None"),
    "steps": ({"steps": 0}, ValueError, "steps.*0"),
    "fractional steps": ({"steps": 2.5}, ValueError, r"steps.*2\.5"),
    "epochs": ({"steps": None, "epochs": -1}, ValueError, "epochs.*-1"),
    "epochs inf": ({"steps": None, "epochs": math.inf}, ValueError, "epochs.*inf"),
    "batch size 0": ({"batch_size": 0}, ValueError, "batch_size.*0"),
    "batch size too large": ({"batch_size": 13}, ValueError, "batch_size.*12.*13"),
    "fractional batch size": ({"batch_size": 6.0}, ValueError, r"batch_size.*6\.0"),
    "batch size True": ({"batch_size": True}, ValueError, "batch_size.*True"),
    "clip 0": ({"clip": 0}, ValueError, "clip.*0"),
    "clip negative": ({"clip": -2.0}, ValueError, r"clip.*-2\.0"),
    "clip inf": ({"clip": math.inf}, ValueError, "clip.*inf"),
    "clip None with noise": ({"clip": None}, ValueError, "clip=None.*noise_multiplier=0"),
    "clip None with a budget": (
        {"clip": None, "noise_multiplier": None, "budget": rgp.Budget(8.0, 1e-5)},
        ValueError,
        "clip=None",
    ),
    "micro-batch": ({"microbatch_size": 0}, ValueError, "microbatch_size.*0"),
    "max_batch": ({"max_batch": -3}, ValueError, "max_batch.*-3"),
    "reduction": ({"loss_reduction": "avg"}, ValueError, "loss_reduction.*'avg'"),
    "seed": ({"seed": -1}, ValueError, "seed.*-1"),
    "fractional seed": ({"seed": 1.5}, ValueError, r"seed.*1\.5"),
    "public loss": ({"public_loss": lambda: None}, ValueError, "public_loss"),
    "no public loss": ({"method": rgp.RGP(source="public")}, ValueError, "public_loss"),
    "scheduler": ({"scheduler": 3}, (TypeError, ValueError), "scheduler.*3"),
    "optimizer": ({"optimizer": "adam"}, (TypeError, ValueError), "optimizer.*'adam'"),
}


@pytest.mark.parametrize("name", WRONG_ARGUMENTS)
def test_wrong_arguments_are_named_with_their_value(name):
    options, kind, message = WRONG_ARGUMENTS[name]
    with pytest.raises(kind, match=message):
        start(**options)


def test_a_model_that_is_none():
    with pytest.raises((TypeError, ValueError), match=r"model.*function"):
        rgp.privatize(
            lambda x: x,
            torch.optim.SGD(toy().parameters(), lr=1),
            examples(),
            noise_multiplier=1.0,
            batch_size=2,
            steps=1,
        )


WRONG_METHODS = {
    "rank": ({"rank": 0}, "rank.*0"),
    "rank by name": ({"rank": {"*": 0}}, r"rank\['\*'\].*0"),
    "rank word": ({"rank": "full"}, "rank.*'full'"),
    "sides": ({"sides": "top"}, "sides.*'top'"),
    "source": ({"source": "gradient"}, "source.*'gradient'"),
    "norm": ({"norm": "l1"}, "norm.*'l1'"),
    "power iterations": ({"power_iterations": 0}, "power_iterations.*0"),
    "warm-up": ({"warmup_steps": -1}, "warmup_steps.*-1"),
    "head scale": ({"head_scale": 0.0}, r"head_scale.*0\.0"),
    "head scale nan": ({"head_scale": math.nan}, "head_scale.*nan"),
    "override": ({"overrides": {"a": "thawed"}}, r"overrides\['a'\].*'thawed'"),
    "override rank": ({"overrides": {"a": 0}}, r"overrides\['a'\].*0"),
}


@pytest.mark.parametrize("name", WRONG_METHODS)
def test_wrong_settings_of_a_method(name):
    options, message = WRONG_METHODS[name]
    with pytest.raises(ValueError, match=message):
        rgp.RGP(**options)


def test_methods_are_frozen_values():
    with pytest.raises(AttributeError):
        rgp.RGP().rank = 3
    assert rgp.RGP(rank=3) == rgp.RGP(rank=3)
    assert rgp.DPSGD() != rgp.DPSGD(head_scale=0.1)


def test_nothing_to_train():
    model = toy().requires_grad_(False)
    with pytest.raises(ValueError, match="trains nothing"):
        start(model)


# -------- datasets


class Squares(Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, i):
        return {"x": torch.full((8,), float(i), dtype=torch.float64), "y": i % 3}


class ManyAtOnce(Squares):
    def __getitems__(self, indices):
        return [self[i] for i in indices]


def test_kinds_of_datasets():
    tensors = TensorDataset(torch.randn(10, 8, dtype=torch.float64), torch.zeros(10, dtype=torch.long))
    for data in (examples(10), tuple(examples(10)), tensors, torch.utils.data.Subset(tensors, range(8))):
        model, run = start(data=data)
        for x, y in run:
            run.step(loss_of(model, (x, y)))
        run.close()
    for data in (Squares(), ManyAtOnce()):
        model, run = start(data=data)
        for batch in run:
            run.step(loss_of(model, (batch["x"], batch["y"])))
        run.close()


def test_a_collate_function():
    model, run = start(data=[("1 2", 0), ("3", 1), ("4 5 6", 2), ("7", 0)], batch_size=2, collate_fn=_pad)
    for x, y in run:
        run.step(loss_of(model, (x, y)))
    run.close()


def _pad(batch):
    x = torch.zeros(len(batch), 8, dtype=torch.float64)
    for row, (text, _) in zip(x, batch, strict=True):
        numbers = [float(word) for word in text.split()]
        row[: len(numbers)] = torch.tensor(numbers)
    return x, torch.tensor([label for _, label in batch])


def test_worker_processes_load_the_same_batches():
    def train(workers: int):
        model, run = start(data=Squares(), workers=workers, steps=2)
        with run:
            for batch in run:
                run.step(loss_of(model, (batch["x"], batch["y"])))
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(train(0), train(1))


def test_datasets_that_cannot_be_sampled():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(examples())

    cases = {
        "IterableDataset": Stream(),
        r"DataLoader.*loader\.dataset": DataLoader(examples()),
        "empty": [],
        r"len\(\)": iter(examples()),
        r"len\(\).*int": 5,
    }
    model = toy()
    for message, data in cases.items():
        with pytest.raises(ValueError, match=message):
            rgp.privatize(
                model, torch.optim.SGD(model.parameters(), lr=1), data, noise_multiplier=1.0, batch_size=2, steps=1
            )


# -------- modules that mix examples


def norm_model(norm: nn.Module) -> nn.Sequential:
    return nn.Sequential(
        nn.Unflatten(1, (2, 4)), nn.Conv1d(2, 6, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(12, 3)
    ).double()


def test_batch_norm_is_refused_and_fixed_on_request():
    model = norm_model(nn.BatchNorm1d(6))
    model[2].weight.data.uniform_(generator=seeded(1))
    with pytest.raises(rgp.UnsupportedError, match=r"'2' is BatchNorm1d.*rgp\.fix"):
        start(model)
    weight = model[2].weight
    assert rgp.fix(model) is model
    assert isinstance(model[2], nn.GroupNorm)
    assert model[2].weight is weight
    check_exact(model, examples(), losses_of, microbatch_size=5)


def test_fix_finds_every_kind_at_any_depth():
    model = nn.ModuleDict(
        {
            "a": nn.Sequential(nn.Sequential(nn.BatchNorm2d(48))),
            "b": nn.BatchNorm3d(7, affine=False),
            "c": nn.SyncBatchNorm(64),
        }
    )
    rgp.fix(model, groups=32)
    assert (model["a"][0][0].num_groups, model["b"].num_groups, model["c"].num_groups) == (24, 7, 32)
    assert model["b"].weight is None
    assert not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())
    assert rgp.fix(nn.Linear(2, 2)) is not None
    with pytest.raises(rgp.UnsupportedError):
        rgp.fix(nn.BatchNorm1d(3))


def test_batch_norm_switched_to_training_later_is_refused():
    model = norm_model(nn.BatchNorm1d(6))
    model[2].eval()
    model, run = start(model)
    model.train()
    with pytest.raises(rgp.UnsupportedError, match="batch norm"):
        for batch in run:
            run.step(loss_of(model, batch))
    assert run.epsilon() == 0
    run.close()


def test_a_model_that_mixes_examples_is_refused():
    class Centred(nn.Module):
        def forward(self, x):
            return x - x.mean(0)

    model = nn.Sequential(nn.Linear(8, 16), Centred(), nn.Linear(16, 3)).double()
    model, run = start(model, batch_size=EXAMPLES)
    with pytest.raises(rgp.UnsupportedError, match=r"'2.weight'.*another example"):
        for batch in run:
            run.step(loss_of(model, batch))
    assert run.epsilon() == 0
    run.close()


@pytest.mark.parametrize("bad", [0, 1, EXAMPLES - 1])
def test_an_example_that_is_not_finite_does_not_hide_the_mixing(bad):
    class Centred(nn.Module):
        def forward(self, x):
            return x - x.mean(0)

    model = nn.Sequential(nn.Linear(8, 16), Centred(), nn.Linear(16, 3)).double()
    data = [(x * math.nan if i == bad else x, y) for i, (x, y) in enumerate(examples())]
    model, run = start(model, data=data, batch_size=EXAMPLES)
    with pytest.raises(rgp.UnsupportedError, match="another example"):
        for batch in run:
            run.step(loss_of(model, batch))
    assert run.epsilon() == 0
    run.close()


def test_several_rows_for_each_example_are_not_guessed():
    """Two views of each example: cat puts them far apart, stack and flatten next to each other. Shapes cannot tell."""
    views = {"apart": lambda x: torch.cat([x, 2 * x]), "together": lambda x: torch.stack([x, 2 * x], 1).flatten(0, 1)}
    for name, both in views.items():

        def losses(model, batch, name=name, both=both):
            found = F.cross_entropy(model(both(batch[0])), both(batch[1]) // 2 % 3, reduction="none")
            return found.view(2, -1).sum(0) if name == "apart" else found.view(-1, 2).sum(1)

        with pytest.raises(rgp.UnsupportedError, match=r"8 rows for 4 examples.*probe=False"):
            check_exact(toy(), examples(), losses, microbatch_size=4)
        if name == "together":
            check_exact(toy(), examples(), losses, microbatch_size=4, probe=False)
    assert captures() == 0


# -------- check


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.body, self.head = nn.Embedding(20, 12), nn.Linear(12, 12), nn.Linear(12, 5)

    def forward(self, ids):
        return self.head(torch.tanh(self.body(self.table(ids))))


def padded() -> dict[str, Tensor]:
    lengths = torch.tensor([6, 2, 4, 1])
    ids = torch.randint(1, 20, (4, 6), generator=seeded(3))
    return {"ids": ids, "mask": torch.arange(6) < lengths[:, None], "tags": ids % 5}


def over_all_tokens(model, batch):
    losses = F.cross_entropy(model(batch["ids"]).transpose(1, 2), batch["tags"], reduction="none")
    return losses[batch["mask"]].mean()


def over_each_example(model, batch):
    losses = F.cross_entropy(model(batch["ids"]).transpose(1, 2), batch["tags"], reduction="none")
    return (losses * batch["mask"]).sum(1) / batch["mask"].sum(1)


def test_check_agrees_with_a_right_model_and_leaves_it_alone():
    model = Tagger()
    state = copy.deepcopy(model.state_dict())
    for method in (None, rgp.DPSGD(), rgp.RGP(rank=2, overrides={"table.weight": "exact"}, head_scale=0.1)):
        result = rgp.check(model, padded(), over_each_example, loss_reduction="none", method=method)
        assert result.ok, result
        assert result.worst < 1e-12
        assert set(result.errors) == {e.name for e in rgp.make_plan(model, method or rgp.RGP()).trained}
        assert "exact" in str(result)
        assert "body.weight" in str(result)
    assert rgp.check(model, padded(), lambda m, b: over_each_example(m, b).mean()).ok
    assert rgp.check(model, padded(), lambda m, b: over_each_example(m, b).sum(), loss_reduction="sum").ok
    assert model.training
    assert all(p.dtype == torch.float32 and p.requires_grad and p.grad is None for p in model.parameters())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_check_catches_a_loss_that_mixes_examples():
    result = rgp.check(Tagger(), padded(), over_all_tokens)
    assert not result.ok
    assert result.worst > 0.1
    assert "WRONG" in str(result)
    assert "NOT exact" in str(result)


def test_check_catches_a_wrong_reduction():
    assert not rgp.check(Tagger(), padded(), lambda m, b: over_each_example(m, b).sum()).ok


def test_check_in_the_models_own_precision():
    assert rgp.check(Tagger(), padded(), lambda m, b: over_each_example(m, b).mean(), double=False).ok


def test_check_with_an_example_without_gradient_and_a_mapping_that_is_no_dict():
    def losses(model, batch):
        return over_each_example(model, batch) * (batch["ids"][:, 0] != padded()["ids"][1, 0])

    assert rgp.check(Tagger(), UserDict(padded()), losses, loss_reduction="none").ok


def test_check_sees_a_parameter_that_goes_around_the_capture():
    model = Tagger()
    model.body.register_forward_hook(lambda layer, inputs, output: output + kept(layer, inputs[0]))

    def kept(layer, x):  # an operation that is hidden from every mode
        with torch._C.DisableTorchFunction():
            return F.linear(x, layer.weight)

    assert not rgp.check(model, padded(), over_each_example, loss_reduction="none").ok


def test_check_does_not_take_nan_for_exact():
    def undefined(model, batch):
        return over_each_example(model, batch) / (batch["ids"][:, 0] != padded()["ids"][1, 0]).double().sqrt() * 0

    result = rgp.check(Tagger(), padded(), undefined, loss_reduction="none")
    assert not result.ok
    assert result.worst == math.inf


def test_check_needs_tensors():
    with pytest.raises(ValueError, match="no tensor"):
        rgp.check(Tagger(), ["text"], over_all_tokens)


# -------- a rule of the user's own


class Outer(torch.autograd.Function):
    """y = x W^T by an operation of the user's own, which no built-in rule knows."""

    @staticmethod
    def forward(ctx, x, W):
        ctx.save_for_backward(x, W)
        return x @ W.T

    @staticmethod
    def backward(ctx, g):
        x, W = ctx.saved_tensors
        return g @ W, g.flatten(0, -2).T @ x.flatten(0, -2)


def own_product(x: Tensor, W: Tensor) -> Tensor:
    if torch.overrides.has_torch_function((x, W)):
        return torch.overrides.handle_torch_function(own_product, (x, W), x, W)
    return Outer.apply(x, W)


class OwnLayer(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.randn(size, size, generator=seeded(2)) / size**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return own_product(x, self.W)


@pytest.fixture
def own_rule():
    from rgp.rules import RULES, register

    @register(own_product)
    def gradients(m, grad, x, W):
        return {1: torch.einsum("mp,md->mpd", grad, x)}

    yield
    del RULES[own_product]


@pytest.mark.parametrize("deferred", [False, True], ids=["dense", "deferred"])
@pytest.mark.parametrize(
    "method", [rgp.RGP(rank=2), rgp.RGP(rank=2, sides="left"), rgp.DPSGD()], ids=["rgp", "left", "dpsgd"]
)
def test_a_registered_rule(own_rule, method, deferred, monkeypatch):
    if deferred:
        monkeypatch.setattr("rgp.slots.LARGEST_DENSE", 0)
    model = nn.Sequential(nn.Linear(8, 8), OwnLayer(8), nn.Tanh(), OwnLayer(8), nn.Linear(8, 3)).double()
    plan = check_exact(model, examples(), losses_of, method=method, microbatch_size=5, family="a registered rule")
    assert plan["1.W"].treatment == ("exact" if isinstance(method, rgp.DPSGD) else "carried")


def test_without_a_rule_the_parameter_is_named():
    model = nn.Sequential(nn.Linear(8, 8), OwnLayer(8), nn.Linear(8, 3)).double()
    model, run = start(model)
    with pytest.raises(rgp.UnsupportedError, match=r"'1.W'.*own_product.*overrides.*register a rule"):
        for batch in run:
            run.step(loss_of(model, batch))
    run.close()
    check_exact(model, examples(), losses_of, method=rgp.RGP(rank=2, overrides={"1.W": "frozen"}))


def test_a_rule_with_the_wrong_shape_is_told_so(own_rule):
    from rgp.rules import register

    register(own_product)(lambda m, grad, x, W: {1: grad})
    model, run = start(nn.Sequential(nn.Linear(8, 8), OwnLayer(8), nn.Linear(8, 3)).double())
    with pytest.raises(ValueError, match=r"own_product.*'1.W'.*must be \(\d, 8, 8\)"):
        for batch in run:
            run.step(loss_of(model, batch))
    run.close()
