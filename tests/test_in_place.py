"""W <- keep W + left right in place: exact for long floats; what rounding to 16 bits keeps of small updates."""

from __future__ import annotations

import pytest
import torch

from helpers import seeded
from rgp import in_place
from rgp.in_place import add_product, stochastic_bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_long_floats_are_updated_in_place(dtype):
    g = seeded(0)
    weight, left, right = (torch.randn(*shape, generator=g, dtype=dtype) for shape in ((7, 5), (7, 2), (2, 5)))
    expected, place = 0.9 * weight + left @ right, weight.data_ptr()
    add_product(weight, left, right, keep=0.9)
    assert weight.data_ptr() == place
    torch.testing.assert_close(weight, expected)


def test_rounding_up_or_down_has_the_right_mean():
    """1 + 2^-9 is a quarter of the way from 1 to the next bfloat16, 1 + 2^-7: accepted is 1/4, and not 1/6 or 3/8."""
    values = torch.full((40_000,), 1 + 2.0**-9)
    found = stochastic_bfloat16(values, seeded(0)).float()
    assert set(found.tolist()) == {1.0, 1 + 2.0**-7}
    up = float((found > 1).float().mean())
    assert abs(up - 1 / 4) < 5 * (3 / 16 / 40_000) ** 0.5 < 1 / 12
    exact = torch.tensor([0.0, 1.5, -3.0, float("inf")])
    assert torch.equal(stochastic_bfloat16(exact.clone(), seeded(1)).float(), exact)


@pytest.mark.parametrize("chunk", [1 << 22, 64])
def test_what_is_left_of_updates_that_are_small(chunk, monkeypatch):
    """A hundred updates of 1/1000 each: to nearest, nothing moves; the others arrive."""
    monkeypatch.setattr(in_place, "CHUNK", chunk)
    left, right = torch.full((32, 1), 1e-3), torch.ones(1, 48)
    moved = {}
    for rounding in ("nearest", "stochastic", "compensated"):
        weight = torch.ones(32, 48, dtype=torch.bfloat16)
        lost = torch.zeros_like(weight) if rounding == "compensated" else None
        g = seeded(0) if rounding == "stochastic" else None
        for _ in range(100):
            add_product(weight, left, right, generator=g, lost=lost)
        moved[rounding] = weight.float() - 1
    assert torch.equal(moved["nearest"], torch.zeros(32, 48))
    assert (moved["compensated"] - 0.1).abs().max() < 2**-8  # the last place of a bfloat16 near 1, halved
    # the variance of one entry is at most 100 updates x (1/1000) x 2^-7, so the mean of 1536 is within 5 of 0.0007
    assert abs(float(moved["stochastic"].mean()) - 0.1) < 5 * (100 * 1e-3 * 2**-7 / 1536) ** 0.5
    assert float(moved["stochastic"].std()) > 0.005
