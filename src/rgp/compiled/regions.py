"""Compiled modules: each is compiled anew, with graphs that fill slots, while a run trains it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo import maybe_mark_dynamic
from torch._dynamo.eval_frame import OptimizedModule, innermost_backend
from torch._dynamo.exc import Unsupported
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from rgp.capture import Capture
from rgp.compiled.graph import Graph
from rgp.errors import UnsupportedError
from rgp.rules.constants import tensors_in
from rgp.slots import CarriedSlot
from rgp.torchstate import as_tree, remove_mode


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
