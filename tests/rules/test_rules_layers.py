"""Layers with rules of their own, and the fallback for those without: against autograd, one example at a time, float64."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rgp
from helpers import seeded, spread

EXAMPLES = 4
METHODS = {"rgp": rgp.RGP(rank=2, fallback="error"), "dpsgd": rgp.DPSGD(fallback="error")}


@pytest.fixture(params=["rgp", "dpsgd", "dpsgd, deferred"])
def method(request, monkeypatch):
    if "deferred" in request.param:
        monkeypatch.setattr("rgp.slots.LARGEST_DENSE", 0)
    return METHODS[request.param.split(",")[0]]


def squares(y: Tensor, weight: Tensor) -> Tensor:
    target = torch.linspace(-1, 1, y[0].numel(), dtype=y.dtype).view(y.shape[1:])
    return ((y.tanh() - target).square().flatten(1).sum(1) * weight).mean()


def check(
    model: nn.Module, *inputs: Tensor, method: rgp.Method, run: Any = lambda model, *x: model(*x), m: int = EXAMPLES
) -> None:
    """The engine's gradients of all parameters, and that none was left out."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn(parameter.shape, dtype=parameter.dtype))
    found = rgp.check(model, (*inputs, spread(m)), lambda model, b: squares(run(model, *b[:-1]), b[-1]), method=method)
    assert found.ok, str(found)
    assert len(found.errors) == len(list(model.parameters()))


def normal(*shape: int) -> Tensor:
    return torch.randn(EXAMPLES, *shape, generator=seeded(3), dtype=torch.float64)


# -------- recurrent layers

RECURRENT = {
    "plain": {},
    "two layers": {"num_layers": 2},
    "both directions": {"bidirectional": True},
    "two layers, both directions": {"num_layers": 2, "bidirectional": True},
    "no biases": {"bias": False},
    "dropout": {"num_layers": 2, "dropout": 0.5},
}


def output_and_states(model: nn.Module, x: Tensor, *hx: Tensor) -> Tensor:
    """The outputs and the final states, examples first."""
    batch_first = model.batch_first
    hx = tuple(h.transpose(0, 1).contiguous() for h in hx)
    y, final = model(x if batch_first else x.transpose(0, 1), (hx if len(hx) > 1 else hx[0]) if hx else None)
    final = final if isinstance(final, tuple) else (final,)
    y = y if batch_first else y.transpose(0, 1)
    return torch.cat([y.flatten(1), *(f.transpose(0, 1).flatten(1) for f in final)], 1)


@pytest.mark.parametrize("case", RECURRENT)
@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_recurrent_layers(kind, case, method):
    for batch_first in (True, False):
        model = kind(5, 6, batch_first=batch_first, **RECURRENT[case])
        keys = list(model.state_dict())
        check(model, normal(3, 5), method=method, run=output_and_states)
        assert list(model.state_dict()) == keys


@pytest.mark.parametrize("bidirectional", [False, True])
def test_an_lstm_with_projections_and_a_given_state(bidirectional, method):
    model = nn.LSTM(5, 8, num_layers=2, proj_size=3, batch_first=True, bidirectional=bidirectional)
    n = 4 if bidirectional else 2
    check(model, normal(3, 5), normal(n, 3), normal(n, 8), method=method, run=output_and_states)


def test_a_relu_rnn_with_a_given_state(method):
    check(nn.RNN(5, 6, nonlinearity="relu"), normal(3, 5), normal(1, 6), method=method, run=output_and_states)


def test_as_many_steps_as_examples(method):
    """A layout with steps first that looks like examples first: the layer says which it is."""
    for batch_first in (True, False):
        check(nn.LSTM(5, 6, batch_first=batch_first), normal(EXAMPLES, 5), method=method, run=output_and_states)


def test_a_recurrent_layer_in_a_model(method):
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.lstm, self.head = (
                nn.Embedding(9, 5),
                nn.LSTM(5, 6, 2, batch_first=True),
                nn.Linear(6, 3),
            )

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(checkpoint(self.lstm, self.embedding(ids), use_reentrant=False)[0][:, -1])

    ids = torch.randint(9, (EXAMPLES, 5), generator=seeded(5))
    check(Tagger(), ids, method=method)


