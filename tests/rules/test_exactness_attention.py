"""Exactness of attention and transformer layers; recurrent layers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import rgp
from helpers import (
    check_exact,
    privatize,
    seeded,
    spread,
    train,
)
from layers import CARRIED, EXACT, EXAMPLES, METHODS, check, examples, squares

# -------- attention


def attention_inputs(count: int = EXAMPLES) -> list[dict[str, Tensor]]:
    rng = seeded(5)
    data = []
    for i, weight in enumerate(spread(count)):
        data.append(
            {
                "x": torch.randn(6, 16, generator=rng, dtype=torch.float64),
                "memory": torch.randn(4, 16, generator=rng, dtype=torch.float64),
                "padding": torch.arange(6) >= 6 - i % 3,
                "memory_padding": torch.arange(4) >= 4 - i % 2,
                "weight": weight,
            }
        )
    return data


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("norm_first", [True, False])
def test_transformer_encoder_layer(norm_first, training, method):
    layer = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True, norm_first=norm_first).train(training)

    def losses(model, batch):
        y = model(batch["x"], src_key_padding_mask=batch["padding"]).masked_fill(batch["padding"].unsqueeze(-1), 0)
        return (y - 0.3).square().sum((1, 2)) * batch["weight"]

    check(layer, data=attention_inputs(), losses=losses, method=method, family="nn.TransformerEncoderLayer")


def test_transformer_encoder_and_decoder():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            sizes = {"d_model": 16, "nhead": 4, "dim_feedforward": 24, "dropout": 0.0, "batch_first": True}
            self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(**sizes), 2)
            self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(**sizes), 2)

        def forward(self, batch):
            memory = self.encoder(batch["memory"], src_key_padding_mask=batch["memory_padding"])
            causal = nn.Transformer.generate_square_subsequent_mask(6, dtype=torch.float64)
            return self.decoder(
                batch["x"], memory, tgt_mask=causal, tgt_is_causal=True, memory_key_padding_mask=batch["memory_padding"]
            )

    def losses(model, batch):
        return (model(batch) - 0.3).square().sum((1, 2)) * batch["weight"]

    check(Both(), data=attention_inputs(), losses=losses, family="nn.Transformer")


ATTENTION = {
    "self": {},
    "self, padded": {"pad": True},
    "self, causal mask": {"mask": "causal"},
    "self, mask per head": {"mask": "heads", "pad": True},
    "cross": {"cross": True},
    "cross, padded": {"cross": True, "pad": True},
    "zero attention": {"pad": True, "options": {"add_zero_attn": True}},
    "without bias": {"options": {"bias": False}},
    "other key and value sizes": {"cross": True, "options": {"kdim": 16, "vdim": 8, "bias": False}},
    "sequence first": {"pad": True, "options": {"batch_first": False}},
    "weights per head": {"average": False, "pad": True},
}


@pytest.mark.parametrize("method", [CARRIED, METHODS["left"], EXACT], ids=["carried", "left", "exact"])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("case", ATTENTION)
def test_multihead_attention(case, need_weights, method):
    setting = ATTENTION[case]
    options = {"batch_first": True, **setting.get("options", {})}
    attention = nn.MultiheadAttention(16, 4, **options)

    def losses(model, batch):
        x, memory = batch["x"], batch["memory"] if setting.get("cross") else batch["x"]
        value = memory[..., : options.get("vdim", 16)] if "vdim" in options else memory
        padding = batch["memory_padding"] if setting.get("cross") else batch["padding"]
        mask = None
        if setting.get("mask") == "causal":
            mask = torch.ones(6, 6, dtype=torch.bool).triu(1)
        elif setting.get("mask") == "heads":
            mask = (
                torch.linspace(-1, 1, 4 * 36, dtype=torch.float64)
                .view(1, 4, 6, 6)
                .expand(len(x), -1, -1, -1)
                .flatten(0, 1)
            )
        if not options["batch_first"]:
            x = memory = value = x.transpose(0, 1)
        y, weights = model(
            x, memory, value, key_padding_mask=padding if setting.get("pad") else None, attn_mask=mask,
            need_weights=need_weights, average_attn_weights=setting.get("average", True),
        )  # fmt: skip
        if not options["batch_first"]:
            y = y.transpose(0, 1)
        loss = (y - 0.3).square().sum((1, 2))
        assert (weights is not None) == need_weights
        if weights is not None:
            loss = loss + weights.square().flatten(1).sum(1)
        return loss * batch["weight"]

    check(attention, data=attention_inputs(), losses=losses, method=method, family="nn.MultiheadAttention")


def test_attention_dropout_is_the_same_with_and_without_capture():
    """Same seed, same masks: the rule for attention draws its dropout where PyTorch does."""
    attention = nn.MultiheadAttention(16, 4, dropout=0.5, batch_first=True).double()
    x = attention_inputs()
    run = privatize(attention, x, method=CARRIED)
    for batch in run:
        for need_weights in (True, False):
            torch.manual_seed(3)
            inside, _ = attention(batch["x"], batch["x"], batch["x"], need_weights=need_weights)
            torch.manual_seed(3)
            with torch.no_grad():
                outside, _ = attention(batch["x"], batch["x"], batch["x"], need_weights=need_weights)
            torch.testing.assert_close(inside, outside, rtol=1e-12, atol=1e-12)
        break
    run.close()


def test_attention_with_sequence_first_transformers_is_not_guessed_at():
    """Positions first, examples second: the linear layers of the block cannot tell. Each example goes alone, or none at all."""
    for length in (6, 5, 10):  # 5 examples: as many as positions, or a multiple
        layer = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=False).double()
        data = [(torch.randn(length, 16, dtype=torch.float64), w) for w in spread(5)]
        run = privatize(layer, data, method=CARRIED, microbatch_size=5)

        def losses(layer, batch):
            return layer(batch[0].transpose(0, 1)).square().sum((0, 2)) * batch[1]

        if length == 5:
            with pytest.raises(rgp.UnsupportedError, match="batch_first"):
                train(run, layer, losses)
        else:
            with pytest.warns(UserWarning, match=r"goes through the model alone.*batch_first"):
                train(run, layer, losses)
            assert run.loading.microbatch_size == 1
        run.close()


@pytest.mark.parametrize("module", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("method", [CARRIED, rgp.DPSGD()], ids=["rgp", "dpsgd"])
def test_recurrent_layers(module, method):
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = module(4, 8, num_layers=2, bidirectional=True, batch_first=True), nn.Linear(16, 3)

        def forward(self, x):
            return self.head(self.rnn(x)[0][:, -1])

    plan = check_exact(Last().double(), examples(3, 4), squares, method=method, family="recurrent")
    assert plan["rnn.weight_ih_l0"].treatment != "frozen"


def test_a_frozen_lstm_under_a_trained_head_is_right():
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.head = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 3)

        def forward(self, x):
            return self.head(self.lstm(x)[0])

    check(Tagger(), 5, 4, method=rgp.RGP(rank=1, overrides={"lstm.*": "frozen"}))
