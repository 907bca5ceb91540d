"""W <- keep W + left right, in place: the update of a thin state goes into its weight, and no full-size copy is made.

Shapes: W (p, d); left (p, k), right (k, d), thin.

A weight of 16 bits loses what is smaller than half of its last place: bfloat16 has 8 significant bits, so an update below
W / 512 leaves W as it was, every time. Against that:

nearest      nothing; what float32 and float64 weights need
stochastic   up or down at random, with the probabilities that make the mean right; costs no memory
compensated  what was lost is kept beside the weight, in the weight's own kind of number, and added the next time
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDINGS = ("nearest", "stochastic", "compensated")
CHUNK = 1 << 22  # entries that are worked on at a time in float32


@torch.no_grad()
def add_product(
    weight: Tensor,
    left: Tensor,
    right: Tensor,
    *,
    keep: float = 1.0,
    generator: torch.Generator | None = None,
    lost: Tensor | None = None,
) -> None:
    """weight <- keep weight + left right, rounded to nearest.

    keep: 1 - rate x decay, for decoupled weight decay.
    generator: rounds stochastically with its numbers (bfloat16 weights only).
    lost: (p, d), what earlier roundings left out; it is brought up to date.
    """
    if weight.dtype in (torch.float32, torch.float64):
        torch.addmm(weight, left.to(weight.dtype), right.to(weight.dtype), beta=keep, out=weight)
        return
    left, right = left.float(), right.float()
    rows = max(1, CHUNK // max(1, weight.shape[1]))
    for start in range(0, len(weight), rows):
        part = slice(start, start + rows)
        exact = weight[part].float()
        if lost is not None:
            exact += lost[part]
        exact = torch.addmm(exact, left[part], right, beta=keep)
        weight[part] = exact if generator is None else stochastic_bfloat16(exact, generator)
        if lost is not None:
            lost[part] = exact - weight[part].float()


def generator_on(device: torch.device, seed: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def stochastic_bfloat16(values: Tensor, generator: torch.Generator) -> Tensor:
    """float32 -> bfloat16, up or down so that the mean is the value. `values` is used up.

    A bfloat16 is the upper half of a float32: 16 random bits are added to the lower half, which is then cut off.
    """
    bits = values.contiguous().view(torch.int32)
    bits += torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, device=bits.device, generator=generator)
    bits &= -(1 << 16)
    return bits.view(torch.float32).bfloat16()
