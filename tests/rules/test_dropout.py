"""Dropout under capture: the right rate and scale, torch's results where there is no dropout, checkpoints recompute it."""

import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import nn

import rgp
import rgp.rules
from rgp.capture import Capture

rgp.rules.load()


@pytest.fixture
def capture():
    mode = Capture({})
    mode.begin(4)
    with mode:
        yield mode


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_rate_and_scale(capture, p):
    torch.manual_seed(0)
    x = torch.ones(400_000, requires_grad=True)
    y = F.dropout(x, p, True)
    kept = int((y != 0).sum())
    assert stats.binomtest(kept, y.numel(), 1 - p).pvalue > 1e-4
    assert stats.binomtest(kept, y.numel(), (1 - p) * 0.98).pvalue < 1e-4
    assert torch.allclose(y[y != 0], torch.tensor(1 / (1 - p)), rtol=1e-3)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad, y.detach())


def test_masks_are_fresh_and_follow_the_seed(capture):
    x = torch.ones(1000, requires_grad=True)
    torch.manual_seed(1)
    first, second = F.dropout(x, 0.5), F.dropout(x, 0.5)
    torch.manual_seed(1)
    again = F.dropout(x, 0.5)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_no_dropout_in_evaluation(capture):
    x = torch.ones(10, requires_grad=True)
    assert torch.equal(F.dropout(x, 0.5, False), x)


@pytest.mark.parametrize("mask", ["none", "bool", "float", "causal", "empty row"])
def test_attention_equals_torch_up_to_the_mask(capture, mask, monkeypatch):
    """With the dropout itself taken out, ours must be torch's."""
    from rgp.rules import dropout

    class Product:
        @staticmethod
        def apply(weights, value, p):
            return weights @ value

    monkeypatch.setattr(dropout, "_DroppedProduct", Product)
    q, k, v = (torch.randn(2, 4, 5, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    options = {"is_causal": mask == "causal"}
    if mask in ("bool", "empty row"):
        options["attn_mask"] = torch.rand(2, 1, 5, 5) < 0.7
        if mask == "empty row":
            options["attn_mask"][0, 0, 2] = False
        else:
            options["attn_mask"] |= torch.eye(5, dtype=torch.bool)
    if mask == "float":
        options["attn_mask"] = torch.randn(5, 5, dtype=torch.float64)
    ours = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, **options)
    capture.end()
    theirs = F.scaled_dot_product_attention(q, k, v, dropout_p=0.0, **options)
    assert torch.allclose(ours, theirs, atol=1e-12)


@pytest.mark.parametrize("bfloat16", [False, True])
def test_gradients_of_attention_with_a_mask_are_autograds(capture, bfloat16, monkeypatch):
    from rgp.rules import dropout

    kept = torch.rand(2, 4, 5, 5) < 0.6
    monkeypatch.setattr(dropout, "_mask", lambda x, threshold: kept)
    q, k, v = (torch.randn(2, 4, 5, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    inputs = [t.bfloat16() for t in (q, k, v)] if bfloat16 else [q, k, v]
    y = F.scaled_dot_product_attention(*inputs, dropout_p=0.5)
    capture.end()
    g = torch.randn_like(y)
    ours = torch.autograd.grad(y, (q, k, v), g)
    weights = torch.softmax(q @ k.mT / 8**0.5, -1) * kept * 2
    theirs = torch.autograd.grad(weights @ v, (q, k, v), g.double())
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, atol=0.1 if bfloat16 else 1e-12)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_sees_the_same_mask(reentrant):
    from torch.utils.checkpoint import checkpoint

    mode = Capture({})
    x = torch.randn(64, requires_grad=True)

    def block(x):
        return F.dropout(x, 0.5) * x

    grads = []
    for use in (False, True):
        torch.manual_seed(3)
        mode.begin(4)
        mode.in_backward = True
        with mode:
            y = checkpoint(block, x, use_reentrant=reentrant) if use else block(x)
            torch.autograd.backward(y.sum())
        grads.append(x.grad.clone())
        x.grad = None
    assert torch.equal(*grads)


@pytest.mark.parametrize("kind", ["scaled_dot_product", "multihead"])
def test_attention_dropout_does_not_mislead_the_rehearsal(kind):
    """Its masks differ from row to row and stay where they are when examples are exchanged, as positions would."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
            self.head = nn.Linear(8, 2)

        def forward(self, x):
            if kind == "multihead":
                x = self.attention(x, x, x, need_weights=False)[0]
            else:
                x = nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5 * self.training)
            return self.head(x[:, 0])

    torch.manual_seed(0)
    data = [(torch.randn(4, 8), i % 2) for i in range(24)]
    model = Attention().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with rgp.privatize(model, optimizer, data, noise_multiplier=1.0, batch_size=12, steps=1) as run:
        passes = 0
        for x, y in run:
            passes += run.rehearsing
            run.step(F.cross_entropy(model(x), y))
    assert run.step_index == 1 and 0 < passes < 10  # nobody took dropout for random numbers that are to be looked into
