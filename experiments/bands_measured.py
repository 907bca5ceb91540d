"""Noise in the weights over whole runs with zero gradients, correlated beside independent, and the factor that was predicted.

    python experiments/bands_measured.py --data DATA     # measure: one line of JSON each in results/bands.jsonl
    python experiments/bands_measured.py --page          # write the table of docs/correlated-noise.md from these lines

Models, data, methods and optimizers are those of the presets. Every batch is empty, so that what moves the weights is noise
alone, and no pass through the model is needed. How far noise moves them does not depend on the data.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import warnings
from pathlib import Path
from typing import Any

import torch

import rgp
from rgp.bench.machine import describe_commit
from rgp.naming import label
from rgp.train import config, setup

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "bands.jsonl"
PAGE = HERE.parent / "docs" / "correlated-noise.md"
BEGIN, END = "<!-- measured -->", "<!-- end -->"

SGD = {"optimizer.name": "sgd", "optimizer.lr": 0.01, "optimizer.head_lr": 0.01, "optimizer.momentum": 0}
MOMENTUM = SGD | {"optimizer.momentum": 0.9}
CASES: list[tuple[str, str, dict[str, Any]]] = [  # setting, preset, what differs from it
    ("digits", "digits-dpsgd", {}),
    ("digits", "digits-rgp", {"method.keep": 112}),
    ("CIFAR-10", "cifar10-mini-dpsgd", {}),
    ("CIFAR-10", "cifar10-mini-dpsgd", {"budget.epsilon": 1}),
    ("CIFAR-10", "cifar10-mini-rgp", {"method.keep": 300}),
    ("CIFAR-10", "cifar10-mini-rgp", {"method.keep": 60}),
    ("MiniLM", "sst2-minilm-dpsgd", SGD),
    ("MiniLM", "sst2-minilm-rgp", {"method.keep": 60} | SGD),
    ("MiniLM", "sst2-minilm-rgp", {"method.keep": 60} | MOMENTUM),
    ("MiniLM", "sst2-minilm-rgp", {"method.keep": 15, "method.source": "history", "method.public": None} | SGD),
    ("MiniLM", "sst2-minilm-rgp", {"method.keep": 15, "method.source": "history", "method.public": None} | MOMENTUM),
    ("MiniLM", "sst2-minilm-rgp", {"method.keep": 60, "budget.epsilon": 1} | SGD),
    ("MiniLM", "sst2-minilm-rgp", {"method.keep": 60}),
]


def noise_in_weights(
    preset: str, changes: dict[str, Any], bands: int | str, raised: float = 1.0
) -> tuple[rgp.Run, list[float]]:
    """The run, and the mean square of how far a weight is from where it began, after each step. raised: factor of the rates."""
    set_ = [f"{name}={'null' if value is None else value}" for name, value in changes.items()]
    settings = config.load(preset=preset, changes=set_)
    parts = setup.make(settings)
    for group in parts.optimizer.param_groups:
        group["lr"] *= raised
        group["initial_lr"] = group["lr"]
    if getattr(parts.scheduler, "base_lrs", None):
        parts.scheduler.base_lrs = [rate * raised for rate in parts.scheduler.base_lrs]
    parts.model.train()
    run = rgp.privatize(
        parts.model,
        parts.optimizer,
        parts.data.train,
        method=parts.method,
        budget=rgp.Budget(settings.budget.epsilon, settings.budget.delta or 1e-5),
        batch_size=settings.training.batch_size,
        steps=parts.steps,
        clip=settings.training.clip,
        scheduler=parts.scheduler,
        public_loss=parts.public_loss,
        collate_fn=parts.data.collate_fn,
        bands=bands,
        probe=False,
        after=(),
    )
    # Heads have rates of their own: what is compared is everything else.
    names = [e.name for e in run.plan.trained if e.kind == "matrix"]
    weights = [parameter for name, parameter in parts.model.named_parameters() if name in names]
    begin = [p.detach().clone() for p in weights]
    moved = []
    with run:
        for _ in range(run.mechanism.steps):
            run._step.begin()
            run._step.end()  # of a batch that came out empty
            squares = sum(float((p.detach() - b).square().sum()) for p, b in zip(weights, begin, strict=True))
            moved.append(squares / sum(p.numel() for p in weights))
    return run, moved


def measure(setting: str, preset: str, changes: dict[str, Any]) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, alone = noise_in_weights(preset, changes, 1)
        raised = 1.0
        run, together = noise_in_weights(preset, changes, "auto")
        worth = run.mechanism.worth
        if worth is not None and not isinstance(run.optimizer, torch.optim.SGD):
            raised = worth.of_a_step
            run, together = noise_in_weights(preset, changes, "auto", raised)
    optimizer = run.optimizer.param_groups[0]
    return {
        "setting": setting,
        "preset": preset,
        "changes": changes,
        "method": run.plan.method.name,
        "keep": getattr(run.plan.method, "keep", None),
        "steps": run.mechanism.steps,
        "optimizer": type(run.optimizer).__name__,
        "momentum": optimizer.get("momentum"),
        "rates_times": round(raised, 3),
        "epsilon": run.mechanism.budget.epsilon,
        "bands": run.mechanism.bands,
        "predicted": 1.0 if worth is None else round(worth.in_weights, 3),
        "predicted_last": 1.0 if worth is None else round(worth.at_the_end, 3),
        "measured": round(math.sqrt(sum(alone) / sum(together)), 3),
        "measured_last": round(math.sqrt(alone[-1] / together[-1]), 3),
        "commit": describe_commit()["commit"],
    }


def table(lines: list[dict[str, Any]]) -> list[str]:
    rows = [
        "| setting | method | optimizer | epsilon | b | predicted | measured |",
        "|---|---|---|---|---|---|---|",
    ]
    for line in lines:
        turns = line["keep"] is not None and line["keep"] < line["steps"]
        carriers = f", carriers turn every {line['keep']} steps" if turns else ""
        optimizer = line["optimizer"]
        optimizer += f", momentum {line['momentum']:g}" if line["momentum"] else ""
        optimizer += f", rates times {line['rates_times']:.1f}" if line["rates_times"] != 1 else ""
        rows.append(
            f"| {line['setting']} | {label(line['method'])}{carriers} | {optimizer} | "
            f"{line['epsilon']:g} | {line['bands']} | {line['predicted']:.2f} / {line['predicted_last']:.2f} | "
            f"{line['measured']:.2f} / {line['measured_last']:.2f} |"
        )
    return rows


def write_page() -> None:
    lines = [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text("\n".join([before + BEGIN, *table(lines), END]) + after, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", help="folder of `rgp data get`")
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--only", default="", help="part of a preset's name")
    args = parser.parse_args()
    if args.page:
        return write_page()
    if args.data:
        os.environ["RGP_DATA"] = args.data
    torch.set_num_threads(1)
    for case in CASES:
        if args.only in case[1]:
            line = measure(*case)
            print(line, flush=True)
            with RESULTS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
