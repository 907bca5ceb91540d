"""What a model and a loop must not do, and what shows it: examples that meet, parameters and buffers past the engine."""

from __future__ import annotations

import random
from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rgp
from helpers import seeded
from rgp.rules.derived import derived

EXAMPLES = 8
POSITIONS = 16


class Model(nn.Module):
    """Some layers, and a forward pass that is given."""

    def __init__(self, forward: Callable[..., Tensor], **parts: Any) -> None:
        super().__init__()
        self._forward = forward
        for name, part in {"out": nn.Linear(6, 3), **parts}.items():
            setattr(self, name, part)
        self.double()

    def forward(self, *args: Any) -> Tensor:
        return self._forward(self, *args)


def zeroed(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        nn.init.zeros_(parameter)
    return module


def examples(shape: tuple[int, ...] = (6,)) -> list[tuple[Tensor, int]]:
    x = torch.randn(EXAMPLES, *shape, generator=seeded(0), dtype=torch.float64)
    return [(x[i] * (100 if i == 7 else 1), i % 3) for i in range(EXAMPLES)]


def mean(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def train(model: nn.Module, data: Any = None, loss: Callable[..., Tensor] = mean, **options: Any) -> rgp.Run:
    data = examples() if data is None else data
    options = {"method": rgp.DPSGD(), "noise_multiplier": 1.0, "batch_size": EXAMPLES, "steps": 2, "seed": 0, **options}
    with rgp.privatize(model, torch.optim.SGD(model.parameters(), lr=0.1), data, **options) as run:
        try:
            for x, y in run:
                run.step(loss(model, x, y))
        except Exception:
            assert run.epsilon() == 0 and run.ledger.count == 0
            raise
    return run


# ---------------------------------------------------------------------- models that mix


def remembers(model: Model, x: Tensor) -> Tensor:
    last, model.last = getattr(model, "last", 0.0), x.mean(0)
    return model.out(x - last)


def drops_a_layer(model: Model, x: Tensor) -> Tensor:
    return model.out(x + torch.tanh(model.inner(x)) if random.random() < 0.5 else x)


def turns(model: Model, x: Tensor) -> Tensor:
    return model.out(x).transpose(0, 1).contiguous()


MIXES: dict[str, Callable[[], Model]] = {
    "into a head of zeros": lambda: Model(lambda m, x: m.out(x - x.mean(0)), out=zeroed(nn.Linear(6, 3))),
    "behind the last layer": lambda: Model(lambda m, x: (y := m.out(x)) - y.detach().mean(0)),
    "by the largest": lambda: Model(lambda m, x: m.out(5 * x / x.abs().max())),
    "with the batch before": lambda: Model(remembers),
}


@pytest.mark.parametrize("make", MIXES.values(), ids=MIXES)
def test_a_model_that_mixes_examples_is_refused(make):
    with pytest.raises(
        rgp.UnsupportedError,
        match=r"when only other examples|for the same examples",
    ):
        train(make())


def test_every_call_of_the_model_is_looked_at():
    model = Model(lambda m, x, mix=False: m.out(x - x.mean(0) if mix else x))

    def loss(model, x, y):
        with torch.no_grad():
            model(x[:3])  # to look at
        return F.cross_entropy(model(x), y) + F.cross_entropy(model(x, True), y)

    with pytest.raises(rgp.UnsupportedError, match="the model mixes"):
        train(model, loss=loss)


def test_positions_that_all_examples_share_are_each_examples_own():
    def forward(model, x):
        return model.out(torch.tanh(x + model.positions(torch.arange(POSITIONS)))).mean(1)

    model = Model(forward, positions=zeroed(nn.Embedding(POSITIONS, 6)))
    batch = torch.utils.data.default_collate(examples((POSITIONS, 6)))
    assert rgp.check(model, batch, lambda model, batch: mean(model, *batch), method=rgp.DPSGD()).ok
    assert train(model, examples((POSITIONS, 6))).step_index == 2


APART: dict[str, Callable[[], Model]] = {
    "zeros": lambda: Model(lambda m, x: m.out(x), out=zeroed(nn.Linear(6, 3))),
    "a gate of zeros": lambda: Model(lambda m, x: m.out(x + m.gate * x.tanh()), gate=nn.Parameter(torch.zeros(6))),
    "own positions": lambda: Model(
        lambda m, x: m.out(x + m.positions(torch.arange(6).expand(len(x), -1)).mean(2)),
        positions=zeroed(nn.Embedding(6, 4)),
    ),
}


@pytest.mark.parametrize("make", APART.values(), ids=APART)
def test_others_are_not(make):
    model = make()
    overrides = {"positions.weight": "exact"} if hasattr(model, "positions") else {}
    assert train(model, method=rgp.DPSGD(overrides=overrides)).step_index == 2


def test_outputs_with_as_many_positions_as_examples_are_not_taken_for_mixtures():
    """CTC wants positions first; which of them are first cannot be seen."""
    model = Model(turns, out=nn.Linear(6, EXAMPLES))
    assert (
        train(model, loss=lambda model, x, y: F.cross_entropy(model(x).T, y), microbatch_size=EXAMPLES).step_index == 2
    )


def test_a_call_in_which_no_tensors_are_seen_is_asked_like_others():
    model = Model(lambda m, given: m.out(given["x"]))
    assert train(model, loss=lambda model, x, y: F.cross_entropy(model(UserDict(x=x)), y)).step_index == 2
    with pytest.raises(rgp.UnsupportedError, match=r"mixes the examples|couples the examples"):
        train(
            Model(lambda m, given: m.out(given["x"])),
            loss=lambda model, x, y: F.cross_entropy(model(UserDict(x=x - x.mean(0))), y),
        )


def test_a_layer_that_is_left_out_for_a_whole_batch_is_refused():
    with pytest.raises(rgp.UnsupportedError, match="share random numbers"):
        train(Model(drops_a_layer, inner=nn.Linear(6, 6)))


# ---------------------------------------------------------------------- past the engine


def test_a_parameter_that_is_not_the_models_is_refused():
    """Its gradient would be neither clipped nor noisy."""
    classes = nn.Parameter(torch.randn(3, 3, generator=seeded(1), dtype=torch.float64))
    with pytest.raises(rgp.WrongUseError, match=r"a parameter of shape \(3, 3\) that is not the model's"):
        train(Model(lambda m, x: m.out(x)), loss=lambda m, x, y: F.cross_entropy(m(x) @ classes, y), probe=False)
    assert classes.grad is None
    classes.requires_grad_(False)
    assert train(Model(lambda m, x: m.out(x)), loss=lambda m, x, y: F.cross_entropy(m(x) @ classes, y)).step_index == 2


@pytest.mark.parametrize("when", [0, 1], ids=["first micro-batch", "second"])
def test_a_parameter_that_is_unfrozen_in_the_loop_is_refused(when):
    model = Model(lambda m, x: m.out(torch.tanh(m.first(x))), first=nn.Linear(6, 6).requires_grad_(False))
    before, seen = model.first.weight.detach().clone(), []

    def loss(model, x, y):
        seen.append(len(x))
        model.first.weight.requires_grad_(len(seen) == 1 + when)
        return mean(model, x, y)

    for _ in range(2):  # the second time, the same step is tried again
        seen.clear()
        with pytest.raises(
            rgp.WrongUseError, match=r"not the model's|'first\.weight' is frozen by the plan and received"
        ):
            train(model, loss=loss, microbatch_size=2)
    assert torch.equal(model.first.weight, before)


def test_a_tensor_that_is_added_to_the_optimizer_in_the_loop_is_refused():
    model, scale = Model(lambda m, x: m.out(x)), torch.ones(3, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"method": rgp.DPSGD(), "noise_multiplier": 1.0, "batch_size": EXAMPLES, "steps": 2, "probe": False}
    with rgp.privatize(model, optimizer, examples(), **options) as run:
        batches = iter(run)
        x, y = next(batches)
        optimizer.add_param_group({"params": [scale]})
        with pytest.raises(ValueError, match="not parameters of the model"):
            run.step(F.cross_entropy(model(x) * scale, y))
        assert run.ledger.count == 0 and bool((scale == 1).all())


def starts_from_data(model: Model, x: Tensor) -> Tensor:
    if not hasattr(model, "started"):
        model.shift.data.copy_(-x.mean(0))
        model.started = True
    return model.out(x + model.shift)


def follows_data(model: Model, x: Tensor) -> Tensor:
    model.centre.data.lerp_(x.mean(0), 0.1)
    return model.out(x)


def registers(model: Model, x: Tensor) -> Tensor:
    if not hasattr(model, "first"):
        model.register_buffer("first", x.mean(0))
    return model.out(x)


@pytest.mark.parametrize("forward", [starts_from_data, follows_data, registers])
def test_a_forward_pass_that_keeps_something_of_the_data_is_refused(forward):
    model = Model(forward, shift=nn.Parameter(torch.zeros(6)), centre=nn.Parameter(torch.zeros(6), requires_grad=False))
    with pytest.raises(rgp.UnsupportedError, match="was changed by the forward pass"):
        train(model, probe=False, method=rgp.DPSGD(overrides={"shift": "exact"}))


def centred(weight: Tensor) -> Tensor:
    return weight - weight.mean(1, keepdim=True)


@pytest.mark.parametrize(
    "other", [lambda w: w, lambda w: derived(w, lambda v: 2 * v)], ids=["itself", "another function"]
)
def test_a_parameter_in_two_forms_is_refused(other):
    def forward(model, x):
        return F.linear(torch.tanh(F.linear(x, derived(model.weight, centred))), other(model.weight))

    weight = nn.Parameter(torch.randn(6, 6, generator=seeded(2)))
    with pytest.raises(rgp.UnsupportedError, match="'weight' is used in two forms"):
        train(Model(forward, weight=weight))


def test_a_parameter_may_be_used_twice_in_one_form():
    def forward(model, x):
        return model.out(
            F.linear(torch.tanh(F.linear(x, derived(model.weight, centred))), derived(model.weight, centred))
        )

    assert train(Model(forward, weight=nn.Parameter(torch.randn(6, 6, generator=seeded(2))))).step_index == 2


@pytest.mark.parametrize("norm", [nn.RMSNorm(6), nn.InstanceNorm1d(6, affine=True)], ids=["rms", "instance"])
def test_an_input_that_is_changed_before_the_backward_pass_is_refused(norm):
    """Per-example gradients of the scale are computed from it."""

    def forward(model, x):
        y = x[:, None, :].expand(-1, 6, -1).clone()
        y += torch.tanh(model.norm(y))
        return model.out(y.mean(1))

    with pytest.raises(rgp.UnsupportedError, match="changed in place before the backward pass"):
        train(Model(forward, norm=norm))


def test_a_transposed_parameter_is_exact_or_refused():
    def forward(m, x):
        return m.out(x[:, None] * m.square.T).mean(1)

    def looked_up(m, x):
        return m.out(F.embedding(x.argmax(1), m.square.T))

    with pytest.raises(rgp.UnsupportedError, match="has no rule"):
        train(Model(looked_up, square=nn.Parameter(torch.randn(6, 6))))
    model = Model(forward, square=nn.Parameter(torch.randn(6, 6, generator=seeded(3))))
    x, y = torch.utils.data.default_collate(examples())
    found = rgp.check(model, (x, y), lambda model, batch: mean(model, *batch), method=rgp.DPSGD())
    assert found.ok and "square" in found.errors
    assert train(model).step_index == 2


def test_complex_parameters_are_refused():
    model = Model(lambda m, x: m.out((x * m.phase).abs()))
    model.phase = nn.Parameter(torch.randn(6, dtype=torch.complex128))
    with pytest.raises(rgp.UnsupportedError, match="'phase' is complex"):
        train(model)
