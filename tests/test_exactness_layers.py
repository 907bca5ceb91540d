"""Exactness layer by layer: every operation with a rule, in the ways in which models call it."""

from __future__ import annotations

import copy
import itertools
import warnings
from typing import Any

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
    train,
)
from rgp.models import WideResNet

EXAMPLES = 5
CARRIED = rgp.RGP(rank=2)
EXACT = rgp.DPSGD()


def examples(*shape: int, count: int = EXAMPLES) -> list[tuple[Tensor, Tensor]]:
    x = torch.randn(count, *shape, generator=seeded(1), dtype=torch.float64)
    return list(zip(x, spread(count), strict=True))


def squares(model: nn.Module, batch: Any) -> Tensor:
    """A loss per example that is not linear in the output, weighted."""
    x, weight = batch
    y = model(x)
    target = torch.linspace(-1, 1, y[0].numel(), dtype=y.dtype).view(y.shape[1:])
    return (y.tanh() - target).square().flatten(1).sum(1) * weight


def check(model: nn.Module, *shape: int, method: Any = CARRIED, family: str | None = None, **options: Any) -> rgp.Plan:
    torch.manual_seed(0)
    model = model.double()
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn(parameter.shape, dtype=torch.float64))
    options = {"microbatch_size": 3, "losses": squares, **options}
    losses = options.pop("losses")
    return check_exact(
        model, options.pop("data", None) or examples(*shape), losses, method=method, family=family, **options
    )


@pytest.fixture(params=["dense", "deferred"])
def storage(request, monkeypatch):
    """Exact parameters as small ones (gradients stored) and as large ones (operands kept until the norms are known)."""
    if request.param == "deferred":
        monkeypatch.setattr("rgp.slots.LARGEST_DENSE", 0)


METHODS = {
    "carried": CARRIED,
    "left": rgp.RGP(rank=2, sides="left"),
    "right": rgp.RGP(rank=2, sides="right"),
    "paper": rgp.RGP(rank=2, norm="paper"),
    "exact": EXACT,
}


@pytest.fixture(params=[*METHODS, "carried, deferred head", "exact, deferred"])
def method(request, monkeypatch):
    if "deferred" in request.param:
        monkeypatch.setattr("rgp.slots.LARGEST_DENSE", 0)
    return METHODS[request.param.split(",")[0]]


class Calls(nn.Module):
    """A model whose forward pass is given as a function of the model."""

    def __init__(self, forward: Any, **children: nn.Module | Tensor) -> None:
        super().__init__()
        self.call = forward
        for name, child in children.items():
            setattr(self, name, nn.Parameter(child) if isinstance(child, Tensor) else child)

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, x)


def matrix(*shape: int) -> Tensor:
    return 0.3 * torch.randn(shape, generator=seeded(2))


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


# -------- where layers are used


def mlp(*, inplace: bool = False) -> nn.Sequential:
    return nn.Sequential(nn.Linear(9, 16), nn.ReLU(inplace), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 3))


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
    with privatize(model, data, method=EXACT, clip=1.0, microbatch_size=3) as run:
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


# -------- convolutions


def conv_grid() -> list[tuple[Any, ...]]:
    grid = []
    for kernel, stride, dilation in itertools.product((1, 2, 3, 5), (1, 2, 3), (1, 2)):
        for padding in (0, 1, 3, "same", "valid"):
            if padding == "same" and stride > 1:
                continue
            grid.append((kernel, stride, padding, dilation))
    return grid


