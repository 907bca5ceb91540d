"""One graph of a compiled module: made under the rules, and called in the place of what the backend alone would have made."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch.autograd.function import once_differentiable

from rgp.capture import Capture
from rgp.checks.means import outputs_of
from rgp.compiled.recorders import Gift, RecordedCarried, RecordedDeferred, RecordedDense, as_port, give
from rgp.compiled.tracing import Sink, Tracing
from rgp.errors import UnsupportedError
from rgp.rules.constants import held_by, tensors_in
from rgp.slots import CarriedSlot, DeferredSlot, Slot


class Receive(torch.autograd.Function):
    """The ports of a graph; their gradients go to `give`."""

    @staticmethod
    def forward(ctx, token, give, ports):
        ctx.give = give
        ctx.set_materialize_grads(False)
        return tuple(torch.zeros(1, dtype=dtype, device=device).expand(shape) for shape, dtype, device in ports)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        ctx.give(gradients)
        return None, None, None


class Graph:
    """One graph of a compiled module, with ports: called by Dynamo in the place of what the backend made."""

    def __init__(
        self,
        module: fx.GraphModule,
        inputs: list[Any],
        *,
        backend: Callable[..., Any],
        capture: Capture,
        model: nn.Module,
    ) -> None:
        assert capture.examples is not None
        self._module, self._capture, self._inputs = module, capture, len(inputs)
        fakes = [node.meta["example_value"] for node in module.graph.find_nodes(op="placeholder")]
        found = {i: slot for i, x in enumerate(inputs) if isinstance(x, Tensor) and (slot := capture.slot(x))}
        self._slots: dict[int, Slot] = found
        self._parameters = {i: id(inputs[i]) for i in found}
        held = {id(tensor) for tensor in (*held_by(model), *model.parameters())}
        self._constants = [i for i, x in enumerate(inputs) if id(x) in held and i not in found]
        self._symbols = _symbols(fakes)
        self._examples_at = self._find_examples(inputs, fakes)
        self._m = capture.examples if self._examples_at is None else fakes[self._examples_at].shape[0]
        self._carried = [slot for slot in found.values() if isinstance(slot, CarriedSlot)]
        self._gifts: list[list[Gift]] = []  # what the slot of each parameter is given
        self._token = torch.zeros((), requires_grad=True)
        self._dry, self._results, self._rehearsing = True, 0, capture.rehearsing

        mode = next(fake.fake_mode for fake in fakes if isinstance(fake, Tensor))
        carriers = [mode.from_tensor(tensor, static_shapes=True) for tensor in self._carriers()]
        outputs = self._dry_run(mode, fakes, carriers)
        given = [tensor for gifts in self._gifts for gift in gifts for tensor in gift.tensors.values()]
        self._dtypes = [tensor.dtype for tensor in given]
        with mode:
            blank = [as_port(tensor) for tensor in given]
            ports = [torch.zeros_like(t[:1, ...].flatten()[:1]).expand(t.shape).requires_grad_() for t in blank]
        self._ports = [(tuple(t.shape), t.dtype, t.device) for t in ports]
        extended = [*inputs, *carriers, *ports]
        self._compiled = backend(_as_module(self._trace, len(extended), outputs), extended)

    def _find_examples(self, inputs: list[Any], fakes: list[Any]) -> int | None:
        """An input whose first dimension is the examples; their number may change if it is a symbol."""
        rows = [
            i
            for i, (x, fake) in enumerate(zip(inputs, fakes, strict=True))
            if isinstance(fake, Tensor)
            and i not in self._slots
            and i not in self._constants
            and x.dim()
            and x.shape[0] == self._capture.examples
        ]
        return next((i for i in rows if not isinstance(fakes[i].shape[0], int)), rows[0] if rows else None)

    def _carriers(self) -> list[Tensor]:
        return [tensor.contiguous() for slot in self._carried for tensor in (slot.Lt, slot.R)]

    def _trace(self, *flat: Any) -> tuple[Any, ...]:
        """The graph under the rules. flat: its inputs, carriers, ports (none in the dry run)."""
        args, rest = list(flat[: self._inputs]), iter(flat[self._inputs :])
        m = self._m if self._examples_at is None else args[self._examples_at].shape[0]
        recorders: list[Any] = []
        for slot in self._slots.values():
            if isinstance(slot, CarriedSlot):
                recorders.append(RecordedCarried(slot, next(rest), next(rest)))
            elif isinstance(slot, DeferredSlot):
                recorders.append(RecordedDeferred(slot))
            else:
                recorders.append(RecordedDense(slot, m))
        if recorders:
            parameters = [args[i] for i in self._slots]
            own = Sink.apply(recorders, self._take, len(parameters), *parameters, *rest)
            for i, parameter in zip(self._slots, own, strict=True):
                args[i] = parameter
        slots = {id(args[i]): recorder for i, recorder in zip(self._slots, recorders, strict=True)}
        capture = Tracing(m, slots, [args[i] for i in self._constants])
        capture.rehearsing = self._rehearsing
        with capture:
            outputs = fx.Interpreter(self._module).run(*args)
        capture.end()
        self._results = len(outputs)
        looked_at = capture.uneven_means, capture.broken
        self._looked_at = [bool(found) for found in looked_at]
        return *outputs, *(torch.stack(found).any() for found in looked_at if found)

    def _take(self, recorders: list[Any]) -> list[Tensor]:
        """What was given, for the ports; in the dry run, when there are none, it is looked at."""
        gifts = [recorder.take() for recorder in recorders]
        if self._dry:
            self._gifts = gifts
            return []
        return [as_port(tensor) for each in gifts for gift in each for tensor in gift.tensors.values()]

    def _dry_run(self, mode: Any, fakes: list[Any], carriers: list[Tensor]) -> int:
        """Finds out what the slots are given. Returns how many outputs the graph has."""
        # with symbols for shapes as AOTAutograd has them: kernels in C++ would ask for numbers
        with mode, enable_python_dispatcher(), torch.enable_grad():
            inputs = [x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in fakes]
            outputs = self._trace(*inputs, *carriers)
            ends = [y for y in outputs if isinstance(y, Tensor) and y.requires_grad]
            wanted = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
            torch.autograd.grad(ends, wanted, [torch.empty_like(y) for y in ends], allow_unused=True)
        self._dry = False
        return len(outputs)

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        capture = self._capture
        self._check(args)
        symbols = {symbol: args[i] if at is None else args[i].shape[at] for symbol, i, at in self._symbols}
        ports: tuple[Tensor, ...] = ()
        if self._ports:
            ports = Receive.apply(
                self._token, self._give, [(_sizes(shape, symbols), *kind) for shape, *kind in self._ports]
            )
        outputs = self._compiled(*args, *self._carriers(), *ports)
        results, rest = outputs[: self._results], iter(outputs[self._results :])
        uneven, broken = (found and bool(next(rest)) for found in self._looked_at)
        if broken:
            raise UnsupportedError(
                "a compiled module picks rows out of the batch in another order than that of the examples, or has a parameter "
                "with rows of its own for each example. Its rules were compiled for neither: leave the module uncompiled."
            )
        if uneven:
            reason = "on all examples' labels or masks"
            capture.uneven.update((edge.node, reason) for edge, _ in outputs_of(results))
        return results

    def _check(self, args: Sequence[Any]) -> None:
        """That it is called as it was made: with these parameters, for as many examples as there are."""
        capture = self._capture
        found = {i: id(x) for i, x in enumerate(args) if isinstance(x, Tensor) and capture.slot(x) is not None}
        if found != self._parameters:
            raise UnsupportedError(
                "a compiled module uses other trained parameters than when it was compiled, or something that was computed from "
                "them outside of it. Leave it uncompiled."
            )
        m = self._m if self._examples_at is None else args[self._examples_at].shape[0]
        if m != capture.examples:
            raise UnsupportedError(
                f"a compiled module was called with {m} rows for the {capture.examples} examples of the micro-batch. Put the "
                "examples first in what it is called with, or leave it uncompiled."
            )
        if any(capture.owners.is_picked(x) for x in tensors_in(args)):
            raise UnsupportedError(
                "a compiled module was called with rows that an index had picked out of the batch, and its rules know examples "
                "in their order only. Leave it uncompiled."
            )

    def _give(self, gradients: Sequence[Tensor | None]) -> None:
        rest = iter(zip(gradients, self._dtypes, strict=True))
        for slot, gifts in zip(self._slots.values(), self._gifts, strict=True):
            for gift in gifts:
                tensors = {}
                for name in gift.tensors:
                    value, dtype = next(rest)
                    if value is not None:
                        tensors[name] = value.to(dtype)
                if len(tensors) == len(gift.tensors):
                    give(slot, gift, tensors)
                elif tensors:
                    raise UnsupportedError("a compiled graph gave only a part of a parameter's gradients")


def _symbols(fakes: Sequence[Any]) -> list[tuple[Any, int, int | None]]:
    """(symbol, input, dimension) of what may change in the shapes of inputs; dimension None: the input is that number."""
    found: dict[Any, tuple[Any, int, int | None]] = {}
    for i, fake in enumerate(fakes):
        sizes: list[tuple[Any, int | None]] = [(fake, None)] if isinstance(fake, torch.SymInt) else []
        if isinstance(fake, Tensor):
            sizes = [(size, at) for at, size in enumerate(fake.shape) if isinstance(size, torch.SymInt)]
        for size, at in sizes:
            if size.node.expr.is_symbol:
                found.setdefault(size.node.expr, (size.node.expr, i, at))
    return list(found.values())


def _sizes(shape: Sequence[Any], symbols: dict[Any, int]) -> tuple[int, ...]:
    return tuple(n if isinstance(n, int) else int(n.node.expr.xreplace(symbols)) for n in shape)


def _as_module(function: Callable[..., tuple[Any, ...]], inputs: int, outputs: int) -> fx.GraphModule:
    """A graph of one node, as backends want it."""

    def graph_under_rules(*flat: Any) -> tuple[Any, ...]:
        return function(*flat)

    graph = fx.Graph()
    whole = graph.call_function(graph_under_rules, tuple(graph.placeholder(f"input_{i}") for i in range(inputs)))
    graph.output(tuple(graph.call_function(operator.getitem, (whole, i)) for i in range(outputs)))
    return fx.GraphModule(nn.Module(), graph)
