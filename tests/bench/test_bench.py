"""The benchmark at toy size: contenders do the work that their names say, and the report has its promised form."""

import dataclasses
import io
import json
import subprocess
import time
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from typer.testing import CliRunner

from rgp.bench import Settings, chart, command, contenders, harness, machine, report, run_bench, scaling, workloads
from rgp.bench.machine import busy_seconds
from rgp.bench.measure import MemoryMeter, seconds_of

TOY = Settings(model="toy", batch=6, microbatch=2, seq=8, rank=2, repeats=2, threads=1, optimizer="sgd")
ROW_KEYS = {
    "name",
    *("seconds_per_step", "ratio_to_plain", "ratio_to_bound", "cpu_ratio_to_bound", "peak_bytes"),
    "memory_ratio_to_plain",
}

USER_MODELS = """
import os
import torch
from torch import nn
from torch.utils.data import TensorDataset

def data(batch):
    return TensorDataset(torch.randn(batch, 5), torch.randint(2, (batch,)))

def mixes_examples(batch):
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), data(batch)

def too_few():
    return nn.Linear(5, 2), data(3)

def crashes():
    os._exit(3)
"""


# Each contender, in this process -----------------------------------------------------------------------------------


@pytest.fixture
def contender():
    built = []

    def build(name: str, settings: Settings = TOY) -> contenders.Contender:
        if name.startswith("opacus"):
            pytest.importorskip("opacus")
        built.append(contenders.build(name, settings, workloads.build(settings)))
        return built[-1]

    yield build
    for one in built:
        one.close()


ALL = ["plain", "bound", "opacus-ghost", "opacus-hooks", "rgp", "dpsgd"]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.filterwarnings("ignore")
def test_every_measured_step_is_one_batch_in_micro_batches(contender, name):
    built = contender(name)
    built.step()  # warm-up: the engine also checks the model in it
    sizes: list[int] = []
    built.workload.model.register_forward_pre_hook(lambda module, inputs: sizes.append(len(inputs[0])))
    built.step()
    assert sizes == [2] * 3
    built.step()
    assert sizes == [2] * 6


@pytest.mark.parametrize("name", [name for name in ALL if name != "bound"])
@pytest.mark.filterwarnings("ignore")
def test_everyone_trains_everything_but_the_embedding(contender, name):
    built = contender(name)
    before = {key: value.clone() for key, value in built.workload.model.state_dict().items()}
    built.step()
    after = built.workload.model.state_dict()
    assert {key for key in before if torch.equal(before[key], after[key])} == {"embedding.weight"}
    assert built.trained_parameters() == sum(v.numel() for v in before.values()) - before["embedding.weight"].numel()


def test_plain_is_a_step_on_the_mean_loss_of_the_batch(contender):
    built = contender("plain")
    model = built.model
    ids, labels = built.workload.dataset.tensors
    F.cross_entropy(model(ids), labels).backward()
    expected = {n: p.detach() - 0.01 * p.grad for n, p in model.named_parameters() if p.requires_grad}
    model.zero_grad()
    built.step()
    for name, parameter in model.named_parameters():
        if name in expected:
            torch.testing.assert_close(parameter.detach(), expected[name], rtol=1e-5, atol=1e-7)


def test_bound_goes_back_to_the_first_trained_layer_without_weight_gradients(contender):
    built = contender("bound")
    reached = []
    built.model.blocks[0].norm1.register_full_backward_hook(lambda module, gi, go: reached.append(gi[0] is not None))
    built.model.embedding.register_forward_hook(lambda module, inputs, output: reached.append(output.requires_grad))
    built.step()
    assert reached == [False, True] * 3  # per micro-batch: not in the embedding, but through the first block
    assert all(p.grad is None for p in built.model.parameters())


@pytest.mark.filterwarnings("ignore")
def test_opacus_hooks_counts_its_per_example_gradients(contender):
    built = contender("opacus-hooks")
    built.step()
    assert built.per_example_bytes() == 4 * TOY.microbatch * built.trained_parameters()


def test_dataset_must_be_one_batch(tmp_path, monkeypatch):
    tmp_path.joinpath("bench_models.py").write_text(USER_MODELS)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="3 examples and must have batch=6"):
        workloads.build(Settings(model="bench_models:too_few", batch=6, microbatch=2))


def test_memory_meter_sees_a_peak_that_is_gone():
    meter = MemoryMeter("cpu")
    torch.ones(25_000_000)
    assert 0.9e8 < meter.peak_bytes() < 1.5e8
    meter.reset()
    assert meter.peak_bytes() < 0.5e8


# The whole harness, in processes -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def toy_report():
    return run_bench(TOY, ["plain", "rgp", "bound"])


