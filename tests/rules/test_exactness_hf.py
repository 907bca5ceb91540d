"""Exactness on Hugging Face models, fully fine-tuned: padded batches, tied embeddings, all settings of the method."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rgp
from helpers import Losses, check_exact, per_example_gradients, privatize, seeded, spread, train

transformers = pytest.importorskip("transformers")

VOCABULARY, WIDTH, LENGTH, EXAMPLES = 50, 32, 7, 5
SMALL = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BERT_LIKE = {**SMALL, **NO_DROPOUT, "intermediate_size": 48, "max_position_embeddings": 16, "num_labels": 3}


def bert() -> nn.Module:
    return transformers.BertForSequenceClassification(transformers.BertConfig(**BERT_LIKE))


def bert_eager() -> nn.Module:
    config = transformers.BertConfig(**BERT_LIKE, attn_implementation="eager")
    return transformers.BertForSequenceClassification(config)


def bert_tokens() -> nn.Module:
    return transformers.BertForTokenClassification(transformers.BertConfig(**BERT_LIKE))


def distilbert() -> nn.Module:
    config = transformers.DistilBertConfig(
        vocab_size=VOCABULARY, dim=WIDTH, n_layers=2, n_heads=4, hidden_dim=48, max_position_embeddings=16,
        num_labels=3, dropout=0.0, attention_dropout=0.0, seq_classif_dropout=0.0,
    )  # fmt: skip
    return transformers.DistilBertForSequenceClassification(config)


def roberta() -> nn.Module:
    return transformers.RobertaForSequenceClassification(transformers.RobertaConfig(**BERT_LIKE, pad_token_id=1))


def _gpt2(**more: Any) -> Any:
    return transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=2, n_head=4, n_positions=16, pad_token_id=0, bos_token_id=1,
        eos_token_id=1, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **more,
    )  # fmt: skip


def gpt2() -> nn.Module:
    return transformers.GPT2ForSequenceClassification(_gpt2(num_labels=3))


def gpt2_lm() -> nn.Module:
    model = transformers.GPT2LMHeadModel(_gpt2())
    assert model.lm_head.weight is model.transformer.wte.weight
    return model


def _t5() -> Any:
    return transformers.T5Config(
        vocab_size=VOCABULARY, d_model=WIDTH, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0,
        relative_attention_num_buckets=8, decoder_start_token_id=0,
    )  # fmt: skip


def t5() -> nn.Module:
    model = transformers.T5ForConditionalGeneration(_t5())
    assert model.lm_head.weight is model.shared.weight
    return model


def _llama(**more: Any) -> Any:
    return transformers.LlamaConfig(
        **SMALL, intermediate_size=48, num_key_value_heads=2, max_position_embeddings=16, pad_token_id=0, **more
    )


def llama() -> nn.Module:
    return transformers.LlamaForSequenceClassification(_llama(num_labels=3))


def llama_lm() -> nn.Module:
    return transformers.LlamaForCausalLM(_llama(tie_word_embeddings=True))


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=8, patch_size=4,
        num_labels=3, **NO_DROPOUT,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


# -------- data and losses


def text(count: int = EXAMPLES, length: int = LENGTH) -> list[dict[str, Tensor]]:
    """Token ids, padded on the right with 0; classes; a weight per example."""
    rng = seeded(7)
    examples = []
    for i, weight in enumerate(spread(count)):
        ids = torch.randint(3, VOCABULARY, (length,), generator=rng)
        mask = torch.arange(length) < length - (2 * i) % (length - 2)
        examples.append({"ids": ids * mask, "mask": mask.long(), "label": torch.tensor(i % 3), "weight": weight})
    return examples


def images(count: int = EXAMPLES) -> list[dict[str, Tensor]]:
    pixels = torch.randn(count, 3, 8, 8, generator=seeded(3), dtype=torch.float64)
    return [
        {"pixels": x, "label": torch.tensor(i % 3), "weight": w}
        for i, (x, w) in enumerate(zip(pixels, spread(count), strict=True))
    ]


def classify(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    if "pixels" in batch:
        logits = model(pixel_values=batch["pixels"]).logits
    else:
        logits = model(input_ids=batch["ids"], attention_mask=batch["mask"]).logits
    return F.cross_entropy(logits, batch["label"], reduction="none") * batch["weight"]


def _token_losses(logits: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    """Mean over each example's own tokens, so that no example's loss depends on another's length."""
    losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    return (losses * mask).sum(1) / mask.sum(1)


