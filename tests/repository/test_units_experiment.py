"""The rule of experiments/units_sst2.py: phrases are put with the sentence they stand in."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))

import units_sst2


def test_phrases_are_put_with_their_sentence():
    texts = [
        "good",  # in two sentences: with the shorter one
        "a very good film about bees",
        "very good film",
        "the end was good",
        "was good",
        "bees about",  # the same words in another order are no phrase
        "a very good film about bees",
        "film about bees and",
    ]
    sentence, standing = units_sst2.group(texts)
    assert sentence[1] == sentence[2] == sentence[6] and sentence[3] == sentence[4] == sentence[0]
    assert len({sentence[i] for i in (1, 3, 5, 7)}) == 4
    assert standing == [2, 1, 1, 1, 1, 1, 1, 1]
    found = units_sst2.report(texts, sentence, standing)
    assert found["groups"] == 4 and found["rows_with_others"] == 6 / 8 and found["groups_of_one_row"] == 2
    assert found["rows_used_at_most"][1] == 0.5 and found["rows_used_at_most"][4] == 1


def test_what_is_written_can_be_trained_on(tmp_path):
    from rgp.data import DataSpec, load
    from tiny_language import Words

    folder = tmp_path / "data" / "sst2"
    folder.mkdir(parents=True)
    rows = [f"film number {i} was\t{i % 2}" for i in range(6)] + [f"number {i} was\t{i % 2}" for i in range(6)]
    for name in ("train", "valid"):
        (folder / f"{name}.tsv").write_text("\n".join(["sentence\tlabel", *rows]) + "\n")
    units_sst2.write(tmp_path / "data", tmp_path / "out")
    data = load(DataSpec(name=str(tmp_path / "out"), text="sentence", tokenizer=Words(), units="unit", rows_per_unit=2))
    assert data.published_test and data.units == 6 and len(data.train) == 12 and len(data.test) == 12
