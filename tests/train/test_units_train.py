"""`rgp train` over persons: a column of a table says whose a row is."""

from __future__ import annotations

import collections
import csv
import json
import random

import numpy as np
import pytest

pytest.importorskip("transformers")

from rgp.cards import card_text, short_unit
from rgp.data import DataError, DataSpec, load
from rgp.train import config, runner
from rgp.train.progress import Silent
from tiny_language import Words, sentence, write_as_table

PEOPLE, EACH = 30, 20


def write_table(path, extra: int = 0, people: int = PEOPLE, each: int = EACH):
    """A made-up table with `each` rows per person, and `extra` more of the first."""
    rng = random.Random(0)
    rows = [(f"user {i % people}", sentence(rng), ("bad", "good")[rng.random() < 0.5]) for i in range(people * each)]
    rows += [("user 0", sentence(rng), "good") for _ in range(extra)]
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("user_id", "text", "label"), *rows])
    return path


def spec(path, **more):
    return DataSpec(name=str(path), tokenizer=Words(), units="user_id", **more)


def test_a_person_is_on_one_side_of_the_split(tmp_path):
    """And one person more in the file moves nobody else."""
    data = load(spec(write_table(tmp_path / "a.csv"), rows_per_unit=3))
    assert data.members.unit.describe() == "one person (column user_id), at most 3 rows in a step"
    assert data.units == data.members.unit.size < PEOPLE and len(data.train) == EACH * data.units
    assert len(data.test) == EACH * (PEOPLE - data.units)
    assert collections.Counter(data.members.of_rows.tolist()) == dict.fromkeys(range(data.units), EACH)
    more = load(spec(write_table(tmp_path / "b.csv", extra=40), rows_per_unit=3))
    assert more.units == data.units and len(more.train) + len(more.test) == len(data.train) + len(data.test) + 40
    assert str(len(data.train)) not in data.description  # how many rows there are is private


def test_columns_that_cannot_be_right(tmp_path):
    path = write_table(tmp_path / "a.csv")
    with pytest.raises(DataError, match="no column 'users'; its columns are user_id, text, label"):
        load(DataSpec(name=str(path), tokenizer=Words(), units="users"))
    with path.open("a", newline="") as file:
        csv.writer(file).writerow(("", "a film", "good"))
    with pytest.raises(DataError, match="row 600 has no id"):
        load(spec(path))
    with pytest.raises(DataError, match="digits has no columns"):
        load(DataSpec(name="digits", units="user_id"))


@pytest.mark.parametrize("ending", ["csv", "tsv", "jsonl", "parquet"])
def test_tables_of_every_kind_have_units(tmp_path, ending):
    rows = [{"user": f"u{i % 12}", "text": f"film {i}", "label": str(i % 2)} for i in range(60)]
    path = tmp_path / f"a.{ending}"
    write_as_table(path, rows)
    data = load(DataSpec(name=str(path), tokenizer=Words(), units="user"))
    assert data.members.rows == len(data.train) == 5 * data.units


class Letters:
    """A tokenizer that makes a token of every letter."""

    pad_token_id = eos_token_id = 0
    name_or_path = "letters"

    def __len__(self):
        return 300

    def __call__(self, texts, **options):
        return {"input_ids": [[ord(c) % 300 for c in t][: options.get("max_length")] for t in texts]}


def test_a_document_cut_into_blocks_is_a_unit_of_blocks(tmp_path):
    documents = [f"document {i} " + "x" * (3 * i) for i in range(40)]
    (tmp_path / "a.txt").write_text("\n\n".join(documents))
    made = {"name": str(tmp_path / "a.txt"), "tokenizer": Letters(), "unit": "block", "block": 8}
    data = load(DataSpec(**made, units="document", rows_per_unit=4))
    assert data.members.unit.describe() == "one document, at most 4 blocks in a step"
    sizes = np.bincount(data.members.of_rows)
    assert len(sizes) == data.units < 40 and sizes.max() > 8 and len(data.train) == sizes.sum()
    starts = [bytes(row["input_ids"].tolist()).startswith(b"document"[:8]) for row in data.train]
    assert sum(starts) == data.units  # every document begins a block of its own
    with pytest.raises(DataError, match="units='document' goes with unit='block'"):
        load(DataSpec(**{**made, "unit": "document"}, units="document"))
    with pytest.raises(DataError, match="must be a column of a table, or 'document'"):
        load(DataSpec(**made, units="author"))


