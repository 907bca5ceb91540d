"""Exactness layer by layer: products with a weight, and layers used twice, not at all, in place, in checkpoints."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rgp
from helpers import (
    Expected,
    check_exact,
    check_step,
    parameters_of,
    per_example_gradients,
    privatize,
    seeded,
    spread,
)
from layers import CARRIED, EXACT, EXAMPLES, Calls, check, examples, matrix, mlp, squares

# -------- products


@pytest.mark.parametrize("lead", [(), (4,), (3, 4)], ids=["2-d", "3-d", "4-d"])
def test_linear_on_inputs_of_two_three_and_four_dimensions(lead, method):
    check(nn.Sequential(nn.Linear(9, 12), nn.Tanh(), nn.Linear(12, 10)), *lead, 9, method=method, family="Linear")


@pytest.mark.parametrize("length", [1, 2, 40])
def test_long_and_short_inputs_to_a_deferred_linear(length, monkeypatch):
    """Both forms of the norm: from Gram matrices and from the gradient itself."""
    monkeypatch.setattr("rgp.slots.LARGEST_DENSE", 0)
    check(nn.Linear(16, 16), length, 16, method=EXACT, family="Linear")


WAYS = {
    "F.linear": lambda self, x: F.linear(x, self.W, self.b),
    "F.linear by keyword": lambda self, x: F.linear(input=x, weight=self.W, bias=self.b),
    "x @ W.T": lambda self, x: x @ self.W.T + self.b,
    "x @ W.t()": lambda self, x: self.b + torch.matmul(x, self.W.t()),
    "x @ W.mT": lambda self, x: x.matmul(self.W.mT).add(self.b),
    "x @ W.transpose": lambda self, x: torch.add(x @ self.W.transpose(0, 1), self.b),
    "x @ W.transpose by keyword": lambda self, x: x @ self.W.transpose(dim0=-2, dim1=-1),
    "x @ W": lambda self, x: x @ self.W,
    "mm": lambda self, x: torch.mm(x.flatten(0, 1), self.W).view_as(x),
    "addmm": lambda self, x: torch.addmm(self.b, x.flatten(0, 1), self.W).view_as(x),
    "addmm by keyword": lambda self, x: torch.addmm(input=self.b, mat1=x.flatten(0, 1), mat2=self.W.T).view_as(x),
    "addmm on an activation": lambda self, x: torch.addmm(self.lin(x).flatten(0, 1), x.flatten(0, 1), self.W).view_as(
        x
    ),
    "F.linear with a computed bias": lambda self, x: F.linear(x, self.W, self.lin(x).flatten(0, 1).sum(0) * 0 + self.b),
    "twice, both ways": lambda self, x: F.linear(torch.tanh(x @ self.W), self.W, self.b),
    "as another layer's weight": lambda self, x: F.linear(self.lin(x).relu_(), self.W),
}


@pytest.mark.parametrize("way", [w for w in WAYS if "computed bias" not in w])
def test_ways_to_multiply_by_a_weight(way, method):
    model = Calls(WAYS[way], W=matrix(8, 8), b=matrix(8), lin=nn.Linear(8, 8))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*never used")
        check(model, 4, 8, method=method, family="Linear")


def computed(self: nn.Module, x: Tensor) -> Tensor:
    return self.lin(x).flatten(0, -2).mean(0)


COMPUTED = {
    "linear": lambda self, x: F.linear(x, self.W, computed(self, x)),
    "addmm": lambda self, x: torch.addmm(computed(self, x), x.flatten(0, 1), self.W).view_as(x),
    "conv1d": lambda self, x: F.conv1d(x.mT, self.K, computed(self, x), padding=1).mT,
    "layer norm": lambda self, x: F.layer_norm(x, (8,), self.w, computed(self, x)),
    "group norm": lambda self, x: F.group_norm(x.mT, 2, computed(self, x), self.w).mT,
}


@pytest.mark.parametrize("operation", COMPUTED)
def test_a_computed_operand_keeps_its_gradient_or_is_refused(operation):
    """A bias that is itself a result: its gradient must not get lost on the way to what it was computed from."""
    model = Calls(COMPUTED[operation], W=matrix(8, 8), K=matrix(8, 8, 3), w=matrix(8), lin=nn.Linear(8, 8)).double()
    used = {"linear": "W", "addmm": "W", "conv1d": "K"}.get(operation, "w")
    method = rgp.RGP(rank=2, overrides={name: "frozen" for name in ("W", "K", "w") if name != used})
    # the mean is over the examples, so they must not meet
    options = {"method": method, "microbatch_size": 1}
    if "norm" in operation:
        with pytest.raises(rgp.UnsupportedError, match=r"'w'.*computed"):
            check_exact(model, examples(4, 8), squares, **options)
    else:
        check_exact(model, examples(4, 8), squares, **options)


@pytest.mark.parametrize("way", ["W @ x", "einsum", "scaled", "norm of W", "cat"])
def test_other_ways_to_use_a_weight(way, method):
    forward = {
        "W @ x": lambda self, x: (self.W @ x.mT).mT,
        "einsum": lambda self, x: torch.einsum("btd,pd->btp", x, self.W),
        "scaled": lambda self, x: F.linear(x, self.W * 0.5),
        "norm of W": lambda self, x: x * self.W.norm(),
        "cat": lambda self, x: F.linear(x, torch.cat([self.W, self.W])),
    }[way]
    check(Calls(forward, W=matrix(8, 8)), 4, 8, method=method, family="forms")


def test_flattened_activations():
    """(m T, d), as in GPT-2, through every kind of layer that may meet it."""

    def forward(self, x):
        flat = x.flatten(0, 1)
        flat = self.norm(torch.tanh(self.a(flat))) * self.gain + self.shift
        return self.b(flat).view(len(x), -1)

    children = {
        "a": nn.Linear(8, 12),
        "norm": nn.LayerNorm(12),
        "gain": matrix(12),
        "shift": matrix(12),
        "b": nn.Linear(12, 9),
    }
    check(Calls(forward, **children), 4, 8, family="Linear")


def test_mlp(method):
    check(mlp(), 9, method=method, family="MLP", steps=2)


def test_in_place_relu(method):
    check(mlp(inplace=True), 9, method=method, family="MLP")


IN_PLACE = {
    "linear on 3-d": (nn.Linear(6, 8), (4, 6)),
    "linear on 4-d": (nn.Linear(6, 8, bias=False), (3, 4, 6)),
    "conv1d": (nn.Conv1d(4, 8, 3), (4, 6)),
    "conv2d": (nn.Conv2d(4, 8, 3, padding="same"), (4, 5, 5)),
    "layer norm": (nn.LayerNorm(6), (4, 6)),
    "group norm": (nn.GroupNorm(2, 8), (8, 5)),
    "instance norm": (nn.InstanceNorm1d(8, affine=True), (8, 5)),
    "batch norm in eval mode": (nn.BatchNorm1d(8).eval(), (8, 5)),
    "rms norm": (nn.RMSNorm(6), (4, 6)),
    "conv with frozen kernel": (nn.Conv1d(4, 8, 3), (4, 6)),
    "linear with frozen weight": (nn.Linear(6, 8), (4, 6)),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_activations_after_every_kind_of_layer(name):
    layer, shape = IN_PLACE[name]
    layer = copy.deepcopy(layer)
    if "frozen" in name:
        layer.weight.requires_grad_(False)
    check(nn.Sequential(nn.Tanh(), layer, nn.LeakyReLU(0.3, inplace=True)), *shape)


def test_a_layer_used_twice(method):
    layer = nn.Linear(8, 8)
    check(
        nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), nn.Linear(8, 3)),
        4,
        8,
        method=method,
        family="layer used twice",
    )


@pytest.mark.parametrize("kind", ["conv", "norm", "embedding"])
def test_other_layers_used_twice(kind, method):
    if kind == "conv":
        layer = nn.Conv2d(4, 4, 3, padding=1)
        check(nn.Sequential(layer, nn.Tanh(), layer), 4, 5, 5, method=method, family="layer used twice")
    elif kind == "norm":
        layer, linear = nn.LayerNorm(8), nn.Linear(8, 8)
        check(nn.Sequential(layer, linear, layer), 4, 8, method=method, family="layer used twice")
    else:
        table = nn.Embedding(11, 8)
        model = Calls(
            lambda self, x: self.a(self.table(x).tanh()) + self.table(x.flip(1)), table=table, a=nn.Linear(8, 8)
        )
        ids = torch.randint(0, 11, (EXAMPLES, 6), generator=seeded(3))
        method = (
            copy.replace(method, overrides={"table.weight": "exact"}) if hasattr(copy, "replace") else _with(method)
        )
        check(model, data=list(zip(ids, spread(EXAMPLES), strict=True)), method=method, family="layer used twice")


def _with(method):
    return type(method)(**{**vars(method), "overrides": {"table.weight": "exact"}})


@pytest.mark.parametrize("method", [CARRIED, EXACT], ids=["carried", "exact"])
def test_a_layer_not_used_in_a_step_contributes_nothing(method, storage):
    """Used in the first step, not in the second, used again: no norm and no gradient of an earlier step comes back."""
    model = Calls(
        lambda self, x: self.b(torch.tanh(self.a(x))) if self.on else self.b(x), a=nn.Linear(8, 8), b=nn.Linear(8, 8)
    )
    model.double()
    initial, data = copy.deepcopy(model), examples(8)
    with privatize(model, data, method=method, clip=1.0, steps=3, microbatch_size=3) as run:
        for batch in run:
            model.on = run.step_index != 1
            before = parameters_of(model)
            loss = squares(model, batch).mean()
            if run.step(loss) and run.step_index == 2:
                after = parameters_of(model)
                carriers = {n: (L.clone(), R.clone()) for n, (L, R) in run.carriers.items()}
                break
        for name in ("a.weight", "a.bias"):
            assert torch.equal(before[name], after[name])
        initial.on = False
        for name, parameter in initial.named_parameters():
            parameter.data.copy_(before[name])
            expected = Expected(per_example_gradients(initial, data, squares), run.plan, carriers, 1, 1.0, len(data))
        assert expected.clipped > 0
        assert check_step(expected, before, after) < 1e-9


def test_a_layer_that_only_some_micro_batches_use():
    def forward(self, x):
        return self.b(x + self.a(x).tanh() if len(x) == 2 else x)

    model = Calls(forward, a=nn.Linear(8, 8), b=nn.Linear(8, 8)).double()
    used = {2: True, 3: False}
    data = examples(8)
    twin = copy.deepcopy(model)
    before = parameters_of(model)
    with privatize(model, data, method=EXACT, clip=1.0, microbatch_size=3, probe=False) as run:
        sizes = []
        for batch in run:
            sizes.append(len(batch[0]))
            run.step(squares(model, batch).mean())
        plan = run.plan
    twin.call = lambda self, x: self.b(x + self.a(x).tanh() if self.on else x)
    truth = []
    for example, size in zip(data, [n for n in sizes for _ in range(n)], strict=True):
        twin.on = used[size]
        truth += per_example_gradients(twin, [example], squares)
    assert check_step(Expected(truth, plan, {}, 0, 1.0, len(data)), before, parameters_of(model)) < 1e-9


class Checkpointed(nn.Module):
    """`reentrant` None is the same model without checkpoints, for the ground truth."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Sequential(nn.Linear(8, 12), nn.LayerNorm(12), nn.ReLU(True), nn.Linear(12, 8))
        self.second = nn.Sequential(nn.GroupNorm(2, 8), nn.Conv1d(8, 8, 3, padding=1), nn.RMSNorm(4), nn.Tanh())
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_(torch.is_grad_enabled())  # what reentrant checkpoints need
        x = self.run(self.first, x)
        x = self.run(self.second, x.transpose(1, 2))
        return self.head(x.transpose(1, 2))

    def run(self, part: nn.Module, x: Tensor) -> Tensor:
        return part(x) if self.reentrant is None else checkpoint(part, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_activation_checkpointing(reentrant, method):
    model = Checkpointed(reentrant)

    def losses(model, batch):
        inside = torch._C._len_torch_function_stack() > 0  # the ground truth is without checkpoints
        model.reentrant = reentrant if inside else None
        return squares(model, batch)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="None of the inputs have requires_grad")
        check(model, 4, 8, method=method, family="activation checkpointing", losses=losses)


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_rgp_check_of_a_model_with_checkpoints(reentrant):
    x, weight = torch.utils.data.default_collate(examples(4, 8))
    assert rgp.check(Checkpointed(reentrant), (x, weight), squares, loss_reduction="none").ok


def test_nested_checkpoints():
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

        def block(self, x: Tensor) -> Tensor:
            return self.outer(checkpoint(self.inner, x.tanh(), use_reentrant=False))

        def forward(self, x: Tensor) -> Tensor:
            return self.head(checkpoint(self.block, x, use_reentrant=False))

    check(Nested(), 4, 8, family="activation checkpointing")
