"""Every method, clip rule and part of the recipe gives what its definition says: compared with plain autograd, in float64."""

from __future__ import annotations

import copy
import math
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rgp
from rgp.accounting import combine
from rgp.clips import AdaptiveClip
from rgp.models import WideResNet
from rgp.models.wrn import StandardizedConv2d, standardized
from rgp.observing import Observer

CLASSES, N = 3, 12


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 8, bias=False), nn.Tanh(), nn.Linear(8, CLASSES)
    ).double()


def make_data(n: int = N, shape: tuple[int, ...] = (6,)) -> list[tuple[Tensor, int]]:
    torch.manual_seed(1)
    return [(torch.randn(shape, dtype=torch.float64), i % CLASSES) for i in range(n)]


def train(model: nn.Module, data: list, method: rgp.Method, *, lr: float = 1.0, loop=None, **options) -> rgp.Run:
    """Full batches (every example with probability 1), SGD; without noise unless asked for."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    defaults = {
        "batch_size": len(data),
        "steps": 1,
        "noise_multiplier": 0.0,
        "clip": None,
        "seed": 3,
        "microbatch_size": 5,
        "probe": False,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = rgp.privatize(model, optimizer, data, method=method, **{**defaults, **options})
    for x, y in run:
        run.step(F.cross_entropy(model(x), y))
        if loop is not None:
            loop(run)
    run.close()
    return run


def update(model: nn.Module, before: nn.Module) -> dict[str, Tensor]:
    """The gradient that SGD with lr 1 was given."""
    old = dict(before.named_parameters())
    return {n: (old[n] - p).detach() for n, p in model.named_parameters()}


def gradients(model: nn.Module, x: Tensor, y: int) -> dict[str, Tensor]:
    """One example, plain autograd."""
    loss = F.cross_entropy(model(x[None]), torch.tensor([y]))
    return dict(zip(dict(model.named_parameters()), torch.autograd.grad(loss, list(model.parameters())), strict=True))


def norm(tensors) -> float:
    return math.sqrt(sum(float(t.square().sum()) for t in tensors))


def assert_same(found: dict[str, Tensor], truth: dict[str, Tensor]) -> None:
    for name, value in truth.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


# ---------------------------------------------------------------------- clip rules


def clipped_mean(model: nn.Module, data: list, factors) -> dict[str, Tensor]:
    """`factors` maps one example's gradients to a number per parameter."""
    total = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    for x, y in data:
        grads = gradients(model, x, y)
        for name, factor in factors(grads).items():
            total[name] += factor * grads[name] / len(data)
    return total


def test_automatic_clipping():
    model, data = make_model(), make_data()
    before = copy.deepcopy(model)
    train(model, data, rgp.DPSGD(), clip=rgp.AutoClip(0.7, gamma=0.05))
    truth = clipped_mean(before, data, lambda g: dict.fromkeys(g, 0.7 / (norm(g.values()) + 0.05)))
    assert_same(update(model, before), truth)


def test_groups_are_clipped_apart():
    model, data = make_model(), make_data()
    before = copy.deepcopy(model)
    run = train(model, data, rgp.DPSGD(), clip=rgp.GroupClip({"4.*": 0.02, "*.bias": 0.01, "*": 0.05}))
    groups = {"4.weight": 0, "4.bias": 0, "0.bias": 1, "0.weight": 2, "2.weight": 2}
    limits = (0.02, 0.01, 0.05)

    def factors(g):
        sizes = [norm(g[n] for n in g if groups[n] == k) for k in range(3)]
        return {n: min(1.0, limits[groups[n]] / sizes[groups[n]]) for n in g}

    assert_same(update(model, before), clipped_mean(before, data, factors))
    assert run.ledger.of_step(0)[0]["C"] == pytest.approx(math.hypot(*limits))


def test_the_noise_of_groups_is_a_multiple_of_their_joint_sensitivity():
    model = nn.Linear(200, 100, bias=True).double()
    with torch.no_grad():
        model.weight.zero_(), model.bias.zero_()
    before = copy.deepcopy(model)
    data = [(torch.zeros(200, dtype=torch.float64), 0)] * 4
    train(model, data, rgp.DPSGD(), clip=rgp.GroupClip({"bias": 3.0, "*": 4.0}), noise_multiplier=2.0, delta=1e-3)
    assert float(update(model, before)["weight"].std()) * 4 == pytest.approx(2.0 * 5.0, rel=0.03)


