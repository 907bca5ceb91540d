"""The ledger's promise attacked: damage, loss and going on never lower epsilon."""

from __future__ import annotations

import json
import os
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from test_silent_ways import data, mean, net, private

import rgp
from rgp import accounting
from rgp.cards import EpsilonSoFar
from rgp.groups import deal
from rgp.ledger import Ledger

BANDS, STEPS, LOST = 3, 9, 4


def trained_until(step: int, folder: Path, **options: Any) -> rgp.Run:
    model = net()
    run = private(model, folder=folder, steps=STEPS, batch_size=4, bands=BANDS, seed=None, **options)
    for x, y in run:
        run.step(mean(model, x, y))
        if run.step_index == step:
            break
    return run


def gone_on(folder: Path) -> rgp.Run:
    model = net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = rgp.resume(folder, model, torch.optim.SGD(model.parameters(), lr=0.1), data())
        for x, y in run:
            run.step(mean(model, x, y))
    return run


def test_groups_that_are_dealt_anew_after_a_lost_secret(tmp_path):
    """Somebody may have been in the most charged group of both deals: 2 + 2 releases, where each group has three lines."""
    first = trained_until(LOST, tmp_path)
    first.save(tmp_path)
    before = deal(first._streams, first.mechanism.dataset_size, BANDS)
    first.close()
    os.remove(tmp_path / "secret.json")
    run = gone_on(tmp_path)
    after = deal(run._streams, run.mechanism.dataset_size, BANDS)
    taken = [
        sum((before if step < LOST else after)[i] == step % BANDS for step in range(STEPS)) for i in range(len(before))
    ]
    told = run.ledger.events()
    assert EpsilonSoFar(run).after(run) >= run.epsilon()
    assert [event.count for event in told] == [4]
    assert 3 <= max(taken) <= 4
    assert Ledger.open(tmp_path).events() == told, "who reads the file is told the same"
    assert run.epsilon() >= accounting.epsilon([accounting.Event(0.5, 1.0, 4)], delta=run.mechanism.delta)


def test_a_budget_stops_a_run_whose_groups_were_dealt_anew(tmp_path):
    first = trained_until(LOST, tmp_path, budget=rgp.Budget(3.0, 1e-3), noise_multiplier=None)
    first.save(tmp_path)
    first.close()
    os.remove(tmp_path / "secret.json")
    run = gone_on(tmp_path)
    assert run.epsilon() <= 3.0
    assert run.step_index < STEPS


def test_a_secret_that_is_kept_deals_nothing_anew(tmp_path):
    first = trained_until(LOST, tmp_path)
    first.save(tmp_path)
    first.close()
    run = gone_on(tmp_path)
    assert [event.count for event in run.ledger.events()] == [3]
    assert not any("deal" in record for record in run.ledger.records)


# ---------------------------------------------------------------------- edits


def edits(lines: list[bytes]) -> dict[str, list[bytes]]:
    def edited(at: int, **values: Any) -> bytes:
        return json.dumps({**json.loads(lines[at]), **values}, sort_keys=True).encode()

    return {
        "more noise": [*lines[:2], edited(2, sigma=9.0), *lines[3:]],
        "a smaller rate": [*lines[:2], edited(2, q=0.01), *lines[3:]],
        "charged to another group": [*lines[:2], edited(2, group=7), *lines[3:]],
        "dealt at another time": [*lines[:2], edited(2, deal="0"), *lines[3:]],
        "another last line": [*lines[:-1], edited(len(lines) - 1, sigma=9.0)],
        "two lines exchanged": [lines[0], lines[2], lines[1], *lines[3:]],
        "the first release left out": [lines[0], *lines[2:]],
        "a line twice": [*lines, lines[-1]],
        "an empty line": [*lines[:2], b"", *lines[2:]],
        "less of the dataset": [edited(0, dataset_size=10**6), *lines[1:]],
        "without the earlier runs": [edited(0, after=[]), *lines[1:]],
    }


@pytest.mark.parametrize("kind", edits([b'{"hash": ""}'] * 5))
def test_an_edited_ledger_has_no_epsilon(kind, tmp_path):
    run = trained_until(4, tmp_path)
    run.close()
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(b"".join(line + b"\n" for line in edits(path.read_bytes().splitlines())[kind]))
    with pytest.raises(rgp.LedgerError, match="line"):
        Ledger.open(tmp_path)


def test_every_cut_counts_the_torn_release(tmp_path):
    """Wherever the last write was cut: its line is whole, counted as torn, or was never begun."""
    run = trained_until(3, tmp_path)
    run.close()
    path = tmp_path / "ledger.jsonl"
    whole = path.read_bytes()
    start = whole.rstrip(b"\n").rfind(b"\n") + 1
    found: Counter[int] = Counter()
    for end in range(start, len(whole) + 1):
        path.write_bytes(whole[:end])
        found[Ledger.open(tmp_path).count] += 1
    assert found == {2: 1, 3: len(whole) - start}
