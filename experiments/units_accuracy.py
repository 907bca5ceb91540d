"""Which k? Accuracy against the number of rows of a unit that a step uses, at equal epsilon: SST-2 by sentence (units_sst2.py).

    python experiments/units_accuracy.py features --data FOLDER --cache FOLDER   once: what a frozen MiniLM says of every row
    python experiments/units_accuracy.py tuning --cache FOLDER                   rates and clip norms, on the tuning rows
    python experiments/units_accuracy.py tables --cache FOLDER                   three seeds, at the settings that tuning chose
    python experiments/units_accuracy.py page                                    tables of docs/units.md, and the figure

A run trains a linear layer on the features, which takes seconds. Every finished run is a line of results/units.jsonl; what is
there already is not run again.

Sentences are dealt at random, once and with all their rows: 500 for tuning, 500 for the tables, the others for training. Tuning
is measured on the rows of the first 500, which no table uses; the tables on those of the second, and on GLUE's validation set.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import units_sst2
from driver import mean_and_error
from torch import Tensor, nn

HERE = Path(__file__).parent
RESULTS, PAGE = HERE / "results" / "units.jsonl", HERE.parent / "docs" / "units.md"
FIGURE = HERE.parent / "docs" / "img" / "units-k.png"

KS = (1, 2, 4, 8, 16)
EPSILONS = (8, 1)
VARIANTS = (*(("sentences", k) for k in KS), *(("kept", k) for k in (1, 4, 16)), ("rows", 8))
OF_A_SENTENCE = (10, 35)
SEEDS = (0, 1, 2)
ASIDE = 500  # sentences each, for tuning and for the tables
BATCH, STEPS = 512, 100  # sentences, or rows
RATES, CLIPS = (1, 2, 4, 8, 16), (0.2, 1)
DELTA = 1e-5


# ---------------------------------------------------------------------- rows


@torch.no_grad()
def embed(texts: list[str], folder: Path) -> np.ndarray:
    """The mean of the last layer over the tokens of each text, of length one."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    found = np.zeros((len(texts), model.config.hidden_size), np.float16)
    for start in range(0, len(order), 64):
        rows = order[start : start + 64]
        tokens = tokenizer([texts[i] for i in rows], padding=True, truncation=True, max_length=64, return_tensors="pt")
        mask = tokens["attention_mask"][:, :, None]
        mean = (model(**tokens).last_hidden_state * mask).sum(1) / mask.sum(1)
        found[rows] = F.normalize(mean).numpy()
    return found


