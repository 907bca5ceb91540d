"""SST-2 by sentence: its rows are phrases, and the phrases of a sentence are its substrings. Which sentence is a row from?

    python experiments/units_sst2.py group --data FOLDER               how well the rule does: rows grouped, sizes of groups
    python experiments/units_sst2.py write --data FOLDER --out FOLDER  train.jsonl with a column `unit`; validation.jsonl
    python experiments/units_sst2.py runs --data FOLDER --out FOLDER   accuracy for k = 1, 2, 4, 8 at one epsilon

FOLDER of --data holds sst2/ and minilm/ (`rgp data get sst2 minilm --to FOLDER`).

The rule: a row whose words stand in a longer row, side by side, is a phrase of it. Rows that stand in no longer row are
taken for sentences, and every other row belongs to a sentence that has it: to the shortest one, where several do. Phrases
of a few words stand in many sentences, and may be put with the wrong one; two sentences with the same words count as one;
and a phrase whose sentence is not among the rows counts as a sentence. The texts tell no more: GLUE does not say which
sentence a phrase is from.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np

ROWS_PER_UNIT = (1, 2, 4, 8)


def read(path: Path) -> list[tuple[str, str]]:
    """(text, label) of every row."""
    _, *rows = path.read_text(encoding="utf-8").splitlines()
    return [(text.strip(), label.strip()) for text, label in (row.rsplit("\t", 1) for row in rows)]


def group(texts: list[str]) -> tuple[list[int], list[int]]:
    """Of each row the number of its sentence, and in how many sentences it stands."""
    words = [tuple(text.split()) for text in texts]
    longest_first = sorted(range(len(texts)), key=lambda i: (-len(words[i]), words[i]))
    inside: dict[tuple[str, ...], list[int]] = defaultdict(
        list
    )  # a phrase -> the sentences that have it, longest first
    sentence, standing = [0] * len(texts), [0] * len(texts)
    count = 0
    for i in longest_first:
        if words[i] not in inside:
            own = words[i]
            phrases = {own[a:b] for a in range(len(own)) for b in range(a + 1, len(own) + 1)}
            for phrase in phrases:
                inside[phrase].append(count)
            count += 1
        sentence[i] = inside[words[i]][-1]
    for i, own in enumerate(words):
        standing[i] = len(inside[own])
    return sentence, standing


def report(texts: list[str], sentence: list[int], standing: list[int]) -> dict[str, Any]:
    """How well the rule does, as far as the texts alone can tell."""
    sizes = Counter(sentence)
    lengths: dict[int, int] = defaultdict(int)
    for text, number in zip(texts, sentence, strict=True):
        lengths[number] = max(lengths[number], len(text.split()))
    in_order = np.array(sorted(sizes.values()))
    alone = sum(size == 1 for size in sizes.values())
    return {
        "rows": len(texts),
        "groups": len(sizes),
        "rows_with_others": 1 - alone / len(texts),
        "rows_in_one_sentence_only": sum(n == 1 for n in standing) / len(texts),
        "rows_in_several": sum(n > 1 for n in standing) / len(texts),
        "groups_of_one_row": alone,
        "groups_whose_longest_row_has_under_5_words": sum(n < 5 for n in lengths.values()),
        "rows_per_group": {
            "mean": float(in_order.mean()),
            **{f"{q}%": int(np.percentile(in_order, q)) for q in (10, 50, 90, 99)},
            "largest": int(in_order[-1]),
        },
        "rows_used_at_most": {k: float(np.minimum(in_order, k).sum() / len(texts)) for k in (*ROWS_PER_UNIT, 16, 32)},
    }


def write(data: Path, out: Path) -> None:
    """A folder that `rgp train` reads: data.name=OUT, data.text=sentence, data.units=unit."""
    rows = read(data / "sst2" / "train.tsv")
    sentence, _ = group([text for text, _ in rows])
    out.mkdir(parents=True, exist_ok=True)
    with (out / "train.jsonl").open("w", encoding="utf-8") as file:
        for (text, label), number in zip(rows, sentence, strict=True):
            file.write(json.dumps({"sentence": text, "label": label, "unit": number}) + "\n")
    with (out / "validation.jsonl").open("w", encoding="utf-8") as file:
        for text, label in read(data / "sst2" / "valid.tsv"):
            file.write(json.dumps({"sentence": text, "label": label}) + "\n")


def run(data: Path, out: Path, *, ks: list[int], epsilon: float, steps: int, batch: int, seed: int) -> None:
    """Equal epsilon, steps and batch (of sentences): only the number of rows that a sentence is heard with differs."""
    from rgp.train import config, runner
    from rgp.train.progress import for_stream

    if not (out / "data" / "train.jsonl").exists():
        write(data, out / "data")
    for k in ks:
        changes = [
            *(f"data.name={out / 'data'}", "data.text=sentence", "data.units=unit", f"data.rows_per_unit={k}"),
            *(f"model.name={data / 'minilm'}", f"budget.epsilon={epsilon}", "training.epochs=null"),
            *(f"training.steps={steps}", f"training.batch_size={batch}", f"run.seed={seed}"),
        ]
        settings = config.load(preset="sst2-minilm-rgp", changes=changes)
        began = time.monotonic()
        summary = runner.train(settings, out / f"k{k}-e{epsilon:g}-s{seed}", progress=for_stream())
        line = {
            "k": k,
            "epsilon": summary["epsilon"],
            "accuracy": summary["accuracy"],
            "sigma": summary["noise_multiplier"],
        }
        print(json.dumps({**line, "seed": seed, "seconds": round(time.monotonic() - began)}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("group", "write", "runs"))
    parser.add_argument("--data", type=Path, required=True, help="folder with sst2/ and minilm/")
    parser.add_argument("--out", type=Path, default=Path("runs/units-sst2"))
    parser.add_argument(
        "--k", type=int, nargs="+", default=list(ROWS_PER_UNIT), help="rows of a sentence in a step, at most"
    )
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=256, help="sentences expected in a step")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if given.what == "group":
        texts = [text for text, _ in read(given.data / "sst2" / "train.tsv")]
        print(json.dumps(report(texts, *group(texts)), indent=2))
    elif given.what == "write":
        write(given.data, given.out)
    else:
        steps, batch = given.steps, given.batch
        run(given.data, given.out, ks=given.k, epsilon=given.epsilon, steps=steps, batch=batch, seed=given.seed)


if __name__ == "__main__":
    main()
