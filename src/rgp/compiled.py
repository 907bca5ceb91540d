"""Compiled models: the rules run once, while the graph is made, and what they give are ordinary results of its backward pass.

Dynamo turns a compiled module into a graph of torch operations. That graph is handed on to the module's own backend as one
function, which runs it under a capture (capture.py) with the rules of uncompiled models; so AOTAutograd sees what the rules
compute, forward and backward, and compiles it. No formula is written twice. In the place of side effects:

ports      inputs (zeros that take no memory) that nothing is computed from. What a rule gives to the slot of a parameter
           while the backward pass is traced, the graph returns as the gradient of a port
recorders  slots that keep what they are given, for `_Sink`: it stands between a parameter and all its uses, so that its
           backward pass comes after theirs, and returns what was recorded. A gradient that arrives at it went around the
           rules, and is an error
carriers   are inputs, as they change from step to step

When the compiled graph runs, `_Receive` takes the gradients of the ports and gives them to the run's own slots.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo import maybe_mark_dynamic
from torch._dynamo.eval_frame import OptimizedModule, innermost_backend
from torch._dynamo.exc import Unsupported
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.autograd.function import once_differentiable

from rgp.capture import Capture
from rgp.checks.means import outputs_of, unevenness
from rgp.errors import UnsupportedError
from rgp.rules.constants import held_by, tensors_in
from rgp.rules.fallback import name_of
from rgp.rules.owners import Owners
from rgp.slots import CarriedSlot, DeferredSlot, DenseSlot, Slot, Use
from rgp.torchstate import as_tree, remove_mode

# ---------------------------------------------------------------------- while the graph is made


class _Recorder(Slot):
    """A slot that keeps what it is given until the sink takes it."""

    taken = False

    def gifts(self) -> list[Gift]:
        """What it was given."""
        raise NotImplementedError

    def take(self) -> list[Gift]:
        self.taken = True
        return self.gifts()

    def check_open(self) -> None:
        """Nothing may come after the sink: it would be lost."""
        if self.taken:
            raise _went_around(self.entry.name)


@dataclass
class Gift:
    """Something that a rule gave to a slot: tensors by name, and what they belong to."""

    tensors: dict[str, Tensor]
    use: Use | None = None  # of a deferred slot, without its tensors


class _Carried(_Recorder, CarriedSlot):
    """Records dL_i transposed and dR_i, summed over the uses of the parameter."""

    def __init__(self, real: CarriedSlot, Lt: Tensor, R: Tensor) -> None:
        super().__init__(real.entry, intrinsic=real.intrinsic)
        self.set_carriers(Lt, R, real.sides)
        self._found: dict[str, Tensor] = {}

    def keep_thin(self, dLt: Tensor | None, dR: Tensor | None, *, taps_first: bool = False) -> None:
        self.check_open()
        dR = self._reordered(dR, taps_first=False) if taps_first and dR is not None else dR
        for side, value in (("dLt", dLt), ("dR", dR)):
            if value is not None:
                self._found[side] = self._found[side] + value if side in self._found else value

    def gifts(self) -> list[Gift]:
        return [Gift(self._found)] if self._found else []


class _Dense(_Recorder, DenseSlot):
    """Records G_i, summed over the uses of the parameter."""

    def __init__(self, real: Slot, m: int) -> None:
        super().__init__(real.entry)
        self._m, self._found = m, None

    def add_dense(self, gradients: Tensor) -> None:
        self.check_open()
        gradients = gradients.reshape(self._m, -1)
        self._found = gradients if self._found is None else self._found + gradients

    def gifts(self) -> list[Gift]:
        return [] if self._found is None else [Gift({"gradients": self._found})]


class _Deferred(_Recorder, DeferredSlot):
    """Records the uses of the parameter."""

    def __init__(self, real: DeferredSlot) -> None:
        super().__init__(real.entry)
        self.uses = []

    def add_use(self, use: Use) -> None:
        self.check_open()
        self.uses.append(use)

    def gifts(self) -> list[Gift]:
        found = []
        for use in self.uses:
            tensors = {name: value for name, value in vars(use).items() if isinstance(value, Tensor)}
            rest = copy.copy(use)
            vars(rest).update(dict.fromkeys(tensors))
            found.append(Gift(tensors, rest))
        return found


def _give(slot: Slot, gift: Gift, tensors: dict[str, Tensor]) -> None:
    """What a recorder took, to the run's own slot."""
    if isinstance(slot, CarriedSlot):
        slot.keep_thin(tensors.get("dLt"), tensors.get("dR"))
    elif gift.use is None:
        slot.add_dense(tensors["gradients"])
    else:
        use = copy.copy(gift.use)
        vars(use).update(tensors)
        slot.add_use(use)  # type: ignore[attr-defined]


