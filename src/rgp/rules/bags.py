"""F.embedding_bag: a lookup, and a sum, mean or maximum over each example's bag of ids."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rgp.errors import LayoutError
from rgp.rules import rule
from rgp.rules.embedding import embedding


@rule(F.embedding_bag)
def embedding_bag(capture, func, args, kwargs):
    def call(
        input,
        weight,
        offsets=None,
        max_norm=None,
        norm_type=2,
        scale_grad_by_freq=False,
        mode="mean",
        sparse=False,
        per_sample_weights=None,
        include_last_offset=False,
        padding_idx=None,
    ):
        ids, counted = input, torch.ones_like(input, dtype=torch.bool)
        if capture.slot(weight) is None:  # only the weights of the bag's members are trained
            return NotImplemented
        if input.dim() == 1:
            if capture.slot(per_sample_weights) is not None:
                return NotImplemented
            ends = (
                torch.cat([offsets[1:], offsets.new_tensor([len(input)])]) if not include_last_offset else offsets[1:]
            )
            starts = offsets[:-1] if include_last_offset else offsets
            ids, counted = _padded(input, starts, ends), _padded(counted, starts, ends)
            if per_sample_weights is not None:
                per_sample_weights = _padded(per_sample_weights, starts, ends)
        if len(ids) != capture.examples:
            raise LayoutError(
                f"embedding {capture.slot(weight).entry.name!r} was looked up with {len(ids)} bags for "
                f"{capture.examples} examples; give each example one bag, or freeze it"
            )
        if padding_idx is not None:
            counted = counted & (ids != padding_idx % weight.shape[0])
        options = {"max_norm": max_norm, "scale_grad_by_freq": scale_grad_by_freq}
        found = embedding(capture, F.embedding, (ids, weight), options)
        if mode == "max":
            found = found.masked_fill(~counted.unsqueeze(-1), -torch.inf).max(1).values
            return found.masked_fill(found == -torch.inf, 0)
        found = found * counted.unsqueeze(-1)
        if per_sample_weights is not None:
            found = capture.run(torch.mul, found, capture.run(torch.unsqueeze, per_sample_weights, -1))
        total = found.sum(1)
        return total / counted.sum(1, keepdim=True).clamp_min(1) if mode == "mean" else total

    return call(*args, **kwargs)


def _padded(x: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    """Pieces of x (n,) side by side, as (bags, longest), filled up with zeros."""
    parts = [x[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]
    return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
