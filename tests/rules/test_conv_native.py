"""Convolutions in C++ (rules/conv_native.py): exact beside torch's kernel gradients, and left to torch elsewhere."""

from __future__ import annotations

import os
import shutil
from math import prod
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import rgp
from rgp.models import WideResNet
from rgp.rules import conv_native
from rgp.rules.conv import Geometry

SHAPES = [  # channels, outputs, input, kernel, stride, padding, dilation, rank
    (3, 16, (9, 8), (3, 3), (1, 1), (1, 1), (1, 1), 16),
    (16, 8, (8, 8), (1, 1), (2, 2), (0, 0), (1, 1), 8),
    (17, 33, (11, 7), (3, 3), (1, 1), (1, 1), (1, 1), 16),
    (40, 5, (10, 21), (5, 2), (2, 1), (2, 0), (1, 2), 20),
    (8, 24, (6, 19), (2, 7), (1, 3), (0, 3), (2, 1), 5),
    (33, 17, (40,), (3,), (2,), (1,), (1,), 33),
    (4, 9, (16,), (1,), (1,), (0,), (1,), 7),
]


@pytest.fixture
def native():
    if (
        torch.backends.cpu.get_cpu_capability() != "AVX512"
        or not shutil.which("c++")
        or os.environ.get("RGP_NATIVE") == "0"
    ):
        pytest.skip("no AVX-512, or no C++ compiler, or turned off")
    library = conv_native.library()
    assert library is not None, "a compiler is there, and what it makes of conv_native.cpp is not right"
    return library


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_the_kernel_gradient_of_each_example(native, shape):
    c, p, size, k, stride, padding, dilation, r = shape
    geometry = Geometry((p, c, *k), stride, padding, dilation, 1)
    generator = torch.Generator().manual_seed(0)
    x, Lt, R = (torch.randn(*s, generator=generator) for s in ((5, c, *size), (r, p), (r, c * prod(k))))
    out = geometry.forward(x, R.new_zeros(p, c, *k), None).shape
    g = torch.randn(out, generator=generator)
    dLt, dR = conv_native.thin_gradients(native, geometry, x, g, Lt, R)
    left_alone, nothing = conv_native.thin_gradients(native, geometry, x, g, None, R)
    assert nothing is None
    assert torch.equal(left_alone, dLt)
    for i in range(5):
        G = geometry.kernel_gradient(g[i : i + 1].double(), x[i : i + 1].double(), (p, c, *k)).flatten(1)
        for found, right in ((dLt[i], R.double() @ G.T), (dR[i], Lt.double() @ G)):
            assert (found - right).norm() < 1e-5 * right.norm()


def trained(method, *, with_library, monkeypatch):
    """The weights of a wide ResNet after two private steps."""
    torch.manual_seed(0)
    model = WideResNet(depth=10, widen=1, num_classes=4, groups=4)
    data = TensorDataset(torch.randn(12, 3, 8, 8), torch.arange(12) % 4)
    with monkeypatch.context() as patch:
        if not with_library:
            patch.setattr(conv_native, "library", lambda: None)
        run = rgp.privatize(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            data,
            method=method,
            noise_multiplier=0.5,
            clip=1.0,
            batch_size=12,
            microbatch_size=4,
            steps=2,
            seed=0,
            probe=False,
        )
        for x, y in run:
            run.step(nn.functional.cross_entropy(model(x), y))
        run.close()
    return torch.cat([w.detach().flatten() for w in model.parameters()])


@pytest.mark.parametrize("sides", ["both", "left", "right"])
@pytest.mark.parametrize("norm", ["intrinsic", "paper"])
def test_a_run_with_and_without(native, sides, norm, monkeypatch):
    """Norms projected in C++, and not; the same weights after two steps, to float32."""
    method = rgp.RGP(rank=6, sides=sides, norm=norm, overrides={"stages.*conv*": "carried"})
    calls = []
    write = conv_native._write
    monkeypatch.setattr(conv_native, "_write", lambda *a, **k: (calls.append(k["projects"]), write(*a, **k)))
    fast = trained(method, with_library=True, monkeypatch=monkeypatch)
    assert calls
    assert any(calls) == (sides == "both" and norm == "intrinsic")
    found = len(calls)
    slow = trained(method, with_library=False, monkeypatch=monkeypatch)
    assert len(calls) == found
    torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-5)


