"""Honest loops that were refused once, or might be: they train."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rgp

ROWS = 24


def net(outputs: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, outputs))


def private(model: nn.Module, **options: Any) -> rgp.Run:
    x = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(1))
    rows = [(x[i], i % 2) for i in range(ROWS)]
    options = {"noise_multiplier": 1.0, "batch_size": 12, "steps": 2, "method": rgp.DPSGD(), **options}
    return rgp.privatize(model, torch.optim.SGD(model.parameters(), lr=0.1), rows, **options)


def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def even(x: Tensor) -> Tensor:
    return torch.full((len(x),), 1 / len(x))


MEANS = {
    "dot": lambda m, x, y: torch.dot(even(x), losses(m, x, y)),
    "matmul": lambda m, x, y: even(x) @ losses(m, x, y),
    "einsum": lambda m, x, y: torch.einsum("i,i->", even(x), losses(m, x, y)),
    "linear": lambda m, x, y: F.linear(losses(m, x, y)[None], even(x)[None]).squeeze(),
    "lerp": lambda m, x, y: torch.lerp(losses(m, x, y), losses(m, 2 * x, y), 0.3).mean(),
    "cumsum": lambda m, x, y: losses(m, x, y).cumsum(0)[-1] / len(x),
    "the largest outputs of each": lambda m, x, y: m(x).topk(1, dim=1).values.mean(),
    "inputs hidden at random": lambda m, x, y: losses(m, x * (torch.rand_like(x) > 0.3), y).mean(),
}


@pytest.mark.parametrize("loss", MEANS.values(), ids=MEANS)
def test_means_in_other_words(loss):
    model = net()
    with private(model) as run:
        for x, y in run:
            run.step(loss(model, x, y))
    assert run.step_index == 2


class Counting(nn.Module):
    """A counter of steps, and a temperature that falls: the same whatever the examples are."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("temperature", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.temperature = self.temperature * 0.99
        return self.net(x) / self.temperature


def test_a_counter_in_a_buffer_which_the_rehearsal_does_not_advance():
    model, passes = Counting(), 0
    with private(model, steps=6) as run:
        for x, y in run:
            run.step(F.cross_entropy(model(x), y))
            passes += not run.rehearsing
    assert int(model.steps) == passes > 0


def test_a_counter_of_examples_is_no_counter_of_steps():
    """How many were drawn is private."""

    class Examples(Counting):
        def forward(self, x: Tensor) -> Tensor:
            self.steps += len(x)
            return self.net(x)

    model = Examples()

    def train(run: rgp.Run) -> None:
        for x, y in run:
            run.step(F.cross_entropy(model(x), y))

    with private(model) as run, pytest.raises(rgp.UnsupportedError, match="'steps' was changed"):
        train(run)


def test_evaluation_in_the_loop_without_no_grad():
    model = net()
    with private(model) as run:
        for x, y in run:
            model(torch.cat([x, x]))
            model(torch.randn(7, 6))
            run.step(F.cross_entropy(model(x), y))
            model(torch.randn(7, 6)).sum().item()
    assert run.step_index == 2


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 8), nn.Linear(4, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, 1)
        return self.decoder(mean + torch.randn_like(mean) * (log_variance / 2).exp()), mean, log_variance


def test_a_variational_autoencoder():
    model = Autoencoder()
    with private(model) as run:
        for x, _ in run:
            out, mean, log_variance = model(x)
            divergence = (mean.square() + log_variance.exp() - 1 - log_variance).sum(1) / 2
            run.step((out - x).square().sum(1).mean() + divergence.mean())
    assert run.step_index == 2


@pytest.mark.parametrize("how", ["grad", "backward"])
def test_adversarial_training(how):
    model = net()
    with private(model) as run:
        for x, y in run:
            inputs = x.clone().requires_grad_()
            loss = F.cross_entropy(model(inputs), y, reduction="sum")
            if how == "grad":
                (direction,) = torch.autograd.grad(loss, inputs)
            else:
                loss.backward()
                assert inputs.grad is not None
                direction = inputs.grad
            run.step(F.cross_entropy(model(x + 0.1 * direction.sign()), y))
    assert run.step_index == 2


