"""What people bring from plain training and from Opacus: epoch loops, schedules, wrapped optimizers."""

from __future__ import annotations

import functools
import io
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rgp

ROWS = 48


def data() -> list:
    x = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(0))
    return [(x[i], i % 2) for i in range(ROWS)]


def start(optimizer=None, model=None, **options):
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if optimizer is None else optimizer(model)
    options = {
        "method": rgp.DPSGD(),
        "noise_multiplier": 1.0,
        "batch_size": 12,
        "epochs": 3,
        "microbatch_size": 4,
        **options,
    }
    return model, rgp.privatize(model, optimizer, data(), **options)


def loss_of(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


# ---------------------------------------------------------------------- epochs


def test_an_epoch_loop():
    model, run = start(seed=1)
    steps = []
    with run:
        for epoch in run.epochs():
            for batch in epoch:
                run.step(loss_of(model, batch))
            steps.append((epoch.number, run.step_index))
    assert steps == [(1, 4), (2, 8), (3, 12)] and len(run) == 12
    other, again = start(seed=1)
    with again:
        for batch in again:
            again.step(loss_of(other, batch))
    assert again.epsilon() == run.epsilon()


def test_a_second_pass_says_that_there_is_nothing_left():
    model, run = start()
    for batch in run:
        run.step(loss_of(model, batch))
    with pytest.raises(rgp.WrongUseError, match=r"run\.epochs\(\)"):
        for _ in run:
            pass
    run.close()


def test_a_finished_run_that_is_resumed_has_an_empty_loop(tmp_path):
    model, run = start(folder=tmp_path)
    for batch in run:
        run.step(loss_of(model, batch))
    run.save(tmp_path)
    run.close()
    again = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    resumed = rgp.resume(tmp_path, again, torch.optim.SGD(again.parameters(), lr=0.1), data())
    assert list(resumed) == []
    resumed.close()


# ---------------------------------------------------------------------- schedules


def schedule(run, per_microbatch: bool) -> float:
    optimizer = run.optimizer
    one_cycle = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 0.9**t)
    with run:
        for batch in run:
            ended = run.step(loss_of(run.model, batch))
            if (ended or per_microbatch) and not run.rehearsing:
                one_cycle.step()
    return optimizer.param_groups[0]["lr"]


def test_a_scheduler_that_is_stepped_for_every_micro_batch_is_noticed_once():
    _, run = start()
    with pytest.warns(UserWarning, match="inside a logical batch") as caught:
        schedule(run, per_microbatch=True)
    assert sum("inside a logical batch" in str(w.message) for w in caught) == 1


def test_a_scheduler_that_is_stepped_once_for_each_step_is_not():
    _, run = start()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert schedule(run, per_microbatch=False) == pytest.approx(0.1 * 0.9 ** len(run), rel=0.3)


def test_one_cycle_has_the_number_it_needs():
    model = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = rgp.accounting.planned_steps(3, ROWS, 12)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=steps + 1)
    with rgp.privatize(
        model, optimizer, data(), noise_multiplier=1.0, batch_size=12, epochs=3, scheduler=scheduler
    ) as run:
        assert len(run) == steps
        for batch in run:
            run.step(loss_of(model, batch))


# ---------------------------------------------------------------------- arguments


def test_numpy_integers_are_integers():
    _, run = start(batch_size=np.int64(12), microbatch_size=np.int32(4), epochs=np.float64(1.0))
    assert len(run) == 4 and run.mechanism.to_json()["batch_sizes"] == [[12, 4]]
    run.close()


def test_an_optimizer_that_accelerate_has_wrapped():
    accelerate = pytest.importorskip("accelerate")
    model = nn.Linear(6, 2)
    prepared, optimizer = accelerate.Accelerator(cpu=True).prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with rgp.privatize(prepared, optimizer, data(), noise_multiplier=1.0, batch_size=12, steps=2) as run:
        for batch in run:
            run.step(loss_of(prepared, batch))
    assert run.step_index == 2


def test_scripted_models_and_opacus_optimizers_are_named():
    model = torch.jit.script(nn.Linear(6, 2))
    with pytest.raises(rgp.UnsupportedError, match=r"as it was before torch.jit: the model was scripted or traced"):
        start(model=model)
    with pytest.raises(rgp.UnsupportedError, match=r"as it was before torch.jit: module '0' was scripted"):
        start(model=nn.Sequential(model))

    class DPOptimizer(torch.optim.SGD):
        pass

    DPOptimizer.__module__ = "opacus.optimizers.optimizer"
    with pytest.raises(TypeError, match="original_optimizer"):
        start(lambda model: DPOptimizer(model.parameters(), lr=0.1))


class GradSampleModule(nn.Module):
    """Does what Opacus's does, as far as it can be told from outside."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = module
        module.register_forward_hook(self.capture_activations_hook)
        module.register_full_backward_hook(functools.partial(self.capture_backprops_hook, loss_reduction="mean"))

    def capture_activations_hook(self, module, inputs, output):
        raise AssertionError("it must not be called")

    capture_backprops_hook = capture_activations_hook


for thing in (GradSampleModule, GradSampleModule.capture_activations_hook):
    thing.__module__ = "opacus.grad_sample.grad_sample_module"


def test_a_model_of_opacus_and_the_hooks_that_it_leaves_behind_are_named():
    inner = nn.Linear(6, 2)
    wrapped = GradSampleModule(inner)
    with pytest.raises(TypeError, match=r"remove_hooks\(\).*model\._module"):
        start(model=wrapped)
    with pytest.raises(ValueError, match="'0' still has hooks of Opacus"):
        start(model=nn.Sequential(inner))


def test_a_progress_bar_of_steps():
    tqdm = pytest.importorskip("tqdm")
    model, run = start()
    with run, tqdm.tqdm(total=len(run), file=io.StringIO()) as bar:
        for batch in run:
            bar.update(run.step(loss_of(model, batch)))
    assert bar.n == bar.total == 12


# ---------------------------------------------------------------------- messages


def refusal(loss) -> str:
    model, run = start()

    def train() -> None:
        for _ in range(2):
            for batch in run:
                run.step(loss(model, batch))

    with run, pytest.raises((rgp.UnsupportedError, rgp.WrongUseError)) as caught:
        train()
    return str(caught.value)


def test_the_first_sentence_is_the_thing_to_do():
    def hardest(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none").max()

    def centred(model, batch):
        return loss_of(model, (batch[0] - batch[0].mean(0), batch[1]))

    def weighted(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], torch.tensor([1.0, 3.0]))

    def penalised(model, batch):
        return loss_of(model, batch) + model[0].weight.square().sum()

    assert refusal(loss_of).startswith("write `for epoch in run.epochs()")
    assert refusal(hardest).startswith("Compute one loss per example")
    assert refusal(centred).startswith("Leave out what looks at the whole batch")
    assert refusal(weighted).startswith("reduce the loss of each example on its own")
    assert refusal(penalised).startswith("use the optimizer's weight_decay")
    with pytest.raises(rgp.UnsupportedError, match=r"^replace batch norm with rgp.fix\(model\)"):
        start(model=nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)))
