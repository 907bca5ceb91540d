"""The plan: its counts against the engine on real tensors, its noise against the accountant, its form as promised."""

import json
import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, addmm_flop
from typer.testing import CliRunner

import rgp
from rgp.bench import Settings, contenders, harness, workloads
from rgp.planning import METHODS, Question, estimate, models, plan
from rgp.planning.estimate import Contender, signal_to_noise
from rgp.planning.question import bytes_from
from rgp.planning.tally import Tally

TOY = Settings(model="toy", batch=4, microbatch=4, seq=16, rank=2, repeats=1, threads=1)
USER_MODELS = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

def convolutions(batch):
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.Dropout(0.1), nn.Conv2d(32, 64, 3, stride=2),
        nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)
    )
    return model, TensorDataset(torch.randn(batch, 3, 16, 16), torch.randint(10, (batch,)))

def mixes_examples(batch):
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)), TensorDataset(torch.randn(batch, 5), torch.zeros(batch))
"""


@pytest.fixture(autouse=True)
def user_models(tmp_path, monkeypatch):
    (tmp_path / "planned_models.py").write_text(USER_MODELS)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.fixture
def folder(tmp_path):
    """A small BERT as a Hugging Face folder without weights."""
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 200}
    transformers.BertConfig(**small, num_hidden_layers=2, architectures=["BertModel"]).save_pretrained(
        tmp_path / "bert"
    )
    return tmp_path / "bert"


def question(settings: Settings, **options) -> Question:
    """The plan's question for the benchmark's work."""
    return Question(
        model=settings.model,
        rank=settings.rank,
        sides=settings.sides,
        source=settings.source,
        batch=settings.batch,
        microbatch=settings.microbatch,
        seq=settings.seq,
        optimizer=settings.optimizer,
        device="cpu",
        dataset_size=max(1000, settings.batch),
        **options,
    )


def rows(found: dict) -> dict[str, dict]:
    return {row["name"]: row for row in found["methods"]}


def planned(asked: Question, name: str, *, dtype=torch.float32, checkpointing=False) -> Contender:
    options = {"task": "classification", "labels": 2, "seq": asked.seq, "dtype": dtype, "checkpointing": checkpointing}
    return Contender(name, asked, models.find(asked.model, **options))


# Against the engine on real tensors -----------------------------------------------------------------------------------

PLANNED_AS = {"rgp": "rgp", "dpsgd": "dpsgd-ghost", "plain": "plain"}  # the benchmark's name -> the plan's


def attention(products: int):
    def flops(*shapes, **_):
        m, heads, length, width = shapes[0]
        return 2 * products * m * heads * length * length * width

    return flops


NOT_COUNTED_BY_TORCH = {
    torch.ops.aten.addmm_: addmm_flop,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention(2),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: attention(5),
}


def one_real_step(settings: Settings, contender: str) -> tuple[int, int]:
    """Flops by torch's own counter, and the peak of live bytes, of the second step on real tensors."""
    workload = workloads.build(settings)
    runner = contenders.build(contender, settings, workload)
    runner.step()  # the first one also probes the model and makes the optimizer's state
    tally = Tally()
    for tensor in (*workload.model.parameters(), *workload.model.buffers(), *workload.dataset.tensors):
        tally.count(tensor)
    for state in runner.optimizer.state.values():
        for tensor in state.values():
            tally.count(tensor)
    if contender != "plain":
        for tensor in runner.run.initial.values():
            tally.count(tensor)
    with FlopCounterMode(display=False, custom_mapping=NOT_COUNTED_BY_TORCH) as flops, tally:
        runner.step()
    runner.close()
    return flops.get_total_flops(), max(tally.peaks.values())


CASES = [
    ("toy", "rgp", {}),
    ("toy", "rgp", {"sides": "left", "source": "history", "optimizer": "sgd"}),
    ("toy", "dpsgd", {}),
    ("toy", "plain", {}),
    ("planned_models:convolutions", "rgp", {"batch": 16, "microbatch": 16, "optimizer": "sgd"}),
    ("planned_models:convolutions", "dpsgd", {"batch": 16, "microbatch": 16}),
]


@pytest.mark.parametrize(("model", "contender", "options"), CASES)
def test_flops_and_peak_are_those_of_a_real_step(model, contender, options):
    settings = Settings(**{**vars(TOY), "model": model, **options})
    flops, peak = one_real_step(settings, contender)
    cost = planned(question(settings), PLANNED_AS[contender]).cost(settings.microbatch)
    assert cost.flops_of(1) == pytest.approx(flops, rel=0.01)
    assert max(cost.peaks.values()) == pytest.approx(peak, rel=0.05)


