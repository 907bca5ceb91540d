"""What carriers of each source keep, on a finished run of SST-2: python sst2_energy.py RUN

Sums over all carried matrices, |P(G)|^2 / |G|^2, with exact principal subspaces, for two things: G the gradient of a batch of
512, which is what is to be learned, and G the derivative of one validation sentence's logit (mean over 48), which says how much
of the noise's effect on predictions is left: to first order noise Z moves that logit by <G, Z>, and projected noise by <P(G), Z>.

The last line asks whether noise of another shape would do better: less in some parts of the weights, more in others, by factors
known beforehand. Parts are those that carriers of rank 16 from public sentences cut every matrix into: both sides, left alone,
right alone, neither. With an energy a_k of the clipped gradients of single rows in part k, and b_k of the logits' derivatives,
noise scaled by s_k costs sum(a / s^2) * sum(b s^2): at best sum(sqrt(a b))^2, and sum(a) * sum(b) if it is even.

`own` is the gradient's own subspace, `other batch` that of 512 other rows; `films` and `noise` are the derivatives of logits on
32 public sentences and on random tokens (rgp.without_labels). Reads private gradients: nothing of it is released.
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

BATCH, SENTENCES, RANKS = 512, 48, (1, 2, 8, 16)
CLIP = 2.0
Matrices = dict[str, Tensor]


def subspaces(matrices: Matrices) -> dict[str, tuple[Tensor, Tensor]]:
    found = {name: torch.linalg.svd(matrix.detach(), full_matrices=False) for name, matrix in matrices.items()}
    return {name: (U[:, : max(RANKS)], V[: max(RANKS)]) for name, (U, _, V) in found.items()}


def kept(matrices: Matrices, basis: dict[str, tuple[Tensor, Tensor]], rank: int) -> tuple[float, float]:
    """The energy inside the carriers' reach, and all of it."""
    missed = energy = 0.0
    for name, G in matrices.items():
        L, R = basis[name][0][:, :rank], basis[name][1][:rank]
        outside = G - L @ (L.T @ G)
        missed += float((outside - (outside @ R.T) @ R).square().sum())
        energy += float(G.square().sum())
    return energy - missed, energy


def parts(matrices: Matrices, basis: dict[str, tuple[Tensor, Tensor]]) -> Tensor:
    """The energy in each of four parts of every matrix: (left and right, left alone, right alone, neither)."""
    found = []
    for name, G in matrices.items():
        L, R = basis[name]
        both, left, right = (float(part.square().sum()) for part in (L.T @ G @ R.T, L.T @ G, G @ R.T))
        found += [both, left - both, right - both, float(G.square().sum()) - left - right + both]
    return torch.tensor(found).clamp_min(0)


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

    def logit(row: int) -> Matrices:
        batch = data.collate_fn([data.test[row]])
        del batch["labels"]
        against, for_it = model(**batch).logits[0]
        return derivative(for_it - against)

    def clipped(row: int) -> Matrices:
        batch = data.collate_fn([data.train[row]])
        labels = batch.pop("labels")
        found = derivative(F.cross_entropy(model(**batch).logits, labels))
        norm = sum(float(G.square().sum()) for G in found.values()) ** 0.5
        return {name: G * min(1.0, CLIP / norm) for name, G in found.items()}

    gradient = batch_gradient()
    sources = {"own": gradient, "other batch": batch_gradient(), "films": public("films"), "noise": public("noise")}
    sources |= {"history": {name: parameters[name] - initial[name] for name in carried}}
    sources |= {"weight": {name: parameters[name] for name in carried}}
    sources |= {"random": {name: torch.randn_like(G) for name, G in gradient.items()}}
    bases = {source: subspaces(matrices) for source, matrices in sources.items()}
    logits = dict.fromkeys(((source, rank) for source in bases for rank in RANKS), torch.zeros(2))
    released = sum(parts(clipped(int(row)), bases["films"]) for row in torch.randperm(len(data.train))[:SENTENCES])
    felt = torch.zeros(())
    for row in range(0, len(data.test), len(data.test) // SENTENCES)[:SENTENCES]:
        one = logit(row)
        felt = felt + parts(one, bases["films"])
        for source, rank in logits:
            logits[source, rank] = logits[source, rank] + torch.tensor(kept(one, bases[source], rank))
    for source, basis in bases.items():
        signal = ", ".join(f"rank {rank} {share(*kept(gradient, basis, rank)):.2f}" for rank in RANKS)
        noise = ", ".join(f"rank {rank} {share(*logits[source, rank].tolist()):.2f}" for rank in RANKS)
        print(f"{source:12} batch gradient: {signal}; logits: {noise}", flush=True)
    least = float((released * felt).sqrt().sum() ** 2 / (released.sum() * felt.sum()))
    print(f"felt noise of the best shape over {len(felt)} parts, against even noise: {least:.2f} of the variance")


def share(part: float, whole: float) -> float:
    return part / whole


if __name__ == "__main__":
    main(Path(sys.argv[1]))
