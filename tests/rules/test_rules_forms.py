"""Parameters that are cast, viewed, sliced or computed with before they meet the batch, and parameters that all examples
share: against autograd, one example at a time, in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import rgp
from helpers import seeded, spread
from layers import Calls, squares

EXAMPLES = 4
METHODS = {
    "rgp": rgp.RGP(rank=2, fallback="error"),
    "left": rgp.RGP(rank=2, sides="left", fallback="error"),
    "dpsgd": rgp.DPSGD(fallback="error"),
}


@pytest.fixture(params=["rgp", "dpsgd", "dpsgd, deferred"])
def method(request, monkeypatch):
    if "deferred" in request.param:
        monkeypatch.setattr("rgp.slots.LARGEST_DENSE", 0)
    return METHODS[request.param.split(",")[0]]


def matrix(*shape: int) -> Tensor:
    return 0.3 * torch.randn(shape, generator=seeded(2))


def losses(model: nn.Module, batch: Any) -> Tensor:
    return squares(model, batch).mean()


def check(model: nn.Module, *shape: int, method: rgp.Method, m: int = EXAMPLES, tolerance: float = 1e-9) -> rgp.Plan:
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn(parameter.shape))
    x = torch.randn(m, *shape, generator=seeded(1), dtype=torch.float64)
    found = rgp.check(model, (x, spread(m)), losses, method=method, tolerance=tolerance)
    assert found.ok, str(found)
    assert len(found.errors) == len(list(model.parameters()))
    return rgp.make_plan(model, method)


FORMS = {
    "to": lambda self, x: F.linear(x, self.W.to(x.dtype)),
    "type_as": lambda self, x: F.linear(x, self.W.type_as(x)),
    "the batch as the parameter": lambda self, x: F.linear(x.type_as(self.W).to(self.W), self.W.to(x)),
    "a shape as the parameter's": lambda self, x: x @ x.new_ones(64).view_as(self.W) + F.linear(x, self.W),
    "clone": lambda self, x: x @ self.W.clone().T,
    "view": lambda self, x: F.linear(x, self.W.view(4, 2, 8).reshape(8, 8)),
    "permute": lambda self, x: F.linear(x, self.W.permute(1, 0)),
    "squeeze": lambda self, x: x @ self.W.unsqueeze(0).squeeze(0),
    "expand": lambda self, x: x * self.W[:1, :].expand(8, 8)[:4],
    "slice of rows": lambda self, x: F.linear(x, self.W[:5]),
    "one row": lambda self, x: x * self.W[3],
    "slices joined": lambda self, x: F.linear(x, torch.cat([self.W[4:], self.W[:4]])),
    "chunks": lambda self, x: sum(F.linear(x, w) for w in self.W.chunk(2)),
    "stacked": lambda self, x: F.linear(x, torch.stack([self.W, self.W.exp()]).sum(0)),
    "exp": lambda self, x: x * -torch.exp(self.W[0]),
    "softplus": lambda self, x: F.linear(x, F.softplus(self.W)),
    "one plus": lambda self, x: x * (1.0 + self.W[0]),
    "normalised": lambda self, x: F.linear(x, F.normalize(self.W, dim=1)),
    "product of parameters": lambda self, x: F.linear(x, self.W @ self.V.T),
    "low rank": lambda self, x: F.linear(x, self.W + self.V * 0.5),
    "matrix exponential": lambda self, x: x @ torch.linalg.matrix_exp(self.W - self.W.T),
    "stack of matrices": lambda self, x: (x.unsqueeze(1) @ self.W.view(2, 4, 8).mT).flatten(1, 2),
    "from the left": lambda self, x: self.W[:, :4] @ x,
    "a vector": lambda self, x: (x @ self.W[0]).unsqueeze(-1) * x,
    "subtracted": lambda self, x: self.W[:4] - x,
    "divided": lambda self, x: x / (2 + self.W[0].square()),
    "divides": lambda self, x: self.W[0] / (2 + x.square()),
    "a power": lambda self, x: (1 + x.square()) ** self.W[:4],
    "maximum": lambda self, x: torch.maximum(x, self.W[:4]),
    "where": lambda self, x: torch.where(x > 0, x, self.W[0]),
    "lerp": lambda self, x: torch.lerp(x, self.W[:4], 0.3),
    "addcmul": lambda self, x: torch.addcmul(x, self.W[:4], x, value=0.5),
    "in place": lambda self, x: (x * 2).add_(self.W[:4]).mul_(self.V[0]),
    "augmented assignment": lambda self, x: _augmented(self, x),
    "einsum": lambda self, x: torch.einsum("btd,hkd->bthk", x, self.W.view(2, 4, 8)),
    "einsum, two parameters": lambda self, x: torch.einsum("btd,kd,kc->btc", x, self.W, self.V),
    "in place before it meets the batch": lambda self, x: x * F.relu((self.W[:4] * 2).mul_(3).add_(1), inplace=True),
    "shaped as": lambda self, x: x * self.W[:4].expand_as(x) + self.W[4].expand_as(x),
    "standardised": lambda self, x: F.linear(x, F.batch_norm(self.W.view(1, 8, 8), None, None, training=True).view(8, 8)),
    "gate": lambda self, x: torch.sigmoid(self.W[0, 0]) * x + (1 - torch.sigmoid(self.W[0, 0])) * x.square(),
    "complex": lambda self, x: torch.fft.irfft(
        torch.fft.rfft(x, dim=1) * torch.view_as_complex(self.W[:3, :].view(3, 4, 2).repeat(1, 2, 1)), n=4, dim=1
    ),
    "real times complex": lambda self, x: torch.fft.irfft(torch.fft.rfft(x, dim=1) * self.W[0] + self.V[1], n=4, dim=1),
}  # fmt: skip


def _augmented(self: nn.Module, x: Tensor) -> Tensor:
    y = x * 2
    y += self.W[:4]
    y *= self.V[0]
    y -= self.V[1]
    return y


@pytest.mark.parametrize("way", FORMS)
def test_forms_of_a_parameter(way, method):
    forward = FORMS[way]
    used = {"V": matrix(8, 8)} if "self.V" in _source(forward) or way == "augmented assignment" else {}
    check(Calls(forward, W=matrix(8, 8), **used), 4, 8, method=method)


def _source(forward: Any) -> str:
    names = forward.__code__.co_names
    return "self.V" if "V" in names else ""


def test_a_cast_to_another_precision_and_back(method):
    def forward(self, x):
        return (F.linear(x.float(), self.W.float()) * self.g.float()).double() + self.g.to(torch.float32)

    check(Calls(forward, W=matrix(8, 8), g=matrix(8)), 4, 8, method=method, tolerance=1e-5)


def test_a_real_parameter_and_a_complex_activation(method):
    """Their product has a real gradient; so has a scale of a spectrum."""

    def forward(self, x):
        z = torch.fft.fft(x, dim=-1)
        z = z * self.scale * self.other + self.shift
        return torch.cat([z.real, z.imag], -1)

    check(Calls(forward, scale=matrix(8), other=matrix(4, 1), shift=matrix(8)), 4, 8, method=method)


@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm", "orthogonal"])
@pytest.mark.parametrize("layer", ["linear", "conv"])
def test_parametrizations(name, layer, method):
    body = nn.Linear(8, 8) if layer == "linear" else nn.Conv1d(4, 6, 3)
    check(nn.Sequential(getattr(parametrizations, name)(body), nn.Tanh()), 4, 8, method=method)


class Tokens(nn.Module):
    """A class token, positions as a slice, a second table by ids, a masked token, a learned query, a gate."""

    def __init__(self, batched: bool) -> None:
        super().__init__()
        self.batched = batched
        self.cls, self.pos, self.query = (nn.Parameter(matrix(1, n, 8)) for n in (1, 9, 2))
        self.missing = nn.Parameter(matrix(8))
        self.table, self.kinds = nn.Embedding(12, 8), nn.Embedding(2, 8)
        self.lin, self.norm, self.key = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)
        self.register_buffer("type_ids", torch.zeros(1, 12, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        m, T, _ = x.shape
        ids = torch.arange(T)
        x = torch.where(x[..., :1] > 1, self.missing, x)
        x = x + self.pos[:, :T] + self.table(ids.unsqueeze(0) if self.batched else ids)
        x = x + self.kinds(self.type_ids[:, :T].expand(m, -1))
        x = torch.cat([self.cls.expand(m, -1, -1), x, self.lin(self.query).repeat(m, 1, 1)], dim=1)
        x = self.norm(x)
        return F.scaled_dot_product_attention(self.lin(self.query).expand(m, -1, -1), self.key(x), x)


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("length", [4, 8, 5])
def test_tokens_and_positions(length, batched, method):
    """Also where the length is the number of examples, or a multiple of it."""
    check(Tokens(batched), length, 8, method=method)


def test_one_example(method):
    check(Tokens(True), 5, 8, method=method, m=1)


class RelativeBias(nn.Module):
    """As in Swin: a table by an index that is a buffer, added to the scores of windows (m windows, heads, T, T)."""

    def __init__(self, windows: int) -> None:
        super().__init__()
        self.windows = windows
        self.bias_table, self.log_scale = nn.Parameter(matrix(7, 2)), nn.Parameter(matrix(2, 1, 1))
        self.qkv, self.mlp = nn.Linear(8, 24), nn.Sequential(nn.Linear(1, 6), nn.ReLU(), nn.Linear(6, 2, bias=False))
        self.register_buffer("index", (torch.arange(4)[:, None] - torch.arange(4)[None]) + 3)
        self.register_buffer("coords", torch.linspace(-1, 1, 7).unsqueeze(-1))

    def forward(self, x: Tensor) -> Tensor:
        m = len(x)
        x = x.reshape(m * self.windows, 4, 8)
        q, k, v = (t.view(-1, 4, 2, 4).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT
        scores = scores * self.log_scale.clamp(max=math.log(100)).exp()
        table = self.bias_table + 16 * torch.sigmoid(self.mlp(self.coords).view(-1, 2))
        bias = table[self.index.view(-1)].view(4, 4, 2).permute(2, 0, 1).contiguous()
        return ((scores + bias.unsqueeze(0)).softmax(-1) @ v).reshape(m, -1)


@pytest.mark.parametrize("windows", [1, 2, 3])
def test_relative_position_bias(windows, method):
    check(RelativeBias(windows), windows, 4, 8, method=method, m=3)


class Shared(nn.Module):
    """Trained layers on what does not come from the batch (a fault of version 0: rows were taken for examples)."""

    def __init__(self, rows: int, where: str) -> None:
        super().__init__()
        self.where = where
        self.table = nn.Embedding(rows, 8).requires_grad_(where == "trained")
        self.register_buffer("buffer", torch.randn(rows, 8))
        self.kept = torch.randn(rows, 8, dtype=torch.float64)
        self.key, self.norm, self.gain = nn.Linear(8, 8), nn.LayerNorm(8), nn.Parameter(matrix(8))

    def forward(self, x: Tensor) -> Tensor:
        table = {"buffer": self.buffer, "attribute": self.kept}.get(self.where, self.table.weight)
        return (x @ (self.norm(self.key(table)) * self.gain).T).softmax(-1)


@pytest.mark.parametrize("where", ["trained", "frozen", "buffer", "attribute"])
@pytest.mark.parametrize("rows", [4, 8, 5])
def test_layers_applied_to_a_table(rows, where, method):
    model = Shared(rows, where)
    if where != "trained":
        del model.table
        model.table = nn.Module()
        model.table.weight = nn.Parameter(torch.randn(rows, 8), requires_grad=False)
    torch.manual_seed(0)
    x = torch.randn(EXAMPLES, 3, 8, generator=seeded(1), dtype=torch.float64)
    found = rgp.check(model, (x, spread(EXAMPLES)), losses, method=method)
    assert found.ok, str(found)
    assert {"key.weight", "norm.weight", "gain"} <= set(found.errors)


def test_learned_queries_that_go_through_layers_of_their_own(method):
    """As in Perceiver: all of it is the same for all examples, until it meets the batch in a product with their rows."""

    def forward(self, x):
        query = self.to_query(self.norm(self.latents.expand(len(x), -1, -1)))
        scores = torch.matmul(query, self.to_key(x).mT)
        return torch.einsum("blt,btd->bld", scores.softmax(-1), x) + torch.einsum("bld,blt->btd", query, scores)[:, :3]

    model = Calls(
        forward, latents=matrix(1, 3, 8), norm=nn.LayerNorm(8), to_query=nn.Linear(8, 8), to_key=nn.Linear(8, 8)
    )
    for length in (4, 5):
        check(model, length, 8, method=method)


@pytest.mark.parametrize("reentrant", [True, False])
def test_forms_in_activation_checkpoints(reentrant, method):
    def part(self, x):
        return torch.tanh(F.linear(x, F.softplus(self.W).view(8, 8)) + self.pos[:4].exp())

    def forward(self, x):
        return checkpoint(part, self, self.first(x), use_reentrant=reentrant)

    check(Calls(forward, W=matrix(8, 8), pos=matrix(6, 8), first=nn.Linear(8, 8)), 4, 8, method=method)


def test_a_form_that_was_changed_in_place_is_refused():
    def forward(self, x):
        weight = self.W.clone()
        weight[0] = 0
        return F.linear(x, weight)

    with pytest.raises(rgp.UnsupportedError, match=r"'W' was changed in place"):
        check(Calls(forward, W=matrix(8, 8)), 4, 8, method=METHODS["dpsgd"])


def test_a_form_that_is_used_after_it_was_changed_is_refused():
    def forward(self, x):
        weight = self.W * 2
        weight.mul_(3)
        return F.linear(x, weight)

    with pytest.raises(rgp.UnsupportedError, match=r"'W' was changed in place"):
        check(Calls(forward, W=matrix(8, 8)), 4, 8, method=METHODS["dpsgd"])


def test_a_form_kept_from_an_earlier_batch_is_refused():
    def forward(self, x):
        if not hasattr(self, "kept"):
            self.kept = [self.W.exp()]
        return x * self.kept[0] + self.b

    model = Calls(forward, W=matrix(8), b=matrix(8)).double()
    data = [(torch.randn(4, 8, dtype=torch.float64), torch.tensor(1.0).double()) for _ in range(4)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = rgp.privatize(
        model,
        optimizer,
        data,
        batch_size=4,
        steps=2,
        microbatch_size=4,
        noise_multiplier=1.0,
        clip=1.0,
        method=rgp.DPSGD(),
        probe=False,
    )
    with run:
        batches = iter(run)
        run.step(losses(model, next(batches)))
        late = losses(model, next(batches))
        with pytest.raises(rgp.WrongUseError, match=r"'W' alone reached the loss outside"):
            run.step(late)


def test_a_penalty_on_the_weights_is_told_to_use_weight_decay():
    model = Calls(lambda self, x: F.linear(x, self.W), W=matrix(8, 8))

    def penalised(model, batch):
        return losses(model, batch) + 0.01 * model.W.square().sum()

    batch = (torch.randn(4, 4, 8, dtype=torch.float64), spread(4))
    with pytest.raises(rgp.UnsupportedError, match=r"^use the optimizer's weight_decay .*'W'"):
        rgp.check(model, batch, penalised, method=rgp.DPSGD())


@pytest.mark.parametrize("steps", [3, 8])
def test_an_einsum_with_the_steps_first_goes_alone(steps):
    """A letter of the examples' number, but not the first, may be anything: each example goes alone."""
    model = Calls(lambda self, x: torch.einsum("ibd,kd->bik", x.transpose(0, 1), self.W), W=matrix(8, 8))
    batch = (torch.randn(EXAMPLES, steps, 8, generator=seeded(1), dtype=torch.float64), spread(EXAMPLES))
    found = rgp.check(model, batch, losses, method=rgp.DPSGD())
    assert "'W'" in found.alone and "einsum" in found.alone and found.ok  # with one example at a time it can be told


