"""PrivateTrainer over persons, and --units on the command line."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("typer")

from commands import ask, rgp
from rgp import accounting
from rgp.integrations.transformers import PrivacyArguments, find_members
from tiny_trainer import N, make_rows, privacy, trainer

PEOPLE = 14


def rows():
    return [{**row, "who": f"user {i % PEOPLE}"} for i, row in enumerate(make_rows())]


def chosen(**options):
    return privacy(units="who", rows_per_unit=2, batch_size=5, **options)


def test_a_column_of_the_dataset_says_whose_an_example_is(tmp_path):
    made = trainer(tmp_path, data=rows(), chosen=chosen())
    made.train()
    unit = made.run.mechanism.unit
    assert unit.describe() == "one person (column who), at most 2 rows in a step" and unit.size == PEOPLE
    assert made.run.mechanism.rate(0) == 5 / PEOPLE and made.run.mechanism.dataset_size == PEOPLE
    made.save_model(tmp_path / "saved")
    card = json.loads((tmp_path / "saved" / "privacy_card.json").read_text())
    assert card["unit"] == unit.describe() and card["training_units"] == PEOPLE and card["training_rows"] is None
    assert "user 1" not in (tmp_path / "saved" / "privacy_card.md").read_text()


def test_epochs_are_passes_over_persons(tmp_path):
    made = trainer(tmp_path, data=rows(), chosen=chosen(), max_steps=-1, num_train_epochs=2)
    assert made._steps() == accounting.planned_steps(2, PEOPLE, 5)


def test_columns_that_are_not_there_and_batches_that_are_too_large(tmp_path):
    with pytest.raises(ValueError, match="units='who': train_dataset has no such column; it has input_ids"):
        trainer(tmp_path, chosen=chosen())
    with pytest.raises(ValueError, match=rf"batch size {N} must be at most {PEOPLE}, the number of persons \(who\)"):
        trainer(tmp_path, data=rows(), chosen=privacy(units="who", batch_size=N))
    with pytest.raises(ValueError, match="rows_per_unit=2 goes with units"):
        PrivacyArguments(epsilon=1.0, rows_per_unit=2)


def test_columns_of_hugging_face_data():
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"who": [3, 3, 5, 5], "x": [0, 1, 2, 3]})
    found = find_members(table, "who", None)
    assert found.unit.size == 2 and found.unit.rows_per_unit == 8 and found.of_rows.tolist() == [0, 0, 1, 1]


# ---------------------------------------------------------------------- rgp calibrate, rgp account, rgp plan


def test_units_are_what_sampling_rates_refer_to():
    got = ask("calibrate --epsilon 8 --units 6920 --batch-size 500 --epochs 10")
    assert got["sampling_rate"] == 500 / 6920 and got["steps"] == round(10 * 6920 / 500) and got["units"] == 6920
    assert got == {**ask("calibrate --epsilon 8 --dataset-size 6920 --batch-size 500 --epochs 10"), "units": 6920}
    spent = ask("account --noise-multiplier 2 --units 6920 --batch-size 500 --epochs 10")
    assert spent["sampling_rate"] == 500 / 6920 and spent["delta"] == accounting.default_delta(6920)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--units 100 --dataset-size 900 --batch-size 50 --epochs 1", "both say how many there are to draw from"),
        ("--units 100 --batch-size 101 --epochs 1", "--batch-size 101 must be at most --units 100"),
        ("--units 100 --sampling-rate 0.1 --steps 5", "one set, complete"),
    ],
)
def test_units_that_contradict(line, message):
    result = rgp(f"calibrate --epsilon 8 {line}")
    assert result.exit_code == 2 and message in result.output


def test_a_plan_for_persons():
    from rgp.planning.estimate import Question

    question = Question(dataset_size=6920, rows_per_unit=4, batch=64, world_size=2)
    assert question.share == 128
    with pytest.raises(ValueError, match="rows_per_unit must be an integer of at least 1; got 0"):
        Question(rows_per_unit=0)
