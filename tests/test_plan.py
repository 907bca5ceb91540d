"""The plan: what each parameter gets by default, by override, and how it reads."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import rgp

transformers = pytest.importorskip("transformers")


def meta(make):
    """A model without weights: only its shapes and names matter here."""
    with torch.device("meta"):
        return make()


def bert(**options):
    return meta(lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**options)))


def treatments(plan: rgp.Plan, *words: str) -> set[str]:
    """How the parameters whose names contain one of the words are treated."""
    found = [e.treatment for e in plan if any(word in e.name for word in words)]
    assert found, words
    return set(found)


# -------- defaults


def test_bert_base():
    """12 layers of 4 (768, 768), one (3072, 768) and one (768, 3072), the pooler; biases, norms and head whole."""
    plan = rgp.make_plan(bert(num_labels=2), rgp.RGP(rank=8))
    by_hand = 12 * (4 * 8 * (768 + 768 - 8) + 2 * 8 * (768 + 3072 - 8)) + 8 * (768 + 768 - 8)
    by_hand += 12 * (4 * 768 + 3072 + 768 + 4 * 768) + 2 * 768 + 768 + 2 * 768 + 2
    by_hand += (512 + 2) * 768  # positions and token types
    assert plan.noise_dimensions == by_hand == 1_853_122
    assert treatments(plan, "word_embeddings.weight") == {"frozen"}
    assert treatments(plan, "position_embeddings.weight", "token_type") == {"exact"}
    assert treatments(plan, "embeddings.LayerNorm") == {"exact"}
    assert treatments(plan, "query.weight", "dense.weight") == {"carried"}
    assert treatments(plan, "bias", "LayerNorm") == {"exact"}
    assert plan["classifier.weight"].treatment == "exact"
    assert sum(e.size for e in plan.trained) == 109_483_778 - 30522 * 768


@pytest.mark.parametrize("method", [rgp.DPSGD(), rgp.NonPrivate(), rgp.DPPowerSGD(rank=2)], ids=lambda m: m.name)
def test_what_says_that_it_trains_everything_does(method):
    plan = rgp.make_plan(bert(num_hidden_layers=1), method)
    assert {e.treatment for e in plan} == {"exact"}
    assert plan.noise_dimensions == sum(e.size for e in plan)
    assert plan.frozen_note() == ""


def test_a_table_of_over_a_million_entries_is_frozen_by_rgp_and_the_plan_says_so():
    def table(rows: int, **options) -> rgp.Plan:
        return rgp.make_plan(nn.Sequential(nn.Embedding(rows, 100), nn.Linear(100, 10)), rgp.RGP(rank=2, **options))

    assert table(10_000)["0.weight"].treatment == "exact"
    assert table(10_000).frozen_note() == ""
    large = table(10_001)
    assert large["0.weight"].treatment == "frozen"
    note = large.frozen_note()
    assert "1,000,100 of the model's 1,001,110" in note
    assert "trains 1,010, 0.1%" in note
    assert "overrides={'0.weight': 'exact'}" in note
    assert table(10_001, overrides={"0.weight": "exact"}).frozen_note() == ""
    assert table(10_001, overrides={"0.weight": "frozen"}).frozen_note() == ""
    assert rgp.make_plan(bert(num_hidden_layers=1), rgp.LinearProbe()).frozen_note() == ""


def test_the_plan_of_a_small_model_with_carriers_says_what_to_try_first():
    def plan(width: int, method: rgp.methods.Method) -> rgp.Plan:
        return rgp.make_plan(nn.Sequential(nn.Linear(99, width, bias=False), nn.Linear(width, 1)), method)

    small, large = plan(990, rgp.RGP()), plan(1000, rgp.RGP())  # 99,001 and 100,001 parameters
    assert "Try method=rgp.DPSGD() first: 99,001 trained parameters" in small.small_note()
    assert str(small).endswith(small.small_note())
    assert large.small_note() == "" and str(large).endswith("dimensions")
    assert plan(990, rgp.DPSGD()).small_note() == ""
    assert plan(990, rgp.ResidualOff()).small_note() == ""  # an ablation, without privacy
    assert plan(8, rgp.RGP()).small_note() == ""  # carriers would be no smaller: all is exact already
    assert plan(990, rgp.RGP(overrides={"0.weight": "exact"})).small_note() == ""


def test_a_head_of_over_a_million_entries_is_carried():
    small = rgp.make_plan(bert(num_hidden_layers=1, num_labels=1302), rgp.RGP(rank=8))
    large = rgp.make_plan(bert(num_hidden_layers=1, num_labels=1303), rgp.RGP(rank=8))
    assert small["classifier.weight"].treatment == "exact"
    assert large["classifier.weight"].treatment == "carried"
    assert large["classifier.bias"].treatment == "exact"


FAMILIES = {
    "BERT, masked": lambda: transformers.BertForMaskedLM(transformers.BertConfig(num_hidden_layers=1)),
    "GPT-2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1)),
    "T5": lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(num_layers=1)),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_head_tied_to_an_embedding_is_frozen_with_it(name):
    model = FAMILIES[name]()
    head = {n for n, p in model.named_parameters(remove_duplicate=False) if p is model.get_output_embeddings().weight}
    assert len(head) >= 2
    plan = rgp.make_plan(model, rgp.RGP(rank=8))
    assert {plan[n].treatment for n in head} == {"frozen"}
    with pytest.raises(KeyError, match="no parameter 'nonsense'"):
        plan["nonsense"]


def test_t5_positions_and_norms():
    plan = rgp.make_plan(meta(FAMILIES["T5"]), rgp.RGP(rank=8))
    assert treatments(plan, "relative_attention_bias") == {"exact"}
    assert treatments(plan, "layer_norm") == {"exact"}
    assert treatments(plan, "Attention.q.", "DenseReluDense.wi") == {"carried"}


def test_vit_tokens_and_positions_are_exact():
    config = transformers.ViTConfig(num_hidden_layers=1, num_labels=10)
    plan = rgp.make_plan(meta(lambda: transformers.ViTForImageClassification(config)), rgp.RGP(rank=8))
    assert treatments(plan, "cls_token", "position_embeddings") == {"exact"}
    assert treatments(plan, "projection.weight", "fc1.weight") == {"carried"}
    assert plan["classifier.weight"].treatment == "exact"


OTHERS = {
    "RobertaForSequenceClassification": ({"num_hidden_layers": 1}, "classifier.out_proj.weight"),
    "DistilBertForSequenceClassification": ({"n_layers": 1}, "classifier.weight"),
    "GPT2ForSequenceClassification": ({"n_layer": 1}, "score.weight"),
    "LlamaForSequenceClassification": ({"num_hidden_layers": 1}, "score.weight"),
    "DeiTForImageClassification": ({"num_hidden_layers": 1}, "classifier.weight"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_families(name):
    options, head = OTHERS[name]
    kind = getattr(transformers, name)
    plan = rgp.make_plan(meta(lambda: kind(kind.config_class(**options))), rgp.RGP(rank=8))
    assert plan[head].treatment == "exact"
    assert plan[head].kind == "head"
    assert sum(e.kind == "head" and len(e.shape) > 1 for e in plan) == 1
    for entry in plan:
        if "embed" in entry.name and "LayerNorm" not in entry.name and "projection" not in entry.name:
            assert entry.treatment == ("frozen" if entry.size > 10**6 else "exact"), entry.name
        elif len(entry.shape) == 1:
            assert entry.treatment == "exact", entry.name
        elif entry.name != head and entry.kind == "matrix":
            assert entry.treatment == "carried", entry.name


def test_learned_tokens_by_name_and_shape():
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.cls_token, self.query = nn.Parameter(torch.zeros(1, 1, 64)), nn.Parameter(torch.zeros(1, 4, 64))
            self.pos_embed = nn.Parameter(torch.zeros(16, 64))
            self.class_embedding = nn.Parameter(torch.zeros(64))
            self.relative_position_bias_table = nn.Parameter(torch.zeros(49, 4))
            self.body, self.head = nn.Linear(64, 64), nn.Linear(64, 1)

    plan = rgp.make_plan(Tokens(), rgp.RGP(rank=2))
    assert {e.treatment for e in plan if e.kind == "token"} == {"exact"}
    assert {e.name for e in plan if e.kind == "token"} == {
        "cls_token", "query", "pos_embed", "class_embedding", "relative_position_bias_table"
    }  # fmt: skip
    assert plan["head.weight"].treatment == "exact"  # one output: a row, but a linear layer's


def test_carriers_that_would_not_be_smaller_become_exact():
    def treatment(p: int, d: int, rank: int) -> str:
        model = nn.Sequential(nn.Linear(d, p, bias=False), nn.Linear(p, 2))
        return rgp.make_plan(model, rgp.RGP(rank=rank))["0.weight"].treatment

    assert treatment(16, 16, 7) == "carried"
    assert treatment(16, 16, 8) == "exact"  # 8 (16 + 16) = 16 * 16
    assert treatment(4, 1000, 3) == "carried"
    assert treatment(4, 1000, 4) == "exact"
    assert treatment(1, 50, 1) == "exact"


def test_kernels_are_matrices_of_outputs_by_the_rest():
    plan = rgp.make_plan(
        nn.Sequential(nn.Conv2d(16, 32, 3), nn.Conv3d(8, 32, 3, groups=2), nn.Linear(32, 2)), rgp.RGP(rank=2)
    )
    assert (plan["0.weight"].p, plan["0.weight"].d) == (32, 144)
    assert (plan["1.weight"].p, plan["1.weight"].d) == (32, 108)
    assert plan["0.weight"].noise_dimensions == 2 * (32 + 144 - 2)


def test_what_does_not_require_grad_is_frozen():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    model[0].weight.requires_grad_(False)
    plan = rgp.make_plan(model, rgp.RGP(rank=1))
    assert plan["0.weight"].treatment == "frozen"
    assert plan["0.bias"].treatment == "exact"
    assert plan["0.weight"].noise_dimensions == 0


# -------- overrides and ranks


def test_overrides_by_pattern_and_the_later_wins():
    method = rgp.RGP(
        rank=2, overrides={"*": "frozen", "*.self.*.weight": "carried", "*query.weight": 5, "classifier.*": "exact"}
    )
    plan = rgp.make_plan(bert(num_hidden_layers=1), method)
    assert plan["bert.encoder.layer.0.attention.self.query.weight"].rank == 5
    assert plan["bert.encoder.layer.0.attention.self.key.weight"].rank == 2
    assert treatments(plan, "intermediate", "pooler") == {"frozen"}
    assert treatments(plan, "classifier") == {"exact"}
    assert plan["classifier.weight"].why == "as you asked"


def test_a_vector_cannot_be_carried():
    with pytest.raises(ValueError, match=r"'0.bias' has shape \(8,\)"):
        rgp.make_plan(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)), rgp.RGP(rank=1, overrides={"0.bias": "carried"}))


def test_a_pattern_that_matches_nothing_is_an_error():
    for method in (rgp.RGP(overrides={"encoder.*": "frozen"}), rgp.RGP(rank={"encoder.*": 2, "*": 1})):
        with pytest.raises(ValueError, match=r"'encoder\.\*' matches no parameter.*'0.weight'"):
            rgp.make_plan(nn.Sequential(nn.Linear(8, 8)), method)


def test_an_override_cannot_train_what_does_not_require_grad():
    model = nn.Sequential(nn.Linear(8, 8)).requires_grad_(False)
    with pytest.raises(ValueError, match=r"'0.weight'.*requires_grad"):
        rgp.make_plan(model, rgp.RGP(overrides={"0.weight": "exact"}))


def test_dpsgd_cannot_carry():
    with pytest.raises(ValueError, match=r"no carriers.*'0.weight'"):
        rgp.make_plan(nn.Sequential(nn.Linear(8, 8)), rgp.DPSGD(overrides={"0.weight": "carried"}))


def test_rank_by_pattern():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 2))
    plan = rgp.make_plan(model, rgp.RGP(rank={"*": 3, "1.*": 6}))
    assert [plan[f"{i}.weight"].rank for i in range(3)] == [3, 6, 0]
    with pytest.raises(ValueError, match=r"rank has no pattern for '1.weight'"):
        rgp.make_plan(model, rgp.RGP(rank={"0.*": 3}))


def test_automatic_rank_follows_the_spectrum():
    model = nn.Sequential(nn.Linear(200, 100), nn.Linear(100, 100), nn.Linear(100, 100), nn.Linear(100, 2))
    with torch.no_grad():
        model[0].weight.copy_(torch.outer(torch.ones(100), torch.ones(200)))  # rank 1
        model[1].weight.copy_(torch.eye(100))  # all directions alike
        model[2].weight.copy_(torch.diag(torch.tensor([1.0] * 5 + [0.0] * 95)))  # five
    plan = rgp.make_plan(model, rgp.RGP(rank="auto"))
    assert [plan[f"{i}.weight"].rank for i in range(3)] == [1, 16, 5]


def test_the_scale_is_for_the_exact_head_only():
    plan = rgp.make_plan(bert(num_hidden_layers=1), rgp.RGP(head_scale=0.1))
    assert {e.name for e in plan if e.scale != 1} <= {"classifier.weight", "classifier.bias"}
    assert plan["classifier.weight"].scale == 0.1
    carried = rgp.make_plan(
        bert(num_hidden_layers=1), rgp.RGP(head_scale=0.1, overrides={"classifier.weight": "frozen"})
    )
    assert carried["classifier.weight"].scale == 1


# -------- reading it


def test_the_plan_reads_as_a_table():
    model = nn.Sequential(nn.Embedding(50, 64), nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 10))
    plan = rgp.make_plan(model, rgp.RGP(rank=2))
    *lines, note = str(plan).splitlines()
    assert note == plan.small_note()
    assert lines[0].split() == ["parameter", "shape", "treatment", "rank", "noise", "dims", "why"]
    assert len(lines) == 2 + len(plan) + 1
    row = next(line for line in lines if line.startswith("1.weight"))
    assert row.split() == ["1.weight", "64", "x", "64", "carried", "2", "252"]
    assert "embedding" in lines[2]
    exact = 64 + 2 * 64 + 64 * 10 + 10 + 50 * 64
    trained, all_of_them, noise = 64 * 64 + exact, 64 * 64 + exact, 252 + exact
    assert lines[-1] == f"{trained:,} of {all_of_them:,} parameters trained; noise in {noise:,} dimensions"


def test_a_plan_is_made_without_touching_the_model():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    before = [(id(p), p._version, p.requires_grad) for p in model.parameters()]
    rgp.make_plan(model, rgp.RGP(rank="auto"))
    assert [(id(p), p._version, p.requires_grad) for p in model.parameters()] == before


def test_a_wide_pattern_that_asks_for_carriers_leaves_vectors_exact():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    plan = rgp.make_plan(model, rgp.RGP(rank=2, overrides={"2.*": "carried"}))
    assert plan["2.weight"].treatment == "carried"
    assert plan["2.bias"].treatment == "exact"
    with pytest.raises(ValueError, match=r"'2\.bias'.*only matrices"):
        rgp.make_plan(model, rgp.RGP(rank=2, overrides={"2.bias": "carried"}))
