"""Configs: what is read is what was written, and every mistake is reported, all at once, before anything else."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("yaml")
pytest.importorskip("typer")
from typer.testing import CliRunner

from rgp import cli
from rgp.train import config, setup
from rgp.train.config import ConfigError, load, presets
from rgp.train.sections import IMAGE_MODELS


def mistakes(*changes, preset="digits-rgp", file=None):
    with pytest.raises(ConfigError) as caught:
        load(file, preset=preset, changes=changes)
    return caught.value.mistakes


@pytest.mark.parametrize("preset", presets())
def test_a_preset_is_valid_and_survives_being_written(preset, tmp_path):
    first = load(preset=preset)
    file = tmp_path / "config.yaml"
    file.write_text(first.to_yaml())
    assert load(file) == first
    assert setup.make_method(first.method).name  # the method accepts what the config says
    assert (first.budget.epsilon is None) == (not first.private)


def test_the_presets_of_the_manual_are_there():
    wanted = {"digits-rgp", "digits-dpsgd", "digits-nonprivate", "digits-rgp-random", "digits-linear", "digits-bitfit"}
    assert wanted | {"mnist-rgp", "cifar10-mini-rgp"} <= set(presets())


def test_settings_come_in_layers(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("method: {rank: 2, sides: left}\nbudget:\n  delta: 1e-6\n")
    made = load(file, preset="digits-rgp", changes=["method.rank=4", "budget.epsilon=3"])
    assert (made.method.rank, made.method.sides, made.budget.epsilon) == (4, "left", 3.0)
    assert made.budget.delta == 1e-6, "YAML takes 1e-6 for text; we do not"
    assert made.training == load(preset="digits-rgp").training


def test_a_later_setting_replaces_the_one_it_excludes():
    made = load(preset="digits-rgp", changes=["training.steps=5", "budget.noise_multiplier=1"])
    assert (made.training.steps, made.training.epochs) == (5, None)
    assert (made.budget.noise_multiplier, made.budget.epsilon) == (1.0, None)
    both = mistakes("training.steps=5", "training.epochs=2")
    assert both == ["training.epochs and training.steps: set one of them, and the other to null; both are set"]


def test_structured_values():
    made = load(
        preset="digits-rgp", changes=['method.rank={"*": 4, "head*": 1}', "method.overrides={head.weight: frozen}"]
    )
    assert made.method.rank == {"*": 4, "head*": 1} and made.method.overrides == {"head.weight": "frozen"}
    assert load(preset="digits-rgp", changes=["method.rank=auto"]).method.rank == "auto"
    assert load(preset="digits-rgp", changes=["data.text=[premise, hypothesis]"]).data.text == ("premise", "hypothesis")


def test_all_mistakes_at_once_each_with_key_value_and_what_is_allowed():
    found = mistakes(
        "method.ranks=4",
        "budget.epsilon=-1",
        "optimzer.lr=1",
        "training.clip=big",
        "optimizer.name=sdg",
        "run.seed=1.5",
        "model.name=smal-cnn",
        "data.name=no/such/file.csv",
        "nonsense",
    )
    assert found == [
        "method.ranks = 4: there is no such key; did you mean method.rank?",
        "optimzer.lr = 1: there is no such key; did you mean optimizer.lr?",
        "--set nonsense: write section.key=value, such as --set method.rank=4",
        "budget.epsilon = -1: must be a number above 0, or null",
        "training.clip = big: must be a number above 0, or a mapping from parameter-name patterns to such numbers, or null",
        "optimizer.name = sdg: must be one of sgd, adam, adamw, adam-corrected; did you mean sgd?",
        "run.seed = 1.5: must be a whole number of at least 0, or null",
        f"model.name = smal-cnn: did you mean small-cnn? must be one of {', '.join(IMAGE_MODELS)}, a folder with a "
        "Hugging Face model, or its name on the hub (owner/name)",
        "data.name = no/such/file.csv: there is no such file or folder; must be one of digits, cifar10, svhn, "
        "mnist, fashion_mnist, sst2, qnli, qqp, mnli, a file or folder that exists, or a data set of the "
        "Hugging Face hub (hf:owner/name)",
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["method.name=nonprivate"], "budget.epsilon = 8: method nonprivate protects nothing, so this must be null"),
        (["method.name=dpsgd"], "method.rank = 8: method dpsgd has no carriers, so this must be null"),
        (["method.name=rgp-random"], "method.source = weight: the carriers of rgp-random are random"),
        (["budget.epsilon=null"], "budget.epsilon and budget.noise_multiplier: set one of them"),
        (["training.clip=null"], "training.clip = null: method rgp needs a number above 0"),
        (
            ["training.max_batch=300", "budget.accountant=rdp"],
            "training.max_batch = 300: needs budget.accountant = pld",
        ),
        (["rank=3"], "rank = 3: there is no such key; did you mean method.rank?"),
        (["method=rgp"], "method = rgp: method is a section; set one of its keys, such as method.name"),
        (["data.name=sst2"], "model.name = small-cnn: sst2 holds texts; the model must be a Hugging Face model"),
        (["data.name=cifar1O"], "data.name = cifar1O: did you mean cifar10?"),
        (["model.width=20"], "model.width = 20: must be a multiple of 8"),
        (["model.name=wrn-16-4"], "model.width = 32: is for small-cnn, tiny-cnn and mlp"),
        (["run.device=gpu"], "run.device = gpu: must be auto, cpu, cuda"),
        (["run.secure_noise=maybe"], "run.secure_noise = maybe: must be true or false"),
        (["budget.delta=.nan"], "budget.delta = nan: must be a number above 0 and below 1, or null"),
        (["optimizer.lr={"], "--set optimizer.lr={ is not YAML"),
    ],
)
def test_mistakes(changes, words):
    found = mistakes(*changes)
    assert any(m.startswith(words) for m in found), found


def test_files_that_cannot_be_read(tmp_path):
    file = tmp_path / "config.yaml"
    assert mistakes(preset=None, file=file) == [f"config file '{file}' does not exist"]
    file.write_text("method: {name: rgp\n")
    (only,) = mistakes(preset=None, file=file)
    assert "is not YAML" in only
    file.write_text("method:\n  rank: 1\n  rank: 2\n")
    assert "key 'rank' is written twice (line 3)" in mistakes(file=file)[0]
    file.write_text("- a\n- b\n")
    assert "must be sections" in mistakes(file=file)[0]
    file.write_text("method: 3\n")
    assert mistakes(file=file) == ["method = 3: must be a section, with keys below it"]
    assert "did you mean digits-rgp?" in mistakes(preset="digit-rgp")[0]
    assert mistakes(preset=None)[0].startswith("nothing to train")


def test_on_the_command_line():
    def rgp(*words):
        return CliRunner().invoke(cli.app, ["train", *words])

    shown = rgp("--preset", "digits-rgp", "--set", "method.rank=4", "--print-config")
    assert shown.exit_code == 0 and "  rank: 4 " in shown.stdout and "# columns of L" in shown.stdout
    program = json.loads(rgp("--preset", "digits-rgp", "--print-config", "--json").stdout)
    assert list(program) == list(config.SECTIONS)
    wrong = rgp("--preset", "digits-rgp", "--set", "method.ranks=4", "--set", "budget.epsilon=0")
    assert wrong.exit_code == 2 and not wrong.stdout
    assert "2 mistakes" in wrong.stderr and "did you mean method.rank?" in wrong.stderr
    assert rgp("--presets").stdout.count("\n") == len(presets())
    assert "rgp train --preset digits-rgp" in rgp("--help").stdout


def test_a_reader_that_stops_reading_is_no_error():
    command = f"{sys.executable} -m rgp train --presets | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stdout.count("\n") == 1 and not done.stderr
    assert done.returncode in (0, 141)  # 0 where all of it fits into the pipe before it is closed
