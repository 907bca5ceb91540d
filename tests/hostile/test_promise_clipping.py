"""One example more moves the released sum by at most C (1 + 1e-6), whatever its numbers are, however it is clipped.

Every method with every clip rule and unit, in float32, float64 and bfloat16, with inputs from denormals to the largest float,
NaN and Inf among them.
"""

from __future__ import annotations

import copy
import itertools
import math
import warnings
from typing import Any

import pytest
import torch
from test_silent_ways import C, data, mean, net, released
from torch import Tensor, nn

import rgp

METHODS = {
    "dpsgd": rgp.DPSGD(),
    "rgp": rgp.RGP(rank=2),
    "powersgd": rgp.DPPowerSGD(rank=2),
}
CLIPS = {
    "flat": C,
    "automatic": rgp.AutoClip(norm=C),
    "groups": rgp.GroupClip({"0.*": 0.3, "*": 0.4}),
    "adaptive": rgp.AdaptiveClip(initial=C),
}
SIZES = [0.0, 1e-45, 1e-38, 1e-30, 1e-20, 1e-10, 1.0, 1e5, 1e10, 1e19, 1e30, 3e38, math.inf, -math.inf, math.nan]


def strange(size: float) -> Tensor:
    """An example whose entries are of this size, one of them ordinary."""
    x = torch.tensor([1.0, -1.0, 0.5, 1.0, -0.3, 1.0]) * size
    x[2] = 0.7
    return x


def bound_of(clip: Any) -> float:
    if isinstance(clip, rgp.GroupClip):
        return math.hypot(*clip.norms.values())
    return C


def moved_by(model: nn.Module, rows: list[Any], **options: Any) -> Tensor:
    """What the last row adds to the sum; without the count that an adaptive C takes."""

    def loss(run: rgp.Run, x: Tensor, y: Tensor) -> None:
        x = x.to(next(run.model.parameters()).dtype)
        run.step(torch.nn.functional.cross_entropy(run.model(x).float() * 5, y))

    units = options.pop("units", None)
    both, less = (
        released(model, part, loss, units=None if units is None else units[: len(part)], **options)
        for part in (rows, rows[:-1])
    )
    return both - less


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("clip", CLIPS)
def test_an_example_of_any_size(method, clip):
    ordinary, worst = data()[:5], 0.0
    limit = bound_of(CLIPS[clip])
    for size in SIZES:
        rows = [*ordinary, (strange(size), 1)]
        change = moved_by(net(), rows, method=METHODS[method], clip=CLIPS[clip])
        extra = 0.0
        if clip == "adaptive":  # the count is one more coordinate, of its own weight
            extra = float(change[-1].abs())
            change = change[:-1]
        assert bool(change.isfinite().all()), size
        assert change.norm() <= limit * (1 + 1e-6), size
        assert extra <= 10 * C
        worst = max(worst, float(change.norm()))
    assert worst > 0.5 * limit, "some of them are clipped"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", ["dpsgd", "rgp"])
def test_in_other_precisions(dtype, method):
    model = net().to(dtype)
    for size in SIZES:
        rows = [*data()[:5], (strange(size), 1)]
        change = moved_by(model, rows, method=METHODS[method])
        assert bool(change.isfinite().all()) and change.norm() <= C * (1 + 1e-6), size


@pytest.mark.parametrize("microbatch_size", [2, 32])
def test_a_person_with_any_rows(microbatch_size):
    """A person more with rows of all sizes at once, in one micro-batch or in pieces."""
    rows = [*data()[:6], *[(strange(s), i % 2) for i, s in enumerate([1e30, 1.0, 1e-30, 1e5, 3.0])]]
    ids = [0, 0, 1, 2, 3, 4, *[9] * 5]
    found = []
    for part in (rows, rows[:6]):
        found.append(
            released(
                net(),
                part,
                lambda run, x, y: run.step(mean(run.model, 9 * x, y)),
                units=ids[: len(part)],
                microbatch_size=microbatch_size,
                batch_size=len(set(ids[: len(part)])),
            )
        )
    assert (found[0] - found[1]).norm() <= C * (1 + 1e-6)
    assert (found[0] - found[1]).norm() > 0.5 * C


def test_one_strange_example_changes_nothing_for_the_others():
    """NaN or Inf in one example, in the same micro-batch: the sum is that of the others, to the bit where it is dropped."""
    for size in (math.nan, math.inf):
        rows = [*data()[:5], (torch.full((6,), size), 1)]
        change = moved_by(net(), rows)
        assert change.norm() <= 1e-6


def test_many_equal_examples_round_the_sum():
    """Float32 sums of thousands of equal gradients: rounding adds about 1e-5 C, as SECURITY.md says."""
    rows = [(torch.arange(6) - 2.0, 0)] * 2048
    change = moved_by(net(), rows, microbatch_size=256)
    assert change.norm() <= C * (1 + 1e-4)


@pytest.mark.parametrize(("views", "size"), [*itertools.product([1, 3], [1e-30, 1.0, 1e30])])
def test_views_of_one_example_count_once(views, size):
    def jitter(batch: Any) -> Any:
        return batch[0] * (1 + torch.rand(len(batch[0]), 1)), batch[1]

    rows = [*data()[:5], (strange(size), 1)]
    options: dict[str, Any] = {"augment": jitter if views > 1 else None, "views": views, "microbatch_size": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        change = moved_by(copy.deepcopy(net()), rows, **options)
    assert change.norm() <= C * (1 + 1e-6)
