"""Noise in the weights over whole runs with zero gradients, correlated beside independent, and the factor that was predicted.

    python experiments/bands_measured.py

The setting is that of docs/correlated-noise.md: 60 steps of 512 out of 62,349 examples, delta 1e-5, SGD. Gradients are zero, so
that what moves the weights is noise alone; how far they move does not depend on the data.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

import torch
from torch import nn

import rgp

SIZE, BATCH, STEPS = 62_349, 512, 60


class Zeros(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(64)


def noise_in_weights(
    method: rgp.methods.Method, *, bands: int | str, epsilon: float, momentum: float
) -> tuple[rgp.Run, float]:
    """The run, and the root mean square over its steps of how far the weights are from where they began."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False), nn.Linear(64, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=momentum)
    begin = [p.detach().clone() for p in model.parameters()]
    moved = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        budget = rgp.Budget(epsilon, 1e-5)
        options = {"budget": budget, "batch_size": BATCH, "steps": STEPS, "microbatch_size": 2048, "bands": bands}
        with rgp.privatize(model, optimizer, Zeros(), method=method, probe=False, **options) as run:
            for x in run:
                if run.step((model(x) * 0).sum(1).mean()):
                    moved.append(
                        sum(float((p - b).square().sum()) for p, b in zip(model.parameters(), begin, strict=True))
                    )
    return run, math.sqrt(sum(moved) / len(moved))


def main() -> None:
    print("| method | epsilon | momentum | bands | predicted | measured |\n|---|---|---|---|---|---|")
    stays = rgp.RGP(rank=8, source="weight", keep=STEPS)
    kinds = {
        "DP-SGD": rgp.DPSGD(),
        "RGP, carriers stay": stays,
        "RGP, carriers turn every 15 steps": replace(stays, keep=15),
    }
    for epsilon, momentum in ((8.0, 0.0), (8.0, 0.9), (1.0, 0.0)):
        for name, method in kinds.items():
            _, alone = noise_in_weights(method, bands=1, epsilon=epsilon, momentum=momentum)
            run, together = noise_in_weights(method, bands="auto", epsilon=epsilon, momentum=momentum)
            worth = run.mechanism.worth
            predicted = 1.0 if worth is None else worth.in_weights
            print(
                f"| {name} | {epsilon:g} | {momentum:g} | {run.mechanism.bands} | {predicted:.2f} | {alone / together:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
