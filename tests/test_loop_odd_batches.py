"""Empty draws, draws of any size, examples without a finite gradient."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import rgp
from helpers import Expected, check_exact, check_step, parameters_of, per_example_gradients, privatize, spread
from toys import examples, loss_of, losses_of, start, toy

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


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
        model,
        data,
        batch_size=3,
        steps=12,
        microbatch_size=2,
        clip=0.8,
        lr=0.1,
        seed=2,
        method=rgp.RGP(rank=2),
        probe=False,
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
