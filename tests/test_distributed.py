"""Distributed runs: one Poisson batch, one noise, one ledger, the same weights on every rank. gloo, 2 to 4 processes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import rgp
from ranks import OPTIONS, Data, Net, launch, parts, state_of, train


def close(a: dict[str, np.ndarray], b: dict[str, np.ndarray], tolerance: float = 1e-10) -> bool:
    return all(np.abs(a[name] - b[name]).max() <= tolerance for name in a)


def equal(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return all(np.array_equal(a[name], b[name]) for name in a)


def whole_run(options: dict[str, Any], folder: Any = None, own_seed: bool = False) -> dict[str, Any]:
    """A whole run on this rank. `own_seed`: every rank begins with other weights."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    model, optimizer, data = parts(rank if own_seed else 0)
    run = rgp.privatize(model, optimizer, data, folder=folder, **{**OPTIONS, **options})
    with run:
        ran = train(run)
        return state_of(run, ran=ran, asked=data.asked, traffic=run.traffic, epsilon=run.epsilon())


def test_two_ranks_are_one():
    """At noise 0 and with noise from the same stream, 1, 2 and 3 ranks give the same weights, to float tolerance."""
    for sigma in (0.0, 0.7):
        alone = launch(whole_run, 1, {"noise_multiplier": sigma})[0]
        for size in (2, 3):
            found = launch(whole_run, size, {"noise_multiplier": sigma}, None, True)
            assert close(alone["weights"], found[0]["weights"])
            assert not close(alone["weights"], {n: w.numpy() for n, w in Net().state_dict().items()}, 1e-3)
            for other in found[1:]:
                assert equal(found[0]["weights"], other["weights"])
                assert other["head"] == found[0]["head"]
