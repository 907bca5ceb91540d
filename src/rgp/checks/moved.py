"""A trained parameter that does not move is an error: it received noise, and the optimizer left it alone."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rgp.errors import WrongUseError

ENTRIES = 256  # entries of each parameter that are compared; noise reaches all of them


class Moves:
    """Watches each trained parameter until it has moved, usually in the first step."""

    def __init__(self, parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
        self._optimizer, self._scheduler = optimizer, scheduler
        still = scheduler is None and all(float(g.get("lr", 1.0)) == 0 for g in optimizer.param_groups)
        self.waiting = (
            {} if still else dict(parameters)
        )  # a learning rate of 0 throughout is deliberate: audits do that
        self._before: dict[str, tuple[Tensor, int]] = {}

    def before(self) -> None:
        if self.waiting:
            with torch._C.DisableTorchFunction():
                self._before = {
                    n: (p.detach().flatten()[:ENTRIES].clone(), p._version) for n, p in self.waiting.items()
                }

    def after(self) -> None:
        """WrongUseError for a parameter that got noise and was not touched. One that was touched and is the same, by a
        learning rate of 0 in a warm-up or by rounding, is looked at again."""
        if not self.waiting:
            return
        with torch._C.DisableTorchFunction():
            for name, (old, version) in self._before.items():
                parameter = self.waiting[name]
                if not torch.equal(old, parameter.detach().flatten()[:ENTRIES]):
                    del self.waiting[name]
                elif self._rate(parameter) == 0 and self._scheduler is not None:
                    continue  # a warm-up begins like this
                elif self._rate(parameter) == 0 or (parameter._version == version and not self._is_fused(parameter)):
                    raise WrongUseError(
                        f"parameter {name!r} is trained by the plan, got its noise, and did not move: "
                        f"{type(self._optimizer).__name__}.step() left it alone, or its learning rate is 0. Freeze it with "
                        "the method's overrides, or let the optimizer update it."
                    )
        self._before = {}

    def warn(self) -> None:
        if self.waiting:
            warnings.warn(
                f"{len(self.waiting)} trained parameters did not move in the whole run, though noise was paid for them: "
                f"{', '.join(list(self.waiting)[:5])}. Their learning rate was 0, or every update was lost in rounding."
            )

    def _rate(self, parameter: Tensor) -> float:
        return float(self._group(parameter).get("lr", 1.0))

    def _is_fused(self, parameter: Tensor) -> bool:
        """Compare contents too, because fused kernels do not raise torch's version counters."""
        return bool(self._group(parameter).get("fused"))

    def _group(self, parameter: Tensor) -> dict[str, Any]:
        return next(g for g in self._optimizer.param_groups if any(p is parameter for p in g["params"]))
