"""Sensitivity: whatever its gradients are, adding or removing an example moves the release by at most C (1 + 1e-6).

Gradients are given to the slots directly (any left and right factors, any carriers), and then made by models whose
inputs and output gradients the data choose. The two sums are compared in float64.
"""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import rgp
from rgp import slots as slots_module
from rgp.clipping import Gradients, squared_norms
from rgp.clips import Bound, clip_factors
from rgp.norms import EmbeddingUse
from rgp.observing import Observer
from rgp.plan import Entry
from rgp.slots import CarriedSlot, DeferredSlot, DenseSlot

TOLERANCE = 1e-6
SLOTS = ("carried", "dense", "deferred", "embedding", "tied")
KINDS = ("plain", "huge", "tiny", "nan", "inf", "same", "cancelling", "lopsided", "one_entry", "zero", "many_tiny")
DTYPES = {"float32": torch.float32, "float64": torch.float64}
hard_worked = settings(max_examples=250, deadline=None, derandomize=True)


def factors(kind: str, rng: np.random.Generator, T: int, p: int, d: int) -> tuple[np.ndarray, np.ndarray]:
    """left (T, p) and right (T, d) of one adversarial example: its gradient is sum_t left_t right_t^T."""
    left, right = rng.standard_normal((T, p)), rng.standard_normal((T, d))
    match kind:
        case "huge":
            left *= 10.0 ** rng.uniform(5, 19)
            right *= 10.0 ** rng.uniform(5, 18)
        case "tiny":
            left *= 10.0 ** rng.uniform(-30, -5)
        case "nan":
            left[rng.integers(T), rng.integers(p)] = np.nan
        case "inf":
            right[rng.integers(T), rng.integers(d)] = rng.choice([np.inf, -np.inf])
        case "same":  # aligned with every other example of this kind
            left[:], right[:] = 3.0, 5.0
        case "cancelling":  # terms far above their sum: what remains is rounding, and must be bounded nevertheless
            size = 10.0 ** rng.uniform(0, 15)
            for t in range(0, T - 1, 2):
                left[t + 1], right[t + 1] = -left[t], right[t]
                left[t : t + 2] *= size
            left[-1] *= 10.0 ** rng.uniform(-3, 3)
        case "lopsided":  # Gram matrices under- or overflow in float32
            size = 10.0 ** rng.uniform(15, 25)
            left, right = left / size, right * size * 10.0 ** rng.uniform(-8, 1)
        case "one_entry":
            left[:], right[:] = 0, 0
            left[0, 0], right[0, 0] = 10.0 ** rng.uniform(-3, 3), 1
        case "zero":
            left[:] = 0
        case "many_tiny":  # each square is lost when it is added to the first
            left[:], right[:] = 2.0**-12, 1
            left[0, 0] = 1
    return left, right


class Bench:
    """Slots of every kind under one norm, fed with given factors."""

    def __init__(self, seed: int, which: set[str], *, norm: str, dtype: torch.dtype, scale: float, T: int) -> None:
        rng = np.random.default_rng(seed)
        self.dtype, self.T = dtype, T
        self.p, self.d, r, self.rows = 6, 40, 2, 11
        shape = (self.p, self.d)
        self.carried = CarriedSlot(Entry("w", shape, "matrix", "carried", rank=r), intrinsic=norm == "intrinsic")
        self.dense = DenseSlot(Entry("b", (self.p,), "bias", "exact", scale=scale))
        self.deferred = DeferredSlot(Entry("head", shape, "head", "exact", scale=scale))
        self.embedding = DeferredSlot(Entry("embedding", (self.rows, self.d), "embedding", "exact"))
        self.tied = DeferredSlot(Entry("tied", (self.rows, self.d), "embedding", "exact"))
        # not orthonormal: the sensitivity must not rest on it
        L, R = (torch.from_numpy(rng.standard_normal((r, n)) * 3).to(dtype) for n in shape)
        self.carried.set_carriers(L, R, str(rng.choice(["both", "left", "right"])))
        self.which = which
        self.slots = [getattr(self, name) for name in SLOTS if name in which]

    def bound(self, rule: str, clip: float) -> Bound:
        if rule == "groups":
            return Bound(tuple(clip * (k + 1) for k in range(len(self.slots))))
        return {
            "flat": Bound((clip,)),
            "auto": Bound((clip,), gamma=0.01),
            "count": Bound((clip,), count_weight=0.7 * clip),
        }[rule]

    def sum(self, examples: list, clip: float | Bound, micro: int) -> Tensor:
        bound = clip if isinstance(clip, Bound) else Bound((clip,))
        groups = [self.slots] if len(bound.norms) == 1 else [[slot] for slot in self.slots]
        gradients = Gradients(groups, dtype=self.dtype, device=torch.device("cpu"))
        gradients.begin_batch(bound)
        for start in range(0, len(examples), micro):
            part = examples[start : start + micro]
            gradients.begin(len(part))
            with np.errstate(over="ignore"):
                left, right = (torch.from_numpy(np.stack(x)).to(self.dtype) for x in zip(*part, strict=True))
            self.feed(left, right)
            gradients.clip_and_add()
        found = gradients.take()
        assert found.sensitivity == bound.sensitivity
        return found.total.double()

    def feed(self, left: Tensor, right: Tensor) -> None:
        m, T, _ = left.shape
        ids = torch.arange(T).expand(m, -1) % self.rows // 2  # two tokens share a row
        shape = (self.rows, self.d)
        if "carried" in self.which:
            self.carried.add_outer(left, right)
        if "dense" in self.which:
            self.dense.add_dense(left.sum(1))
        if "deferred" in self.which:
            self.deferred.add_outer(left, right)
        if "embedding" in self.which:
            self.embedding.add_use(EmbeddingUse(ids, left[:, :, :1] * right, shape))
        if "tied" in self.which:  # the table is also the head: the two uses may cancel
            onehot = torch.nn.functional.one_hot(ids, self.rows).to(right.dtype)
            self.tied.add_use(EmbeddingUse(ids, left[:, :, :1] * right, shape))
            self.tied.add_outer(-left[:, :, :1] * onehot, right)