def test_the_written_out_steps_are_those_of_torch():
    """The forward pass itself, under the capture and without it."""
    for kind, options in itertools.product((nn.RNN, nn.LSTM, nn.GRU), RECURRENT.values()):
        torch.manual_seed(0)
        model = kind(5, 6, batch_first=True, **options).double().eval()
        seen = []

        def loss(model, batch, seen=seen):
            y = output_and_states(model, batch[0])
            seen.append(y.detach())
            return y.square().flatten(1).sum(1).mean()

        rgp.check(model, (normal(3, 5),), loss, method=rgp.DPSGD())
        torch.testing.assert_close(seen[0], torch.cat(seen[1:]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", [nn.RNNCell, nn.LSTMCell, nn.GRUCell])
def test_cells_in_a_loop(kind, method):
    def run(model, x):
        state = None
        for t in range(x.shape[1]):
            state = model(x[:, t], state)
        return torch.cat(state, 1) if isinstance(state, tuple) else state

    check(kind(5, 6), normal(3, 5), method=method, run=run)


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_a_packed_sequence_goes_alone_or_is_refused_with_the_way_out(kind):
    model = kind(5, 6, 2, batch_first=True, bidirectional=True)

    def losses(model, batch):
        x, lengths, weight = batch
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        packed, state = model(packed)
        y = nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)[0]
        state = state[0] if isinstance(state, tuple) else state
        each = torch.cat([y.sum(1), state.transpose(0, 1).flatten(1)], 1).tanh().square().sum(1)
        return (each * weight).mean()

    batch = (normal(3, 5), torch.tensor([3, 3, 2, 1]), spread(EXAMPLES))
    found = rgp.check(model, batch, losses, method=rgp.DPSGD())
    assert found.ok, str(found)
    assert len(found.errors) == 16 and "PackedSequence" in found.alone
    with pytest.raises(rgp.UnsupportedError, match=r"'weight_ih_l0' met a PackedSequence.*padded tensor"):
        rgp.check(model, batch, losses, method=METHODS["dpsgd"])


# -------- transposed convolutions

GEOMETRIES = [
    {"kernel_size": 3},
    {"kernel_size": 3, "stride": 2, "padding": 1, "output_padding": 1},
    {"kernel_size": 2, "stride": 3, "output_padding": 2},
    {"kernel_size": 3, "dilation": 2, "stride": 2, "padding": 2},
    {"kernel_size": 3, "groups": 2, "stride": 2, "bias": False},
    {"kernel_size": 1, "stride": 2},
]


@pytest.mark.parametrize("options", GEOMETRIES, ids=lambda o: "-".join(f"{k}{v}" for k, v in o.items()))
@pytest.mark.parametrize("n", [1, 2, 3])
def test_transposed_convolutions(n, options, method):
    kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[n - 1]
    check(kind(4, 6, **options), normal(4, *[5, 4, 3][:n]), method=method)


def test_only_the_bias_of_a_transposed_convolution():
    model = nn.ConvTranspose2d(4, 6, 3)
    model.weight.requires_grad_(False)
    found = rgp.check(model, (normal(4, 3, 3), spread(4)), lambda f, b: squares(f(b[0]), b[1]), method=rgp.DPSGD())
    assert found.ok
    assert set(found.errors) == {"bias"}


# -------- others


@pytest.mark.parametrize("slopes", [1, 4])
def test_prelu(slopes, method):
    check(nn.Sequential(nn.Conv1d(3, 4, 3), nn.PReLU(slopes)), normal(3, 6), method=method)


@pytest.mark.parametrize("bias", [True, False])
def test_bilinear(bias, method):
    check(nn.Bilinear(4, 5, 6, bias=bias), normal(3, 4), normal(3, 5), method=method)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, 2])
def test_embedding_bags(mode, padding, method):
    ids = torch.randint(7, (EXAMPLES, 5), generator=seeded(4))
    check(nn.EmbeddingBag(7, 6, mode=mode, padding_idx=padding), ids, method=method)


def test_embedding_bags_by_offsets_and_with_weights():
    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag, self.scale = nn.EmbeddingBag(7, 6, mode="sum"), nn.Linear(5, 5)

        def forward(self, ids: Tensor, x: Tensor) -> Tensor:
            counts = (ids[:, 0] % 3 + 1).tolist()  # how many of an example's ids are in its bag
            flat = torch.cat([row[:n] for row, n in zip(ids, counts, strict=True)])
            offsets = torch.tensor([0, *itertools.accumulate(counts)][:-1])
            return self.bag(flat, offsets) + self.bag(ids, per_sample_weights=self.scale(x))

    ids = torch.randint(7, (EXAMPLES, 5), generator=seeded(4))
    check(Bags(), ids, normal(5), method=METHODS["dpsgd"])


def test_rows_of_a_table_by_ids_of_the_batch(method):
    class Prototypes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(7, 6))

        def forward(self, ids: Tensor) -> Tensor:
            return self.table[ids - 7]

    if method.carries:
        with pytest.raises(rgp.UnsupportedError, match="cannot be carried"):
            check(Prototypes(), torch.randint(7, (EXAMPLES, 3)), method=method)
    else:
        check(Prototypes(), torch.randint(7, (EXAMPLES, 3), generator=seeded(4)), method=method)