def test_later_microbatches_hold_the_sum_of_the_earlier_ones():
    settings = Settings(**{**vars(TOY), "batch": 8})
    for name in ("rgp", "plain"):
        peaks = [
            max(planned(question(Settings(**{**vars(TOY), "batch": b})), name).cost(4).peaks.values()) for b in (4, 8)
        ]
        assert peaks[1] > peaks[0]
    _, peak = one_real_step(settings, "rgp")
    assert max(planned(question(settings), "rgp").cost(4).peaks.values()) == pytest.approx(peak, rel=0.05)


MEASURED = [
    Settings(model="bert-base", batch=16, microbatch=8, seq=128, rank=8, repeats=1),
    Settings(model="minilm", batch=64, microbatch=32, seq=64, rank=8, repeats=1),
    Settings(model="wrn28-4", batch=32, microbatch=16, rank=16, repeats=1),
]


@pytest.mark.slow
@pytest.mark.parametrize("settings", MEASURED, ids=lambda s: s.model)
def test_measured_memory_within_15_percent(settings):
    """The table of docs/planning.md; `-s` prints it."""
    measured = [harness.empty_row(name) for name in ("rgp", "plain")]
    harness.measure_memory(measured, settings, print)
    found = rows(plan(question(settings, against=("rgp", "plain"))))
    for row in measured:
        peak = found[row["name"]]["memory"]["peak"]
        print(f"{settings.model} {row['name']}: planned {peak / 1e6:.0f} MB, measured {row['peak_bytes'] / 1e6:.0f} MB")
        assert peak == pytest.approx(row["peak_bytes"], rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize("settings", MEASURED, ids=lambda s: s.model)
def test_counted_flops_within_5_percent(settings):
    """The same work with one micro-batch; the rest is a multiplication."""
    one = Settings(**{**vars(settings), "batch": settings.microbatch})
    for contender in ("rgp", "plain"):
        flops, _ = one_real_step(one, contender)
        cost = planned(question(one), contender).cost(one.microbatch)
        print(f"{one.model} {contender}: planned {cost.flops_of(1) / 1e9:.1f}, counted {flops / 1e9:.1f} Gflop")
        assert cost.flops_of(1) == pytest.approx(flops, rel=0.05)


# What is planned -------------------------------------------------------------------------------------------------------


def test_bert_base_has_the_noise_dimensions_of_the_paper_setting():
    pytest.importorskip("transformers")
    contender = planned(Question(model="bert-base", rank=8), "rgp")
    assert contender.noise_dimensions == 1_458_370
    assert contender.trainable == 85_648_130
    assert planned(Question(model="bert-base"), "dpsgd").noise_dimensions == 85_648_130


def test_the_whole_answer_for_a_folder(folder):
    asked = Question(model=str(folder), microbatch=4, seq=16, rank=2, world_size=4)
    found = plan(asked)
    assert [row["name"] for row in found["methods"]] == list(METHODS)
    assert found["sampling_rate"] == 1024 / 67349
    assert found["steps"] == 197
    sigma = rgp.accounting.calibrate(
        epsilon=8, delta=found["delta"], sampling_rate=found["sampling_rate"], steps=found["steps"]
    )
    for row in found["methods"]:
        assert all(isinstance(v, int) for k, v in row["memory"].items() if k != "phase")
        memory = row["memory"]
        assert memory["peak"] >= memory["weights"] + memory["optimizer"] + memory["activations"]
        assert isinstance(row["flops_per_step"], int)
        if row["name"] != "plain":
            assert row["noise_multiplier"] == sigma
            assert row["snr"] == pytest.approx(1024 / (sigma * math.sqrt(row["noise_dimensions"])))
    by_name = rows(found)
    assert by_name["plain"]["snr"] is None
    assert by_name["rgp"]["noise_dimensions"] < by_name["dpsgd"]["noise_dimensions"]
    assert by_name["dpsgd"]["memory"]["per_example"] > 2 * by_name["rgp"]["memory"]["per_example"]
    assert by_name["rgp"]["memory"]["initial"] > 0 == by_name["plain"]["memory"]["initial"]
    thin, whole = (by_name[name]["network_bytes_per_step"] for name in ("rgp", "plain"))
    assert whole == 2 * 4 * by_name["plain"]["trainable"]
    assert thin < whole
    query = next(e for e in found["layers"] if e["name"].endswith("layer.0.attention.self.query.weight"))
    assert query | {"name": ""} == {
        "name": "",
        "kind": "matrix",
        "treatment": "carried",
        "shape": [64, 64],
        "rank": 2,
        "noise_dimensions": 2 * (64 + 64 - 2),
    }


def test_lora_trains_factors_of_what_rgp_carries_and_the_head(folder):
    lora = planned(Question(model=str(folder), rank=2, seq=16), "dp-lora")
    carried = [e for e in planned(Question(model=str(folder), rank=2), "rgp").plan if e.treatment == "carried"]
    head = 64 * 2 + 2
    assert lora.noise_dimensions == sum(2 * (e.p + e.d) for e in carried) + head
    assert all(".A" in e.name or ".B" in e.name or "classifier" in e.name for e in lora.plan.trained)


def test_lora_of_a_convolution_has_its_factors():
    base = nn.Conv2d(8, 16, 3, stride=2, padding=1)
    wrapped = estimate.add_lora.__globals__["_Lora"](base, 2)
    x = torch.randn(2, 8, 9, 9)
    assert torch.allclose(wrapped(x), base(x))  # B starts at zero
    nn.init.normal_(wrapped.A), nn.init.normal_(wrapped.B)
    merged = torch.einsum("pr,rckl->pckl", wrapped.B[:, :, 0, 0], wrapped.A)
    expected = base(x) + torch.nn.functional.conv2d(x, merged, None, 2, 1)
    assert torch.allclose(wrapped(x), expected, atol=1e-5)


@pytest.mark.parametrize(("name", "checkpointing"), [*((name, False) for name in METHODS), ("rgp", True)])
def test_layers_not_gone_through_are_extrapolated(monkeypatch, name, checkpointing):
    pytest.importorskip("transformers")
    tiny = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 50}
    monkeypatch.setitem(workloads.HUGGING_FACE, "minilm", {**tiny, "num_hidden_layers": 8})
    asked = Question(model="minilm", seq=16, rank=2, microbatch=4, batch=8)
    every = planned(asked, name, checkpointing=checkpointing).cost(4)
    monkeypatch.setattr(estimate, "DEEP", 5)
    some = planned(asked, name, checkpointing=checkpointing).cost(4)
    # the buffer has whole blocks of 256 columns, which is something for so small a model and nothing for a large one
    block = 2 * 4 * 256 * 4  # bytes of one in the layers gone through and one in the rest, for 4 examples
    assert max(some.peaks.values()) == pytest.approx(max(every.peaks.values()), rel=0.01, abs=block)
    for part in ("weights", "optimizer", "gradients", "activations", "per_example", "initial"):
        assert getattr(some, part) == pytest.approx(getattr(every, part), rel=0.01, abs=block)
    assert some.flops_of(2) == pytest.approx(every.flops_of(2), rel=0.001)


