"""How much of a batch gradient's energy carriers of each source hold, on a finished run of SST-2: python sst2_energy.py RUN

Sums over all carried matrices, |P(G)|^2 / |G|^2, with exact principal subspaces. `own` is the gradient's own subspace, `other
batch` that of 512 other rows; `films` and `noise` are the derivatives of logits on 32 public sentences and on random tokens
(rgp.without_labels). Reads private gradients: nothing of it is released.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import rgp
from rgp.train import language, setup, weights

BATCH, RANKS = 512, (1, 2, 8)
Matrices = dict[str, Tensor]


def held(gradient: Matrices, basis: Matrices, rank: int) -> float:
    missed = energy = 0.0
    for name, G in gradient.items():
        U, _, V = torch.linalg.svd(basis[name].detach(), full_matrices=False)
        L, R = U[:, :rank], V[:rank]
        outside = G - L @ (L.T @ G)
        missed += float((outside - (outside @ R.T) @ R).square().sum())
        energy += float(G.square().sum())
    return 1 - missed / energy


def main(run: Path) -> None:
    torch.manual_seed(0)
    settings, trained, _ = weights.load_trained(run)
    begun = setup.make(settings)  # data, tokenizer and the initial weights
    model, data, tokenizer = trained.model.eval(), begun.data, begun.tokenizer
    carried = [entry.name for entry in rgp.make_plan(model, rgp.RGP(rank=1)) if entry.treatment == "carried"]
    parameters, initial = (dict(m.named_parameters()) for m in (model, begun.model))

    def derivative(loss: Tensor) -> Matrices:
        return dict(zip(carried, torch.autograd.grad(loss, [parameters[n] for n in carried]), strict=True))

    def batch_gradient() -> Matrices:
        total = {name: torch.zeros_like(parameters[name]) for name in carried}
        for part in torch.randperm(len(data.train))[:BATCH].split(64):
            batch = data.collate_fn([data.train[int(i)] for i in part])
            labels = batch.pop("labels")
            for name, G in derivative(F.cross_entropy(model(**batch).logits, labels, reduction="sum") / BATCH).items():
                total[name] += G
        return total

    def public(kind: str) -> Matrices:
        inputs: Callable[[], dict[str, Tensor]] = language.public_inputs(
            replace(settings, method=replace(settings.method, public=kind)), data, tokenizer
        )
        return derivative(rgp.without_labels(lambda: model(**inputs()).logits)())

    gradient = batch_gradient()
    sources = {"own": gradient, "other batch": batch_gradient(), "films": public("films"), "noise": public("noise")}
    sources |= {"history": {name: parameters[name] - initial[name] for name in carried}, "weight": parameters}
    sources |= {"random": {name: torch.randn_like(G) for name, G in gradient.items()}}
    for source, basis in sources.items():
        shares = ", ".join(f"rank {rank} {held(gradient, basis, rank):.2f}" for rank in RANKS)
        print(f"{source:12} {shares}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
