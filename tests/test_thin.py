"""Thin state: against full state where both must agree, against a dense computation where they cannot; resume; refusals."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rgp
from helpers import privatize
from resuming import STEPS, again, same, start, train, uninterrupted, weights
from rgp.errors import UnsupportedError
from rgp.optimizers import AdamCorrected
from rgp.rules.derived import derived
from rgp.slots import CarriedSlot
from toys import examples, loss_of, toy

SGD, ADAM, ADAMW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
THIN = {"rank": 2, "keep": 4, "state": "thin"}


def trained(
    make, *, state: str, steps: int = 6, model: nn.Module | None = None, noise: float = 1.0, **options
) -> rgp.Run:
    """A whole run; carriers from the weight, so that thin and full find the same ones at the first step."""
    model = toy() if model is None else model
    method = rgp.RGP(**{"rank": 2, "keep": steps, "source": "weight", "state": state, **options})
    run = privatize(
        model,
        examples(),
        optimizer=make(model.parameters()),
        method=method,
        steps=steps,
        batch_size=6,
        noise_multiplier=noise,
        microbatch_size=4,
    )
    for batch in run:
        run.step(loss_of(model, batch))
    return run


def apart(a: rgp.Run, b: rgp.Run) -> float:
    pairs = zip(a.model.parameters(), b.model.parameters(), strict=True)
    return max(float((p - q).detach().abs().max()) for p, q in pairs)


# ---------------------------------------------------------------------- exact


@pytest.mark.parametrize("sides", ["both", "left", "right"])
@pytest.mark.parametrize(
    "make",
    [
        lambda p: SGD(p, lr=0.1),
        lambda p: SGD(p, lr=0.1, weight_decay=0.05),
        lambda p: SGD(p, lr=0.1, momentum=0.9),
        lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.5, foreach=True, maximize=True),
    ],
    ids=["sgd", "decay", "momentum", "nesterov", "foreach"],
)
def test_linear_optimizers_are_those_of_the_full_state(make, sides):
    """Rebuilding is linear, so within a stretch it does not matter whether moments are taken before it or after it."""
    thin, full = (trained(make, state=state, sides=sides) for state in ("thin", "full"))
    assert apart(thin, full) < 1e-9
    pairs = zip(toy().parameters(), thin.model.parameters(), strict=True)
    assert max(float((p - q).detach().abs().max()) for p, q in pairs) > 0.01


def test_sgd_without_momentum_is_that_of_the_full_state_when_carriers_turn():
    make = lambda p: SGD(p, lr=0.1)  # noqa: E731
    assert apart(*(trained(make, state=state, keep=2) for state in ("thin", "full"))) < 1e-9


class DenseAdam:
    """AdamW in the coordinates (A, dR) of one weight, from its definition, with dense projectors."""

    def __init__(self, weight: Tensor, L: Tensor, R: Tensor, *, lr: float, decay: float, betas=(0.9, 0.999), eps=1e-8):
        self.W, self.L, self.R = weight.detach().clone().flatten(1), L, R
        self.lr, self.decay, self.betas, self.eps, self.t = lr, decay, betas, eps, 0
        self.m = self.v = None

    def step(self, A: Tensor, dR: Tensor) -> None:
        g = torch.cat([A.T.reshape(-1), dR.reshape(-1)])
        self.t += 1
        b1, b2 = self.betas
        self.m = (1 - b1) * g if self.m is None else b1 * self.m + (1 - b1) * g
        self.v = (1 - b2) * g**2 if self.v is None else b2 * self.v + (1 - b2) * g**2
        U = -self.lr * (self.m / (1 - b1**self.t)) / ((self.v / (1 - b2**self.t)).sqrt() + self.eps)
        UA, UR = U[: A.numel()].view(A.shape[1], A.shape[0]).T, U[A.numel() :].view_as(dR)
        outside = torch.eye(len(self.L)).to(self.L) - self.L @ self.L.T
        self.W = (1 - self.lr * self.decay) * self.W + outside @ UA @ self.R + self.L @ UR


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=["loop", "foreach", "fused"])
def test_adam_is_element_wise_in_the_released_coordinates(options):
    model = toy()
    optimizer = ADAMW(model.parameters(), lr=0.02, weight_decay=0.1, **options)
    method = rgp.RGP(rank=2, keep=9, source="weight", state="thin")
    run = privatize(model, examples(), optimizer=optimizer, method=method, steps=4, batch_size=6, noise_multiplier=1.0)
    released: list[Tensor] = []

    class Look(rgp.observing.Observer):
        def released(self, step, noisy):
            released.append(noisy / 6)

    run.observe(Look())
    run.begin_step()
    dense = {n: DenseAdam(run.model.get_parameter(n), *run.carriers[n], lr=0.02, decay=0.1) for n in run.carriers}
    assert dense
    for batch in run:
        run.step(loss_of(model, batch))
    for part in released:
        for name, adam in dense.items():
            where = run._step.gradients.where[name]
            cut = adam.L.numel()
            At, dR = part[where][:cut].view(adam.L.T.shape), part[where][cut:].view(adam.R.shape)
            adam.step(At.T, dR)
    for name, adam in dense.items():
        assert (adam.W - model.get_parameter(name).detach().flatten(1)).abs().max() < 1e-9


def test_adam_corrected_knows_the_noise_as_it_is_released():
    model = toy()
    optimizer = AdamCorrected(model.parameters(), lr=0.01)
    asked: dict[tuple[int, ...], object] = {}
    run = privatize(
        model,
        examples(),
        optimizer=optimizer,
        method=rgp.RGP(**THIN),
        steps=1,
        batch_size=6,
        noise_multiplier=2.0,
        clip=0.5,
    )
    told = optimizer.noise
    assert told is not None
    optimizer.noise = lambda p: asked.setdefault(tuple(p.shape), told(p))
    for batch in run:
        run.step(loss_of(model, batch))
    widths = {(slot.width,) for slot in run._step.trained.carried.values()}
    assert widths and widths <= asked.keys()
    assert all(asked[w] == pytest.approx((2.0 * 0.5 / 6) ** 2) for w in widths)


# ---------------------------------------------------------------------- nothing of full size


@pytest.mark.parametrize("make", [lambda p: SGD(p, lr=0.1, momentum=0.9), lambda p: ADAM(p, lr=0.01)])
@pytest.mark.parametrize("source", ["history", "momentum", "random"])
def test_nothing_of_full_size_exists_between_steps_nor_in_them(make, source):
    model = nn.Sequential(nn.Linear(40, 50), nn.Tanh(), nn.Linear(50, 60), nn.Tanh(), nn.Linear(60, 3)).double()
    optimizer = make(model.parameters())
    options = {"method": rgp.RGP(rank=2, keep=2, state="thin", source=source, warmup_steps=2), "steps": 5}
    x = torch.randn(12, 40, dtype=torch.float64)
    items = [(x[i], i % 3) for i in range(12)]
    run = privatize(model, items, optimizer=optimizer, batch_size=6, noise_multiplier=1.0, **options)
    carried = {
        id(p): n for n, p in model.named_parameters() if n in run.carriers or n.endswith(("0.weight", "2.weight"))
    }
    before = [copy.deepcopy(group) for group in optimizer.param_groups]
    sizes: list[int] = []

    def look(opt, *_):
        sizes.extend(t.numel() for g in opt.param_groups for p in g["params"] for t in (p, p.grad) if t is not None)

    optimizer.register_step_pre_hook(look)
    for batch in run:
        run.step(loss_of(model, batch))
    assert run.initial == {}
    assert max(sizes) == 2 * (50 + 60)  # of the second layer at rank 2, and 3000 in full
    assert max(t.numel() for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)) == 220
    assert all(p.grad is None for p in model.parameters())
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert [id(p) for p in held] == [id(p) for p in model.parameters()] and len(carried) == 2
    for group, old in zip(optimizer.param_groups, before, strict=True):
        assert {k: v for k, v in group.items() if k != "params"} == {k: v for k, v in old.items() if k != "params"}
    assert set(optimizer.state) <= set(model.parameters())


def test_groups_and_schedulers_reach_the_thin_part():
    model = toy()
    weights_, biases = [p for p in model.parameters() if p.dim() > 1], [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": weights_, "lr": 0.0}, {"params": biases, "lr": 0.1}]
    optimizer = SGD(groups, lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda t: 1.0, lambda t: float(t > 1)])
    optimizer.param_groups[0]["lr"] = scheduler.base_lrs[0] = 0.5
    old = copy.deepcopy(model.state_dict())
    run = privatize(
        model,
        examples(),
        optimizer=optimizer,
        scheduler=scheduler,
        method=rgp.RGP(**THIN),
        steps=1,
        batch_size=6,
        noise_multiplier=1.0,
    )
    for batch in run:
        run.step(loss_of(model, batch))
    assert not torch.equal(model[0].weight, old["0.weight"]) and torch.equal(model[0].bias, old["0.bias"])


# ---------------------------------------------------------------------- carriers that turn


def test_momentum_and_history_go_along_when_carriers_turn():
    """J_t m_t is the projection of J_s m_s on the new carriers, with dense projectors; second moments become their mean."""
    model = toy()
    optimizer = ADAM(model.parameters(), lr=0.01)
    method = rgp.RGP(rank=2, keep=3, state="thin", warmup_steps=1)
    run = privatize(model, examples(), optimizer=optimizer, method=method, steps=5, batch_size=6, noise_multiplier=1.0)
    name, weight = "2.weight", model[2].weight

    def matrices() -> dict[str, Tensor]:
        slot = run._step.trained.carried[name]
        thin = run._step.update.thin
        L, R = slot.Lt.T, slot.R
        found = {}
        for key, part in (("exp_avg", optimizer.state[weight]["exp_avg"]), ("sum", thin.sums[name])):
            A, dR = part[: L.numel()].view(slot.Lt.shape).T, part[L.numel() :].view(R.shape)
            found[key] = (torch.eye(len(L)).to(L) - L @ L.T) @ A @ R + L @ dR
        return found

    for batch in run:
        if run.step(loss_of(model, batch)) and run.step_index == 3:
            break
    before, second = matrices(), optimizer.state[weight]["exp_avg_sq"].clone()
    L_old = run.carriers[name][0].clone()
    run.begin_step()
    L, R = run.carriers[name]
    assert not torch.allclose(L, L_old)
    for key, old in before.items():
        outside = (torch.eye(len(L)).to(L) - L @ L.T) @ old @ (torch.eye(R.shape[1]).to(R) - R.T @ R)
        assert (matrices()[key] - (old - outside)).abs().max() < 1e-9
        assert float((old - outside).norm()) > 0.1 * float(old.norm()) > 0
    assert torch.equal(optimizer.state[weight]["exp_avg_sq"], torch.full_like(second, float(second.mean())))
    again_ = {k: v.clone() for k, v in matrices().items()}
    run.stop()
    run.begin_step()  # a batch that was dropped: the same step begins once more, and nothing turns twice
    run._step.drop()
    run._step.begin()
    assert torch.equal(run.carriers[name][0], L) and all(torch.equal(matrices()[k], again_[k]) for k in again_)


def test_history_is_the_way_of_the_weights_within_the_first_stretch():
    model = toy()
    old = copy.deepcopy(model)
    run = trained(lambda p: ADAM(p, lr=0.01), state="thin", model=model, steps=4)
    for name in run.carriers:
        left, right = run._step.update.thin.history(name)
        way = (model.get_parameter(name) - old.get_parameter(name)).detach()
        assert (left @ right - way).abs().max() < 1e-12 < float(way.abs().max())


def test_history_that_has_not_begun_is_the_weight():
    runs = []
    for source in ("history", "weight"):
        model = toy()
        method = rgp.RGP(rank=2, source=source, warmup_steps=0, state="thin")
        runs.append(privatize(model, examples(), method=method, steps=3))
        runs[-1].begin_step()
    one, two = (run.carriers for run in runs)
    assert one and all(torch.equal(one[name][0], two[name][0]) for name in one)


# ---------------------------------------------------------------------- resume


@pytest.mark.parametrize(
    "options",
    [
        {"scheduler": "cosine", "method": rgp.RGP(**THIN, warmup_steps=2)},
        {
            "optimizer": "amsgrad",
            "method": rgp.RGP(**{**THIN, "keep": 3}, source="momentum", warmup_steps=2),
            "ema": 0.9,
        },
        {"optimizer": "sgd", "method": rgp.RGP(**{**THIN, "keep": 1})},
        {"optimizer": "groups", "method": rgp.RGP(**{**THIN, "keep": 2}, sides="left", source="random")},
    ],
    ids=["adam", "amsgrad", "sgd", "groups"],
)
def test_resumed_training_is_bit_identical(tmp_path, options):
    truth = uninterrupted(**options)
    run = start(tmp_path, **options)
    train(run, 3)
    run.begin_step()  # saved after carriers have turned for a step that is not taken yet
    run.save(tmp_path)
    train(run, 5, part=1)
    resumed = again(tmp_path, **{k: options[k] for k in ("optimizer", "scheduler") if k in options})
    train(resumed)
    assert same(weights(resumed), weights(truth))
    assert resumed.ledger.count == STEPS and resumed.ledger.events() == truth.ledger.events()


class HalfNet(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second, self.head = nn.Linear(6, 12), nn.Linear(12, 12), nn.Linear(12, 3)
        self.to(torch.bfloat16)

    def forward(self, x):
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x.bfloat16()))))).float()


@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "compensated"])
def test_bfloat16_is_resumed_to_the_bit_and_its_state_is_float32(tmp_path, rounding):
    options = {"net": HalfNet, "method": rgp.RGP(**THIN, rounding=rounding)}
    truth = uninterrupted(**options)
    run = start(tmp_path, **options)
    train(run, 3)
    run.save(tmp_path)
    resumed = again(tmp_path, net=HalfNet)
    state = resumed.optimizer.state[resumed.model.second.weight]
    assert state["exp_avg"].dtype == torch.float32
    assert torch.equal(state["exp_avg"], run.optimizer.state[run.model.second.weight]["exp_avg"])
    train(resumed)
    assert same(weights(resumed), weights(truth))


# ---------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: torch.optim.Adagrad(p), "Adagrad"),
        (lambda p: torch.optim.RMSprop(p), "RMSprop"),
        (lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1), "through the moments"),
        (lambda p: ADAM(p, weight_decay=0.1), "through the moments"),
    ],
)
def test_optimizers_that_it_cannot_serve_are_refused(make, words):
    model = toy()
    with pytest.raises(UnsupportedError, match=words):
        privatize(model, examples(), optimizer=make(model.parameters()), method=rgp.RGP(**THIN))


def test_an_optimizer_with_steps_behind_it_is_refused():
    model = toy()
    optimizer = ADAM(model.parameters())
    loss_of(model, (examples()[0][0][None], torch.tensor([1]))).backward()
    optimizer.step()
    with pytest.raises(UnsupportedError, match="taken steps"):
        privatize(model, examples(), optimizer=optimizer, method=rgp.RGP(**THIN))


def go(run: rgp.Run, model: nn.Module) -> None:
    for batch in run:
        run.step(loss_of(model, batch))


def test_derived_weights_are_refused_before_a_release():
    class Standardised(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.head = nn.Linear(8, 12).double(), nn.Linear(12, 3).double()

        def forward(self, x):
            weight = derived(self.inner.weight, lambda w: w - w.mean(1, keepdim=True))
            return self.head(F.linear(x, weight, self.inner.bias))

    model = Standardised()
    run = privatize(model, examples(), optimizer=SGD(model.parameters(), lr=0.1), method=rgp.RGP(**THIN))
    with pytest.raises(UnsupportedError, match="derived"):
        go(run, model)
    assert run.ledger.count == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"state": "thin", "sides": "alternate"}, "alternate"),
        ({"state": "slim"}, "state"),
        ({"rounding": "stochastic"}, "goes with state"),
        ({"state": "thin", "rounding": "up"}, "rounding"),
    ],
)
def test_settings_that_do_not_go_together(options, words):
    with pytest.raises(ValueError, match=words):
        rgp.RGP(**options)


def test_learning_rates_of_zero_are_still_noticed():
    model = toy()
    groups = [
        {"params": [model[2].weight], "lr": 0.0},
        {"params": [p for p in model.parameters() if p is not model[2].weight]},
    ]
    run = privatize(
        model, examples(), optimizer=SGD(groups, lr=0.1), method=rgp.RGP(**THIN), noise_multiplier=1.0, batch_size=6
    )
    with pytest.raises(rgp.errors.WrongUseError, match=r"2\.weight"):
        go(run, model)


def test_it_is_about_carried_weights_alone():
    run = trained(lambda p: ADAM(p, lr=0.01), state="thin", steps=1)
    state = run.optimizer.state
    slots = run._step.trained.slots
    for name, p in run.model.named_parameters():
        carried = isinstance(slots[name], CarriedSlot)
        assert state[p]["exp_avg"].shape == ((slots[name].width,) if carried else p.shape)