@pytest.mark.parametrize("bad", [{"head*": 1.0}, {"*": 1.0, "none*": 2.0}, {}, {"*": -1.0}])
def test_groups_that_do_not_fit_are_refused(bad):
    with pytest.raises(ValueError, match="GroupClip"):
        train(make_model(), make_data(), rgp.DPSGD(), clip=rgp.GroupClip(bad))


def test_the_adaptive_clip_follows_the_quantile():
    model, data = make_model(), make_data(60)
    seen = []
    rule = rgp.AdaptiveClip(initial=20.0, quantile=0.4, rate=0.5)
    train(
        model,
        data,
        rgp.DPSGD(),
        lr=0.0,
        clip=rule,
        steps=60,
        microbatch_size=60,
        loop=lambda run: seen.append(run.clip_norm),
    )
    norms = np.array([norm(gradients(model, *row).values()) for row in data])
    norm_now = 20.0
    for found in seen[:10]:  # C <- C exp(-rate (share below - quantile)), from the exact count without noise
        norm_now *= math.exp(-0.5 * ((norms <= norm_now).mean() - 0.4))
        assert found == pytest.approx(norm_now, rel=1e-9)
    assert np.mean(norms <= seen[-1]) == pytest.approx(0.4, abs=0.05)


@pytest.mark.parametrize(("sigma", "count_noise"), [(1.0, None), (0.7, 0.5), (5.0, 3.0)])
def test_gradients_and_count_are_one_event(sigma, count_noise):
    rule = AdaptiveClip(count_noise=count_noise)
    bound = rule.bound(0, sigma=sigma, batch_size=100, adapted=2.0)
    std = sigma * bound.sensitivity  # the same noise on every released coordinate
    on_count = std / bound.count_weight  # in units of examples, each of which adds 1/2 or -1/2
    assert combine([(2.0, std), (0.5, on_count)]) == pytest.approx(sigma)
    assert on_count == pytest.approx(count_noise or max(100 / 20, 2 * sigma))


def test_the_count_is_released_with_its_noise_and_recorded_in_one_line():
    model, data, released = nn.Linear(3, 2).double(), make_data(40, (3,)), []
    rule = rgp.AdaptiveClip(initial=1.0, count_noise=4.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    run = rgp.privatize(
        model, optimizer, [(x, y % 2) for x, y in data], method=rgp.DPSGD(), batch_size=40, steps=400, noise_multiplier=1.0,
        clip=rule, microbatch_size=40, seed=1, delta=1e-3,
    )  # fmt: skip

    class Spy(Observer):
        def before_clipping(self, gradients, indices):
            gradients.rows().zero_()  # everyone is below C: the count is N/2

        def released(self, step, noisy):
            bound = run._step.bound
            released.append((noisy[-1].item() / bound.count_weight, bound))

    run.observe(Spy())
    for x, y in run:
        run.step(F.cross_entropy(model(x), y))
    counts = np.array([count for count, _ in released]) - 20
    assert abs(counts.mean()) < 4 * 4.0 / math.sqrt(len(counts))
    assert counts.std() == pytest.approx(4.0, rel=0.15)  # fails for 2/3 and 3/2 of it
    lines = [run.ledger.of_step(t) for t in range(400)]
    assert all(len(line) == 1 and line[0]["sigma"] == 1.0 for line in lines)
    assert [line[0]["C"] for line in lines] == [bound.clip for _, bound in released]


def test_a_count_that_would_spend_more_than_the_step_is_refused():
    with pytest.raises(ValueError, match="count_noise"):
        train(make_model(), make_data(), rgp.DPSGD(), clip=rgp.AdaptiveClip(count_noise=0.4), noise_multiplier=1.0)


# ---------------------------------------------------------------------- views, averaging


@pytest.mark.parametrize("clip", [0.3, 1e3], ids=["clipped", "not clipped"])  # clipped, a factor would not be noticed
@pytest.mark.parametrize("method", [rgp.DPSGD(), rgp.RGP(rank=2, source="weight")], ids=["dpsgd", "rgp"])
def test_the_gradient_of_an_example_is_the_mean_over_its_views_before_clipping(method, clip):
    model, data, K = make_model(), make_data(), 4
    before, views = copy.deepcopy(model), []

    def augment(batch):
        x, y = batch
        views.append(x + torch.randn_like(x))
        return views[-1], y

    run = train(model, data, method, clip=clip, views=K, augment=augment, microbatch_size=5, probe=False)
    shown = [torch.stack(views[start : start + K], 1) for start in range(0, len(views), K)]
    inputs = torch.cat(shown)  # (N, K, 6)
    assert len(inputs) == N and not torch.equal(inputs[:, 0], inputs[:, 1])
    carriers = {n: (L, R) for n, (L, R) in run.carriers.items()}
    total = {n: torch.zeros_like(p) for n, p in before.named_parameters()}
    for i, (_, y) in enumerate(data):
        each = [gradients(before, inputs[i, k], y) for k in range(K)]
        mean = {n: sum(g[n] for g in each) / K for n in total}
        for n, (L, R) in carriers.items():
            G = mean[n]
            mean[n] = G - (G - L @ (L.T @ G)) @ (torch.eye(R.shape[1]).double() - R.T @ R)
        factor = min(1.0, clip / norm(mean.values()))
        for n, g in mean.items():
            total[n] += factor * g / N
    found = update(model, before)
    for name, value in total.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-8)