def test_largest_microbatch_fits_and_the_next_does_not():
    for name in ("rgp", "dpsgd"):
        asked = question(Settings(**{**vars(TOY), "batch": 64}), memory=3_000_000)
        contender = planned(asked, name)
        most, room = contender.largest_microbatch(), 3_000_000 * (1 - estimate.RESERVE)
        assert 1 < most < 64
        assert contender.memory(most)["peak"] <= room < contender.memory(most + 2)["peak"]
    assert planned(question(TOY, memory=1000), "rgp").largest_microbatch() == 0
    assert planned(question(TOY, memory=10**12), "rgp").largest_microbatch() == TOY.batch
    assert planned(question(TOY), "rgp").largest_microbatch() is None


def test_one_side_has_its_own_noise_and_traffic():
    both, left = (
        planned(question(Settings(**{**vars(TOY), "sides": s}), world_size=2), "rgp") for s in ("both", "left")
    )
    carried = [e for e in left.plan if e.treatment == "carried"]
    exact = sum(e.size for e in left.plan if e.treatment == "exact")
    assert left.noise_dimensions == exact + sum(2 * e.p for e in carried)
    assert left.network_bytes(4) == 8 * left.noise_dimensions
    assert both.network_bytes(4) == 8 * (exact + sum(2 * (e.p + e.d) for e in carried))


def test_sharding_divides_what_is_resident():
    alone = planned(question(TOY, world_size=4), "plain").memory(1)
    asked = question(TOY, world_size=4, sharded=True)
    shared = planned(asked, "plain").memory(1)
    for part in ("weights", "optimizer", "gradients"):
        assert shared[part] == pytest.approx(alone[part] / 4, abs=1)
    assert shared["activations"] == alone["activations"]
    assert shared["peak"] < alone["peak"]


def test_a_thin_state_is_thin_and_whole_on_every_rank(folder):
    asked = {"model": str(folder), "seq": 16, "microbatch": 4, "batch": 8, "rank": 2}
    full = planned(Question(**asked), "rgp").memory(4)
    contender = planned(Question(**asked, state="thin"), "rgp")
    thin = contender.memory(4)
    released = 4 * contender.released
    assert thin["initial"] == 0 < full["initial"]
    assert released <= thin["gradients"] < released + 512 < full["gradients"]  # allocators round up
    small = 3 * 512 * len(contender.plan.trained)
    assert 2 * released <= thin["optimizer"] < 2 * released + small
    assert thin["optimizer"] < full["optimizer"]
    assert thin["peak"] < full["peak"]
    shared = planned(Question(**asked, state="thin", world_size=2, sharded=True), "rgp").memory(4)
    assert shared["optimizer"] == thin["optimizer"] and shared["weights"] < 0.51 * thin["weights"]
    half = planned(
        Question(**asked, state="thin", dtype="bfloat16", rounding="stochastic"), "rgp", dtype=torch.bfloat16
    )
    carried = sum(e.rank * (e.p + e.d) for e in half.plan.trained if e.treatment == "carried")
    assert half.memory(4)["optimizer"] > 2 * 4 * carried > 0  # two moments of float32, though weights are not


