"""Exactness of convolutions, alone and in a wide ResNet."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import rgp
from layers import EXACT, Calls, check, examples, matrix
from rgp.models import WideResNet
from rgp.observing import Observer

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


@pytest.mark.slow
@pytest.mark.parametrize("method", [rgp.RGP(rank=2), rgp.DPSGD()], ids=["RGP", "DPSGD"])
def test_compiled_wide_resnet(method):
    model = WideResNet(depth=10, widen=1, num_classes=4, groups=4).double()
    model.compile(backend="aot_eager")
    check(model, 3, 8, 8, method=method, family="WideResNet with GroupNorm, compiled")


def test_wide_resnet_with_all_gradients_deferred(monkeypatch):
    monkeypatch.setattr("rgp.slots.LARGEST_DENSE", 0)
    model = WideResNet(depth=10, widen=1, num_classes=4, groups=4)
    check(model, 3, 8, 8, method=rgp.DPSGD(head_scale=0.1), family="WideResNet with GroupNorm")


def test_a_kernel_whose_gradients_are_found_in_two_orders():
    """Stride 1 unfolds the gradient, stride 2 the input: taps first and channels first, in one parameter."""
    kernel = nn.Conv2d(4, 4, (3, 2), padding=1, bias=False)

    def both_ways(self, x):
        plain, strided = self.conv(x).tanh(), F.conv2d(x, self.conv.weight, stride=2, padding=1)
        return torch.cat([plain.flatten(1), strided.flatten(1)], 1)

    check(Calls(both_ways, conv=kernel), 4, 6, 6, method=rgp.RGP(rank=2), family="Conv2d")


def test_rows_are_in_the_released_order_in_the_middle_of_a_batch():
    """Who looks at a micro-batch finds dR_i as it is released, and the sum of the batch is not disturbed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(5, 6, 3, padding=1, bias=False), nn.Flatten(), nn.Linear(6 * 16, 2)).double()
    data = TensorDataset(torch.randn(6, 5, 4, 4, dtype=torch.float64), torch.randint(2, (6,)))

    class Looks(Observer):
        sums = 0.0

        def before_clipping(self, gradients, indices):
            where = gradients.where["0.weight"]
            self.sums = self.sums + gradients.rows()[:, where].sum(0)

        def released(self, step, noisy):
            self.noisy = noisy.clone()

    found = []
    for looks in (True, False):
        copied = copy.deepcopy(model)
        run = rgp.privatize(
            copied, torch.optim.SGD(copied.parameters(), lr=0.1), data, method=rgp.RGP(rank=2), noise_multiplier=1e-9,
            clip=100.0, batch_size=6, steps=1, microbatch_size=2, seed=0, probe=False,
        )  # fmt: skip
        observer = Looks()
        if not looks:
            observer.before_clipping = lambda gradients, indices: None
        run.observe(observer)
        for x, y in run:
            run.step(F.cross_entropy(copied(x), y))
        width = 2 * (6 + 5 * 9)
        found.append(observer.noisy[:width])
        if looks:
            assert torch.allclose(observer.sums, found[0], atol=1e-5)
    assert torch.allclose(*found, atol=1e-5)