def test_memory_does_not_grow_with_the_views():
    sizes = []
    for K in (1, 8):
        options = {} if K == 1 else {"views": K, "augment": lambda batch: batch}
        sizes.append(train(make_model(), make_data(), rgp.RGP(rank=2), clip=1.0, **options).per_example_bytes)
    assert sizes[0] == sizes[1] > 0


def test_augmentation_repeats_with_the_seed_and_leaves_the_generators_alone():
    def once() -> tuple[Tensor, float]:
        model, data, seen = make_model(), make_data(), []

        def augment(batch):
            seen.append((torch.rand(()).item(), np.random.rand()))
            return batch

        torch.manual_seed(5), np.random.seed(5)
        train(model, data, rgp.DPSGD(), clip=1.0, views=2, augment=augment, steps=2, probe=False)
        assert len(set(seen)) == len(seen)
        return torch.tensor(seen), np.random.rand() + torch.rand(()).item()

    (a, left_a), (b, left_b) = once(), once()
    assert torch.equal(a, b) and left_a == left_b
    torch.manual_seed(5), np.random.seed(5)
    assert left_a == np.random.rand() + torch.rand(()).item()


def test_views_need_augmentation():
    with pytest.raises(ValueError, match="augment"):
        train(make_model(), make_data(), rgp.DPSGD(), views=2)


def test_the_mean_of_the_weights():
    model, weights = make_model(), []
    start = model[0].weight.detach().clone()
    keep = lambda run: weights.append(model[0].weight.detach().clone())  # noqa: E731
    run = train(model, make_data(), rgp.DPSGD(), lr=0.3, steps=40, ema=0.7, microbatch_size=N, loop=keep)
    mean = start
    for t, weight in enumerate(weights, 1):
        d = min(0.7, (1 + t) / (10 + t))
        mean = d * mean + (1 - d) * weight
    own = model[0].weight.detach().clone()
    with run.averaged():
        torch.testing.assert_close(model[0].weight, mean, rtol=1e-12, atol=1e-14)
    assert torch.equal(model[0].weight, own)


@pytest.mark.parametrize("decay", [1.0, -0.1, "0.9", True])
def test_a_wrong_decay_is_refused(decay):
    with pytest.raises(ValueError, match="ema"):
        train(make_model(), make_data(), rgp.DPSGD(), ema=decay)


# ---------------------------------------------------------------------- methods


def batch_gradient(model: nn.Module, data: list) -> dict[str, Tensor]:
    return clipped_mean(model, data, lambda g: dict.fromkeys(g, 1.0))


def test_nonprivate_is_plain_training():
    model, data = make_model(), make_data()
    plain = copy.deepcopy(model)
    train(model, data, rgp.NonPrivate(), lr=0.1, steps=3)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    x, y = torch.stack([x for x, _ in data]), torch.tensor([y for _, y in data])
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(plain(x), y).backward()
        optimizer.step()
    assert_same(dict(model.named_parameters()), dict(plain.named_parameters()))