@hard_worked
@given(
    seed=st.integers(0, 2**32 - 1),
    which=st.sets(st.sampled_from(SLOTS), min_size=1),
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=4),
    clip=st.sampled_from([1e-3, 1.0, 100.0]),
    norm=st.sampled_from(["intrinsic", "paper"]),
    dtype=st.sampled_from(sorted(DTYPES)),
    scale=st.sampled_from([1.0, 0.01, 7.0]),
    T=st.sampled_from([1, 2, 3, 33]),
    micro=st.integers(1, 4),
    rule=st.sampled_from(["flat", "auto", "count", "groups"]),
)
@example(0, {"deferred"}, ["cancelling"], 1.0, "paper", "float32", 1.0, 33, 1, "flat")
@example(0, {"deferred"}, ["cancelling", "same"], 1.0, "paper", "float32", 1.0, 3, 2, "flat")
@example(0, {"embedding"}, ["cancelling", "same"], 1.0, "paper", "float32", 1.0, 3, 2, "flat")
@example(0, {"tied"}, ["plain", "same"], 1.0, "paper", "float32", 1.0, 3, 2, "flat")
@example(0, {"deferred"}, ["lopsided"], 1e-3, "paper", "float32", 1.0, 2, 1, "flat")
@example(0, {"dense"}, ["many_tiny"], 1e-3, "intrinsic", "float32", 1.0, 1, 1, "flat")
def test_one_example_moves_the_sum_by_at_most_C(seed, which, kinds, clip, norm, dtype, scale, T, micro, rule):
    kinds = kinds[:2] if dtype == "float32" else kinds  # the sum's own rounding grows with the examples in it
    rng = np.random.default_rng(seed)
    bench = Bench(seed, which, norm=norm, dtype=DTYPES[dtype], scale=scale, T=T)
    examples = [factors(kind, rng, T, bench.p, bench.d) for kind in kinds]
    bound = bench.bound(rule, clip)
    whole = bench.sum(examples, bound, micro)
    assert whole.isfinite().all()
    for i in range(len(kinds)):
        without = bench.sum(examples[:i] + examples[i + 1 :], bound, micro)
        assert float((whole - without).norm()) <= bound.sensitivity * (1 + TOLERANCE), kinds[i]


