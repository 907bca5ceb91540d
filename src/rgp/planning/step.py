"""One logical step on the meta device under the tally: the real engine for private methods, a plain loop for plain training.

What is looked at is an ordinary step late in a run: the optimizer has its state, and the micro-batch is not the first of
its logical batch, so the sum of the earlier ones is there too.

phases  carriers -> forward -> backward -> clipping -> release (noise, rebuilt gradients) -> optimizer
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rgp import slots
from rgp.checks.arguments import check_model, check_trainable
from rgp.clipping import Gradients
from rgp.ledger import Ledger
from rgp.loading import Loading
from rgp.mechanism import plan_mechanism
from rgp.methods import Method
from rgp.norms import DenseUse
from rgp.observing import Observer
from rgp.plan import Entry, make_plan
from rgp.planning.devices import as_on
from rgp.planning.models import Subject
from rgp.planning.tally import Tally, bytes_of
from rgp.privatize import assemble
from rgp.rules import conv
from rgp.run import Run
from rgp.sampling import Poisson
from rgp.streams import Streams

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters, **options: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, **options),
    "adam": lambda parameters, **options: torch.optim.Adam(parameters, lr=1e-3, **options),
    "adamw": lambda parameters, **options: torch.optim.AdamW(parameters, lr=1e-3, **options),
}
EVERY_MICROBATCH = ("forward", "backward", "clipping")  # phases that a step has once per micro-batch; others once


@dataclass(frozen=True)
class Cost:
    """Bytes and flops of one step with one micro-batch; phase -> value where they differ by phase."""

    peaks: dict[str, int]
    flops: dict[str, int]
    weights: int
    initial: int  # W_0, which history carriers keep
    optimizer: int
    gradients: int  # .grad of all trained parameters when the optimizer steps
    activations: int  # what the forward pass leaves for the backward pass
    per_example: int  # buffer of per-example gradients, and what large exact parameters keep for theirs
    total: int  # the sum over a logical batch: clipped gradients, or plain training's .grad
    batch: int  # the micro-batch itself

    def flops_of(self, microbatches: float, ranks: int = 1) -> int:
        """Flops of a logical batch over all ranks: each rank finds the carriers and rebuilds the gradients for itself."""
        once = sum(n for phase, n in self.flops.items() if phase.partition(":")[0] not in EVERY_MICROBATCH)
        return round(ranks * once + microbatches * (sum(self.flops.values()) - once))


def extrapolate(low: Cost, high: Cost, at: float) -> Cost:
    """Every number on the line through `low` (at 0) and `high` (at 1)."""

    def line(a: Any, b: Any) -> Any:
        if isinstance(a, dict):
            return {key: line(a.get(key, 0), b.get(key, 0)) for key in {**a, **b}}
        return round(a + (b - a) * at)

    return Cost(**{key: line(getattr(low, key), getattr(high, key)) for key in low.__dataclass_fields__})


# The step ----------------------------------------------------------------------------------------------------------


def private_step(
    model: nn.Module,
    subject: Subject,
    method: Method,
    m: int,
    *,
    first: bool,
    optimizer: str,
    device: str,
    materialise: bool = False,
) -> Cost:
    """A step of the real engine. `first`: the micro-batch is the only one of its logical batch.

    materialise: store every exact parameter's per-example gradients, whatever their size.
    """
    batch, tally = subject.batch(m), Tally()
    noted: dict[str, int] = {}
    plan, streams = make_plan(model, method), Streams.from_seed(0)
    mechanism = plan_mechanism(size=m, method=method.name, batch_size=m, noise_multiplier=1.0, steps=2)
    chosen = _optimizer(model, optimizer, device)
    check_model(model, meta=True)
    check_trainable(model, plan, chosen)
    run = assemble(
        model,
        chosen,
        range(m),
        plan=plan,
        mechanism=replace(mechanism, sampling=_EmptyThenAll(size=m, batch_sizes=mechanism.sampling.batch_sizes)),
        loading=Loading(microbatch_size=m, collate_fn=lambda _: batch),
        streams=streams,
        source=_NoNoise(tally, noted),
        ledger=Ledger(mechanism.header()),
        scheduler=_AfterFirst(tally),
        probe=False,
        slot=_make_materialised if materialise else slots.make_slot,
    )
    run.observe(_Phases(run, tally, noted, first=first))
    _watch_optimizer(run.optimizer, tally, noted)
    with warnings.catch_warnings(), tally, as_on(device), _marked_layers(model, tally):
        warnings.simplefilter("ignore")
        _count_resident(model, [*run.initial.values(), *batch], tally)
        for given in run:
            noted["before"] = tally.live
            tally.enter("forward")
            loss = subject.loss(model, given)
            noted["activations"] = tally.live - noted["before"]
            tally.enter("backward")
            run.step(loss)
            del loss
        run.close()
    return _cost(model, tally, noted, batch, list(run.initial.values()), run.optimizer)


@dataclass(frozen=True, kw_only=True)
class _EmptyThenAll(Poisson):
    """An empty first step gives the optimizer its state; the second has every example."""

    def draw(self, streams: Streams, step: int, attempt: int) -> np.ndarray:
        return np.arange(self.size if step else 0)


class _Phases(Observer):
    """Notes where one phase ends and the next begins."""

    def __init__(self, run: Run, tally: Tally, noted: dict[str, int], *, first: bool) -> None:
        self._run, self._tally, self._noted, self._first = run, tally, noted, first

    def begin_pass(self, gradients: Gradients) -> None:
        if not self._first:
            gradients.reserve()

    def before_clipping(self, gradients: Gradients, indices: list[int]) -> None:
        self._noted["per_example"] = self._run.per_example_bytes + self._tally.live - self._noted["before"]
        self._tally.enter("clipping")


def plain_step(model: nn.Module, subject: Subject, m: int, *, first: bool, optimizer: str, device: str) -> Cost:
    """Ordinary training of the same parameters: gradients of the micro-batches add up in .grad."""
    batch, tally = subject.batch(m), Tally()
    noted: dict[str, int] = {}
    chosen = _optimizer(model, optimizer, device)
    trained = [p for p in model.parameters() if p.requires_grad]
    with tally, as_on(device), _marked_layers(model, tally):
        _count_resident(model, batch, tally)
        _zero_gradients(trained)
        chosen.step()
        chosen.zero_grad()
        _AfterFirst(tally).step()
        _watch_optimizer(chosen, tally, noted)
        if not first:
            _zero_gradients(trained)
        noted["before"] = tally.live
        tally.enter("forward")
        loss = subject.loss(model, batch)
        noted["activations"] = tally.live - noted["before"]
        tally.enter("backward")
        loss.backward()
        del loss
        chosen.step()
        chosen.zero_grad()
    noted |= {"per_example": 0, "total": noted["gradients"]}
    return _cost(model, tally, noted, batch, [], chosen)


def _cost(model, tally, noted, batch, initial, optimizer) -> Cost:
    state = [value for values in optimizer.state.values() for value in values.values()]
    return Cost(
        peaks={phase: peak for phase, peak in tally.peaks.items() if phase != "setup"},
        flops=dict(tally.flops),
        weights=bytes_of([*model.parameters(), *model.buffers()]),
        initial=bytes_of(initial),
        optimizer=bytes_of(state),
        gradients=noted["gradients"],
        activations=noted["activations"],
        per_example=noted["per_example"],
        total=noted["total"],
        batch=bytes_of(batch),
    )


def _count_resident(model: nn.Module, others: Sequence[Tensor], tally: Tally) -> None:
    for tensor in (*model.parameters(), *model.buffers(), *others):
        tally.count(tensor)


def _zero_gradients(parameters: list[Tensor]) -> None:
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)


def _optimizer(model: nn.Module, name: str, device: str) -> torch.optim.Optimizer:
    # torch's own choice: all tensors together on a GPU, one after the other on a CPU
    return OPTIMIZERS[name]([p for p in model.parameters() if p.requires_grad], foreach=device == "gpu")


def _watch_optimizer(optimizer: torch.optim.Optimizer, tally: Tally, noted: dict[str, int]) -> None:
    def before(*_: Any) -> None:
        noted["gradients"] = bytes_of(p.grad for group in optimizer.param_groups for p in group["params"])
        tally.enter("optimizer")

    optimizer.register_step_pre_hook(before)


class _Materialised(slots.DeferredSlot):
    """A large exact parameter as hooks treat it: formed in the backward pass, kept until the clip factors are known."""

    def add_outer(self, left, right, *, thin_left=None, thin_right=None) -> None:
        self.add_dense(torch.bmm(left.transpose(1, 2), right))

    def add_use(self, use: Any) -> None:
        if isinstance(use, conv.ConvUse):
            patches = conv._grouped(use.geometry.patches(use.x), use.geometry.groups)
            use = DenseUse(torch.matmul(conv._grouped(use.g, use.geometry.groups), patches.transpose(-1, -2)))
        super().add_use(use)

    def squared_norms(self) -> tuple[Tensor, Tensor]:
        norms = [torch.linalg.vector_norm(use.gradients.flatten(1), dim=1) for use in self.uses]  # type: ignore[attr-defined]
        squares = torch.stack(norms).double().square().sum(0)
        return squares, squares


def _make_materialised(entry: Entry, **options: Any) -> slots.Slot:
    slot = slots.make_slot(entry, **options)
    return _Materialised(entry) if isinstance(slot, slots.DeferredSlot) else slot


class _AfterFirst:
    """A scheduler, called after each step: forgets what the first step cost."""

    def __init__(self, tally: Tally) -> None:
        self._tally, self._calls = tally, 0

    def step(self) -> None:
        self._calls += 1
        if self._calls == 1:
            self._tally.peaks.clear()
            self._tally.flops.clear()
            self._tally.enter("carriers")


class _NoNoise:
    """Noise is drawn a few megabytes at a time: no memory to speak of, and no flops that are counted."""

    name = "none"
    replayable = True

    def __init__(self, tally: Tally, noted: dict[str, int]) -> None:
        self._tally, self._noted = tally, noted

    def add(self, total: Tensor, *, std: float, step: int, attempt: int) -> None:
        self._tally.enter("release")
        self._noted["total"] = total.nbytes


# Layers --------------------------------------------------------------------------------------------------------------


@contextmanager
def _marked_layers(model: nn.Module, tally: Tally) -> Iterator[None]:
    """Split the backward phase at the first, second and last of a stack of layers.

    As layers are added each of these peaks grows by a constant; the highest of them need not.
    """
    layers = stack_of_layers(model)

    def mark(layer: int) -> Callable[..., None]:
        place = {len(layers) - 1: "last", 0: "first", 1: "second"}.get(layer, "inner")

        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            if isinstance(hidden, Tensor) and hidden.requires_grad:
                hidden.register_hook(lambda _: tally.enter(f"backward:{place}"))

        return hook

    hooks = [layer.register_forward_hook(mark(i)) for i, layer in enumerate(layers)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def stack_of_layers(model: nn.Module) -> list[nn.Module]:
    """The longest ModuleList: the layers of a transformer."""
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=[])