def test_nonprivate_keeps_no_per_example_gradients():
    assert train(make_model(), make_data(), rgp.NonPrivate()).per_example_bytes == 0


@pytest.mark.parametrize("method", [rgp.NonPrivate(), rgp.PowerSGD(rank=2), rgp.ResidualOff(rank=2)])
def test_what_protects_nothing_takes_no_noise(method):
    with pytest.raises(ValueError, match="protects nothing"):
        train(make_model(), make_data(), method, noise_multiplier=1.0, clip=1.0)


@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("kind", [rgp.PowerSGD, rgp.DPPowerSGD])
def test_powersgd(kind, feedback):
    """Two steps against a loop that is PowerSGD's definition, from the same starting Q."""
    model, data = make_model(), make_data()
    reference, Q, error = copy.deepcopy(model), {}, {}
    steps = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    clip = None if kind is rgp.PowerSGD else 1e6
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = rgp.privatize(
            model, optimizer, data, method=kind(rank=2, error_feedback=feedback), batch_size=N, steps=3, noise_multiplier=0.0,
            clip=clip, seed=0, microbatch_size=N, probe=False,
        )  # fmt: skip
    run._step.update.power.state |= {
        f"{n}.Q": torch.randn(2, reference.get_parameter(n).shape[1]).double() for n in ("0.weight", "2.weight")
    }
    Q = {n.removesuffix(".Q"): q.clone() for n, q in run._step.update.power.state.items()}
    for x, y in run:
        grads = batch_gradient(reference, data)
        for name, q in Q.items():
            G = grads[name] + (error.get(name, 0) if feedback else 0)
            P = torch.linalg.qr(G @ q.T).Q
            Q[name] = P.T @ G
            error[name] = G - P @ Q[name]
            grads[name] = P @ Q[name]
        run.step(F.cross_entropy(model(x), y))
        steps.append(norm(grads.values()))
        with torch.no_grad():
            for name, p in reference.named_parameters():
                p -= 0.5 * grads[name]
    for name, p in model.named_parameters():
        torch.testing.assert_close(p, reference.get_parameter(name), rtol=1e-5, atol=1e-8)
    run.close()


def test_dp_powersgd_projects_the_noisy_sum():
    """Rank r after noise on every entry: the noise is in what is approximated, and the charge is DP-SGD's."""
    model, data = nn.Sequential(nn.Linear(30, 20, bias=False), nn.Linear(20, CLASSES)).double(), make_data(8, (30,))
    before = copy.deepcopy(model)
    run = train(model, data, rgp.DPPowerSGD(rank=3), clip=1e-3, noise_multiplier=50.0, delta=1e-3)
    change = update(model, before)["0.weight"]
    assert torch.linalg.matrix_rank(change) == 3
    assert float(change.norm()) > 0
    assert run.plan["0.weight"].noise_dimensions == 600


def test_residual_off_computes_with_the_carriers_alone():
    """The gradient is taken at L R, projected, and the update goes to W, which is otherwise left alone."""
    model, data = make_model(), make_data()
    before = copy.deepcopy(model)
    run = train(model, data, rgp.ResidualOff(rank=2, source="weight"))
    at = copy.deepcopy(before)
    with torch.no_grad():
        for name, (L, R) in run.carriers.items():
            at.get_parameter(name).copy_(L @ R)
    truth = batch_gradient(at, data)
    for name, (L, R) in run.carriers.items():
        G = truth[name]
        truth[name] = G - (G - L @ (L.T @ G)) @ (torch.eye(R.shape[1]).double() - R.T @ R)
    found = update(model, before)
    for name, value in truth.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-9)


# ---------------------------------------------------------------------- weight standardisation


class Standardized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = StandardizedConv2d(2, 12, 3, padding=1)
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.conv(x)).mean((2, 3)))


def test_a_standardised_kernel_gets_the_gradient_of_autograd():
    torch.manual_seed(0)
    model, data = Standardized().double(), make_data(10, (2, 5, 5))
    before = copy.deepcopy(model)
    train(model, data, rgp.DPSGD(), clip=None)
    assert_same(update(model, before), batch_gradient(before, data))


