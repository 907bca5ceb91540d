"""A self-test of what the guarantee rests on, on this machine and with these versions of the libraries.

Every part compares with a computation of its own. The statistical ones use fresh randomness and bounds of six standard
deviations: a sound installation fails one in a hundred million times, and a rate or a noise that is off by a third fails always.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rgp import accounting, noise, sampling
from rgp.checking import check
from rgp.composition import Event
from rgp.ledger import Ledger
from rgp.methods import DPSGD, RGP
from rgp.privatize import privatize
from rgp.streams import Streams

DEVIATIONS = 6.0


@dataclass(frozen=True)
class Finding:
    """The result of one part of the self-test: whether it passed, and what was measured."""

    name: str
    ok: bool
    seen: str
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def self_test(device: str = "cpu") -> list[Finding]:
    """All parts, one after the other; one that raises has failed."""
    parts: list[tuple[str, Callable[[], tuple[bool, str]]]] = [
        ("sampling", sampling_is_poisson),
        ("noise", lambda: noise_of_a_step(device)),
        ("exactness", lambda: gradients_are_exact(device)),
        ("accounting", accounting_of_a_gaussian),
        ("ledger", ledger_keeps_every_release),
    ]
    return [_run(name, part) for name, part in parts]


def _run(name: str, part: Callable[[], tuple[bool, str]]) -> Finding:
    start = time.perf_counter()
    try:
        ok, seen = part()
    except Exception as error:  # whatever is wrong with the installation: say so, and look at the rest
        ok, seen = False, f"{type(error).__name__}: {error}"
    return Finding(name, ok, seen, round(time.perf_counter() - start, 2))


def sampling_is_poisson(size: int = 500, rate: float = 0.2, steps: int = 2000) -> tuple[bool, str]:
    """Batch sizes have the mean N q and the variance N q (1 - q) of independent draws; batches of one size have none."""
    streams = Streams.from_system()
    sizes = torch.tensor([float(len(sampling.draw(streams, step, size, rate))) for step in range(steps)])
    mean, variance = sizes.mean().item(), sizes.var().item()
    expected, spread = size * rate, size * rate * (1 - rate)
    ok = abs(mean - expected) < DEVIATIONS * math.sqrt(spread / steps)
    ok &= abs(variance / spread - 1) < DEVIATIONS * math.sqrt(2 / steps)
    return ok, f"batches of {mean:.1f} on average, {expected:g} expected; variance {variance:.1f}, {spread:g} expected"


def noise_of_a_step(device: str = "cpu", sigma: float = 2.0, clip: float = 0.5) -> tuple[bool, str]:
    """Where all gradients are zero, SGD with rate 1 moves the weights by sigma C / B times a standard normal."""
    batch_size, entries = 16, 300 * 100
    model = nn.Linear(300, 100, bias=False).to(device)
    before = model.weight.detach().clone()
    rows = [(torch.zeros(300), torch.zeros(100)) for _ in range(64)]
    run = privatize(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        rows,
        method=DPSGD(),
        noise_multiplier=sigma,
        clip=clip,
        batch_size=batch_size,
        steps=1,
        probe=False,  # nothing to find out about zeros
    )
    with run:
        for x, y in run:
            run.step(F.mse_loss(model(x.to(device)), y.to(device)))
    moved = (model.weight.detach() - before).double().std().item()
    expected = sigma * clip / batch_size
    ok = abs(moved / expected - 1) < DEVIATIONS / math.sqrt(2 * entries)
    seen = f"a step's noise has standard deviation {moved:.5f}, {expected:g} expected"
    try:
        secure = noise.noise_source("secure", Streams.from_system())
    except ImportError:
        return ok, f"{seen}; secure noise is not installed"
    total = torch.zeros(entries)
    secure.add(total, std=expected, step=0, attempt=0)
    ok &= abs(total.double().std().item() / expected - 1) < DEVIATIONS / math.sqrt(2 * entries)
    return ok, f"{seen}; secure noise {total.std().item():.5f}"


class _Small(nn.Module):
    """An embedding, a convolution, attention, norms and a head: one of each kind of rule."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.conv(self.embed(ids).transpose(1, 2)).transpose(1, 2)
        return self.head(self.block(x).mean(1))


def gradients_are_exact(device: str = "cpu") -> tuple[bool, str]:
    """Per-example gradients of RGP and DP-SGD against autograd, one example at a time, in float64 (float32 on MPS)."""
    model = _Small().to(device)
    batch = torch.randint(11, (5, 7), device=device), torch.randint(3, (5,), device=device)
    results = [check(model, batch, _loss, method=method, double=device != "mps") for method in (RGP(rank=2), DPSGD())]
    worst = max(result.worst for result in results)
    return all(result.ok for result in results), f"worst relative error {worst:.1e}, over {len(results)} methods"


def _loss(model: nn.Module, batch: Any) -> Tensor:
    ids, labels = batch
    return F.cross_entropy(model(ids), labels)


def accounting_of_a_gaussian(sigma: float = 1.0, delta: float = 1e-5) -> tuple[bool, str]:
    """Epsilon of one release of everybody's data, against its closed form (Balle and Wang 2018)."""
    normal, mu = NormalDist(), 1 / sigma

    def excess(eps: float) -> float:
        return normal.cdf(mu / 2 - eps / mu) - math.exp(eps) * normal.cdf(-mu / 2 - eps / mu) - delta

    low, high = 0.0, 50.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    found = accounting.epsilon([Event(1.0, sigma, 1)], delta=delta)
    return high * (1 - 1e-6) <= found <= high * 1.01, f"epsilon {found:.4f}, {high:.4f} in closed form"


def ledger_keeps_every_release(steps: int = 3) -> tuple[bool, str]:
    """A short run with its ledger on disk; what is read from there gives the epsilon that the run reports."""
    model = nn.Linear(4, 2)
    rows = [(torch.randn(4), i % 2) for i in range(40)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        run = privatize(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            rows,
            method=DPSGD(),
            noise_multiplier=1.0,
            batch_size=8,
            steps=steps,
            folder=path,
            after=(),  # made-up rows: nobody is in them
        )
        with run:
            for x, y in run:
                run.step(F.cross_entropy(model(x), y))
            spent = run.epsilon()
        events = Ledger.open(path).events()
    expected = accounting.epsilon([Event(8 / 40, 1.0, steps)], delta=1e-5)
    again = accounting.epsilon(events, delta=1e-5)
    ok = math.isclose(spent, expected, rel_tol=1e-9) and math.isclose(again, expected, rel_tol=1e-9)
    return ok, f"{steps} releases on disk, epsilon {again:.3f}"
