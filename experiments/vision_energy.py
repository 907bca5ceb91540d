"""How much of a batch gradient's energy carriers of each source hold, along a path like DP-SGD's: python vision_energy.py DATA

The path: `tiny-cnn` of width 16, 200 steps, learning rate 1; the gradient scaled to norm 0.15 (assumed, not measured, for the
mean of clipped gradients), and the noise of epsilon 8 added. Carriers are exact principal subspaces. Reads private
gradients: nothing of it is released.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import rgp
from rgp.models import SmallCNN

ROWS, BATCH, NOISE, SIGNAL, SHOWN = 20_000, 512, 0.53 / 512, 0.15, (5, 30, 100, 200)


def held(gradient: Tensor, basis: Tensor, rank: int) -> tuple[float, float]:
    """Shares of the gradient's energy: in the span of both carriers, and on the left side alone (dL R)."""
    U, _, V = torch.linalg.svd(basis.flatten(1), full_matrices=False)
    G, L, R = gradient.flatten(1), U[:, :rank], V[:rank]
    outside = G - L @ (L.T @ G)
    outside = outside - (outside @ R.T) @ R
    energy = G.square().sum()
    return float(1 - outside.square().sum() / energy), float((G @ R.T).square().sum() / energy)


def main(data: Path) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with np.load(data / "cifar10.npz") as file:
        x = torch.from_numpy(file["x_train"][:ROWS]).permute(0, 3, 1, 2)
        y = torch.from_numpy(file["y_train"][:ROWS]).long().flatten()
    model = SmallCNN(width=16, stride=2)
    parameters = dict(model.named_parameters())
    initial = {name: p.detach().clone() for name, p in parameters.items()}
    momentum = {name: torch.zeros_like(p) for name, p in parameters.items()}
    for step in range(max(SHOWN) + 1):
        rows = torch.randint(0, ROWS, (BATCH,))
        model.zero_grad()
        F.cross_entropy(model((x[rows].float() / 255 - 0.47) / 0.25), y[rows]).backward()
        gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        for name in ("convs.1.weight", "convs.2.weight") if step in SHOWN else ():
            G, W = gradients[name], parameters[name].detach()
            values = torch.linalg.svdvals(G.flatten(1))
            sources = {"own": G, "momentum": momentum[name], "history": W - initial[name], "weight": W}
            sources["random"] = torch.randn_like(G)
            loss = rgp.without_labels(lambda: model(torch.randn(64, 3, 32, 32)))
            (sources["noise images"],) = torch.autograd.grad(loss(), [parameters[name]])
            cells = []
            for source, matrix in sources.items():
                shares = [held(G, matrix, rank) for rank in (8, 16)]
                cells.append(f"{source} " + ", ".join(f"{both:.2f}/{left:.2f}" for both, left in shares))
            print(f"{step:4} {name} stable rank {values.square().sum() / values[0] ** 2:.1f}: {'; '.join(cells)}")
        scale = SIGNAL / torch.cat([g.flatten() for g in gradients.values()]).norm()
        with torch.no_grad():
            for name, p in parameters.items():
                momentum[name].mul_(0.9).add_(gradients[name] * scale + NOISE * torch.randn_like(p))
                p.sub_(momentum[name])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
