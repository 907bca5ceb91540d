"""Rows that an index picks out of the batch (tokens sent to experts): each keeps its owner, or the rule refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rgp
from helpers import seeded, spread

EXAMPLES, LENGTH, WIDTH, EXPERTS = 4, 6, 8, 3


@pytest.fixture(params=["rgp", "dpsgd", "dpsgd, deferred"])
def method(request, monkeypatch):
    if "deferred" in request.param:
        monkeypatch.setattr("rgp.slots.LARGEST_DENSE", 0)
    return rgp.RGP(rank=2, fallback="error") if request.param == "rgp" else rgp.DPSGD(fallback="error")


class Experts(nn.Module):
    """Tokens go to their best expert; experts are one tensor, or modules."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(0.3 * torch.randn(EXPERTS, 2 * WIDTH, WIDTH))
        self.gain = nn.Parameter(torch.ones(EXPERTS, WIDTH))
        self.down = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS)])

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, WIDTH)
        probabilities = self.router(flat).softmax(-1)
        best, chosen = probabilities.max(-1)
        out = torch.zeros_like(flat)
        for e in range(EXPERTS):
            rows = torch.where(chosen == e)[0]
            if self.way == "mask":
                sent = flat[chosen == e]
            elif self.way == "with a new dimension":
                sent = flat[None, rows].reshape(-1, WIDTH)
            elif self.way == "index_select":
                sent = flat.index_select(0, rows)
            else:
                sent = flat[rows]
            gate, up = F.linear(sent, self.up[e]).chunk(2, -1)
            y = self.down[e](F.silu(gate) * up * self.gain[e]) * best[rows].unsqueeze(-1)
            if self.way == "assigned":
                out[rows] = y
            else:
                out.index_add_(0, rows, y)
        return out.view_as(x)


def losses(model: nn.Module, batch: Any) -> Tensor:
    y = model(batch[0])
    target = torch.linspace(-1, 1, y[0].numel(), dtype=y.dtype).view(y.shape[1:])
    return ((y.tanh() - target).square().flatten(1).sum(1) * batch[1]).mean()


def batch(seed: int = 1) -> tuple[Tensor, Tensor]:
    return torch.randn(EXAMPLES, LENGTH, WIDTH, generator=seeded(seed), dtype=torch.float64), spread(EXAMPLES)


@pytest.mark.parametrize("seed", range(3))  # with numbers of rows that are multiples of the examples among them
@pytest.mark.parametrize("way", ["index", "index_select", "mask", "assigned", "with a new dimension"])
def test_tokens_sent_to_experts(way, seed, method):
    torch.manual_seed(seed)
    found = rgp.check(Experts(way), batch(seed), losses, method=method)
    assert found.ok, str(found)
    assert len(found.errors) == 10


def test_tokens_sorted_by_expert_and_cut_into_pieces(method):
    """As in JetMoE and Granite: all tokens in the order of their experts, one product each, and back."""

    class Sorted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.up = nn.Linear(WIDTH, EXPERTS), nn.Parameter(0.3 * torch.randn(EXPERTS, WIDTH, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            flat = x.reshape(-1, WIDTH)
            best, chosen = self.router(flat).softmax(-1).max(-1)
            order = chosen.argsort(stable=True)
            sizes = chosen.bincount(minlength=EXPERTS).tolist()
            pieces = flat[order].split(sizes, dim=0)
            y = torch.cat([(piece @ self.up[e])[..., ::2] for e, piece in enumerate(pieces)], dim=0)
            out = torch.zeros_like(flat)[:, ::2].index_add(0, order, y * best[order][:, None])
            return out.view(len(x), -1)

    torch.manual_seed(0)
    found = rgp.check(Sorted(), batch(), losses, method=method)
    assert found.ok, str(found)


@pytest.mark.parametrize("tokens", [1, 2])
def test_an_expert_with_one_token(tokens, method):
    """Also as many tokens as examples have, and fewer."""

    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            flat = self.head(x).reshape(-1, WIDTH)
            rows = x[..., 0].flatten().argsort(descending=True)[:tokens] if len(x) > 1 else self.rows(x)
            return flat.index_add(0, rows, self.lin(flat[rows])).view_as(x)

        def rows(self, x: Tensor) -> Tensor:  # the same choice, for an example alone
            return torch.where(torch.isin(x[0, :, 0], batch()[0][..., 0].flatten().topk(tokens).values))[0]

    found = rgp.check(One(), batch(), losses, method=method)
    assert found.ok, str(found)


WAYS = {
    "sorted": lambda self, rows: self.lin(rows.sort(0).values),
    "turned round": lambda self, rows: self.lin(rows.flip(0)),
    "a norm": lambda self, rows: F.group_norm(rows, 2, self.w, self.w),
    "without a rule": lambda self, rows: torch.cdist(rows, self.lin.weight),
    "mixed": lambda self, rows: self.lin(rows.cumsum(0)),
}


class Picked(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.lin, self.w = way, nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, WIDTH)
        index = torch.tensor([5, 0, 1, 2, 11, 9, 20, 21])[: 2 * len(x)] % len(flat)
        return (x * self.w).flatten(1) + WAYS[self.way](self, flat[index]).sum()


@pytest.mark.parametrize("way", WAYS)
def test_rows_whose_owners_are_lost_are_refused(way):
    """Eight rows for four examples: by their number they could be taken for two of each."""
    with pytest.raises(rgp.UnsupportedError, match=r"picked out of the batch"):
        rgp.check(Picked(way), batch(), losses, method=rgp.DPSGD(fallback="error"))
    found = rgp.check(Picked(way), batch(), losses, method=rgp.DPSGD())  # alone: then it shows that examples are mixed
    assert found.alone and (not found.ok or found.worst == 0)  # distances are so large that no gradient is left


def test_rows_put_back_elsewhere_are_refused():
    class Shuffled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            flat = x.reshape(-1, WIDTH)
            index = torch.tensor([3, 1, 0, 2]) * LENGTH
            if len(x) == 1:
                return self.head(self.lin(x))
            y = torch.zeros_like(flat).index_add_(0, index, self.lin(flat[index.flip(0)]))
            return self.head(y).view_as(x)

    with pytest.raises(rgp.UnsupportedError, match=r"picked out of the batch"):
        rgp.check(Shuffled(), batch(), losses, method=rgp.DPSGD(fallback="error"))
    found = rgp.check(Shuffled(), batch(), losses, method=rgp.DPSGD())  # alone: then it shows that examples are mixed
    assert found.alone and not found.ok


def test_rows_picked_in_the_order_of_the_examples_are_ordinary(method):
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            last = (x[..., 0] > 0).long().sum(1) % x.shape[1]
            y = self.norm(x[torch.arange(len(x)), last])
            mask = torch.arange(x.shape[1]) == last[:, None]
            return self.lin(y) + self.lin(x[mask].view(len(x), -1))

    found = rgp.check(Last(), batch(), losses, method=method)
    assert found.ok, str(found)
