"""The rule of experiments/units_sst2.py: phrases are put with the sentence they stand in."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))

import units_accuracy
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


def test_the_tables_of_the_page_are_those_of_the_kept_results():
    text, rows = units_accuracy.PAGE.read_text(encoding="utf-8"), units_accuracy.read()
    assert all(f"<!-- {name} -->" in text for name in units_accuracy.TABLES)
    assert units_accuracy.filled(text, rows) == text, "run: python experiments/units_accuracy.py page"
    first = next(row for row in rows if row["stage"] == "tables")
    first["held_out"] += 0.1
    assert units_accuracy.filled(text, rows) != text


def test_every_line_of_the_table_had_the_same_trials_and_rows_that_tuning_never_saw():
    rows = units_accuracy.read()
    for kind, k in units_accuracy.VARIANTS:
        for epsilon in units_accuracy.EPSILONS:
            of = [row for row in rows if (row["kind"], row["k"], row["epsilon"]) == (kind, k, epsilon)]
            tuning = [row for row in of if row["stage"] == "tuning"]
            tables = [row for row in of if row["stage"] == "tables"]
            assert sorted(row["lr"] for row in tuning) == list(units_accuracy.RATES)
            assert {row["lr"] for row in tables} == {units_accuracy.chosen(rows, kind, k, epsilon)}
            assert sorted(row["seed"] for row in tables) == list(units_accuracy.SEEDS)
            assert not any("held_out" in row or "validation" in row for row in tuning)


def test_a_sentence_of_one_row_has_the_epsilon_of_a_row():
    from rgp import accounting
    from rgp.accounting import Event

    row = accounting.epsilon([Event(0.1, 3.0, 20)], delta=units_accuracy.DELTA)
    assert units_accuracy.sentence_epsilon(1, rate=0.1, sigma=3.0, steps=20) == pytest.approx(row, rel=5e-3)
    several = units_accuracy.sentence_epsilon(4, rate=0.1, sigma=3.0, steps=20)
    assert 2 * row < several


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