def tag(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(input_ids=batch["ids"], attention_mask=batch["mask"]).logits
    return _token_losses(logits, batch["ids"] % 3, batch["mask"]) * batch["weight"]


def next_token(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(input_ids=batch["ids"], attention_mask=batch["mask"]).logits
    return _token_losses(logits[:, :-1], batch["ids"][:, 1:], batch["mask"][:, 1:]) * batch["weight"]


def translate(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    target, mask = batch["ids"].flip(1)[:, :4], batch["mask"].flip(1)[:, :4] | 1
    logits = model(input_ids=batch["ids"], attention_mask=batch["mask"], decoder_input_ids=target).logits
    return _token_losses(logits, target, mask) * batch["weight"]


@dataclass(frozen=True)
class Family:
    name: str
    build: Callable[[], nn.Module]
    losses: Losses
    data: Callable[[], list[dict[str, Tensor]]] = text

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        model = self.build().double().train()
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # biases start at 0 and norms at 1: nothing may rest on that
                parameter.data.add_(
                    0.1 * torch.randn(parameter.shape, generator=seeded(len(name)), dtype=torch.float64)
                )
        return model


FAMILIES = [
    Family("BERT", bert, classify),
    Family("BERT, eager attention", bert_eager, classify),
    Family("BERT, token classification", bert_tokens, tag),
    Family("DistilBERT", distilbert, classify),
    Family("RoBERTa", roberta, classify),
    Family("GPT-2", gpt2, classify),
    Family("GPT-2, language model", gpt2_lm, next_token),
    Family("T5", t5, translate),
    Family("Llama", llama, classify),
    Family("Llama, language model", llama_lm, next_token),
    Family("ViT", vit, classify, images),
]
BY_NAME = {family.name: family for family in FAMILIES}


@pytest.fixture(params=FAMILIES, ids=lambda family: family.name)
def family(request: pytest.FixtureRequest) -> Family:
    return request.param


def run(which: Family, method: Any, **options: Any) -> rgp.Plan:
    # the probe does not know that what is computed without the batch (T5's relative bias) has no rows of examples
    options = {"microbatch_size": 3, "family": which.name, "probe": which.name != "T5", **options}
    return check_exact(which.model(), which.data(), which.losses, method=method, **options)


# -------- every family


def test_intrinsic_norm_over_several_micro_batches(family):
    plan = run(family, rgp.RGP(rank=2), steps=2)
    carried = [e for e in plan if e.treatment == "carried"]
    assert len(carried) >= 8


def test_paper_norm_and_vector_loss(family):
    run(family, rgp.RGP(rank=3, norm="paper", head_scale=0.1), reduction="none")


def test_alternating_sides(family):
    run(family, rgp.RGP(rank=2, sides="alternate"), steps=2, reduction="sum")


def test_dpsgd(family):
    run(family, rgp.DPSGD(head_scale=0.2))


@pytest.mark.slow
@pytest.mark.parametrize("method", [rgp.RGP(rank=2), rgp.DPSGD()], ids=["RGP", "DPSGD"])
@pytest.mark.parametrize("name", ["BERT", "GPT-2", "GPT-2, language model", "Llama, language model", "ViT"])
def test_compiled(name, method):
    which = BY_NAME[name]
    model = which.model()
    model.compile(backend="aot_eager")
    check_exact(model, which.data(), which.losses, method=method, microbatch_size=3, family=f"{name}, compiled")


# -------- the method's settings, on three

THREE = ["BERT", "GPT-2", "ViT"]


@pytest.mark.parametrize("name", THREE)
@pytest.mark.parametrize("sides", ["both", "left", "right", "alternate"])
@pytest.mark.parametrize("norm", ["intrinsic", "paper"])
def test_sides_and_norms(name, sides, norm):
    run(BY_NAME[name], rgp.RGP(rank=2, sides=sides, norm=norm, source="weight"), steps=1 + (sides == "alternate"))


@pytest.mark.parametrize("source", ["history", "weight", "random", "momentum"])
def test_sources(source):
    run(BY_NAME["BERT"], rgp.RGP(rank=2, source=source, warmup_steps=1, power_iterations=2), steps=3)


@pytest.mark.parametrize("name", THREE)
@pytest.mark.parametrize("microbatch_size", [1, 2, 5, 100])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_micro_batches_and_reductions(name, microbatch_size, reduction):
    if microbatch_size != 2 and reduction != "mean":
        pytest.skip("one size is enough for each reduction")
    run(BY_NAME[name], rgp.RGP(rank=2), microbatch_size=microbatch_size, reduction=reduction)


@pytest.mark.parametrize("name", THREE)
@pytest.mark.parametrize("method", [rgp.RGP(rank=2), rgp.RGP(rank=2, norm="paper", sides="left"), rgp.DPSGD()])
def test_without_clip_the_scale_of_the_head_changes_nothing(name, method):
    family = BY_NAME[name]
    run(family, method, clip=None)
    scaled = type(method)(**{**vars(method), "head_scale": 0.01})
    run(family, scaled, clip=None)


@pytest.mark.parametrize("clip", [0.03, 1e6])
def test_everything_or_nothing_clipped(clip):
    run(BY_NAME["BERT"], rgp.RGP(rank=2), clip=clip, family=None)


@pytest.mark.parametrize("rank", [1, {"*": 1, "*.dense.weight": 3}, "auto"])
def test_ranks(rank):
    plan = run(BY_NAME["BERT"], rgp.RGP(rank=rank))
    assert len({e.rank for e in plan if e.treatment == "carried"}) >= (1 if rank == 1 else 2)


# -------- embeddings

EMBEDDINGS = {
    "BERT": {"bert.embeddings.*": "exact"},
    "DistilBERT": {"distilbert.embeddings.*": "exact"},
    "RoBERTa": {"*_embeddings.weight": "exact"},
    "GPT-2": {"transformer.wte.weight": "exact", "transformer.wpe.weight": "exact"},
    "GPT-2, language model": {"transformer.wte.weight": "exact", "transformer.wpe.weight": "exact"},
    "T5": {"shared.weight": "exact"},
    "Llama": {"model.embed_tokens.weight": "exact"},
    "Llama, language model": {"model.embed_tokens.weight": "exact"},
}


@pytest.mark.parametrize("deferred", [False, True], ids=["dense", "deferred"])
@pytest.mark.parametrize("name", EMBEDDINGS)
def test_exact_embeddings_tied_ones_and_positions_too(name, deferred, monkeypatch):
    if deferred:
        monkeypatch.setattr("rgp.slots.LARGEST_DENSE", 0)
    plan = run(BY_NAME[name], rgp.RGP(rank=2, overrides=EMBEDDINGS[name]))
    assert any(e.kind == "embedding" and e.treatment == "exact" for e in plan)


@pytest.mark.parametrize("name", ["BERT", "GPT-2, language model", "T5", "ViT"])
def test_dpsgd_with_deferred_gradients(name, monkeypatch):
    """Large exact parameters keep their operands until the norms are known; here all are called large."""
    monkeypatch.setattr("rgp.slots.LARGEST_DENSE", 0)
    run(BY_NAME[name], rgp.DPSGD(overrides=EMBEDDINGS.get(name, {}), head_scale=0.3))


def test_a_table_tied_to_the_head_goes_by_either_name():
    for name in ("transformer.wte.weight", "lm_head.weight"):
        plan = rgp.make_plan(gpt2_lm(), rgp.RGP(overrides={name: "exact"}))
        assert plan["lm_head.weight"].treatment == plan["transformer.wte.weight"].treatment == "exact"


def test_a_carried_embedding_is_refused():
    model, data = gpt2_lm().double(), text()
    method = rgp.RGP(rank=2, overrides={"transformer.wte.weight": "carried"})
    with privatize(model, data, method=method) as run, pytest.raises(rgp.UnsupportedError, match=r"wte.*exact.*frozen"):
        train(run, model, next_token)


# T5's relative bias is one (heads, T, T) tensor for all examples, made of ids (T, T), which look like (examples, T) or a
# flattening of examples wherever T is a multiple of m. Its gradient belongs to all examples, to each its own part.
@pytest.mark.parametrize(("examples", "length"), [(5, 7), (4, 8), (8, 8), (2, 6)])
def test_a_relative_bias_is_exact(examples, length):
    plan = check_exact(t5().double(), text(examples, length), translate)
    assert any("relative_attention_bias" in e.name and e.treatment == "exact" for e in plan)


# DeBERTa sends its relative positions, (2k, d) and the same for all examples, through trained layers.
@pytest.mark.parametrize("method", [rgp.RGP(rank=2), rgp.DPSGD()], ids=["rgp", "dpsgd"])
@pytest.mark.parametrize("examples", [2, 4, 5])
def test_deberta(examples, method):
    config = transformers.DebertaV2Config(
        **BERT_LIKE, relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=4,
        norm_rel_ebd="layer_norm", share_att_key=True, position_biased_input=False, pooler_hidden_size=WIDTH,
        pooler_dropout=0.0,
    )  # fmt: skip
    family = Family("DeBERTa", lambda: transformers.DebertaV2ForSequenceClassification(config), classify)
    check_exact(family.model(), text(examples), classify, method=method, family="DeBERTa")


def test_every_parameter_of_a_tied_model_gets_the_gradient_of_all_its_uses():
    """The ground truth itself: autograd sees both uses of a tied table."""
    model = gpt2_lm().double()
    gradient = per_example_gradients(model, text(1), next_token)[0]["transformer.wte.weight"]
    ids = text(1)[0]["ids"].unique()
    rest = [i for i in range(VOCABULARY) if i not in ids]
    assert gradient[rest].any(), "the head's use reaches rows that were not looked up"