def test_a_gradient_penalty_is_told_what_to_write():
    model = net()

    def train(run: rgp.Run) -> None:
        for x, _ in run:
            inputs = x.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
            run.step((gradient.norm(dim=1) - 1).square().mean())

    with private(model) as run, pytest.raises(rgp.UnsupportedError, match=r"^penalise a difference"):
        train(run)


def test_a_difference_in_place_of_a_gradient_penalty():
    model = net(1)
    with private(model) as run:
        for x, _ in run:
            direction = F.normalize(torch.randn_like(x), dim=1)
            slope = (model(x + 0.1 * direction) - model(x))[:, 0] / 0.1
            run.step(model(x).mean() + (slope.abs() - 1).relu().square().mean())
    assert run.step_index == 2


@pytest.mark.parametrize("clamped", [False, True])
def test_a_generator_learns_beside_the_run(clamped):
    torch.manual_seed(0)
    generator, critic = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 6)), net(1)
    optimizer, before = torch.optim.Adam(generator.parameters(), lr=1e-3), generator[0].weight.clone()
    moves = 0
    with private(critic) as run, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for x, _ in run:
            fake = generator(torch.randn(len(x), 3)).detach()
            run.step(critic(fake).mean() - critic(x).mean())
            if clamped:
                for parameter in critic.parameters():
                    parameter.data.clamp_(-0.1, 0.1)
            optimizer.zero_grad()
            old = generator[0].weight.clone()
            critic(generator(torch.randn(16, 3))).mean().neg().backward()
            optimizer.step()
            assert all(p.grad is None for p in critic.parameters())
            assert run.rehearsing == torch.equal(old, generator[0].weight), (
                "it is not trained while the loop is rehearsed"
            )
            moves += not run.rehearsing
    assert run.step_index == 2 and moves >= 2
    assert not torch.equal(before, generator[0].weight)
    assert sum("never from private examples" in str(w.message) for w in said) == 1


def test_plain_training_is_still_refused():
    model = net()

    def train(run: rgp.Run) -> None:
        for x, y in run:
            F.cross_entropy(model(x), y).backward()

    with private(model) as run, pytest.raises(rgp.WrongUseError, match=r"call run\.step\(loss\) in place of"):
        train(run)


class Rounded(nn.Module):
    """Texts of several lengths, padded. Its rounding depends on the longest, as other kernels may be chosen for another
    length: next to nothing in float32, several percent in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        hidden = self.first(x)
        offset = hidden.new_tensor(float(x.shape[1]))
        hidden = ((hidden + offset) - offset) * mask[:, :, None]
        return self.second(hidden.sum(1) / mask.sum(1)[:, None])


def padded(rows: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor, Tensor]:
    texts = [x for x, _ in rows]
    mask = nn.utils.rnn.pad_sequence([torch.ones(len(x)) for x in texts], batch_first=True)
    return nn.utils.rnn.pad_sequence(texts, batch_first=True), mask, torch.tensor([y for _, y in rows])


def test_the_rounding_of_autocast_is_no_coupling():
    torch.manual_seed(0)
    model = Rounded()
    rows = [(torch.randn(2 + i % 9, 6), i % 2) for i in range(ROWS)]
    options = {"method": rgp.DPSGD(), "noise_multiplier": 1.0, "batch_size": 12, "steps": 2, "collate_fn": padded}
    with rgp.privatize(model, torch.optim.SGD(model.parameters(), lr=0.1), rows, **options) as run:
        for x, mask, y in run:
            with torch.autocast("cpu", torch.bfloat16):
                outputs = model(x, mask)
            run.step(F.cross_entropy(outputs.float(), y))
    assert run.step_index == 2


def test_a_small_coupling_does_not_hide_in_the_rounding_of_autocast():
    model = net()
    model[0].register_forward_hook(lambda _module, _args, h: h.float() * (1 + 0.001 * torch.tanh(h.sum())))
    run = private(model)
    with pytest.raises(rgp.UnsupportedError, match="the examples of a batch"), run:  # noqa: PT012
        for x, y in run:
            with torch.autocast("cpu", torch.bfloat16):
                outputs = model(x)
            run.step(F.cross_entropy(outputs.float(), y))