@pytest.mark.parametrize("method", ["carried", "exact"])
@pytest.mark.parametrize("kernel", [1, 2, 3, 5])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_convolution_grid(n, kernel, method, monkeypatch):
    """Every kernel, stride, padding and dilation together; groups, storage and numbers of channels turn with them."""
    size = (11, 10, 9)[:n]
    for i, (k, stride, padding, dilation) in enumerate(conv_grid()):
        if k != kernel or (n == 3 and i % 3):
            continue
        groups = (1, 1, 2, 4)[i % 4]
        wide = (4, 12)[i // 4 % 2]  # thin or fat input against the rank: either side is unfolded
        outputs = (8, 4)[i // 2 % 2]
        monkeypatch.setattr("rgp.slots.LARGEST_DENSE", (0, 1 << 14)[i % 2])
        convolution = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[n]
        layer = convolution(wide, outputs, k, stride, padding, dilation, groups, bias=i % 3 > 0)
        rgp_method = rgp.RGP(rank=1 + i % 2, overrides={"weight": "carried"}) if method == "carried" else EXACT
        try:
            check(
                layer,
                wide,
                *size,
                method=rgp_method,
                family=f"Conv{n}d",
                microbatch_size=4,
                data=examples(wide, *size, count=4),
            )
        except AssertionError as error:
            raise AssertionError(f"{layer}: {error}") from error


@pytest.mark.parametrize("sides", ["both", "left", "right"])
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2, 6], ids=["groups=1", "groups=2", "depthwise"])
def test_convolutions_with_groups_and_sides(n, groups, sides, storage):
    convolution = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[n]
    layer = convolution(6, 12, 3, stride=2, padding=1, groups=groups)
    for method in (rgp.RGP(rank=1, sides=sides), EXACT):
        check(layer, 6, *(7, 6, 5)[:n], method=method, family=f"Conv{n}d")


def test_convolutions_with_unequal_sizes_and_circular_padding(method):
    layers = [
        nn.Conv2d(4, 8, (3, 1), stride=(2, 1), padding=(0, 2), dilation=(1, 2)),
        nn.Tanh(),
        nn.Conv2d(8, 8, (2, 3), padding="same", dilation=(3, 1)),
        nn.Tanh(),
        nn.Conv2d(8, 6, 3, padding=1, padding_mode="circular"),
    ]
    check(nn.Sequential(*layers), 4, 7, 6, method=method, family="Conv2d")


def test_convolution_calls():
    def forward(self, x):
        x = F.conv2d(input=x, weight=self.W, bias=self.b, padding=1).tanh()
        return torch.conv2d(x.to(memory_format=torch.channels_last), self.V, None, (2, 2))

    model = Calls(forward, W=matrix(8, 4, 3, 3), b=matrix(8), V=matrix(6, 8, 3, 3))
    check(model, 4, 7, 7, family="Conv2d")