class Reader(nn.Module):
    """Attention of learned queries to the batch, and of the batch to learned keys; of other sizes, with a joint bias."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.query, self.memory = nn.Parameter(torch.randn(1, 2, 8)), nn.Parameter(torch.randn(1, 3, 6))
        self.read = nn.MultiheadAttention(8, 2, kdim=6, vdim=6, batch_first=batch_first)
        self.recall = nn.MultiheadAttention(8, 2, kdim=6, vdim=6, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        def turned(t: Tensor) -> Tensor:
            return t if self.batch_first else t.transpose(0, 1)

        query, memory = (turned(t.expand(len(x), -1, -1)) for t in (self.query, self.memory))
        y = self.read(query, turned(x), turned(x))[0]
        return turned(self.recall(y, memory, memory)[0])


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("length", [3, EXAMPLES])
def test_attention_with_learned_queries_and_keys(length, batch_first, method):
    check(Reader(batch_first), normal(length, 6), method=method)


# -------- several rows to an example


class Film(nn.Module):
    """Frames go through convolutions as if each were an example."""

    def __init__(self, groups: int, bias: bool) -> None:
        super().__init__()
        self.down = nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=groups, bias=bias)
        self.up = nn.ConvTranspose2d(6, 4, 2, stride=2, groups=groups, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        frames = torch.tanh(self.down(x.flatten(0, 1)))
        return self.up(frames).unflatten(0, x.shape[:2]).sum((1, 3, 4))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("bias", [True, False])
def test_convolutions_of_several_frames_to_an_example(groups, bias, method):
    check(Film(groups, bias), normal(3, 4, 5, 5), method=method)


def test_frames_that_belong_to_no_example_are_refused():
    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(2, 3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x[:-1] + x[1:]).flatten().sum() * torch.ones(len(x), 1)

    with pytest.raises(rgp.UnsupportedError, match=r"'conv.weight' met an input of shape \(3, 2, 4\)"):
        check(Pairs(), normal(2, 4), method=METHODS["dpsgd"])


# -------- what has no rule


class Scan(nn.Module):
    """A cumulative scan of a gated parameter, a lookup by gather in each example's copy of a table, and a distance."""

    def __init__(self) -> None:
        super().__init__()
        self.decay, self.table, self.centres = (nn.Parameter(torch.randn(s) * 0.3) for s in ((5,), (5, 3), (6, 5)))

    def forward(self, x: Tensor) -> Tensor:
        near = torch.cdist(x, self.centres)
        picked = torch.gather(self.table.expand(len(x), -1, -1), 2, (x[..., :1] > 0).long().expand(-1, 5, -1))
        return torch.cat([torch.cumsum(x * self.decay, 1), near, picked], -1)


@pytest.mark.parametrize("name", ["rgp", "dpsgd"])
def test_the_fallback_is_exact_and_says_so_once(name):
    method = {"rgp": rgp.RGP(rank=1), "dpsgd": rgp.DPSGD()}[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check(Scan(), normal(5, 5), method=method)
    said = [str(w.message) for w in caught if "one example at a time" in str(w.message)]
    assert len(said) == 1
    assert "cdist with parameter 'centres'" in said[0]


def test_the_fallback_can_be_refused():
    with pytest.raises(rgp.UnsupportedError, match=r"'centres'.*cdist.*overrides=.*fallback='loop'"):
        check(Scan(), normal(5, 5), method=METHODS["dpsgd"])
    with pytest.raises(ValueError, match="fallback must be one of 'loop', 'error'; got 'slow'"):
        rgp.DPSGD(fallback="slow")


@pytest.mark.parametrize("way", ["steps first", "mixes", "no rows", "random", "in place"])
def test_the_fallback_refuses_what_it_cannot_tell_apart(way):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.centres = nn.Parameter(torch.randn(6, 5))

        def forward(self, x: Tensor) -> Tensor:
            if way == "steps first":
                return torch.cdist(x.transpose(0, 1).contiguous(), self.centres).transpose(0, 1)
            if way == "mixes":
                return mixing(x, self.centres)
            if way == "no rows":
                return torch.cdist(x.reshape(1, -1, 5), self.centres).reshape(len(x), -1)
            if way == "random":
                return drawing(x, self.centres)
            return (x * 1).index_add_(2, torch.arange(3), self.centres[:3, :1].T.expand(len(x), x.shape[1], 3))

    for length in (8, 3):
        if way in ("random", "in place"):
            with pytest.raises(rgp.UnsupportedError, match=r"'centres'"):
                check(Model(), normal(length, 5), method=rgp.DPSGD())
        else:  # then each example goes through the model alone, which shows whether they are mixed
            found = rgp.check(
                Model(), (normal(length, 5), spread(EXAMPLES)), lambda f, b: squares(f(b[0]), b[1]), method=rgp.DPSGD()
            )
            assert "'centres'" in found.alone and found.ok == (way != "mixes")


@torch.overrides.wrap_torch_function(lambda x, w: (x, w))
def mixing(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x - x.mean(0), w)


@torch.overrides.wrap_torch_function(lambda x, w: (x, w))
def drawing(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w) * torch.rand(())
