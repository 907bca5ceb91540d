"""Per-example gradients under autocast and in lower precisions."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rgp
from helpers import (
    Expected,
    per_example_gradients,
    privatize,
    seeded,
)
from layers import CARRIED, EXACT, examples, mlp, squares

# -------- other precisions


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(8, 16, 3, padding=1), nn.GroupNorm(2, 16)
        self.block = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True)
        self.table, self.gain = nn.Embedding(7, 16), nn.Parameter(torch.ones(16))
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x)).transpose(1, 2)
        x = self.block(x + self.table(torch.arange(6).expand(len(x), -1))) * self.gain
        return self.head(x)


def autocast_step(
    model: nn.Module, data: list[tuple[Tensor, Tensor]], **options: Any
) -> tuple[rgp.Run, dict[str, Tensor]]:
    """One step with the forward pass in bfloat16; the run and what the optimizer saw as gradients."""
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=1.0), {}
    optimizer.register_step_pre_hook(
        lambda *_: seen.update({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    )
    with privatize(model, data, optimizer=optimizer, **options) as run:
        for batch in run:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = squares(model, batch).mean()
            run.step(loss)
    return run, seen


AUTOCAST = {"carried": rgp.RGP(rank=2, overrides={"table.weight": "exact"}), "exact": rgp.DPSGD()}


@pytest.mark.parametrize("method", AUTOCAST.values(), ids=AUTOCAST.keys())
def test_autocast(method, storage):
    """Forward in bfloat16; per-example norms and the clipped sum are not."""
    torch.manual_seed(0)
    model = Mixed()
    data = [(x.float(), w.float()) for x, w in examples(8, 6, count=4)]
    twin = copy.deepcopy(model).double()
    run, gradients = autocast_step(model, data, method=method, clip=1.0, microbatch_size=3)
    carriers = {n: (L.double(), R.double()) for n, (L, R) in run.carriers.items()}
    truth = per_example_gradients(twin, [(x.double(), w.double()) for x, w in data], squares)
    expected = Expected(truth, run.plan, carriers, 0, 1.0, len(data))
    assert expected.clipped > 0
    wanted = torch.cat([-expected.update[n].flatten() for n in gradients])
    found = torch.cat([g.double().flatten() for g in gradients.values()])
    assert float((found - wanted).norm() / wanted.norm()) < 0.03
    for name, gradient in gradients.items():
        assert gradient.dtype == torch.float32
        total = 4 * gradient  # what was summed, to the bit: 4 examples
        if run.plan[name].treatment == "exact" and total.numel() > 20:
            # kept in bfloat16, all entries would have 8 significant bits
            assert (total != total.bfloat16().float())[total != 0].float().mean() > 0.9, name


@pytest.mark.parametrize("method", [CARRIED, EXACT], ids=["carried", "exact"])
def test_autocast_does_not_exceed_the_clip(method, storage):
    """One example, all of it clipped: the released sum has the norm C, and not a bfloat16's rounding more."""
    torch.manual_seed(0)
    for seed in range(5):
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
        data = [(torch.randn(4, 8, generator=seeded(seed)), torch.tensor(100.0))]
        _, gradients = autocast_step(model, data, method=method, clip=0.7)
        norm = float(torch.cat([g.double().flatten() for g in gradients.values()]).norm())
        assert 0.69 < norm <= 0.7 * (1 + 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_models(dtype):
    model = mlp().to(dtype)
    with privatize(model, [(x.to(dtype), w.to(dtype)) for x, w in examples(9)], method=CARRIED) as run:
        for batch in run:
            run.step(squares(model, batch).mean())
        assert all(L.dtype == R.dtype == dtype for L, R in run.carriers.values())
    assert all(p.isfinite().all() for p in model.parameters())
