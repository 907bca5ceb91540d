"""Full and thin state on the digits at equal noise, and what may be done to second moments when carriers turn (docs/thin.md).

    python experiments/thin_digits.py 6        # seeds; about 80 seconds of one core for six of them

One line of JSON for each setting: accuracy on 397 rows, seed by seed.
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import rgp
from rgp.thin import ThinState

RATES = {"full": (0.004, 0.008), "thin": (0.008, 0.016, 0.032)}  # of carried weights; the rest has 0.004
VARIANTS = (
    "mean",
    "restart",
    "scalar",
)  # as it is; all moments start again; one second moment per matrix in every step


class Trial(ThinState):
    variant = "mean"

    def turn(self, name: str, *carriers: Any) -> None:
        super().turn(name, *carriers)
        if self.variant == "restart":
            for value in self._optimizer.state.get(self._trained.parameters[name], {}).values():
                value.zero_()

    def apply(self, step: int) -> None:
        super().apply(step)
        if self.variant == "scalar":
            for name in self._trained.carried:
                moment = self._optimizer.state[self._trained.parameters[name]]["exp_avg_sq"]
                moment.fill_(moment.mean())


def accuracy(state: str, variant: str, rate: float, sigma: float, seed: int) -> float:
    Trial.variant = variant
    X, Y = (torch.tensor(a) for a in load_digits(return_X_y=True))
    X = X.float() / 8 - 1
    order = torch.randperm(len(X), generator=torch.Generator().manual_seed(0))
    train, test = order[:1400], order[1400:]
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 10))
    carried = [model[0].weight, model[2].weight]
    rest = [p for p in model.parameters() if all(p is not c for c in carried)]
    run = rgp.privatize(
        model,
        torch.optim.Adam([{"params": carried, "lr": rate}, {"params": rest, "lr": 0.004}]),
        TensorDataset(X[train], Y[train]),
        method=rgp.RGP(rank=4, keep=10, state=state),
        noise_multiplier=sigma,
        clip=1.0,
        batch_size=256,
        steps=120,
        microbatch_size=512,
        seed=seed,
        probe=False,
    )
    for x, y in run:
        run.step(F.cross_entropy(model(x), y))
    run.close()
    with torch.no_grad():
        return 100 * (model(X[test]).argmax(1) == Y[test]).float().mean().item()


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rgp.privatize.__globals__["ThinState"] = Trial
    seeds = range(int(sys.argv[1]))
    for sigma in (0.8, 2.0):
        for state, rates in RATES.items():
            for variant in VARIANTS if state == "thin" else ("mean",):
                for rate in rates:
                    found = [round(accuracy(state, variant, rate, sigma, seed), 1) for seed in seeds]
                    setting = {"state": state, "variant": variant, "rate": rate, "sigma": sigma}
                    print(json.dumps(setting | {"accuracy": found}), flush=True)


if __name__ == "__main__":
    main()
