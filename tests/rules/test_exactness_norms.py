"""Exactness of norms, scales, shifts and other vectors, and of what belongs to no example."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import rgp
from helpers import (
    check_exact,
    privatize,
    seeded,
)
from layers import CARRIED, EXACT, Calls, check, examples, matrix, mlp, squares

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
        model, examples(length, 8), squares, microbatch_size=5, family="Embedding", method=rgp.RGP(rank=1)
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
        check_exact(model, examples(length, 8), squares, microbatch_size=5, family="forms")


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