def test_large_exact_layers_without_any_patch():
    """Above the real threshold between stored and deferred gradients."""
    model = nn.Sequential(nn.Conv2d(8, 256, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(1024, 17))
    plan = check(model, 8, 2, 2, method=EXACT, family="Conv2d")
    assert min(e.size for e in plan if len(e.shape) > 1) > 1 << 14


# -------- norms and vectors

NORMS = {
    "LayerNorm": (nn.LayerNorm(8), (4, 8)),
    "LayerNorm over two": (nn.LayerNorm((4, 8)), (4, 8)),
    "LayerNorm without bias": (nn.LayerNorm(8, bias=False), (4, 8)),
    "RMSNorm": (nn.RMSNorm(8), (4, 8)),
    "GroupNorm": (nn.GroupNorm(2, 8), (8, 3, 5)),
    "GroupNorm on (m, c)": (nn.GroupNorm(2, 8), (8,)),
    "InstanceNorm1d": (nn.InstanceNorm1d(8, affine=True), (8, 5)),
    "InstanceNorm2d": (nn.InstanceNorm2d(8, affine=True), (8, 3, 5)),
    "BatchNorm2d in eval mode": (nn.BatchNorm2d(8).eval(), (8, 3, 5)),
    "BatchNorm1d in eval mode": (nn.BatchNorm1d(8).eval(), (8,)),
}


@pytest.mark.parametrize("name", NORMS)
def test_norms(name, storage):
    norm, shape = NORMS[name]
    norm = copy.deepcopy(norm)
    if hasattr(norm, "running_mean") and norm.running_mean is not None:
        norm.running_mean.normal_(generator=seeded(1))
        norm.running_var.uniform_(0.5, 2, generator=seeded(2))
    family = name.split()[0].rstrip("12d") + (" (evaluation mode)" if "eval" in name else "")
    check(norm, *shape, family=family)


@pytest.mark.parametrize("affine", [True, False])
def test_running_statistics_are_refused(affine):
    """They would be computed from private data without noise, and published with the state_dict."""
    norm = nn.InstanceNorm1d(8, affine=affine, track_running_stats=True)
    model = nn.Sequential(nn.Conv1d(4, 8, 3), norm).double()
    with pytest.raises(
        rgp.UnsupportedError, match=r"'1' is InstanceNorm1d with running statistics.*track_running_stats=False"
    ):
        privatize(model, examples(4, 6), method=CARRIED)
    norm.eval()
    before = norm.running_mean.clone()
    check(model, 4, 6, family="InstanceNorm")
    assert torch.equal(norm.running_mean, before)


VECTORS = {
    "x * w": lambda self, x: x * self.w,
    "w * x": lambda self, x: self.w * x,
    "x + w": lambda self, x: x + self.w,
    "mul": lambda self, x: torch.mul(x, other=self.w),
    "add": lambda self, x: torch.add(self.w, x),
    "layer scale": lambda self, x: x + self.w * self.lin(x),
    "both": lambda self, x: (x * self.w).tanh() + self.w,
}


@pytest.mark.parametrize("way", VECTORS)
def test_vectors_that_scale_and_shift(way):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*never used")
        check(Calls(VECTORS[way], w=matrix(8), lin=nn.Linear(8, 8)), 4, 8, family="vectors")


def test_parameters_of_other_shapes():
    """A scalar, a column, a whole plane: broadcast and summed back."""

    def forward(self, x):
        return (x * self.scalar + self.column) * self.plane

    model = Calls(forward, scalar=torch.tensor(0.7), column=matrix(4, 1), plane=matrix(4, 8))
    check(model, 3, 4, 8, method=EXACT, family="vectors")


@pytest.mark.parametrize(
    "model",
    [mlp(), nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.Flatten(), nn.Linear(72, 3))],
    ids=["linear", "conv"],
)
def test_biases_only(model):
    """BiTFiT: weights frozen, biases trained."""
    model = copy.deepcopy(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("bias" in name)
    shape = (9,) if isinstance(model[0], nn.Linear) else (3, 5, 5)
    plan = check(model, *shape, family="biases only")
    assert {e.name for e in plan.trained} == {n for n, _ in model.named_parameters() if "bias" in n}
    assert [p.requires_grad for _, p in model.named_parameters()] == ["bias" in n for n, _ in model.named_parameters()]


def test_weights_only():
    model = mlp()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("weight" in name)
    check(model, 9)


# -------- attention


def attention_inputs(count: int = EXAMPLES) -> list[dict[str, Tensor]]:
    rng = seeded(5)
    data = []
    for i, weight in enumerate(spread(count)):
        data.append(
            {
                "x": torch.randn(6, 16, generator=rng, dtype=torch.float64),
                "memory": torch.randn(4, 16, generator=rng, dtype=torch.float64),
                "padding": torch.arange(6) >= 6 - i % 3,
                "memory_padding": torch.arange(4) >= 4 - i % 2,
                "weight": weight,
            }
        )
    return data


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("norm_first", [True, False])
def test_transformer_encoder_layer(norm_first, training, method):
    layer = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True, norm_first=norm_first).train(training)

    def losses(model, batch):
        y = model(batch["x"], src_key_padding_mask=batch["padding"]).masked_fill(batch["padding"].unsqueeze(-1), 0)
        return (y - 0.3).square().sum((1, 2)) * batch["weight"]

    check(layer, data=attention_inputs(), losses=losses, method=method, family="nn.TransformerEncoderLayer")