def test_an_author_is_a_unit_of_documents(tmp_path):
    rows = [{"author": f"a{i % 9}", "text": f"text number {i}"} for i in range(45)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    made = {"name": str(tmp_path / "a.jsonl"), "tokenizer": Letters(), "units": "author"}
    data = load(DataSpec(**made, unit="document"))
    assert data.members.unit.describe() == "one person (column author), at most 8 documents in a step"
    assert len(data.train) == 5 * data.units
    blocks = load(DataSpec(**made, unit="block", block=8))
    assert blocks.units == data.units and len(blocks.train) > len(data.train)


# ---------------------------------------------------------------------- rgp train


def settings(path, model, *changes):
    base = [
        *("data.units=user_id", "data.rows_per_unit=3", f"data.name={path}", f"model.name={model}", "method.rank=2"),
        *("training.batch_size=4", "training.epochs=null", "training.steps=3", "training.clip=1", "budget.epsilon=8"),
        *("model.pretrained=false", "training.microbatch_size=8", "data.max_length=12", "method.name=rgp"),
    ]
    return config.load(preset="digits-rgp", changes=[*base, "model.width=null", *changes])


@pytest.fixture(scope="module")
def trained(bert_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("units")
    runs = {}
    for extra in (0, 37):
        path = folder / str(extra) / "people.csv"
        path.parent.mkdir()
        made = settings(write_table(path, extra), bert_folder)
        out = path.parent / "run"
        runs[extra] = (runner.train(made, out, progress=Silent()), out)
    return runs


def test_card_report_and_summary_say_what_a_unit_is_because_the_sampler_did_it(trained):
    summary, out = trained[0]
    words = "one person (column user_id), at most 3 rows in a step"
    units = summary["training_units"]
    assert summary["unit"] == words and units < PEOPLE and summary["sampling_rate"] == 4 / units
    assert summary["training_rows"] is None and summary["held_out_rows"] is None
    card = json.loads((out / "model" / "privacy_card.json").read_text())
    assert card["unit"] == words and card["delta"] <= 1 / (10 * units)
    text = card_text(card)
    assert (
        f"{units} training persons" in text and "each person on its own" in text and "whether a person was used" in text
    )
    assert "one person is added or removed" in text and "k rows" not in text
    report = (out / "report.html").read_text()
    assert f"of {units} persons" in report and "any one person" in report and "k rows" not in report
    assert short_unit(words) == "one person" and short_unit("one row of the training data") == "one row"


def test_nothing_in_a_run_folder_tells_how_many_rows_somebody_has(trained):
    """In files that may be published, all numbers are the same with and without 37 more rows of one person."""
    (one, first), (two, second) = trained[0], trained[37]
    changing = {"wall_seconds", "step_seconds", "peak_memory_bytes", "ledger_head", "accuracy", "dataset", "seed"}
    assert {k: v for k, v in one.items() if k not in changing} == {k: v for k, v in two.items() if k not in changing}
    for out, extra in ((first, 0), (second, 37)):
        rows = {str(EACH * n + extra) for n in (one["training_units"], PEOPLE - one["training_units"], PEOPLE)}
        rows |= {f"{int(n):,}" for n in rows}
        for path in out.rglob("*"):
            if path.suffix in (".json", ".jsonl", ".yaml", ".md", ".html") and path.name != "secret.json":
                text = path.read_text()
                assert "user 0" not in text and "user 1" not in text, path
                if path.name in ("summary.json", "privacy_card.json", "privacy_card.md"):
                    assert not any(f" {n}," in text or f" {n} " in text for n in rows), path


def test_an_interrupted_run_goes_on(bert_folder, tmp_path):
    made = settings(write_table(tmp_path / "p.csv"), bert_folder, "run.seed=1")
    whole = runner.train(made, tmp_path / "whole", progress=Silent())
    assert runner.train(made, tmp_path / "whole", progress=Silent(), resume=True) == whole
    with pytest.raises(config.ConfigError, match=r"must be at most \d+, the number of training persons"):
        runner.train(
            settings(tmp_path / "p.csv", bert_folder, "training.batch_size=31"), tmp_path / "x", progress=Silent()
        )


def test_an_audit_has_canary_persons(bert_folder, tmp_path):
    from rgp.audit.auditing import AuditSettings, audit

    made = settings(write_table(tmp_path / "p.csv"), bert_folder)
    found = audit(made, AuditSettings(canaries=30, steps=2, seed=0), tmp_path / "audit", progress=Silent())
    assert (
        found["rows"] == 30 and found["private_rows"] == 0 and found["unit"].startswith("one person (column user_id)")
    )
    assert found["epsilon_lower"] <= found["epsilon_proven"] and not found["broken"]


def test_an_attack_guesses_about_persons(bert_folder, tmp_path, monkeypatch):
    """Shadows are trained on whole persons, with the target's sampling rate; what is promised is about persons."""
    from rgp.attacks import attacking, shadows

    made = settings(write_table(tmp_path / "p.csv", extra=5, each=4), bert_folder, "data.held_out=0.5", "run.seed=1")
    summary = runner.train(made, tmp_path / "run", progress=Silent())
    trained, train = [], shadows.runner.train

    def spy(config, out, *, parts, **options):
        trained.append((config.training.batch_size, parts.data))
        return train(config, out, parts=parts, **options)

    monkeypatch.setattr(shadows.runner, "train", spy)
    found = attacking.attack_run(tmp_path / "run", shadows=4, progress=Silent())
    assert found["unit"] == "person" and found["members"] == summary["training_units"]
    assert found["members"] + found["nonmembers"] == PEOPLE
    spent = json.loads((tmp_path / "run" / "attack.json").read_text())["promised"]
    assert spent["mu"] > 0 and spent["success_rate"] < 1
    first, second = trained[0][1], trained[1][1]
    assert first.members.unit.size + second.members.unit.size == PEOPLE
    assert len(first.train) + len(second.train) == 4 * PEOPLE + 5 == len(first.train) + len(first.test)
    for batch, data in trained:
        assert batch == round(4 * data.members.unit.size / summary["training_units"])
        assert data.members.rows == len(data.train) and data.members.unit.rows_per_unit == 3
    page = (tmp_path / "run" / "report.html").read_text()
    assert "which persons are taken for training persons" in page and "training rows against" not in page


def test_an_attack_has_to_know_whose_the_test_rows_are(bert_folder, tmp_path):
    from rgp.attacks.attacking import attack_run

    write_table(tmp_path / "train.csv")
    (tmp_path / "test.csv").write_text("text,label\na film,good\n" * 1 + "a bad film,bad\n")
    runner.train(settings(tmp_path, bert_folder), tmp_path / "run", progress=Silent())
    with pytest.raises(ValueError, match="nothing says whose the test rows are"):
        attack_run(tmp_path / "run", progress=Silent())
    write_table(tmp_path / "test.csv", people=9, each=2)
    assert load(spec(tmp_path)).test_members.unit.size == 9
