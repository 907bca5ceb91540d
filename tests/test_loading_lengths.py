"""Micro-batches of similar lengths: cheaper, and the same result."""

from __future__ import annotations

import copy
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

import helpers
import rgp
from rgp.loading import cut
from tiny_language import (
    load_sst2_like,
    texts,
    transformers,
)

# ---------------------------------------------------------------------- length-sorted micro-batches


def test_cut_by_length_keeps_every_index_and_groups_similar_lengths():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 100, 1000).astype(float)
    indices = np.sort(rng.choice(1000, 300, replace=False))
    parts = cut(indices, 32, lengths)
    assert sorted(i for part in parts for i in part) == indices.tolist()
    assert [len(p) for p in parts] == [len(p) for p in cut(indices, 32)]
    for before, after in pairwise(parts):
        assert lengths[before].min() >= lengths[after].max()  # the longest first


def test_sorting_changes_the_cost_and_not_the_result(bert_folder):
    """Same draws, same clipped sum; fewer padded tokens."""
    data = load_sst2_like(bert_folder, texts(60))
    torch.manual_seed(1)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(bert_folder, num_labels=2).double()
    found, padded = [], []
    for lengths in (None, data.train.lengths):
        twin = copy.deepcopy(model)
        optimizer = torch.optim.SGD(twin.parameters(), lr=1.0)
        run = rgp.privatize(
            twin,
            optimizer,
            data.train,
            method=rgp.RGP(rank=2, source="weight"),
            noise_multiplier=0.5,
            batch_size=30,
            steps=2,
            clip=0.05,
            microbatch_size=6,
            seed=3,
            collate_fn=data.collate_fn,
            lengths=lengths,
            probe=False,
        )
        tokens = 0
        for batch in run:
            tokens += batch["input_ids"].numel()
            run.step(twin(**batch).loss)
        run.close()
        found.append(helpers.parameters_of(twin))
        padded.append(tokens)
    moved = max(float((found[0][n] - p).abs().max()) for n, p in helpers.parameters_of(model).items())
    apart = max(float((found[0][n] - found[1][n]).abs().max()) for n in found[0])
    assert moved > 1e-3 and apart < 1e-12
    assert padded[1] < 0.8 * padded[0]


@pytest.mark.parametrize("lengths", [[1, 2], np.ones((4, 1)), ["a", "b", "c", "d"]])
def test_lengths_must_be_one_number_per_example(lengths):
    model = nn.Linear(2, 2)
    data = [(torch.zeros(2), 0)] * 4
    with pytest.raises(ValueError, match="lengths must be one number per example"):
        helpers.privatize(model, data, lengths=lengths)
