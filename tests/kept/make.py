"""Files of a release, kept so that later versions are shown to read them: a ledger, and a run that was stopped half-way.

python tests/kept/make.py      writes tests/kept/VERSION; once for each release, never again after it
"""

import json
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F

import rgp

DELTA, STEPS, STOP = 1e-5, 6, 3


def rows():
    """Made without random numbers, which may differ from one torch to the next."""
    x = torch.sin(torch.arange(240, dtype=torch.float64)).reshape(40, 6).float()
    return [(x[i], i % 2) for i in range(len(x))]


def parts():
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.cos(torch.arange(parameter.numel())).reshape(parameter.shape) / 4)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(run, model, stop=None):
    for x, y in run:
        if run.step(F.cross_entropy(model(x), y)) and run.step_index == stop:
            break


def main(folder: Path) -> None:
    model, optimizer = parts()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = rgp.privatize(
            model, optimizer, rows(), method=rgp.RGP(rank=2, source="weight"), noise_multiplier=1.5, delta=DELTA,
            batch_size=10, steps=STEPS, microbatch_size=5, seed=7, folder=folder,
        )  # fmt: skip
        train(run, model, STOP)
        run.save(folder)
        spent = run.epsilon()
        run.close()
    weights = [parameter.detach().flatten().tolist() for parameter in model.parameters()]
    (folder / "expected.json").write_text(json.dumps({"epsilon": spent, "steps": STOP, "weights": weights}) + "\n")


if __name__ == "__main__":
    main(Path(__file__).parent / rgp.__version__.rpartition(".")[0])
