"""Small dealings with torch's global and optimizer state that have no better home."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


@contextmanager
def forked_rng(seed: int) -> Iterator[None]:
    """torch's default generators under our seed (dropout), and afterwards as the user left them."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        for device in devices:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


def momentum_of(optimizer: torch.optim.Optimizer, parameter: Tensor) -> Tensor | None:
    """First moment of a parameter in the optimizer's state, if it keeps one and has taken a step."""
    state = optimizer.state.get(parameter, {})
    for key in ("momentum_buffer", "exp_avg"):
        if isinstance(state.get(key), Tensor):
            return state[key]
    return None


def remove_mode(mode: TorchFunctionMode) -> None:
    """Take a mode off the stack wherever it stands; a loop that was left early may have others above it."""
    above = []
    stack = [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]
    if mode not in stack:
        return
    while (top := torch._C._pop_torch_function_stack()) is not mode:
        above.append(top)
    for other in reversed(above):
        torch._C._push_on_torch_function_stack(other)
