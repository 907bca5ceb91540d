"""Compiled models on several ranks, and under autocast: what the same model does uncompiled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import rgp
from helpers import privatize
from ranks import OPTIONS, close, equal, launch, parts, state_of

QUICK = "aot_eager"
METHODS = {"rgp": rgp.RGP(rank=2), "dpsgd": rgp.DPSGD()}


def ranked_run(method: rgp.RGP | rgp.DPSGD, compiled: bool) -> dict[str, Any]:
    model, optimizer, data = parts()
    if compiled:
        model.compile(backend=QUICK)
    options = {**OPTIONS, "method": method, "noise_multiplier": 0.7, "steps": 3}
    with rgp.privatize(model, optimizer, data, **options) as run:
        graphs = 0
        for x, y in run:
            run.step(nn.functional.cross_entropy(model(x), y))
        if run._step.regions is not None:
            graphs = sum(region.graphs for region in run._step.regions.regions)
        return state_of(run, graphs=graphs)


@pytest.mark.slow
@pytest.mark.flaky(reruns=1, only_rerun=["RankDied"])
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
def test_compiled_on_two_ranks(method):
    """Both ranks hold the same bits, and the weights of one process with the model as it is written."""
    alone = launch(ranked_run, 1, method, False)[0]
    found = launch(ranked_run, 2, method, True)
    assert alone["graphs"] == 0 and all(rank["graphs"] > 0 for rank in found)
    assert equal(found[0]["weights"], found[1]["weights"])
    assert found[0]["head"] == found[1]["head"]
    assert close(alone["weights"], found[0]["weights"])


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.inside, self.norm = nn.Embedding(11, 16), nn.Linear(16, 16), nn.LayerNorm(16)
        self.head = nn.Linear(16, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        return self.head(torch.tanh(self.norm(x + self.inside(x))).mean(1))


def autocast_gradients(
    method: rgp.RGP | rgp.DPSGD, *, compiled: bool, backend: str = QUICK, autocast: bool = True, scale: float = 1.0
) -> np.ndarray:
    """What one step without noise gives the optimizer, with micro-batches of 3 and 2 examples."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = Small()
    data = [(torch.randint(0, 11, (4,)), i % 3) for i in range(5)]
    if compiled:
        model.compile(backend=backend)
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=1.0), {}
    optimizer.register_step_pre_hook(
        lambda *_: seen.update({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    )
    with privatize(model, data, optimizer=optimizer, method=method, clip=0.3, microbatch_size=3) as run:
        for ids, labels in run:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                logits = model(ids)
                assert not compiled or run.rehearsing or autocast == (logits.dtype == torch.bfloat16)
                loss = scale * nn.functional.cross_entropy(logits.float(), labels)
            run.step(loss)
        assert not compiled or run._step.regions.regions[0].graphs == 2  # the rehearsal's, and one for both sizes
    assert all(g.dtype == torch.float32 for g in seen.values())
    return torch.cat([seen[n].double().flatten() for n in sorted(seen)]).numpy()


AUTOCAST = {"rgp": rgp.RGP(rank=2, overrides={"table.*": "exact"}), "dpsgd": rgp.DPSGD()}


def off(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.filterwarnings("ignore:noise_multiplier is 0")
@pytest.mark.parametrize("method", AUTOCAST.values(), ids=AUTOCAST.keys())
def test_compiled_under_autocast(method):
    """The graph has the casts in it: the gradients of the uncompiled model under autocast, not those without it."""
    written = autocast_gradients(method, compiled=False)
    found = autocast_gradients(method, compiled=True)
    exact = autocast_gradients(method, compiled=False, autocast=False)
    assert off(written, exact) > 1e-4  # bfloat16 leaves its mark
    assert off(found, written) < 1e-6


@pytest.mark.filterwarnings("ignore:noise_multiplier is 0")
@pytest.mark.parametrize("method", AUTOCAST.values(), ids=AUTOCAST.keys())
def test_compiled_under_autocast_does_not_exceed_the_clip(method):
    """All examples are clipped: the mean of their gradients is not longer than C."""
    found = autocast_gradients(method, compiled=True, scale=100.0)
    assert np.linalg.norm(found) <= 0.3 * (1 + 1e-6)