def write_features(data: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    train, valid = (units_sst2.read(data / "sst2" / f"{name}.tsv") for name in ("train", "valid"))
    sentence, _ = units_sst2.group([text for text, _ in train])
    np.savez(
        folder / "features.npz",
        train=embed([text for text, _ in train], data / "minilm"),
        valid=embed([text for text, _ in valid], data / "minilm"),
        labels=np.array([int(label) for _, label in train]),
        valid_labels=np.array([int(label) for _, label in valid]),
        sentence=np.array(sentence),
    )


class Split:
    """Features, labels and sentences of the three sides."""

    def __init__(self, folder: Path) -> None:
        found = np.load(folder / "features.npz")
        self.x, self.y = torch.from_numpy(found["train"]).float(), torch.from_numpy(found["labels"])
        self.valid = torch.from_numpy(found["valid"]).float(), torch.from_numpy(found["valid_labels"])
        self.sentence = found["sentence"]
        order = np.random.default_rng(0).permutation(int(self.sentence.max()) + 1)
        self.tuning, self.tables = self._of(order[:ASIDE]), self._of(order[ASIDE : 2 * ASIDE])
        self.training = self._of(order[2 * ASIDE :])

    def _of(self, sentences: np.ndarray) -> np.ndarray:
        return np.flatnonzero(np.isin(self.sentence, sentences))

    def kept(self, most: int) -> np.ndarray:
        """Training rows, at most so many of each sentence: drawn once, for good."""
        rows = np.random.default_rng(1).permutation(self.training)
        _, first = np.unique(self.sentence[rows], return_inverse=True)
        seen: dict[int, int] = defaultdict(int)
        chosen = []
        for row, unit in zip(rows, first, strict=True):
            seen[unit] += 1
            if seen[unit] <= most:
                chosen.append(row)
        return np.sort(chosen)


# ---------------------------------------------------------------------- what a run over rows promises to a sentence


def sentence_epsilon(rows: int, *, rate: float, sigma: float, steps: int) -> float:
    """Of a run over rows, for a sentence with so many of them: in a step a binomial number of them is drawn, and each of
    these moves the sum by C. By dp-accounting's mixtures of Gaussians, which is tight."""
    from dp_accounting import dp_event
    from dp_accounting.pld import PLDAccountant
    from scipy.stats import binom

    chances = binom.pmf(np.arange(rows + 1), rows, rate)
    drawn = np.flatnonzero(chances > 1e-15)
    event = dp_event.MixtureOfGaussiansDpEvent(sigma, drawn.astype(float), chances[drawn] / chances[drawn].sum())
    accountant = PLDAccountant(value_discretization_interval=1e-3 if sigma > 2 else 1e-2)
    accountant.compose(event, steps)
    return accountant.get_epsilon(DELTA)


@cache
def row_sigma(rate: float, steps: int, epsilon: float) -> float:
    """The noise of what is drawn as a whole, a row or a sentence."""
    from rgp.accounting import calibrate

    return calibrate(epsilon=epsilon, delta=DELTA, sampling_rate=rate, steps=steps)


@cache
def sentence_sigma(rows: int, rate: float, steps: int, epsilon: float) -> float:
    """The least noise, in steps of 1%, with which a run over rows protects a sentence that has so many."""
    low, high = 0.3, 0.3
    while sentence_epsilon(rows, rate=rate, sigma=high, steps=steps) > epsilon:
        low, high = high, 2 * high
    while high / low > 1.01:
        middle = math.sqrt(low * high)
        fits = sentence_epsilon(rows, rate=rate, sigma=middle, steps=steps) <= epsilon
        low, high = (low, middle) if fits else (middle, high)
    return high


# ---------------------------------------------------------------------- runs


def train(split: Split, kind: str, k: int, *, epsilon: float, lr: float, clip: float, seed: int) -> dict[str, Any]:
    """kind: sentences (at most k rows of one in a step), rows (k times BATCH rows in a step, epsilon of a row) or kept (at most k
    rows of a sentence are kept for good, and the noise is for all of them)."""
    import rgp

    rows = split.kept(k) if kind == "kept" else split.training
    units = len(np.unique(split.sentence[rows]))
    options: dict[str, Any] = {"batch_size": BATCH}
    if kind == "sentences":
        options |= {"units": split.sentence[rows].tolist(), "rows_per_unit": k}
    elif kind == "rows":
        options["batch_size"] = k * BATCH
    else:
        options["batch_size"] = round(BATCH * len(rows) / units)
    rate = options["batch_size"] / (units if kind == "sentences" else len(rows))
    sigma = sentence_sigma(k, rate, STEPS, epsilon) if kind == "kept" else row_sigma(rate, STEPS, epsilon)
    torch.manual_seed(seed)
    model = nn.Linear(split.x.shape[1], 2)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr / clip)  # what a step moves does not depend on clip, then
    began = time.process_time()
    run = rgp.privatize(
        model,
        optimizer,
        rows.tolist(),  # an example is the number of a row, and a batch is gathered at once
        collate_fn=lambda batch: (split.x[batch], split.y[batch]),
        method=rgp.DPSGD(),
        clip=clip,
        noise_multiplier=sigma,
        delta=DELTA,
        steps=STEPS,
        microbatch_size=4096,
        seed=seed,
        **options,
    )
    for x, y in run:
        run.step(F.cross_entropy(model(x), y))
    run.close()
    sides = {
        name: (split.x[side], split.y[side]) for name, side in (("tuning", split.tuning), ("held_out", split.tables))
    }
    found = {name: accuracy(model, *side) for name, side in {**sides, "validation": split.valid}.items()}
    return {
        **found,
        "sigma": sigma,
        "rate": rate,
        "cpu_seconds": round(time.process_time() - began, 1),
    }


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    return float((model(x).argmax(1) == y).double().mean())


# ---------------------------------------------------------------------- stages


def read() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def same(row: dict[str, Any], job: dict[str, Any]) -> bool:
    return all(row[key] == value for key, value in job.items())


def planned(stage: str) -> Iterator[dict[str, Any]]:
    """Every run of a stage: what is trained, and with which settings."""
    for (kind, k), epsilon in itertools.product(VARIANTS, EPSILONS):
        job = {"stage": stage, "kind": kind, "k": k, "epsilon": epsilon}
        if stage == "tuning":
            yield from ({**job, "lr": lr, "clip": clip, "seed": 100} for lr in RATES for clip in CLIPS)
        else:
            lr, clip = chosen(read(), kind, k, epsilon)
            yield from ({**job, "lr": lr, "clip": clip, "seed": seed} for seed in SEEDS)


def chosen(rows: list[dict[str, Any]], kind: str, k: int, epsilon: float) -> tuple[float, float]:
    """(rate, clip norm) with the highest accuracy on the tuning rows."""
    tried = [row for row in rows if same(row, {"stage": "tuning", "kind": kind, "k": k, "epsilon": epsilon})]
    best = max(tried, key=lambda row: row["tuning"])
    return best["lr"], best["clip"]


def run_stage(stage: str, folder: Path) -> None:
    split, there = Split(folder), read()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=HERE)
    for job in planned(stage):
        if any(same(row, job) for row in there):
            continue
        given = {key: job[key] for key in ("epsilon", "lr", "clip", "seed")}
        line = {**job, **train(split, job["kind"], job["k"], **given), "commit": commit.stdout.strip()}
        if stage == "tuning":  # what the tables are measured on is not looked at
            line = {key: value for key, value in line.items() if key not in ("held_out", "validation")}
        with RESULTS.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)


