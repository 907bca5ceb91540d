"""Faults of data."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import rgp
from faults.small import (
    SIZE,
    check_as_if_nothing_had_been,
    data,
    fault,
    loss_of,
    start,
    train,
    weight,
)


@fault
def iterable_dataset(_):
    class Endless(IterableDataset):
        def __iter__(self):
            yield from data()

    start(dataset=Endless())


@fault
def dataloader(_):
    start(dataset=DataLoader(data(), batch_size=4, shuffle=True))


@fault
def empty_dataset(_):
    start(dataset=[])


@fault
def large_batch(_):
    start(batch_size=41)


@fault
def empty_draw(_):
    run = start(batch_size=1, steps=12)
    steps, drawn = [], set()
    run.optimizer.register_step_post_hook(lambda *_args: steps.append(weight(run)))
    for batch in run:
        drawn.add(run.step_index)
        run.step(loss_of(run, batch))
    assert 0 < len(drawn) < 12  # a third of the draws or so is empty
    assert run.step_index == run.ledger.count == len(steps) == 12
    assert all(not torch.equal(a, b) for a, b in pairwise(steps))


@fault
def nan_example(_):
    bad = [(x if i % 2 else x * float("nan"), y) for i, (x, y) in enumerate(data())]
    run = train(start(dataset=bad))
    assert run.bad_examples > 0 and weight(run).isfinite().all()


@fault
def huge_example(_):
    def moved(scale):
        rows = [(x * scale if i == 0 else x * 0, y) for i, (x, y) in enumerate(data())]
        run = start(
            dataset=rows, batch_size=SIZE, steps=1, noise_multiplier=0.0, clip=0.5, method=rgp.DPSGD(), probe=False
        )
        before = weight(run)
        for x, _y in run:
            run.step(run.model[0](x).sum() / len(x))  # the gradient of one row, and biases
        return float((weight(run) - before).norm()) * SIZE / 0.1

    assert moved(1e30) <= moved(0.0) + 0.5 * 1.0001


@fault
def mixup(_):
    def collate(items):
        x, y = torch.utils.data.default_collate(items)
        return 0.7 * x + 0.3 * x.roll(1, 0), y

    train(start(collate_fn=collate))


@fault
def raising_dataset(_):
    class Moody(list):
        angry = True

        def __getitem__(self, i):
            if self.angry and i == 7:
                raise OSError("unreadable image")
            return super().__getitem__(i)

    rows = Moody(data())
    run = start(dataset=rows)
    with pytest.raises(OSError, match="unreadable image"):
        train(run)
    assert run.ledger.count == run.step_index
    rows.angry = False
    check_as_if_nothing_had_been(run)