@pytest.mark.parametrize("experts", [4, 8])
def test_a_stack_of_experts_is_not_taken_for_examples(experts):
    """Rows of a parameter are no examples, be they as many; nor if all of them are zero."""

    def forward(self, x):
        sent = x.reshape(experts, -1, 8)
        return torch.bmm(sent, self.W.mT).reshape(x.shape)

    for start in (matrix(experts, 8, 8), torch.zeros(experts, 8, 8)):
        model = Calls(forward, W=start)
        batch = (torch.randn(4, 4, 8, dtype=torch.float64), spread(4))
        with pytest.raises(rgp.UnsupportedError, match=r"'W'.*not the 4 examples"):
            rgp.check(model, batch, losses, method=rgp.DPSGD(fallback="loop" if experts == 8 else "error"))


class Written(nn.Module):
    """A table of positions that is written into a tensor of the model's, once for all examples or row by row."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.W, self.V = way, nn.Parameter(matrix(8, 8)), nn.Parameter(matrix(8))

    def forward(self, x: Tensor) -> Tensor:
        whole = torch.zeros(len(x), 8, 8, dtype=x.dtype)
        if self.way == "all rows":
            whole[:, :5] = self.W[:5]
            whole[:, 5] = self.V
        else:
            for i in range(len(x)):
                whole[i, : 5 if self.way == "alike" else 3 + i] = self.W[:5] if self.way == "alike" else self.W[: 3 + i]
                whole[i, -1] = self.V * (i + 1 if self.way == "unlike" else 1)
        return (x * whole).flatten(1).tanh()


@pytest.mark.parametrize("way", ["all rows", "alike"])
def test_parameters_that_are_written_into_a_tensor(way, method):
    check(Written(way), 8, 8, method=method)


def test_other_rows_for_each_example_are_not_taken_for_copies_of_one():
    batch = (torch.randn(EXAMPLES, 8, 8, generator=seeded(1), dtype=torch.float64), spread(EXAMPLES))
    with pytest.raises(rgp.UnsupportedError, match="has a row for each row"):
        rgp.check(Written("unlike"), batch, losses, method=METHODS["dpsgd"])


def test_a_form_into_which_a_parameter_is_written_is_refused():
    class Overwritten(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.W = nn.Parameter(matrix(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            form = self.W * 2
            form[0] = self.W[1]
            return F.linear(x, form)

    with pytest.raises(rgp.UnsupportedError, match="changed in place"):
        check(Overwritten(), 8, method=METHODS["dpsgd"])
