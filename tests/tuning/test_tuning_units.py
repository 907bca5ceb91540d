"""A search where persons are protected: a person adds at most 1 to a score, and trials draw persons."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import rgp
from rgp.accounting import Event
from rgp.composition import merge
from rgp.members import Members
from rgp.tuning import running
from rgp.tuning.scores import Score

IDS = ["a"] * 30 + ["b", "b", "c"]


def data(**changes):
    found = {"train": range(50), "test": range(len(IDS)), "members": Members(["x", "y"] * 25), "published_test": False}
    return SimpleNamespace(**{**found, "test_members": Members(IDS), **changes})


def count(monkeypatch, right, ids=IDS):
    """The score of a model that is right on these rows."""
    parts = SimpleNamespace(data=data(test_members=Members(ids)), model=None, device=None)
    parts.data.collate_fn = None
    settings = SimpleNamespace(training=SimpleNamespace(microbatch_size=8))
    monkeypatch.setattr(running, "load_trained", lambda folder: (settings, parts, "model"))
    found = torch.tensor(right, dtype=torch.float32)
    monkeypatch.setattr(running.setup, "example_losses", lambda *a, **k: (None, found))
    return running.right_answers(Path(), Score(kind="private", rows=3, noise=5.0, unit="person"))


def test_a_person_with_many_rows_adds_at_most_one_to_a_score(monkeypatch):
    assert count(monkeypatch, [1.0] * 30 + [1.0, 0.0, 1.0]) == pytest.approx(2.5)
    with_them, without = count(monkeypatch, [1.0] * 33), count(monkeypatch, [1.0] * 3, IDS[30:])
    assert with_them - without == pytest.approx(1)
    assert count(monkeypatch, [7.0] * 30 + [np.nan] * 3) == pytest.approx(1)  # whatever the model does


def test_a_private_score_is_measured_on_persons():
    made = running.make_score(data(), None, "held-out", None)
    assert (made.kind, made.rows, made.unit, made.noise) == ("private", 3, "person", 5.0)
    assert "as the mean of each of 3 persons (held-out)" in made.words
    assert running.make_score(data(), "private", "training", None).rows == 2
    rows = running.make_score(data(members=None, test_members=None), None, "held-out", None)
    assert (rows.rows, rows.unit) == (33, "row")
    with pytest.raises(ValueError, match="nothing says whose the test rows are"):
        running.make_score(data(test_members=None, published_test=True), "private", "held-out", None)


def test_a_test_file_of_ones_own_is_not_taken_for_published(tmp_path):
    found = data(members=None, test_members=None, published_test=True)
    assert running.make_score(found, None, "held-out", None).kind == "public"
    assert running.make_score(found, None, "held-out", None, known=False).kind == "private"
    assert running.make_score(found, "public", "held-out", None, known=False).kind == "public"  # who says so, decides
    assert running.is_own(str(tmp_path)) and not running.is_own("sst2") and not running.is_own("owner/name")


def test_trials_of_ones_own_loop_draw_persons():
    torch.manual_seed(0)
    x = torch.randn(80, 4)
    rows = torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long())
    ids, events = [i % 20 for i in range(80)], []

    def train(trial, **changes):
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=trial.settings["lr"])
        run = trial.privatize(model, optimizer, rows, **{"units": ids, "rows_per_unit": 3, **changes})
        for inputs, labels in run:
            run.step(F.cross_entropy(model(inputs), labels))
        run.close()
        assert run.mechanism.unit.describe() == "one person, at most 3 rows in a step"
        events.append(merge(run.ledger.events()))
        return model, 1.0

    plan = {"batch_size": 5, "steps": 3, "epsilon": 6.0, "trials": 2, "score": "public", "seed": 1, "accountant": "rdp"}
    best = rgp.tune(train, {"lr": [0.1]}, dataset_size=20, **plan)
    assert best is not None and set(events) == {(Event(5 / 20, best.noise_multiplier, 3),)}
    with pytest.raises(ValueError, match=r"the dataset has 20 persons \(units\), and the search was planned for 80"):
        rgp.tune(train, {"lr": [0.1]}, dataset_size=80, **plan)