class _Sink(torch.autograd.Function):
    """The parameters, for the rules. In the backward pass, after all uses: what they gave, as gradients of the ports.

    One for all of them: every rule hands at least one of the parameters that it fills the slots of to autograd, not each.
    """

    @staticmethod
    def forward(ctx, recorders, take, count, *tensors):
        """tensors: `count` parameters, then the ports. take: from recorders to what the ports get."""
        ctx.recorders, ctx.take, ctx.count, ctx.ports = recorders, take, count, len(tensors) - count
        ctx.set_materialize_grads(False)
        return tuple(parameter.detach() for parameter in tensors[:count])

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        for recorder, g in zip(ctx.recorders, gradients, strict=True):
            if g is not None:
                raise _went_around(recorder.entry.name)
        found = ctx.take(ctx.recorders)
        assert len(found) == ctx.ports, "the graph is the same each time that it is traced"
        return None, None, None, *[None] * ctx.count, *found


class _Anchor(torch.autograd.Function):
    """What was computed from parameters alone, detached, as rules and forms want it; but the sinks of the parameters
    still wait for its uses."""

    @staticmethod
    def forward(ctx, form, name):
        ctx.name = name
        ctx.set_materialize_grads(False)
        return form.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        if g is not None:
            raise _went_around(ctx.name)
        return None, None


def _went_around(name: str) -> UnsupportedError:
    return UnsupportedError(
        f"parameter {name!r} has a gradient in the compiled graph that no rule has seen, so it could not be clipped per "
        "example. Freeze it, or leave the module that uses it uncompiled."
    )


def _as_port(tensor: Tensor) -> Tensor:
    """Gradients have no integers; float64 holds those of any table exactly."""
    return tensor if tensor.is_floating_point() else tensor.double()


class _Tracing(Capture):
    """The capture of a graph that is being made: tensors have shapes, and no numbers that could be looked at."""

    tracing = True

    def __init__(self, m: int, parameters: dict[int, Slot], constants: Sequence[Tensor]) -> None:
        """parameters: id -> slot."""
        super().__init__(parameters)
        self.owners = Owners(self.assume)
        self.uneven_means: list[Tensor] = []
        self.broken: list[Tensor] = []  # assumptions that do not hold
        self.begin(m)
        for tensor in constants:
            self.constants.add(tensor)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if isinstance(func, HigherOrderOperator):
            raise UnsupportedError(
                f"the graph of a compiled module has {func.name()} in it (an activation checkpoint, control flow, an autograd "
                "Function), and the rules do not see what is inside. Leave that part uncompiled."
            )
        return super().__torch_function__(func, types, args, kwargs)

    def hand_on(self, result: Tensor, slot: Slot, transposed: bool) -> Tensor:
        value = _Anchor.apply(result, slot.entry.name)
        self.remember(value, slot, transposed)
        return value

    def _note_mean(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> None:
        assert self.examples is not None
        with torch.no_grad():
            uneven = unevenness(func, self.examples, args, kwargs)
            if uneven is not False:
                self.uneven_means.append(torch.as_tensor(uneven))

    def assume(self, holds: Tensor) -> None:
        """The rules go on as if this were true, and it is looked at when the graph runs."""
        self.broken.append(~holds)

    def _without_rule(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], met: list[Slot]) -> Any:
        name = met[0].entry.name
        raise UnsupportedError(
            f"parameter {name!r} is trained but was used in {name_of(func)}, which has no rule for per-example gradients that "
            f"could be compiled. Leave the module that uses it uncompiled, or freeze it (overrides={{{name!r}: 'frozen'}})."
        )


# ---------------------------------------------------------------------- a graph