def test_report_has_the_promised_form(toy_report):
    toy_report = json.loads(json.dumps(toy_report))
    assert [row["name"] for row in toy_report["rows"]] == ["plain", "rgp", "bound"]
    for row in toy_report["rows"]:
        assert row.keys() >= ROW_KEYS
        assert "error" not in row
        assert all(row[key] > 0 for key in ROW_KEYS - {"name"})
        assert len(row["seconds"]) == TOY.repeats
    plain = toy_report["rows"][0]
    assert plain["ratio_to_plain"] == plain["memory_ratio_to_plain"] == 1
    assert toy_report["machine"].keys() >= {"cpu", "cores", "threads", "torch", "python", "device"}
    assert toy_report["commit"] is None or len(toy_report["commit"]) >= 7
    assert toy_report["settings"]["batch"] == 6
    assert harness.unequal_work(toy_report["rows"]) is None


def test_a_contender_that_fails_does_not_stop_the_others(tmp_path, monkeypatch):
    tmp_path.joinpath("bench_models.py").write_text(USER_MODELS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    settings = Settings(model="bench_models:mixes_examples", batch=4, microbatch=2, repeats=1, threads=1)
    failed, plain = run_bench(settings, ["rgp", "plain"])["rows"]
    assert failed["error"] and failed.keys() >= ROW_KEYS and failed["ratio_to_plain"] is None
    assert plain["ratio_to_plain"] == 1


def test_a_process_that_dies_is_a_row_with_an_error(tmp_path, monkeypatch):
    tmp_path.joinpath("bench_models.py").write_text(USER_MODELS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (row,) = run_bench(Settings(model="bench_models:crashes", batch=4, microbatch=2, threads=1), ["plain"])["rows"]
    assert "ended with code 3" in row["error"]


def row_of(name: str, *seconds: float) -> dict:
    return harness.empty_row(name) | {
        "seconds": list(seconds),
        "cpu_seconds": [2 * s for s in seconds],
        "peak_bytes": 1,
    }


def test_ratios_are_those_of_a_round():
    """A machine that was three times slower in the second round, and slower still for one contender in the third."""
    rows = [row_of("rgp", 1.0, 3.3, 9.0), row_of("bound", 1.0, 3.0, 1.0), row_of("plain", 2.0, 6.0, 2.0)]
    harness.add_ratios(rows)
    rgp, bound, _ = rows
    assert rgp["ratio_to_bound"] == pytest.approx(1.1) and rgp["ratio_to_bound_range"] == [1.0, 9.0]
    assert rgp["ratio_to_plain"] == pytest.approx(0.55) and bound["ratio_to_plain_range"] == [0.5, 0.5]
    assert rgp["cpu_ratio_to_bound"] == pytest.approx(1.1)
    assert report.with_range(rgp["ratio_to_bound"], rgp["ratio_to_bound_range"]) == "1.10 (1.00-9.00)"


def test_a_busy_machine_is_told_of(toy_report):
    def told(busy: float | None) -> bool:
        machine = {**toy_report["machine"], "busy_elsewhere": busy, "load_before": 0.0}
        return "busy" in text_of(report.show_bench, {**toy_report, "machine": machine})

    assert told(0.8) and not told(0.02) and not told(None)


def test_cpu_time_of_others_is_seen():
    if (before := busy_seconds()) is None:
        pytest.skip("the kernel does not say")
    started = time.process_time()
    while time.process_time() - started < 0.3:
        pass
    assert busy_seconds() - before > 0.2


def test_commit_is_found_in_a_checkout_of_somebody_else(tmp_path, monkeypatch):
    """git calls every checkout somebody else's under this variable of its own tests."""
    package = tmp_path / "src" / "rgp"
    package.mkdir(parents=True)
    package.joinpath("_version.py").write_text("")

    def git(*words: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True, capture_output=True)

    git("init")
    git("add", "-A")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-m", "first")
    monkeypatch.setattr(machine, "PACKAGE", package)
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    with pytest.raises(subprocess.CalledProcessError):
        git("-C", str(package), "rev-parse", "HEAD")
    found = machine.describe_commit()
    assert found["commit"] is not None and found["uncommitted_changes"] is False


@pytest.mark.parametrize("state", ["full", "thin"])
def test_keep_and_state_reach_the_method(contender, state):
    built = contender("rgp", dataclasses.replace(TOY, keep=3, state=state))
    built.step()
    assert (built.run.plan.method.keep, built.run.plan.method.state) == (3, state)
    with pytest.raises(ValueError, match="state must be one of"):
        Settings(state="slim")


@pytest.mark.filterwarnings("ignore")
def test_bands_are_measured_with_all_past_noise_in_place(contender):
    made = contender("dpsgd", dataclasses.replace(TOY, bands=5))
    made.step()
    chain = made.run.releases.chain
    assert (chain.bands, chain.length) == (5, 4)
    taken_back = [past.clone() for past in chain.secrets()]
    made.step()
    assert chain.length == 4
    assert torch.equal(chain.secrets()[1], taken_back[0])
    assert not torch.equal(chain.secrets()[0], taken_back[0])


def test_unequal_work_is_reported():
    rows = [{"name": "plain", "trained_parameters": 10}, {"name": "rgp", "trained_parameters": 9}]
    assert "plain 10, rgp 9" in harness.unequal_work(rows)


# Scaling -----------------------------------------------------------------------------------------------------------


def test_slope_is_the_exponent():
    assert scaling.slope([1, 2, 4], [3, 12, 48]) == pytest.approx(2)
    assert scaling.slope([1, 10, 100], [5, 5, 5]) == pytest.approx(0)
    assert scaling.slope([1, 2, 4], [3, None, 12]) == pytest.approx(1)
    assert scaling.slope([1, 2], [None, 3]) is None


@pytest.mark.parametrize("axis", scaling.AXES)
def test_an_axis_changes_one_size_of_the_stack(axis):
    settings = scaling.AXES[axis].apply(scaling.BASE, 24)
    model, dataset = workloads.build(settings).model, workloads.build(settings).dataset
    sizes = {"width": 512, "batch": 16, "sequence": 32, "rank": 8, "power-iterations": 1} | {axis: 24}
    assert model.layers[0].weight.shape == (sizes["width"], sizes["width"])
    assert dataset.tensors[0].shape == (sizes["batch"], sizes["sequence"], sizes["width"])
    assert (settings.rank, settings.power_iterations) == (sizes["rank"], sizes["power-iterations"])
    assert settings.microbatch == settings.batch


def bench_in_this_process(settings, names, say):
    """What `run_bench` reports, without its processes: `toy_report` has those."""
    say("in this process")
    rows = []
    for name in names:
        built = contenders.build(name, settings, workloads.build(settings))
        row = harness.empty_row(name) | {"seconds_per_step": seconds_of(built.step, "cpu"), "peak_bytes": 1}
        rows.append(row | {"per_example_bytes": built.per_example_bytes()})
        built.close()
    machine = harness.describe_machine() | {"threads": settings.threads}
    return {"rows": rows, "machine": machine, "commit": None, "date": "today"}


@pytest.fixture(scope="module")
def width_report():
    settings = Settings(model="stack:32", batch=4, microbatch=4, seq=8, rank=2, repeats=1, threads=1)
    with mock.patch.object(scaling, "run_bench", bench_in_this_process):
        return scaling.run_scaling("width", settings, ["rgp"], [64, 128])


def test_per_example_gradients_of_rgp_grow_with_the_width_and_not_its_square(width_report):
    (row,) = width_report["rows"]
    assert width_report["values"] == [64, 128]
    assert row["memory_measure"] == "per_example_bytes"
    assert 0.9 <= row["memory_slope"] <= 1.1
    assert row["expected_memory_slope"] == 1
    assert len(row["seconds_per_step"]) == 2


# For people --------------------------------------------------------------------------------------------------------


def text_of(show, measured) -> str:
    console = Console(file=io.StringIO(), width=120)
    show(measured, console)
    return console.file.getvalue()


def test_table_and_bars(toy_report, tmp_path):
    broken = {**harness.empty_row("opacus-ghost"), "error": "ModuleNotFoundError: no opacus"}
    measured = {**toy_report, "rows": [*toy_report["rows"], broken]}
    text = text_of(report.show_bench, measured)
    assert "toy, batch 6 as 3 x 2" in text and "█" in text and "no opacus" in text
    chart.draw_bench(measured, tmp_path / "bars.png")
    assert tmp_path.joinpath("bars.png").stat().st_size > 5000


def test_slopes_as_table_and_figure(width_report, tmp_path):
    assert "width^slope" in text_of(report.show_scaling, width_report)
    chart.draw_scaling(width_report, tmp_path / "slopes.png")
    assert tmp_path.joinpath("slopes.png").stat().st_size > 5000


@pytest.fixture
def cli(toy_report, monkeypatch):
    """`rgp bench` on a command line of its own, with the measurement replaced by the one already made."""
    asked = []

    def measured(settings, names, say):
        asked.append((settings, names))
        return toy_report

    monkeypatch.setattr(harness, "run_bench", measured)
    app = typer.Typer()
    app.callback()(lambda: None)
    command.register(app)
    return lambda *words: (CliRunner().invoke(app, ["bench", *words]), asked)


def test_command_prints_json_and_nothing_else(cli):
    result, asked = cli(
        "--model", "wrn16-4", "--batch", "64", "--microbatch", "16", "--against", "plain,dpsgd", "--json"
    )
    assert result.exit_code == 0
    assert json.loads(result.stdout)["rows"][0]["name"] == "plain"
    ((settings, names),) = asked
    assert names == ["rgp", "plain", "dpsgd"]
    assert (settings.model, settings.batch, settings.microbatch, settings.optimizer) == ("wrn16-4", 64, 16, "sgd")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "nosuch"], "model='nosuch'"),
        (["--batch", "9"], "batch=9 must be a multiple"),
        (["--rank", "0"], "rank must be an integer of at least 1"),
        (["--optimizer", "lion"], "optimizer='lion'"),
        (["--against", "plian"], "against=plian"),
        (["--scaling", "depth"], "scaling='depth'"),
        (["--scaling", "width", "--values", "8"], "two different values"),
        (["--scaling", "width", "--model", "toy"], "its own model"),
    ],
)
def test_command_names_what_is_wrong(cli, words, message):
    result, _ = cli(*words)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())
