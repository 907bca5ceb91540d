"""`rgp demo`, in small: three real runs, three attacks, one report."""

import json
from pathlib import Path

import pytest

pytest.importorskip("yaml")
pytest.importorskip("typer")
pytest.importorskip("safetensors")
pytest.importorskip("sklearn")
from typer.testing import CliRunner

from rgp import cli
from rgp.bench.settings import Settings
from rgp.demo import running as demo
from rgp.train.errors import DemoError
from rgp.train.folder import RunFolder

SMALL = ("model.width=8", "training.epochs=1", "training.batch_size=200", "run.threads=1", "run.eval_every=100")
SMALL += ("budget.accountant=rdp",)  # seconds less than pld, which test_train has
STEP = Settings(model="toy", batch=8, microbatch=4, seq=16, keep=1000, state="thin", repeats=1, threads=1)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return demo.run_demo(tmp_path_factory.mktemp("demo") / "d", epsilon=8.0, changes=SMALL, step=STEP, quiet=True)


def test_the_three_runs_are_the_same_network(result):
    none, dpsgd, rgp = result["runs"]
    assert [row["method"] for row in result["runs"]] == ["nonprivate", "dpsgd", "rgp"]
    assert none["epsilon"] is None and 7.9 < dpsgd["epsilon"] <= 8 and 7.9 < rgp["epsilon"] <= 8
    assert none["parameters"] == dpsgd["parameters"] == rgp["parameters"] == dpsgd["noise_dimensions"]
    assert rgp["noise_dimensions"] < dpsgd["noise_dimensions"] and none["noise_dimensions"] == 0
    assert all(0 <= row["accuracy"] <= 1 and row["steps"] == 7 and row["seed"] is None for row in result["runs"])


def test_all_are_attacked_and_the_result_is_kept_private(result):
    for row in result["runs"]:
        assert 0.3 < row["attack"]["success_rate"] < 0.8  # after one epoch nobody remembers much
        folder = RunFolder(row["folder"])
        assert folder.rows(folder.private)[-1]["attack"] == row["attack"]
        assert "attack" not in folder.metrics.read_text() + folder.summary.read_text()


def test_a_step_of_a_larger_network_is_measured_in_three_ways(result):
    rows = {row["name"]: row for row in result["cost"]["rows"]}
    assert list(rows) == ["plain", "dpsgd", "rgp"] and not any("error" in row for row in rows.values())
    assert len({row["trained_parameters"] for row in rows.values()}) == 1
    assert demo.STEP.state == "thin" and demo.STEP.model.startswith("transformer:")


def test_report_and_table(result, capsys):
    pytest.importorskip("rgp.report")
    assert result["report"] is not None and "<html" in Path(result["report"]).read_text().lower()
    demo.show_demo(result)
    shown = capsys.readouterr().out
    for words in (
        "RGP",
        "DP-SGD",
        "no privacy",
        "million parameters",
        "memory",
        "report.html",
        "±",
        "coin",
        "proves nothing",
    ):
        assert words in shown
    json.dumps(result, allow_nan=False)


@pytest.mark.parametrize(("busy", "said"), [(1.5, True), (0.0, False), (None, False)])
def test_times_of_a_busy_machine_are_not_believed(result, busy, said, capsys):
    machine = result["cost"]["machine"] | {"busy_elsewhere": busy}
    demo.show_demo(result | {"cost": result["cost"] | {"machine": machine}})
    assert ("other programs kept 1.5 cores busy" in " ".join(capsys.readouterr().out.split())) == said


def test_an_existing_folder_is_not_touched(tmp_path):
    (tmp_path / "mine").write_text("dear")
    refused = CliRunner().invoke(cli.app, ["demo", "--out", str(tmp_path)])
    assert refused.exit_code == 2 and "was not touched" in refused.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


def test_a_failing_run_is_reported(tmp_path):
    with pytest.raises(DemoError, match=r"exit code 2[\s\S]*model.width = 9"):
        demo.run_demo(tmp_path / "d", epsilon=8.0, changes=("model.width=9",), quiet=True)