def test_a_sharded_step_of_one_micro_batch_has_its_gradients_divided_too():
    contender = planned(question(replace(TOY, batch=32, seq=4), world_size=16, sharded=True), "plain")
    share = contender.question.share
    most, less = (contender.memory(m)["peak"] for m in (share, share - 1))
    assert less < most < 1.4 * less


def test_devices_differ_where_they_should(folder):
    """Dropout in attention: a CPU keeps the T x T weights, a GPU does not."""
    asked = {"model": str(folder), "seq": 64, "microbatch": 2, "batch": 4, "source": "weight"}
    cpu, gpu = (planned(Question(**asked, device=device), "rgp").cost(2) for device in ("cpu", "gpu"))
    assert cpu.activations - gpu.activations > 2 * 2 * 4 * 64 * 64 * 4  # layers, examples, heads, T, T, floats


def test_checkpointing_trades_flops_for_activations(folder):
    asked = Question(model=str(folder), seq=32, microbatch=4, batch=8)
    for name in ("rgp", "plain"):
        without, with_ = (planned(asked, name, checkpointing=c).cost(4) for c in (False, True))
        assert with_.activations < without.activations / 2
        assert with_.flops_of(2) > 1.2 * without.flops_of(2)


def test_bfloat16_halves_the_weights_but_not_the_sum(folder):
    asked = Question(model=str(folder), seq=16, microbatch=4, batch=8)
    full, half = (planned(asked, "rgp", dtype=dtype).cost(4) for dtype in (torch.float32, torch.bfloat16))
    assert half.weights < 0.52 * full.weights
    assert half.total == full.total


# What is refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "sgd"}, "method must be one of .*got 'sgd'"),
        ({"batch": 10, "dataset_size": 5}, "at most dataset_size=5"),
        ({"rank": 0}, "rank must be an integer of at least 1; got 0"),
        ({"sharded": True}, "world_size"),
        ({"source": "public"}, "public data"),
        ({"against": ("opacus",)}, "against must be one of .*got 'opacus'"),
    ],
)
def test_wrong_questions_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        Question(**options)


def test_a_model_that_mixes_examples_is_refused():
    with pytest.raises(rgp.UnsupportedError, match="BatchNorm1d"):
        planned(question(Settings(**{**vars(TOY), "model": "planned_models:mixes_examples"})), "rgp").cost(4)


def test_sizes():
    assert bytes_from("24GB") == 24 * 10**9
    assert bytes_from("1.5 GiB") == 3 * 2**29
    for wrong in ("24 apples", "", "-1GB", "1.2.3GB"):
        with pytest.raises(ValueError, match="24GB"):
            bytes_from(wrong)


def test_signal_to_noise_is_that_of_gradients_that_agree():
    """Aligned gradients of norm C against drawn noise: the ratio of lengths is the one that is promised."""
    C, B, sigma, D = 0.3, 50, 0.8, 40_000
    signal = (torch.ones(B, D) / math.sqrt(D) * C).sum(0).norm()
    noise = sigma * C * torch.randn(D, generator=torch.Generator().manual_seed(0))
    assert signal_to_noise(B, sigma, D) == pytest.approx(float(signal / noise.norm()), rel=0.02)


# The command --------------------------------------------------------------------------------------------------------------


SMALL = (
    *("--model", "toy", "--seq", "8", "--rank", "2", "--batch", "32", "--microbatch", "4"),
    *("--dataset-size", "1000"),
)


def command(*words: str):
    import typer

    from rgp.planning.command import register

    app = typer.Typer()
    register(app)
    return CliRunner().invoke(app, list(words))


def test_command_prints_json_and_nothing_else():
    result = command(*SMALL, "--against", "plain", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    promised = "model method parameters trainable noise_dimensions noise_multiplier sampling_rate steps epsilon delta snr layers"
    assert set(promised.split()) | {"methods"} <= set(found)
    assert [row["name"] for row in found["methods"]] == ["rgp", "plain"]


def test_command_shows_tables_within_80_columns():
    result = command(*SMALL, "--memory", "24GB", "--layers", "--against", "dpsgd-ghost,plain")
    assert result.exit_code == 0, result.output
    assert "…" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "signal to noise is at most" in " ".join(result.stdout.split())
