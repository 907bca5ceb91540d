"""Compiled models: the same gradients as autograd gives one example at a time, few graphs, and no way around the rules."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

import rgp
from helpers import check_exact, privatize, train
from rgp.compiled import Region
from rgp.rules import RULES, load

pytestmark = pytest.mark.filterwarnings("ignore:noise_multiplier is 0")
load()  # a test puts a rule in the place of a built-in one, and must come second
QUICK = "aot_eager"  # traces as inductor does, and generates no code


class Words(nn.Module):
    """A table, positions that are the same for all, a product, a norm, a pooled head."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inside = nn.Embedding(11, 6), nn.Linear(6, 6)
        self.positions = nn.Parameter(torch.randn(1, 4, 6))
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids) + self.positions[:, : ids.shape[1]]
        return self.head(torch.tanh(self.norm(x + self.inside(x))).mean(1))


def words(count: int = 8) -> list[tuple[Tensor, int]]:
    return [(torch.randint(0, 11, (4,)), i % 3) for i in range(count)]


def losses(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


@pytest.fixture
def regions(monkeypatch: pytest.MonkeyPatch) -> list[Region]:
    """The compiled modules that runs of this test have taken."""
    found: list[Region] = []
    make = Region.__init__

    def noted(self: Region, *args: Any) -> None:
        found.append(self)
        make(self, *args)

    monkeypatch.setattr(Region, "__init__", noted)
    return found


@pytest.fixture(autouse=True)
def doubles():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    torch._dynamo.reset()
    yield
    torch.set_default_dtype(torch.float32)


def test_exact_in_one_graph_for_micro_batches_of_two_sizes(regions):
    model = Words()
    model.compile(backend=QUICK)
    check_exact(model, words(), losses, method=rgp.RGP(rank=2, overrides={"table.*": "exact"}), microbatch_size=3)
    assert [region.graphs for region in regions] == [2]  # one for the rehearsal, one for micro-batches of 3 and of 2


@pytest.mark.slow
def test_exact_for_dpsgd_with_weights_that_are_not_formed_per_example(regions):
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.inside, self.head = nn.Embedding(2000, 16), nn.Linear(16, 1100), nn.Linear(1100, 3)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(torch.tanh(self.inside(self.table(ids))).mean(1))

    model = Wide()
    model.compile(backend=QUICK)
    check_exact(model, words(), losses, method=rgp.DPSGD(overrides={"table.*": "exact"}), microbatch_size=3)
    assert [region.graphs for region in regions] == [2]


def test_wrapped_model_is_trained_and_left_as_it_was():
    model = nn.Linear(3, 2)
    wrapper = torch.compile(model, backend=QUICK)
    forward, before = wrapper.forward, model.weight.detach().clone()
    data = [(torch.randn(3), i % 2) for i in range(4)]
    with privatize(wrapper, data, clip=1.0, method=rgp.DPSGD()) as run:
        train(run, wrapper, losses)
        assert run.model is model and not torch.equal(model.weight, before)
        assert wrapper.forward is not forward
    assert wrapper.forward is forward


def test_what_is_compiled_after_privatize_runs_as_it_is_written():
    model = Words()
    twin, data, weights = copy.deepcopy(model), words(), []
    for each, call in ((model, lambda m: torch.compile(m, backend=QUICK)), (twin, lambda m: m)):
        with privatize(each, data, clip=0.1, method=rgp.DPSGD()) as run:
            train(run, call(each), losses)
        weights.append([p.detach() for p in each.parameters()])
    assert all(map(torch.equal, *weights))


# ---------------------------------------------------------------------- attacks


def refused(model: nn.Module, words: str, data: Any = None, *, backend: Any = QUICK, **options: Any) -> None:
    model.compile(backend=backend)
    data = [(torch.randn(3), i % 2) for i in range(4)] if data is None else data
    with (
        privatize(model, data, clip=1.0, method=rgp.DPSGD(), **options) as run,
        pytest.raises(rgp.UnsupportedError, match=words),
    ):
        train(run, model, losses)


class Through(nn.Module):
    """A linear layer behind some function of the batch."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function, self.linear = function, nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def test_parameter_that_goes_around_the_rules_is_refused(monkeypatch):
    monkeypatch.setitem(RULES, F.linear, lambda capture, func, args, kwargs: func(*args, **kwargs))
    refused(nn.Linear(3, 2), "no rule has seen", probe=False)


def test_operation_without_a_rule_is_refused():
    refused(
        Through(lambda self, x: -torch.cdist(x, self.linear.weight)), "no rule for per-example gradients that could"
    )


def test_rows_in_another_order_are_refused():
    order = torch.tensor([1, 0, 3, 2])
    refused(Through(lambda self, x: self.linear(x[order])), "another order", probe=False)


def test_a_model_that_is_another_when_it_is_compiled_is_refused():
    def mixing(self: Through, x: Tensor) -> Tensor:
        return self.linear(x * 2 if torch.compiler.is_compiling() else x)

    refused(Through(mixing), "other per-example gradients than the same model uncompiled")


def test_code_that_a_compiler_generated_wrong_is_refused():
    """The rehearsal compares what the model's own backend made, not the graph before it."""

    def forward(graph: fx.GraphModule, inputs: Any) -> Any:
        return make_boxed_func(graph.forward)

    def backward(graph: fx.GraphModule, inputs: Any) -> Any:
        def wrong(*args: Any) -> Any:
            return [g * 1.01 if isinstance(g, Tensor) and g.dim() > 1 else g for g in graph.forward(*args)]

        return make_boxed_func(wrong)

    backend = aot_autograd(fw_compiler=forward, bw_compiler=backward)
    refused(
        Through(lambda self, x: self.linear(x)),
        "other per-example gradients than the same model uncompiled",
        backend=backend,
    )


@pytest.mark.slow
def test_inductor_and_convolutions():
    """Windows of an image are not read by strides, which inductor lays out in its own way."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, stride=2), nn.Flatten(), nn.Linear(16, 4)
    )
    model.compile(backend="inductor")
    check_exact(model, [(torch.randn(3, 6, 6), i % 4) for i in range(6)], losses, method=rgp.DPSGD())


def test_two_graphs_are_refused():
    def broken(self: Through, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return self.linear(x)

    refused(Through(broken), "more than one graph")


def test_mean_over_labels_inside_the_graph_is_refused():
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.linear(x).flatten(0, 1), y.flatten())

    model = WithLoss()
    model.compile(backend=QUICK)
    data = [(torch.randn(2, 3), torch.tensor([1, -100 if i == 2 else 0])) for i in range(4)]
    with privatize(model, data, clip=1.0, method=rgp.DPSGD(), probe=False) as run:
        batches = iter(run)
        x, y = next(batches)
        with pytest.raises(rgp.UnsupportedError, match="do not count equally"):
            run.step(model(x, y))


# ---------------------------------------------------------------------- with what else a run may have

OPTIONS = {
    "views": {"views": 2, "augment": lambda batch: [batch[0] + 0.1 * torch.randn_like(batch[0]), batch[1]]},
    "persons": {"units": [i // 3 for i in range(24)], "rows_per_unit": 2, "batch_size": 3},
    "alternate": {"method": rgp.RGP(rank=2, sides="alternate")},
    "one example": {"microbatch_size": 1},
    "bands": {"method": rgp.DPSGD(), "bands": 2},
    "thin": {"method": rgp.RGP(rank=2, keep=4, state="thin")},
    "automatic clipping": {"clip": rgp.AutoClip(1.0)},
}


def trained(
    folder: Any, *, compiled: bool, stop: int | None = None, dropout: float = 0.0, **options: Any
) -> list[Tensor]:
    """Weights after four noisy steps; with `stop`, saved after so many and resumed by another model."""

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), nn.Tanh(), nn.Dropout(dropout), nn.Linear(12, 3))
        if compiled:
            model.compile(backend=QUICK)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    torch.manual_seed(1)
    data = [(torch.randn(6), i % 3) for i in range(24)]
    model, optimizer = make()
    given = {"noise_multiplier": 1.0, "delta": 1e-2, "batch_size": 8, "steps": 4, "seed": 3, "microbatch_size": 3}
    given |= {"method": rgp.RGP(rank=2), "folder": folder, **options}
    run = rgp.privatize(model, optimizer, data, **given)
    done = 0
    for batch in run:
        done += run.step(losses(model, batch).mean())
        if done == stop:
            break
    if stop is not None:
        run.save(folder)
        run.close()
        model, optimizer = make()
        run = rgp.resume(folder, model, optimizer, data)
        train(run, model, losses)
    run.close()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.filterwarnings("ignore")
def test_compiled_with_options(tmp_path, name):
    found = [trained(tmp_path / str(compiled), compiled=compiled, **OPTIONS[name]) for compiled in (True, False)]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_run_with_dropout_resumes_to_the_bit(tmp_path):
    whole = trained(tmp_path / "whole", compiled=True, dropout=0.3)
    parts = trained(tmp_path / "parts", compiled=True, dropout=0.3, stop=2)
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))
