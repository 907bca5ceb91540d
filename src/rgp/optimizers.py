"""Adam that knows how much of the gradient's square is noise (DP-AdamBC). Post-processing: nothing private is read.

Adam divides by the root of a running mean of g^2. For a noisy gradient that mean is signal^2 + noise variance, and where
noise dominates, every entry is divided by the same number: what is left is SGD with momentum. The variance is
known, because the noise was added here, so it is subtracted again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class AdamCorrected(torch.optim.Optimizer):
    """Adam with decoupled weight decay, whose second moment is free of the noise that `rgp.privatize` adds.

    >>> import torch, rgp
    >>> model = torch.nn.Linear(8, 2)
    >>> optimizer = AdamCorrected(model.parameters(), lr=1e-3)
    >>> data = [(torch.randn(8), i % 2) for i in range(64)]
    >>> run = rgp.privatize(model, optimizer, data, noise_multiplier=1.0, batch_size=16, steps=1)  # which tells it the variance
    >>> run.close()

    floor: the second moment of an entry is at least this share of the mean noise variance of its parameter. A running
        mean of g^2 - variance is below zero for about half of the entries that hold nothing but noise. At 1 no entry
        takes a larger step than signal-free Adam would give it; at 0.1, about three times as large.
    noise: set by privatize: parameter -> variance of the noise in each entry of its gradient. None: plain Adam.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        floor: float = 0.1,
    ) -> None:
        for name, value, low, high in (
            ("lr", lr, 0, float("inf")),
            ("betas[0]", betas[0], 0, 1),
            ("betas[1]", betas[1], 0, 1),
            ("eps", eps, 0, float("inf")),
            ("weight_decay", weight_decay, 0, float("inf")),
        ):
            if not low <= value < high:
                raise ValueError(f"{name} must be at least {low} and below {high}; got {value!r}")
        if not 0 < floor <= 1:
            raise ValueError(f"floor must be above 0 and at most 1, a share of the noise variance; got {floor!r}")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "floor": floor})
        self.noise: Callable[[Tensor], Tensor | float] | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise ValueError("AdamCorrected takes no closure: the loss is not computed again in private training")
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)  # of g^2 - variance: may be negative
                state["step"] += 1
                first, second, t = state["exp_avg"], state["exp_avg_sq"], state["step"]
                variance = 0.0 if self.noise is None else self.noise(parameter)
                first.lerp_(gradient, 1 - beta1)
                # the running mean is linear, so the variance can be taken out before it: carriers turn, and with them
                # the variance of each entry, without a further state
                second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
                second.sub_(variance * (1 - beta2))
                mean = variance.mean() if isinstance(variance, Tensor) else variance
                least = (group["floor"] * mean).to(second) if isinstance(mean, Tensor) else group["floor"] * mean
                scale = (second / (1 - beta2**t)).clamp_(min=least).sqrt_().add_(group["eps"])
                if group["weight_decay"]:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.addcdiv_(first, scale, value=-group["lr"] / (1 - beta1**t))
