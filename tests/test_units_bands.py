"""Correlated noise over persons: a person is dealt into one group, and moves a release of that group's turns by at most C."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest
import torch

import rgp
from resuming import SIZE, again, crashed, same, train, uninterrupted, weights
from rgp.cards.content import make_card
from rgp.cards.text import card_text
from rgp.ledger import Ledger
from toys import examples, loss_of, toy

IDS = [f"person {i * i % 13}" for i in range(SIZE)]
BANDS, CLIP, STEPS = 2, 0.3, 8
UNITS = {"units": IDS, "rows_per_unit": 7, "batch_size": 3, "microbatch_size": 5, "bands": BANDS}


class Watch(rgp.observing.Observer):
    """Who was in each step, and what was released."""

    def __init__(self, run: rgp.Run) -> None:
        self.run, self.units, self.releases = run, [set() for _ in range(run.mechanism.steps)], []
        run.observe(self)

    def before_clipping(self, gradients, indices) -> None:
        self.units[self.run.step_index] |= set(map(int, indices))

    def released(self, step, noisy) -> None:
        self.releases.append(noisy.clone())


def watched(data, ids, **options) -> Watch:
    """Weights that stay, so that two runs differ by what one person adds and nothing else."""
    model = toy()
    run = rgp.privatize(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        data,
        units=ids,
        clip=CLIP,
        steps=STEPS,
        noise_multiplier=1.0,
        seed=0,
        probe=False,
        **options,
    )
    seen = Watch(run)
    for batch in run:
        run.step(loss_of(model, batch))
    return seen


@pytest.mark.filterwarnings("ignore:the examples that were looked at")
def test_a_person_moves_the_releases_of_one_group_by_at_most_c_each():
    """Rows of a person that agree, and are large; without them (rows that are not finite give nothing) all else is equal."""
    ids = [0] * 20 + [i % 9 for i in range(1, 41)]  # the first person has more rows than a micro-batch
    data = [(x * (50 if who == 0 else 1), 0 if who == 0 else y) for (x, y), who in zip(examples(60), ids, strict=True)]
    gone = [(x * (torch.nan if who == 0 else 1), y) for (x, y), who in zip(data, ids, strict=True)]
    options = {"rows_per_unit": 20, "batch_size": 3, "microbatch_size": 8, "bands": 3, "method": rgp.RGP(rank=2)}
    with_them, without = (watched(rows, ids, **options) for rows in (data, gone))
    groups = with_them.run.groups
    assert len(groups) == 9  # one for each person
    for step, units in enumerate(with_them.units):
        assert all(groups[unit] == step % 3 for unit in units)
    moved = [float((a - b).norm()) for a, b in zip(with_them.releases, without.releases, strict=True)]
    turns = [0 in units for units in with_them.units]
    assert any(turns) and all(step % 3 == groups[0] for step, there in enumerate(turns) if there)
    for there, by in zip(turns, moved, strict=True):
        assert (0.2 < by <= CLIP * (1 + 1e-6)) if there else by == 0


@pytest.mark.parametrize("method", [rgp.RGP(rank=2, warmup_steps=0), rgp.DPSGD()], ids=["rgp", "dpsgd"])
def test_a_run_that_was_stopped_goes_on_to_the_bit(tmp_path, method):
    whole = uninterrupted(method=method, **UNITS)
    crashed(tmp_path, method=method, **UNITS)
    run = again(tmp_path, units=IDS)
    train(run)
    assert same(weights(run), weights(whole)) and (run.groups == whole.groups).all()
    assert Ledger.open(tmp_path).count == STEPS


def test_ledger_epsilon_and_card_are_about_persons_in_groups(tmp_path):
    from dp_accounting import dp_event
    from dp_accounting.pld import PLDAccountant

    run = uninterrupted(folder=tmp_path, method=rgp.DPSGD(), delta=1e-3, **UNITS)
    persons = len(set(IDS))
    lines = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "group" in line]
    assert [line["group"] for line in steps] == [t % BANDS for t in range(STEPS)]
    rate = BANDS * 3 / persons
    assert all(line["q"] == pytest.approx(rate) for line in steps)
    accountant = PLDAccountant(value_discretization_interval=1e-3)
    accountant.compose(dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(1.0)), math.ceil(STEPS / BANDS))
    assert run.epsilon() == pytest.approx(accountant.get_epsilon(1e-3), rel=5e-3)
    sizes = np.bincount([sorted(set(IDS)).index(name) for name in IDS])
    names = {"method": "dpsgd", "dataset": "visits", "model": "net"}
    text = card_text(make_card(run, **names, seed_known=True, secure_noise=False))
    assert "one person, at most 7 rows in a step" in text and f"correlated over {BANDS} steps" in text
    numbers = re.findall(r"(?<![\d:])\d+(?![\d:])", text)  # those of a time of day are none
    assert str(SIZE) not in numbers and sizes.max() > 7  # how many rows there are stays private
