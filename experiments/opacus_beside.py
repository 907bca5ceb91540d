"""The examples of examples/opacus, trained by Opacus in place of rgp: the second column of a table in docs/opacus.md.

    pip install opacus
    python experiments/opacus_beside.py examples/opacus/mnist.py --seeds 3
    python experiments/opacus_beside.py examples/opacus/bert.py --seeds 3 --lora
    python experiments/opacus_beside.py examples/opacus/mnist.py --seeds 3 --with rgp

The example runs as it stands; `rgp.privatize` is replaced by a run of Opacus (hooks, Poisson sampling) with the same model, data,
optimizer, sigma, clip and number of steps, `nn.LSTM` by its DPLSTM, and `inplace=True` by False.
Seeds are added to the example's own manual_seed.
"""

from __future__ import annotations

import argparse
import re
import runpy
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import rgp


class OpacusRun:
    """As much of a run as the examples use."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, dataset: Any, **options: Any) -> None:
        from opacus import PrivacyEngine

        given = Calls(model, optimizer, dataset, options)
        self.noise_multiplier, self.clip_norm, self._delta = given.sigma, options["clip"], given.delta
        self._augment, self._scheduler = options.get("augment") or (lambda batch: batch), options.get("scheduler")
        loader = DataLoader(dataset, batch_size=options["batch_size"], collate_fn=options.get("collate_fn"))
        for module in model.modules():
            if getattr(module, "inplace", False):
                module.inplace = False  # its backward hooks cannot bear it
        self._engine = PrivacyEngine()
        self._wrapped, self._optimizer, self._loader = self._engine.make_private(
            module=model,
            optimizer=optimizer,
            data_loader=loader,
            noise_multiplier=given.sigma,
            max_grad_norm=options["clip"],
        )
        self._steps = given.steps

    def __iter__(self) -> Iterator[Any]:
        taken = 0
        while taken < self._steps:
            for batch in self._loader:
                if taken < self._steps:
                    taken += 1
                    self._wrapped.enable_hooks()
                    yield self._augment(batch)

    def epochs(self) -> Iterator[Any]:
        batches, length = iter(self), len(self._loader)
        for number in range(1, -(-self._steps // length) + 1):
            yield rgp.run.Epoch(number, (batch for _, batch in zip(range(length), batches, strict=False)))

    def step(self, loss: torch.Tensor) -> bool:
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._wrapped.disable_hooks()  # a generator's own pass through the model leaves nothing for the next step
        if self._scheduler is not None:
            self._scheduler.step()
        return True

    def epsilon(self) -> float:
        return self._engine.get_epsilon(self._delta)

    def close(self) -> None:
        self._wrapped.remove_hooks()

    def __enter__(self) -> OpacusRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Calls:
    """What rgp's own run of the example would promise: sigma, steps and delta."""

    def __init__(self, model: nn.Module, optimizer: Any, dataset: Any, options: dict[str, Any]) -> None:
        run = PRIVATIZE(model, optimizer, dataset, **{**options, "scheduler": None, "after": ()})
        self.sigma, self.steps, self.delta = run.noise_multiplier, len(run), run.mechanism.delta
        run.close()


PRIVATIZE, MANUAL_SEED = rgp.privatize, torch.manual_seed


def run_example(path: str, arguments: list[str], seed: int, opacus: bool) -> str:
    """Its held-out accuracy in percent; of dcgan the brightness of what it draws, in the upper left and elsewhere."""
    said, argv, lstm = StringIO(), sys.argv, nn.LSTM
    torch.manual_seed = lambda given: MANUAL_SEED(given + seed)  # type: ignore[assignment]
    make: Callable[..., Any] = OpacusRun if opacus else lambda *a, **k: PRIVATIZE(*a, **k, after=())
    rgp.privatize, sys.argv = make, [path, *arguments]  # type: ignore[assignment]
    try:
        if opacus:
            from opacus.layers import DPLSTM

            nn.LSTM = DPLSTM  # type: ignore[misc, assignment]
        with redirect_stdout(said):
            runpy.run_path(path, run_name="__main__")
    finally:
        torch.manual_seed, rgp.privatize, sys.argv, nn.LSTM = MANUAL_SEED, PRIVATIZE, argv, lstm  # type: ignore[misc]
    if drawn := re.search(r"generated images: (\S+) in the upper left, (\S+) elsewhere", said.getvalue()):
        return " / ".join(drawn.groups())
    return f"{100 * float(re.findall(r'held-out accuracy ([0-9.]+)', said.getvalue())[-1]):.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("example")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--with", dest="by", choices=("opacus", "rgp"), default="opacus")
    args, arguments = parser.parse_known_args()  # what is not known here is for the example
    warnings.simplefilter("ignore")
    found = [run_example(args.example, arguments, seed, args.by == "opacus") for seed in range(args.seeds)]
    print(args.example, *arguments, args.by, *found, sep="  ")


if __name__ == "__main__":
    main()