class _Receive(torch.autograd.Function):
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
            blank = [_as_port(tensor) for tensor in given]
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
                recorders.append(_Carried(slot, next(rest), next(rest)))
            elif isinstance(slot, DeferredSlot):
                recorders.append(_Deferred(slot))
            else:
                recorders.append(_Dense(slot, m))
        if recorders:
            parameters = [args[i] for i in self._slots]
            own = _Sink.apply(recorders, self._take, len(parameters), *parameters, *rest)
            for i, parameter in zip(self._slots, own, strict=True):
                args[i] = parameter
        slots = {id(args[i]): recorder for i, recorder in zip(self._slots, recorders, strict=True)}
        capture = _Tracing(m, slots, [args[i] for i in self._constants])
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
        return [_as_port(tensor) for each in gifts for gift in each for tensor in gift.tensors.values()]

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
            ports = _Receive.apply(
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
            capture.uneven += [edge.node for edge, _ in outputs_of(results)]
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
                    _give(slot, gift, tensors)
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


# ---------------------------------------------------------------------- a module


class Region:
    """A compiled module: takes the place of its compiled call while a run trains it."""

    def __init__(self, module: nn.Module, compiled: Any, capture: Capture, model: nn.Module) -> None:
        """module: as it was before it was compiled. compiled: its compiled call."""
        self._module, self._plain, self._capture, self._model = module, compiled, capture, model
        context = _context_of(compiled)
        self._backend, self._dynamic = innermost_backend(context.callback), context._dynamic
        self._calls: dict[Any, Callable[..., Any]] = {}
        self._refusal: Exception | None = None
        self.graphs = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        capture = self._capture
        if capture.examples is None or not torch.is_grad_enabled():
            with _aside(capture):
                return self._plain(*args, **kwargs)
        if capture.rehearsing and not capture.rehearsing_compiled:
            return self._module._call_impl(*args, **kwargs)
        self._mark(args, kwargs)
        with _aside(capture):
            self._refusal = None
            try:
                return self._private()(*args, **kwargs)
            except Exception as error:
                raise self._explained(error) from error

    def _mark(self, args: Any, kwargs: Any) -> None:
        """The number of examples changes from micro-batch to micro-batch: one graph for all, and one for a single example."""
        if self._dynamic is False:
            return
        for tensor in tensors_in((args, as_tree(kwargs))):
            if tensor.dim() and tensor.shape[0] == self._capture.examples:
                maybe_mark_dynamic(tensor, 0)

    def _private(self) -> Callable[..., Any]:
        slots = set(self._capture._slots.values())
        sides = tuple(sorted({slot.sides for slot in slots if isinstance(slot, CarriedSlot)}))
        key = sides, self._capture.rehearsing
        if key not in self._calls:
            self._calls[key] = self._compile()
        return self._calls[key]

    def _compile(self) -> Callable[..., Any]:
        module = self._module

        def call(*args: Any, **kwargs: Any) -> Any:
            return module._call_impl(*args, **kwargs)

        # Dynamo keeps what it compiled with the code: a code of its own, or it would count that of other models too
        own = FunctionType(call.__code__.replace(), call.__globals__, "call", None, call.__closure__)
        return torch.compile(own, backend=self._make, fullgraph=True, dynamic=self._dynamic)

    def _make(self, module: fx.GraphModule, inputs: list[Any]) -> Graph:
        try:
            self.graphs += 1
            # a rehearsal's graph, without dropout, is used once; it has the same backend, because code that a compiler generates
            # is not always right
            return Graph(module, inputs, backend=self._backend, capture=self._capture, model=self._model)
        except Exception as error:
            self._refusal = error
            raise

    def _explained(self, error: Exception) -> Exception:
        if isinstance(self._refusal, UnsupportedError):
            return self._refusal
        if isinstance(self._refusal, (DataDependentOutputException, DynamicOutputShapeException)):
            return UnsupportedError(
                "a compiled module has an operation with trained parameters whose rule looks at the numbers of a batch "
                f"({self._refusal}), which a graph cannot. Leave that part uncompiled."
            )
        if isinstance(error, Unsupported) and self._refusal is None:
            return UnsupportedError(
                "a compiled module is more than one graph, and what happens between two of them would not be seen. Leave out "
                f"what breaks it, or compile smaller parts of the model. torch.compile(fullgraph=True) says: {str(error)[:500]}"
            )
        return error


@contextmanager
def _aside(capture: Capture) -> Iterator[None]:
    """The capture off the stack of modes, where a compiler would trace it."""
    remove_mode(capture)
    try:
        with torch.compiler.set_stance("default"):
            yield
    finally:
        capture.__enter__()


def _context_of(compiled: Any) -> Any:
    """How torch.compile was called: kept in the closure of what it returned."""
    names = compiled.__code__.co_freevars
    return compiled.__closure__[names.index("self")].cell_contents


class Regions:
    """The compiled modules of a model."""

    def __init__(self, model: nn.Module, capture: Capture, wrapper: nn.Module | None = None) -> None:
        """wrapper: what torch.compile(model) returned, if the loop calls that."""
        self._undo: list[Callable[[], None]] = []
        self._model, self._capture, self._wrapper = model, capture, wrapper
        self.regions: list[Region] = []

    def take(self) -> None:
        """Put a region in the place of each compiled call."""
        covered: set[nn.Module] = set()
        for module in (*(() if self._wrapper is None else (self._wrapper,)), *self._model.modules()):
            if module in covered:
                continue
            if isinstance(module, OptimizedModule):
                inner, name = module._orig_mod, "forward"
            elif module._compiled_call_impl is not None:
                inner, name = module, "_compiled_call_impl"
            else:
                continue
            compiled = getattr(module, name)
            region = Region(inner, compiled, self._capture, self._model)
            setattr(module, name, region)
            self._undo.append(partial(setattr, module, name, compiled))
            self.regions.append(region)
            covered.update(inner.modules())

    def give_back(self) -> None:
        while self._undo:
            self._undo.pop()()