def released_sum(model: nn.Module, data: list, method: rgp.Method, *, clip: float, **options) -> Tensor:
    """What a run of one step over all of the data would release if there were no noise."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = rgp.privatize(
            model,
            torch.optim.SGD(model.parameters(), lr=0.0),
            data,
            method=method,
            batch_size=len(data),
            steps=1,
            noise_multiplier=0.0,
            clip=clip,
            loss_reduction="none",
            seed=1,
            **options,
        )
    found = []

    class Spy(Observer):
        def released(self, step, noisy):
            found.append(noisy.clone().double())  # before it is divided and rebuilt

    run.observe(Spy())
    for x, c in run:
        run.step((model(x) * c).flatten(1).sum(1))  # the data choose inputs and output gradients alike
    run.close()
    return found[0]


METHODS = {
    "dpsgd": rgp.DPSGD(),
    "rgp": rgp.RGP(rank=2),
    "paper norm": rgp.RGP(rank=2, norm="paper"),
    "left": rgp.RGP(rank=2, sides="left"),
    "head scale": rgp.RGP(rank=2, head_scale=0.1),
}


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_sensitivity_of_whole_runs(method, deferred, monkeypatch):
    """Through privatize: every method, both norms, tokens, both ways of holding exact gradients."""
    if deferred:
        monkeypatch.setattr(slots_module, "LARGEST_DENSE", 0)

    @settings(max_examples=15, deadline=None, derandomize=True)
    @given(
        seed=st.integers(0, 2**32 - 1),
        kinds=st.lists(st.sampled_from(KINDS), min_size=2, max_size=4),
        clip=st.sampled_from([1e-2, 1.0]),
        T=st.sampled_from([1, 3, 20]),
    )
    def check(seed, kinds, clip, T):
        rng = np.random.default_rng(seed)
        torch.manual_seed(seed % 1000)
        model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 5)).double()
        pairs = [factors(kind, rng, T, 5, 8) for kind in kinds]
        data = [(torch.from_numpy(right), torch.from_numpy(left)) for left, right in pairs]
        whole = released_sum(model, data, METHODS[method], clip=clip, microbatch_size=3, probe=False)
        assert whole.isfinite().all()
        for i in range(len(kinds)):
            rest = data[:i] + data[i + 1 :]
            without = released_sum(model, rest, METHODS[method], clip=clip, microbatch_size=3, probe=False)
            assert float((whole - without).norm()) <= clip * (1 + TOLERANCE), kinds[i]

    check()


def test_an_unclipped_sum_would_fail_this_test():
    """The test above has teeth: without the clip, the same comparison is far out."""
    rng = np.random.default_rng(0)
    bench = Bench(0, {"dense", "carried"}, norm="paper", dtype=torch.float64, scale=1.0, T=3)
    examples = [factors("plain", rng, 3, bench.p, bench.d) for _ in range(3)]
    assert float((bench.sum(examples, 1e6, 2) - bench.sum(examples[1:], 1e6, 2)).norm()) > 10


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("which", SLOTS)
def test_a_bad_example_contributes_exactly_zero_and_is_counted(which, value):
    rng = np.random.default_rng(0)
    bench = Bench(0, {which}, norm="intrinsic", dtype=torch.float32, scale=1.0, T=3)
    good, bad = (factors("plain", rng, 3, bench.p, bench.d) for _ in range(2))
    bad[0][0, 0] = value
    gradients = Gradients([bench.slots], dtype=torch.float32, device=torch.device("cpu"))
    gradients.begin_batch(Bound((1.0,)))
    gradients.begin(2)
    bench.feed(*(torch.from_numpy(np.stack(x)).float() for x in zip(good, bad, strict=True)))
    gradients.clip_and_add()
    found = gradients.take()
    assert (found.examples, found.bad_examples) == (2, 1)
    torch.testing.assert_close(found.total.double(), bench.sum([good], 1.0, 1), rtol=1e-6, atol=1e-7)


def test_small_gradients_are_summed_as_they_are():
    rng = np.random.default_rng(0)
    bench = Bench(0, {"dense", "deferred"}, norm="paper", dtype=torch.float64, scale=1.0, T=3)
    examples = [factors("plain", rng, 3, bench.p, bench.d) for _ in range(4)]
    left, right = (np.stack(x) for x in zip(*examples, strict=True))
    total = bench.sum(examples, 1e6, 3)
    truth = np.einsum("mtp,mtd->pd", left, right)
    found = total[-truth.size :].numpy().reshape(truth.shape)
    np.testing.assert_allclose(found, truth, rtol=1e-12)
    np.testing.assert_allclose(total[: bench.p].numpy(), left.sum((0, 1)), rtol=1e-12)


def test_a_slot_that_was_not_used_holds_nothing_from_before():
    bench = Bench(0, {"dense", "carried"}, norm="paper", dtype=torch.float64, scale=1.0, T=1)
    gradients = Gradients([bench.slots], dtype=torch.float64, device=torch.device("cpu"))
    gradients.begin_batch(Bound((1.0,)))
    gradients.begin(2)
    bench.feed(torch.ones(2, 1, bench.p).double(), torch.ones(2, 1, bench.d).double())
    gradients.clip_and_add()
    gradients.begin_batch(Bound((100.0,)))
    gradients.begin(2)
    bench.dense.add_dense(torch.ones(2, bench.p).double())
    gradients.clip_and_add()
    total = gradients.take().total
    assert not total[gradients.where["w"]].any()
    assert torch.equal(total[gradients.where["b"]], torch.full((bench.p,), 2.0).double())


def test_clip_factors():
    squares = torch.tensor([0.0, 0.25, 1.0, 16.0, 1e300, float("inf"), float("nan")], dtype=torch.float64)
    found = clip_factors(squares, 1.0)
    assert found[:2].tolist() == [1.0, 1.0]
    torch.testing.assert_close(found[2:4], torch.tensor([1.0, 0.25], dtype=torch.float64))
    assert found[5:].tolist() == [0.0, 0.0]
    assert (found.double() * squares[:5].sqrt().max() >= 0).all() and (found[:5] * squares[:5].sqrt() <= 1).all()
    assert clip_factors(squares, None)[:5].tolist() == [1.0] * 5
    # a factor among float32's subnormal numbers would be off by more than rounding
    assert clip_factors(torch.tensor([1e80], dtype=torch.float64), 1.0, torch.float32).tolist() == [0.0]


@pytest.mark.parametrize("columns", [3, 256, 1000, 25600])
def test_norms_of_rows_are_float64_sums(columns):
    rows = torch.randn(3, columns, generator=torch.Generator().manual_seed(0))
    rows[1] *= 1e25
    torch.testing.assert_close(squared_norms(rows), rows.double().square().sum(1), rtol=3e-6, atol=0)
