"""SST-2 by sentence: its rows are phrases, and the phrases of a sentence are its substrings. Which sentence is a row from?

    python experiments/units_sst2.py group --data FOLDER               how well the rule does: rows grouped, sizes of groups
    python experiments/units_sst2.py write --data FOLDER --out FOLDER  train.jsonl with a column `unit`; validation.jsonl

FOLDER of --data holds sst2/ (`rgp data get sst2 --to FOLDER`). Accuracy against k: units_accuracy.py.

The rule: a row whose words stand in a longer row, side by side, is a phrase of it. Rows that stand in no longer row are
taken for sentences, and every other row belongs to a sentence that has it: to the shortest one, where several do. Phrases
of a few words stand in many sentences, and may be put with the wrong one; two sentences with the same words count as one;
and a phrase whose sentence is not among the rows counts as a sentence. The texts tell no more: GLUE does not say which
sentence a phrase is from.
"""

from __future__ import annotations

import argparse
import json
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("group", "write"))
    parser.add_argument("--data", type=Path, required=True, help="folder with sst2/")
    parser.add_argument("--out", type=Path, default=Path("runs/units-sst2"))
    given = parser.parse_args()
    if given.what == "group":
        texts = [text for text, _ in read(given.data / "sst2" / "train.tsv")]
        print(json.dumps(report(texts, *group(texts)), indent=2))
    else:
        write(given.data, given.out)


if __name__ == "__main__":
    main()
