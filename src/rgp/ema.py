"""A running mean of the weights. Post-processing of released weights: it costs no privacy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor


class WeightMean:
    """mean <- d mean + (1 - d) weights after every step t = 1, 2, ..., with d = min(decay, (1 + t) / (10 + t)).

    The first steps decay faster than `decay`, so that the initial weights are soon forgotten.
    """

    def __init__(self, parameters: Mapping[str, Tensor], decay: float) -> None:
        if isinstance(decay, bool) or not isinstance(decay, (int, float)) or not 0 <= decay < 1:
            raise ValueError(f"ema must be a decay from 0 to below 1, such as 0.999; got {decay!r}")
        self.decay = float(decay)
        self._parameters = dict(parameters)
        self.state = {name: p.detach().clone() for name, p in self._parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after step number `step` (1 is the first)."""
        weight = 1 - min(self.decay, (1 + step) / (10 + step))
        for name, parameter in self._parameters.items():
            self.state[name].lerp_(parameter.detach(), weight)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Replace the weights by their mean for a while."""
        own = {name: p.data for name, p in self._parameters.items()}
        try:
            for name, parameter in self._parameters.items():
                parameter.data = self.state[name]
            yield
        finally:
            for name, parameter in self._parameters.items():
                parameter.data = own[name]
