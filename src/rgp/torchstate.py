"""Small helpers for torch's global state and optimizer state."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

HALF = (torch.float16, torch.bfloat16)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@contextmanager
def forked_rng(seed: int | None) -> Iterator[None]:
    """Seed torch's default generators (dropout), or leave them running; afterwards they are as the user left them."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        if seed is None:
            yield
            return
        torch.default_generator.manual_seed(seed)
        for device in devices:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


@contextmanager
def kept_rng() -> Iterator[None]:
    """Restore Python's, numpy's and torch's generators afterwards: loading a batch seeds them."""
    states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.default_generator.set_state(states[2])


def autocast_devices() -> list[str]:
    """Kinds of devices on which autocast is on."""
    return [kind for kind in ("cpu", "cuda", "mps", "xpu") if torch.is_autocast_enabled(kind)]


@contextmanager
def without_autocast() -> Iterator[None]:
    """Turn autocast off on every device: gradients, norms and sums keep the precision that they have."""
    with ExitStack() as stack:
        for kind in autocast_devices():
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def in_full_precision(function: Callable[..., Any]) -> Callable[..., Any]:
    """Products of float32 matrices as float32, whatever torch was told to allow: norms must not be below the truth."""

    @wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        allowed = torch.get_float32_matmul_precision()
        if allowed != "highest":
            torch.set_float32_matmul_precision("highest")
        convolutions, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
        try:
            with without_autocast():
                return function(*args, **kwargs)
        finally:
            torch.backends.cudnn.allow_tf32 = convolutions
            if allowed != "highest":
                torch.set_float32_matmul_precision(allowed)

    return wrapped


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for a while; afterwards every module is in its own mode again."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def seed_others(seed: int) -> None:
    """Python's and numpy's generators, which augmentation may use."""
    np.random.seed(seed % 2**32)
    random.seed(seed)


def has_rows(leaf: Any, m: int) -> bool:
    """Whether this is a tensor with a row for each of m examples."""
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == m


def as_tree(batch: Any) -> Any:
    """For torch's tree functions: Hugging Face's BatchEncoding is a mapping, but no dict."""
    return dict(batch) if isinstance(batch, Mapping) else batch


def is_sharded(tensor: Any) -> bool:
    """Whether this is a DTensor (whose module takes long to import)."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def bits_of(tensor: Tensor) -> Tensor:
    """The sum of a tensor's bits, read as integers: shows whether tensors that should be equal are."""
    content = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    # eight bytes at a time: a sum of smaller integers would be made of a copy, which is twice the weight
    flat, each = content.reshape(-1), 8 // content.element_size()
    flat = flat.clone() if flat.storage_offset() % each else flat
    whole = len(flat) - len(flat) % each
    rest = flat[whole:].view(_BITS[flat.element_size()]).sum(dtype=torch.int64)
    return flat[:whole].view(torch.int64).sum() + rest


def momentum_of(optimizer: torch.optim.Optimizer, parameter: Tensor) -> Tensor | None:
    """First moment of a parameter in the optimizer's state, if it keeps one and has taken a step."""
    state = optimizer.state.get(parameter, {})
    for key in ("momentum_buffer", "exp_avg"):
        if isinstance(state.get(key), Tensor):
            return state[key]
    return None


def is_compiled(module: nn.Module) -> bool:
    """Whether this is what torch.compile(module) returned, or module.compile() was called."""
    return type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None


@contextmanager
def as_written() -> Iterator[None]:
    """Compiled functions run as they are written: a compiler would trace the capture, or not see it."""
    if "torch._dynamo" not in sys.modules:
        yield
    else:
        with torch.compiler.set_stance("force_eager"):
            yield


def uncompiled(model: Any) -> Any:
    """The model inside of what torch.compile(model) returned, whose parameters have their own names."""
    return model._orig_mod if type(model).__name__ == "OptimizedModule" else model


def remove_mode(mode: TorchFunctionMode) -> None:
    """Remove a mode from the stack, wherever it is; a loop that was left early may have others above it."""
    if sys.is_finalizing():  # a loop that nobody finished ends with the interpreter, when torch is gone already
        return
    above = []
    stack = [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]
    if mode not in stack:
        return
    while (top := torch._C._pop_torch_function_stack()) is not mode:
        above.append(top)
    for other in reversed(above):
        torch._C._push_on_torch_function_stack(other)


def saved_tensors_hooks() -> Callable[[bool], Any]:
    """torch's function that returns the saved-tensor hooks in force, or None where there are none: a checkpoint has some.

    torch 2.6 has no such function. There, those that put hooks in force and take them away are made to count.
    """
    autograd: Any = torch._C._autograd
    if hasattr(autograd, "_top_saved_tensors_default_hooks"):
        return autograd._top_saved_tensors_default_hooks
    push, pop = autograd._push_saved_tensors_default_hooks, autograd._pop_saved_tensors_default_hooks
    here = threading.local()  # hooks belong to a thread

    def counted_push(*hooks: Any) -> None:
        push(*hooks)
        here.depth = getattr(here, "depth", 0) + 1

    def counted_pop() -> None:
        pop()
        here.depth = getattr(here, "depth", 1) - 1

    autograd._push_saved_tensors_default_hooks, autograd._pop_saved_tensors_default_hooks = counted_push, counted_pop
    return lambda _: True if getattr(here, "depth", 0) else None
