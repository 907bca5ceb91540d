"""Small dealings with torch's global and optimizer state that have no better home."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rgp.errors import UnsupportedError

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@contextmanager
def forked_rng(seed: int | None) -> Iterator[None]:
    """torch's default generators under our seed (dropout), or going on as they are; afterwards as the user left them."""
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
    """Python's, numpy's and torch's generators, afterwards as they were: loading a batch seeds them."""
    states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.default_generator.set_state(states[2])


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, and afterwards every module's own mode again."""
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


class Watch:
    """Notices a forward pass that changes parameters or buffers: what it wrote there is private data without noise."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._places = self._find()
        self._bits: Tensor | None = None

    def _find(self) -> list[tuple[str, dict[str, Any], str]]:
        return [
            (f"{prefix}.{leaf}".lstrip("."), tensors, leaf)
            for prefix, module in self._model.named_modules()
            for tensors in (module._parameters, module._buffers)
            for leaf, tensor in tensors.items()
            if tensor is not None and leaf != "num_batches_tracked" and leaf not in module._non_persistent_buffers_set
        ]

    def _now(self) -> list[tuple[Tensor | None, int]]:
        tensors = [place.get(leaf) for _, place, leaf in self._places]
        with torch._C.DisableTorchFunction():  # the capture need not see hundreds of looks at version counters
            return [(t, -1 if t is None or t.is_inference() else t._version) for t in tensors]

    def start(self, *, closely: bool = False) -> None:
        """closely: also compare contents, which `.data` changes past the version counters; a pass over the weights."""
        self._before = self._now()
        self._bits = self._sums() if closely else None

    def _sums(self) -> Tensor:
        tensors = [place.get(leaf) for _, place, leaf in self._places]
        with torch.no_grad(), torch._C.DisableTorchFunction():
            return torch.stack(
                [bits_of(t).cpu() if t is not None and _has_bits(t) else torch.tensor(0) for t in tensors]
            )

    def check(self) -> None:
        now = self._now()
        changed = [old is not new or a != b for (old, a), (new, b) in zip(self._before, now, strict=True)]
        if self._bits is not None and not any(changed):
            changed = (self._sums() != self._bits).tolist()
            known = {name for name, *_ in self._places}
            added = next((name for name, *_ in self._find() if name not in known), None)
            if added is not None:
                _refuse_change(added)
        if any(changed):
            _refuse_change(self._places[changed.index(True)][0])


def _refuse_change(name: str) -> None:
    raise UnsupportedError(
        f"{name!r} was changed by the forward pass: it now holds something computed from private data "
        "without noise, and would be published with the model. Running statistics must be off (.eval(), or "
        "track_running_stats=False), and so must an embedding's max_norm."
    )


def is_sharded(tensor: Any) -> bool:
    """Whether this is a DTensor (whose module takes long to import)."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _has_bits(tensor: Tensor) -> bool:
    return not (tensor.is_meta or is_sharded(tensor))


def bits_of(tensor: Tensor) -> Tensor:
    """The sum of a tensor's bits, read as integers: tells tensors apart that should be equal."""
    content = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    return content.view(_BITS[content.element_size()]).sum(dtype=torch.int64)


def momentum_of(optimizer: torch.optim.Optimizer, parameter: Tensor) -> Tensor | None:
    """First moment of a parameter in the optimizer's state, if it keeps one and has taken a step."""
    state = optimizer.state.get(parameter, {})
    for key in ("momentum_buffer", "exp_avg"):
        if isinstance(state.get(key), Tensor):
            return state[key]
    return None


def remove_mode(mode: TorchFunctionMode) -> None:
    """Take a mode off the stack wherever it stands; a loop that was left early may have others above it."""
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