def test_transformer_encoder_and_decoder():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            sizes = {"d_model": 16, "nhead": 4, "dim_feedforward": 24, "dropout": 0.0, "batch_first": True}
            self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(**sizes), 2)
            self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(**sizes), 2)

        def forward(self, batch):
            memory = self.encoder(batch["memory"], src_key_padding_mask=batch["memory_padding"])
            causal = nn.Transformer.generate_square_subsequent_mask(6, dtype=torch.float64)
            return self.decoder(
                batch["x"], memory, tgt_mask=causal, tgt_is_causal=True, memory_key_padding_mask=batch["memory_padding"]
            )

    def losses(model, batch):
        return (model(batch) - 0.3).square().sum((1, 2)) * batch["weight"]

    check(Both(), data=attention_inputs(), losses=losses, family="nn.Transformer")


ATTENTION = {
    "self": {},
    "self, padded": {"pad": True},
    "self, causal mask": {"mask": "causal"},
    "self, mask per head": {"mask": "heads", "pad": True},
    "cross": {"cross": True},
    "cross, padded": {"cross": True, "pad": True},
    "zero attention": {"pad": True, "options": {"add_zero_attn": True}},
    "without bias": {"options": {"bias": False}},
    "other key and value sizes": {"cross": True, "options": {"kdim": 16, "vdim": 8, "bias": False}},
    "sequence first": {"pad": True, "options": {"batch_first": False}},
    "weights per head": {"average": False, "pad": True},
}


@pytest.mark.parametrize("method", [CARRIED, METHODS["left"], EXACT], ids=["carried", "left", "exact"])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("case", ATTENTION)
def test_multihead_attention(case, need_weights, method):
    setting = ATTENTION[case]
    options = {"batch_first": True, **setting.get("options", {})}
    attention = nn.MultiheadAttention(16, 4, **options)

    def losses(model, batch):
        x, memory = batch["x"], batch["memory"] if setting.get("cross") else batch["x"]
        value = memory[..., : options.get("vdim", 16)] if "vdim" in options else memory
        padding = batch["memory_padding"] if setting.get("cross") else batch["padding"]
        mask = None
        if setting.get("mask") == "causal":
            mask = torch.ones(6, 6, dtype=torch.bool).triu(1)
        elif setting.get("mask") == "heads":
            mask = (
                torch.linspace(-1, 1, 4 * 36, dtype=torch.float64)
                .view(1, 4, 6, 6)
                .expand(len(x), -1, -1, -1)
                .flatten(0, 1)
            )
        if not options["batch_first"]:
            x = memory = value = x.transpose(0, 1)
        y, weights = model(
            x, memory, value, key_padding_mask=padding if setting.get("pad") else None, attn_mask=mask,
            need_weights=need_weights, average_attn_weights=setting.get("average", True),
        )  # fmt: skip
        if not options["batch_first"]:
            y = y.transpose(0, 1)
        loss = (y - 0.3).square().sum((1, 2))
        assert (weights is not None) == need_weights
        if weights is not None:
            loss = loss + weights.square().flatten(1).sum(1)
        return loss * batch["weight"]

    check(attention, data=attention_inputs(), losses=losses, method=method, family="nn.MultiheadAttention")


def test_attention_dropout_is_the_same_with_and_without_capture():
    """Same seed, same masks: the rule for attention draws its dropout where PyTorch does."""
    attention = nn.MultiheadAttention(16, 4, dropout=0.5, batch_first=True).double()
    x = attention_inputs()
    run = privatize(attention, x, method=CARRIED)
    for batch in run:
        for need_weights in (True, False):
            torch.manual_seed(3)
            inside, _ = attention(batch["x"], batch["x"], batch["x"], need_weights=need_weights)
            torch.manual_seed(3)
            with torch.no_grad():
                outside, _ = attention(batch["x"], batch["x"], batch["x"], need_weights=need_weights)
            torch.testing.assert_close(inside, outside, rtol=1e-12, atol=1e-12)
        break
    run.close()


