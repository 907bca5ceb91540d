"""Statements about the whole mechanism, seen from outside: what a run publishes is a function of its releases, and its
ledger says what was done. (tests/mutants/ shows what these and the other tests would catch.)"""

import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rgp
from rgp import accounting
from rgp.ledger import Ledger

N, STEPS = 24, 6


def toy():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def examples(seed, scale=1.0, bad=False):
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(scale * rng.standard_normal((N, 6)))
    if bad:
        x[::5] = float("nan")
    return [(x[i], int(rng.integers(3))) for i in range(N)]


class Scripted:
    """In place of noise: the same numbers whatever the data gave, so that two runs on different data release the same."""

    replayable = True

    def add(self, total, *, std, step, attempt):
        numbers = np.random.default_rng([step, attempt]).standard_normal(total.numel())
        total.copy_(torch.from_numpy(std * numbers))


def published(data, method, *, scripted=True, **options):
    """Everything that a run has published after each of its steps, and after its end."""
    model = toy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options = {"batch_size": 6, "steps": STEPS, "noise_multiplier": 1.0, "microbatch_size": 4, "seed": 1, **options}
    found = []

    def note(*_):
        state = {f"weight {name}": p.detach().clone() for name, p in model.named_parameters()}
        state |= {f"momentum {i}": s["momentum_buffer"].clone() for i, s in enumerate(optimizer.state.values())}
        for name, (L, R) in run.carriers.items():
            state |= {f"L {name}": L.clone(), f"R {name}": R.clone()}
        found.append(state | {"C": torch.tensor(run.clip_norm or 0.0)})

    optimizer.register_step_post_hook(note)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with rgp.privatize(model, optimizer, data, method=method, **options) as run:
            if scripted:
                run.releases.source = Scripted()
            for x, y in run:
                run.step(F.cross_entropy(model(x), y))
            records = [{k: r[k] for k in ("step", "q", "sigma", "C", "batch_size")} for r in run.ledger.records]
    assert len(found) == STEPS
    return found, records


METHODS = {
    "rgp": (rgp.RGP(rank=2, warmup_steps=1), {}),
    "rgp, weight": (rgp.RGP(rank=2, source="weight", norm="paper"), {}),
    "rgp, momentum": (rgp.RGP(rank=2, source="momentum", warmup_steps=1, sides="alternate"), {}),
    "rgp, adaptive clip": (rgp.RGP(rank=2, head_scale=0.1), {"clip": rgp.AdaptiveClip(0.5)}),
    "dpsgd": (rgp.DPSGD(), {"clip": rgp.GroupClip({"4.*": 0.5, "*": 1.0})}),
    "dp-powersgd": (rgp.DPPowerSGD(rank=2), {}),
}


@pytest.mark.parametrize("name", METHODS)
def test_what_a_run_publishes_is_a_function_of_its_releases(name, monkeypatch):
    """Other data, other draws (an empty one too), NaN: the same releases give the same weights, carriers, C and ledger."""
    method, options = METHODS[name]
    one, ledger = published(examples(1), method, **options)
    draws = [np.arange(8), np.arange(0), np.arange(5, 24), np.array([3]), np.arange(24), np.array([0, 5])]
    monkeypatch.setattr(rgp.sampling, "draw", lambda streams, step, *_, **__: draws[step])
    two, other_ledger = published(examples(2, scale=50.0, bad=True), method, **options)
    assert ledger == other_ledger
    for step, (a, b) in enumerate(zip(one, two, strict=True)):
        for what in a:
            assert torch.equal(a[what], b[what]), (step, what)
    assert not torch.equal(one[0]["weight 0.weight"], one[1]["weight 0.weight"])
    monkeypatch.undo()
    assert any(  # the comparison has teeth: with noise of its own, other data give other weights
        not torch.equal(a["weight 0.weight"], b["weight 0.weight"])
        for a, b in zip(
            *(published(examples(seed), method, scripted=False, **options)[0] for seed in (1, 2)), strict=True
        )
    )


def test_the_ledger_says_what_was_done_at_every_step(tmp_path):
    """Schedules of everything: each line has its own step's rate, noise and C, the noise was that, and so is epsilon."""
    sizes, sigmas, clips = [30, 60, 120], [0.9, 1.4, 2.5], [1.0, 0.2, 3.0]
    model = nn.Linear(200, 200)
    data = [(torch.zeros(200), 0)] * 240
    run = rgp.privatize(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        data,
        method=rgp.DPSGD(),
        batch_size=lambda t: sizes[t],
        noise_multiplier=lambda t: sigmas[t],
        clip=lambda t: clips[t],
        steps=3,
        delta=1e-3,
        seed=0,
        folder=tmp_path,
    )
    before, step, moved = model.weight.detach().clone(), 0, []
    for x, _ in run:
        if run.step(0.0 * model(x).sum()):
            moved.append(float((model.weight.detach() - before).std()))
            before, step = model.weight.detach().clone(), step + 1
    lines = Ledger.open(tmp_path).records
    assert [(r["step"], r["q"], r["sigma"], r["C"], r["batch_size"]) for r in lines] == [
        (t, sizes[t] / 240, sigmas[t], clips[t], sizes[t]) for t in range(3)
    ]
    for t in range(3):
        assert moved[t] == pytest.approx(sigmas[t] * clips[t] / sizes[t], rel=0.03)
    events = [accounting.Event(sizes[t] / 240, sigmas[t], 1) for t in range(3)]
    assert run.epsilon() == pytest.approx(accounting.epsilon(events, delta=1e-3), rel=1e-6)
    assert accounting.default_delta(240) < 1e-3 / 10  # the test would notice another delta
    run.close()