@pytest.mark.parametrize("method", [rgp.DPSGD(), rgp.RGP(rank=2, source="weight")], ids=["dpsgd", "rgp"])
def test_what_is_clipped_of_a_standardised_kernel_is_the_gradient_of_the_kernel_in_use(method):
    torch.manual_seed(0)
    model, data, clip = Standardized().double(), make_data(10, (2, 5, 5)), 0.05
    before = copy.deepcopy(model)
    run = train(model, data, method, clip=clip)
    names = ["conv.weight", "conv.bias", "head.weight", "head.bias"]
    total = {n: torch.zeros_like(before.get_parameter(n)) for n in names}
    for x, y in data:
        kernel = standardized(before.conv.weight).detach().requires_grad_()
        leaves = [kernel, before.conv.bias, before.head.weight, before.head.bias]
        hidden = F.relu(F.conv2d(x[None], kernel, before.conv.bias, padding=1)).mean((2, 3))
        grads = dict(
            zip(
                names, torch.autograd.grad(F.cross_entropy(before.head(hidden), torch.tensor([y])), leaves), strict=True
            )
        )
        for n, (L, R) in run.carriers.items():
            G = grads[n].flatten(1)
            grads[n] = (G - (G - L @ (L.T @ G)) @ (torch.eye(R.shape[1]).double() - R.T @ R)).view_as(grads[n])
        factor = min(1.0, clip / norm(grads.values()))
        for n in names:
            total[n] += factor * grads[n] / len(data)
    leaf = before.conv.weight.detach().requires_grad_()
    total["conv.weight"] = torch.autograd.grad(standardized(leaf), leaf, total["conv.weight"])[0]
    found = update(model, before)
    for name in names:
        torch.testing.assert_close(found[name], total[name], rtol=1e-5, atol=1e-9)


def test_a_standardised_wide_resnet_trains_under_the_probe():
    torch.manual_seed(0)
    model = WideResNet(10, 1, weight_standardization=True)
    data = [(torch.randn(3, 8, 8), i % 10) for i in range(16)]
    before = copy.deepcopy(model)
    train(model, data, rgp.RGP(rank=2), clip=1.0, noise_multiplier=1.0, delta=1e-3, steps=2, microbatch_size=8)
    assert all(not torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True))


# ---------------------------------------------------------------------- all of it survives a checkpoint


@pytest.mark.parametrize(
    ("method", "options"),
    [
        (rgp.DPPowerSGD(rank=2, error_feedback=True), {"clip": 1.0}),
        (rgp.RGP(rank=2), {"clip": rgp.AdaptiveClip(initial=0.1), "ema": 0.9}),
        (rgp.RGP(rank=2), {"clip": rgp.GroupClip({"4.*": 0.1, "*": 1.0})}),
        (
            rgp.DPSGD(),
            {"clip": rgp.AutoClip(0.5), "views": 2, "augment": lambda b: (b[0] + torch.randn_like(b[0]), b[1])},
        ),
    ],
    ids=["powersgd", "adaptive+ema", "groups", "auto+views"],
)
def test_a_resumed_run_ends_where_the_uninterrupted_one_does(tmp_path, method, options):
    def parts():
        model = make_model()
        return model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), make_data()

    common = {"method": method, "batch_size": 6, "steps": 6, "noise_multiplier": 1.0, "delta": 1e-3, "seed": 7}

    def go(run, model, stop=99):
        for x, y in run:
            if run.step(F.cross_entropy(model(x), y)) and run.step_index == stop:
                break

    model, *rest = parts()
    whole = rgp.privatize(model, *rest, **common, **options)
    go(whole, model)
    again, *rest = parts()
    first = rgp.privatize(again, *rest, **common, **options, folder=tmp_path)
    go(first, again, stop=3)
    first.save(tmp_path)
    first.close()
    third, *rest = parts()
    run = rgp.resume(tmp_path, third, *rest, augment=options.get("augment"))
    assert run.mechanism == whole.mechanism
    go(run, third)
    assert run.clip_norm == whole.clip_norm
    for a, b in zip(model.parameters(), third.parameters(), strict=True):
        assert torch.equal(a, b)
    with whole.averaged(), run.averaged():
        for a, b in zip(model.parameters(), third.parameters(), strict=True):
            assert torch.equal(a, b)