def test_attention_with_sequence_first_transformers_is_refused():
    """Positions first, examples second: the linear layers of the block cannot tell, so it must not be guessed."""
    for length in (6, 5, 10):  # 5 examples: as many as positions, or a multiple
        layer = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=False).double()
        data = [(torch.randn(length, 16, dtype=torch.float64), w) for w in spread(5)]
        run = privatize(layer, data, method=CARRIED, microbatch_size=5)
        with pytest.raises(rgp.UnsupportedError, match="batch_first"):
            train(run, layer, lambda layer, batch: layer(batch[0].transpose(0, 1)).square().sum((0, 2)) * batch[1])
        run.close()


@pytest.mark.parametrize("module", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_refused(module):
    model = nn.Sequential(module(4, 8, batch_first=True)).double()
    with pytest.raises(rgp.UnsupportedError, match=rf"{module.__name__}.*'0.weight_ih_l0'.*overrides"):
        privatize(model, examples(3, 4))


def test_a_frozen_lstm_under_a_trained_head_is_right():
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.head = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 3)

        def forward(self, x):
            return self.head(self.lstm(x)[0])

    check(Tagger(), 5, 4, method=rgp.RGP(rank=1, overrides={"lstm.*": "frozen"}))


# -------- vision


def test_wide_resnet(method):
    check(
        WideResNet(depth=10, widen=1, num_classes=4, groups=4),
        3,
        8,
        8,
        method=method,
        family="WideResNet with GroupNorm",
    )


def test_wide_resnet_with_all_gradients_deferred(monkeypatch):
    monkeypatch.setattr("rgp.slots.LARGEST_DENSE", 0)
    model = WideResNet(depth=10, widen=1, num_classes=4, groups=4)
    check(model, 3, 8, 8, method=rgp.DPSGD(head_scale=0.1), family="WideResNet with GroupNorm")


# -------- other precisions


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(8, 16, 3, padding=1), nn.GroupNorm(2, 16)
        self.block = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True)
        self.table, self.gain = nn.Embedding(7, 16), nn.Parameter(torch.ones(16))
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x)).transpose(1, 2)
        x = self.block(x + self.table(torch.arange(6).expand(len(x), -1))) * self.gain
        return self.head(x)


