"""One small batch of a rehearsal: its random numbers, and what is kept of the loop's pass over it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from rgp.checks.sketches import sketch
from rgp.errors import LayoutError
from rgp.torchstate import HALF, as_tree, forked_rng, has_rows, kept_rng, seed_others

Sketches = Mapping[str, Tensor]  # parameter -> (m, 3): norm and two projections of each example's gradient, float64


@dataclass
class Trial:
    """One small batch, and what the loop made of it."""

    batch: Any
    examples: int
    seed: int
    drew: bool  # whether making the batch, or the loop, drew random numbers
    precise: bool = True  # whether autocast is left out
    autocast: bool = False  # whether there was any to leave out
    compiled: bool = False  # whether compiled modules run compiled, without hooks
    plain: bool = False  # whether the gradients are those of plain training, summed over the examples
    unassigned: LayoutError | None = None  # why nothing came of it: rows could not be assigned to examples
    weights: Tensor | None = None  # shows whether another trial had the same
    sketches: Sketches = field(default_factory=dict)
    inputs: list[Tensor] = field(default_factory=list)  # the model's outputs: (m, 2), norm and a projection of each row
    outputs: list[Tensor] = field(default_factory=list)
    coarse: bool = False  # whether half precision was seen

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """During the loop's pass: use this trial's random numbers, and note the model's outputs."""
        with ExitStack() as stack:
            if not self.compiled:
                stack.callback(model.register_forward_hook(self._note, with_kwargs=True).remove)
            stack.enter_context(seeded(self.seed))
            before = generators()
            yield
            self.drew = self.drew or not same_generators(before)

    def _note(self, _module: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
        with torch.no_grad(), torch._C.DisableTorchFunction():
            for kept, tensors in ((self.inputs, (args, kwargs)), (self.outputs, as_tree(outputs))):
                for leaf in tree_leaves(tensors):
                    if has_rows(leaf, self.examples) and (leaf.is_floating_point() or kept is self.inputs):
                        self.coarse |= leaf.dtype in HALF
                        kept.append(sketch(leaf.detach().reshape(self.examples, -1))[:, :2])


# ---------------------------------------------------------------------- random numbers


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed Python's, numpy's and torch's generators; afterwards they are as they were."""
    with kept_rng(), forked_rng(seed):
        seed_others(seed)
        yield


def generators() -> tuple[Any, ...]:
    name, keys, *rest = np.random.get_state(legacy=True)
    states = [torch.default_generator.get_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states += torch.cuda.get_rng_state_all()
    return random.getstate(), (name, np.asarray(keys).tobytes(), *rest), *(state.numpy().tobytes() for state in states)


def same_generators(before: tuple[Any, ...]) -> bool:
    return before == generators()