def run_promises() -> None:
    """What the runs over rows promise to a sentence with 10 rows (as many as most have) and with 35 (the largest)."""
    for row in [row for row in read() if row["stage"] == "tables" and row["kind"] == "rows" and row["seed"] == 0]:
        for rows in OF_A_SENTENCE:
            job = {"stage": "promise", "kind": "rows", "k": row["k"], "epsilon": row["epsilon"], "rows": rows}
            if not any(same(found, job) for found in read()):
                found = sentence_epsilon(rows, rate=row["rate"], sigma=row["sigma"], steps=STEPS)
                with RESULTS.open("a") as file:
                    file.write(json.dumps({**job, "sentence_epsilon": found}) + "\n")


# ---------------------------------------------------------------------- page


def measured(rows: list[dict[str, Any]], kind: str, k: int, epsilon: float, measure: str) -> list[float]:
    """In percent, by seed."""
    job = {"stage": "tables", "kind": kind, "k": k, "epsilon": epsilon}
    return [100 * row[measure] for row in sorted(rows, key=lambda r: r.get("seed", 0)) if same(row, job)]


def cell(values: list[float]) -> str:
    mean, error = mean_and_error(values)
    return f"{mean:.1f} ± {error:.1f}"


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: a line for each variant, two columns of accuracy for each epsilon."""
    head = [
        "what is drawn, and protected",
        *(f"{m}, epsilon {e}" for e in EPSILONS for m in ("held-out", "validation")),
    ]
    lines = []
    for kind, k in VARIANTS:
        words = {
            "sentences": f"sentences, at most {k} row{'s' * (k > 1)} in a step",
            "kept": f"rows, at most {k} of a sentence kept, noise for all of them"
            if k > 1
            else "rows, 1 of a sentence kept",
            "rows": "rows, and a row is protected",
        }[kind]
        cells = [cell(measured(rows, kind, k, e, m)) for e in EPSILONS for m in ("held_out", "validation")]
        lines.append([words, *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines))


def promise_table(rows: list[dict[str, Any]]) -> str:
    head = ["epsilon of a row", *(f"of a sentence with {n} rows" for n in OF_A_SENTENCE)]
    lines = []
    for epsilon in EPSILONS:
        found = [
            next(
                row["sentence_epsilon"]
                for row in rows
                if row["stage"] == "promise" and row["epsilon"] == epsilon and row["rows"] == n
            )
            for n in OF_A_SENTENCE
        ]
        lines.append([str(epsilon), *(f"{value:.1f}" for value in found)])
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines))


TABLES = {"units-k": table, "units-promise": promise_table}


def filled(text: str, rows: list[dict[str, Any]]) -> str:
    """The page with its tables from the kept results: what stands between `<!-- NAME -->` and `<!-- end -->`."""
    for name, made in TABLES.items():
        between = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        text = between.sub(lambda found, made=made: f"{found[1]}{made(rows)}\n{found[2]}", text)
    return text


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.4), layout="constrained")
    both = figure.subplots(1, len(EPSILONS), sharey=True)
    looks = {
        "sentences": ("o-", "#1b7f5c", "sentences are drawn, k rows of each"),
        "kept": ("s--", "#c2571a", "rows are drawn, k of a sentence kept,\nnoise for all of them"),
    }
    for axes, epsilon in zip(both, EPSILONS, strict=True):
        for kind, (style, colour, label) in looks.items():
            ks = [k for name, k in VARIANTS if name == kind]
            found = [mean_and_error(measured(rows, kind, k, epsilon, "held_out")) for k in ks]
            means, errors = zip(*found, strict=True)
            axes.errorbar(ks, means, yerr=errors, fmt=style, color=colour, capsize=3, label=label)
        (k,) = (k for name, k in VARIANTS if name == "rows")
        line = mean_and_error(measured(rows, "rows", k, epsilon, "held_out"))[0]
        axes.axhline(line, color="0.5", linestyle=":", label="a row is protected, not a sentence")
        axes.set_xscale("log", base=2)
        axes.set_xticks(KS, list(map(str, KS)))
        axes.set_xlabel("k, rows of a sentence")
        axes.set_title(f"epsilon {epsilon}")
        axes.spines[["top", "right"]].set_visible(False)
    both[0].set_ylabel("accuracy in %, rows of 500\nheld-out sentences")
    figure.legend(*both[0].get_legend_handles_labels(), frameon=False, loc="outside right center")
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("features", "tuning", "tables", "page"))
    parser.add_argument("--data", type=Path, help="folder with sst2/ and minilm/")
    parser.add_argument("--cache", type=Path, default=Path("runs/units-sst2"))
    given = parser.parse_args()
    if given.what == "features":
        write_features(given.data, given.cache)
    elif given.what == "page":
        PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), read()), encoding="utf-8")
        draw(read(), FIGURE)
    else:
        run_stage(given.what, given.cache)
        if given.what == "tables":
            run_promises()


if __name__ == "__main__":
    main()