def autocast_step(
    model: nn.Module, data: list[tuple[Tensor, Tensor]], **options: Any
) -> tuple[rgp.Run, dict[str, Tensor]]:
    """One step with the forward pass in bfloat16; the run and what the optimizer saw as gradients."""
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=1.0), {}
    optimizer.register_step_pre_hook(
        lambda *_: seen.update({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    )
    with privatize(model, data, optimizer=optimizer, **options) as run:
        for batch in run:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = squares(model, batch).mean()
            run.step(loss)
    return run, seen


AUTOCAST = {"carried": rgp.RGP(rank=2, overrides={"table.weight": "exact"}), "exact": rgp.DPSGD()}


@pytest.mark.parametrize("method", AUTOCAST.values(), ids=AUTOCAST.keys())
def test_autocast(method, storage):
    """Forward in bfloat16; per-example norms and the clipped sum are not."""
    torch.manual_seed(0)
    model = Mixed()
    data = [(x.float(), w.float()) for x, w in examples(8, 6, count=4)]
    twin = copy.deepcopy(model).double()
    run, gradients = autocast_step(model, data, method=method, clip=1.0, microbatch_size=3)
    carriers = {n: (L.double(), R.double()) for n, (L, R) in run.carriers.items()}
    truth = per_example_gradients(twin, [(x.double(), w.double()) for x, w in data], squares)
    expected = Expected(truth, run.plan, carriers, 0, 1.0, len(data))
    assert expected.clipped > 0
    wanted = torch.cat([-expected.update[n].flatten() for n in gradients])
    found = torch.cat([g.double().flatten() for g in gradients.values()])
    assert float((found - wanted).norm() / wanted.norm()) < 0.03
    for name, gradient in gradients.items():
        assert gradient.dtype == torch.float32
        total = 4 * gradient  # what was summed, to the bit: 4 examples
        if run.plan[name].treatment == "exact" and total.numel() > 20:
            # kept in bfloat16, all entries would have 8 significant bits
            assert (total != total.bfloat16().float())[total != 0].float().mean() > 0.9, name


@pytest.mark.parametrize("method", [CARRIED, EXACT], ids=["carried", "exact"])
def test_autocast_does_not_exceed_the_clip(method, storage):
    """One example, all of it clipped: the released sum has the norm C, and not a bfloat16's rounding more."""
    torch.manual_seed(0)
    for seed in range(5):
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
        data = [(torch.randn(4, 8, generator=seeded(seed)), torch.tensor(100.0))]
        _, gradients = autocast_step(model, data, method=method, clip=0.7)
        norm = float(torch.cat([g.double().flatten() for g in gradients.values()]).norm())
        assert 0.69 < norm <= 0.7 * (1 + 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_models(dtype):
    model = mlp().to(dtype)
    with privatize(model, [(x.to(dtype), w.to(dtype)) for x, w in examples(9)], method=CARRIED) as run:
        for batch in run:
            run.step(squares(model, batch).mean())
        assert all(L.dtype == R.dtype == dtype for L, R in run.carriers.values())
    assert all(p.isfinite().all() for p in model.parameters())


# -------- what belongs to no example


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("length", [7, 5, 10])
def test_positions_shared_by_all_examples(length, batched, storage):
    """Ids (1, T) or (T,), the same for all examples; also where T is a multiple of their number."""

    def forward(self, x):
        ids = torch.arange(x.shape[1])
        return self.lin(x + self.table(ids.unsqueeze(0) if batched else ids))

    model = Calls(forward, table=nn.Embedding(12, 8), lin=nn.Linear(8, 3)).double()
    plan = check_exact(
        model, examples(length, 8), squares, microbatch_size=5, probe=False, family="Embedding", method=rgp.RGP(rank=1)
    )
    assert plan["table.weight"].treatment == "exact"


@pytest.mark.parametrize("length", [7, 5, 10])
@pytest.mark.parametrize("way", ["linear", "norm", "scale", "frozen table"])
def test_layers_on_what_all_examples_share(way, length):
    """A trained layer on something that does not come from the batch: each example has its part of the gradient."""

    def forward(self, x):
        positions = torch.linspace(0, 9, length * 8, dtype=x.dtype).view(length, 8).sin()
        if way == "frozen table":
            positions = self.table.weight[:length]
        layer = {"linear": self.lin, "norm": self.norm, "scale": lambda t: t * self.gain, "frozen table": self.lin}[way]
        return self.head(x + layer(positions))

    model = Calls(forward, lin=nn.Linear(8, 8), norm=nn.LayerNorm(8), gain=matrix(8), head=nn.Linear(8, 3)).double()
    model.table = nn.Embedding(12, 8).double().requires_grad_(False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*never used")
        check_exact(model, examples(length, 8), squares, microbatch_size=5, probe=False, family="forms")


def test_constants_given_to_each_example_are_fine():
    """Token types, learned queries: made without the batch, but with a row for each example."""

    def forward(self, x):
        kinds = self.kinds[:, :4].expand(len(x), -1)
        query = self.query.expand(len(x), -1, -1)
        x = torch.cat(
            [x + self.table(kinds) + self.table(torch.zeros(x.shape[:2], dtype=torch.long)), self.lin(query)], 1
        )
        return self.head(x)

    model = Calls(forward, table=nn.Embedding(3, 8), lin=nn.Linear(8, 8), head=nn.Linear(8, 3))
    model.register_buffer("kinds", torch.tensor([[0, 1, 2, 1, 0, 1]]))
    model.register_buffer("query", torch.randn(1, 2, 8, dtype=torch.float64))
    check(model, 4, 8, method=rgp.RGP(rank=1, overrides={"table.weight": "exact"}), microbatch_size=5)