def test_a_kernel_that_is_used_twice_adds_up(native, monkeypatch):
    """The second use finds the buffer filled."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.head = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 3)

        def forward(self, x):
            return self.head(self.conv(self.conv(x).tanh()).mean((2, 3)))

    def weights(wanted):
        torch.manual_seed(0)
        model, data = Twice(), TensorDataset(torch.randn(6, 8, 5, 5), torch.arange(6) % 3)
        with monkeypatch.context() as patch:
            if not wanted:
                patch.setattr(conv_native, "library", lambda: None)
            run = rgp.privatize(
                model,
                torch.optim.SGD(model.parameters(), lr=0.1),
                data,
                method=rgp.RGP(rank=5, overrides={"conv.weight": "carried"}),
                noise_multiplier=0.5,
                clip=1.0,
                batch_size=6,
                steps=1,
                seed=0,
                probe=False,
            )
            for x, y in run:
                run.step(nn.functional.cross_entropy(model(x), y))
            run.close()
        return model.conv.weight.detach()

    torch.testing.assert_close(weights(True), weights(False), rtol=1e-4, atol=1e-6)


def test_a_bad_example_leaves_the_others_alone(native):
    geometry = Geometry((8, 17, 3, 3), 1, 1, 1, 1)
    x, g, Lt, R = torch.randn(4, 17, 6, 6), torch.randn(4, 8, 6, 6), torch.randn(5, 8), torch.randn(5, 153)
    right = conv_native.thin_gradients(native, geometry, x, g, Lt, R)
    x[1, 16, 5, 5], g[2, 0, 0, 0] = float("nan"), float("inf")
    found = conv_native.thin_gradients(native, geometry, x, g, Lt, R)
    for a, b in zip(found, right, strict=True):
        assert torch.equal(a[[0, 3]], b[[0, 3]])
        assert not a[1].isfinite().all()
        assert not a[2].isfinite().all()


def test_threads_do_not_change_a_bit(native):
    geometry = Geometry((8, 17, 3, 3), 1, 1, 1, 1)
    operands = torch.randn(5, 17, 6, 6), torch.randn(5, 8, 6, 6), torch.randn(5, 8), torch.randn(5, 153)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(conv_native.thin_gradients(native, geometry, *operands))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_without_a_compiler_and_when_it_fails(tmp_path, monkeypatch):
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("no AVX-512")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build = conv_native.library.__wrapped__
    monkeypatch.setenv("CXX", str(tmp_path / "no-such-compiler"))
    assert build() is None
    monkeypatch.setenv("CXX", "false")
    assert build() is None
    monkeypatch.setattr(conv_native.subprocess, "run", lambda *a, **k: pytest.fail("a compiler was started"))
    monkeypatch.setenv("RGP_NATIVE", "0")
    assert build() is None
    assert not list(tmp_path.rglob("*.so"))


def test_a_library_with_wrong_numbers_is_not_used(native, tmp_path, monkeypatch):
    def almost(*arguments):
        native.rgp_thin_gradients(*arguments)
        dR, dR_step = arguments[5], arguments[7]
        conv_native.ctypes.c_float.from_address(dR.value + 4 * dR_step.value).value += 1e-2

    assert conv_native.is_right(native)
    assert not conv_native.is_right(SimpleNamespace(rgp_thin_gradients=almost))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(conv_native, "_build", lambda path: path.write_bytes(b""))
    monkeypatch.setattr(conv_native.ctypes, "CDLL", lambda path: SimpleNamespace(rgp_thin_gradients=lambda *a: None))
    with pytest.warns(UserWarning, match="wrong gradients of convolutions and is not used"):
        assert conv_native.library.__wrapped__() is None


def test_what_is_left_to_torch(native):
    geometry = Geometry((8, 4, 3, 3), 1, 1, 1, 1)
    slot = SimpleNamespace(Lt=torch.zeros(6, 8), R=torch.zeros(6, 36), entry=SimpleNamespace(rank=6))
    x, g = torch.zeros(2, 4, 6, 6), torch.zeros(2, 8, 6, 6)
    assert conv_native.takes(slot, geometry, x, g)
    assert not conv_native.takes(slot, geometry, x.double(), g.double())
    assert not conv_native.takes(slot, geometry, x, g.bfloat16())
    assert not conv_native.takes(slot, geometry, x.to("meta"), g.to("meta"))
    assert not conv_native.takes(slot, geometry, x[..., :3, :3], g[..., :3, :3])  # nine positions
    assert not conv_native.takes(slot, Geometry((8, 2, 3, 3), 1, 1, 1, 2), x, g)
    assert not conv_native.takes(slot, geometry, x[:0], g[:0])
    slot.entry.rank = 4
    assert not conv_native.takes(slot, geometry, x, g)
