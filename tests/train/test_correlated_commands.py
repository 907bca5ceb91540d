"""`--bands`, `training.bands` and `PrivacyArguments.bands`: from a setting to the card."""

import json

import pytest

pytest.importorskip("yaml")
pytest.importorskip("typer")
pytest.importorskip("safetensors")
pytest.importorskip("sklearn")
from typer.testing import CliRunner

from rgp import cli
from rgp.ledger import Ledger
from rgp.train import config, runner
from rgp.train.config import ConfigError
from rgp.train.progress import Silent

SST2 = ("--delta", "1e-5", "--sampling-rate", "0.0082119", "--steps", "60")


def ask(*arguments):
    result = CliRunner().invoke(cli.app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize(("bands", "sigma"), [("60", 0.5442), ("8", 0.5338), ("1", 0.4307), ("auto", 0.5442)])
def test_calibrate(bands, sigma):
    found = ask("calibrate", "--epsilon", "8", *SST2, "--bands", bands)
    assert found["noise_multiplier"] == sigma
    if bands == "auto":
        assert found["bands"] == 60
        assert found["times_less_noise_in_weights"] == pytest.approx(2.02, abs=0.01)


def test_account_is_the_inverse_and_its_attack_rates_are_those_of_a_groups_events():
    found = ask("account", "--noise-multiplier", "0.5442", *SST2, "--bands", "60")
    assert 7.99 < found["epsilon"] <= 8
    single = ask(
        "account", "--noise-multiplier", "0.5442", "--delta", "1e-5", "--sampling-rate", "0.492714", "--steps", "1"
    )
    assert found["tpr_at_0.01"] == pytest.approx(single["tpr_at_0.01"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("account", "--noise-multiplier", "1", *SST2, "--bands", "auto"), "needs a budget"),
        (("calibrate", "--epsilon", "8", *SST2, "--bands", "61"), "from 1 to the number of steps"),
        (("calibrate", "--epsilon", "8", *SST2, "--bands", "some"), "must be auto"),
    ],
)
def test_wrong_bands_are_refused(arguments, words):
    result = CliRunner().invoke(cli.app, list(arguments))
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["training.bands=4", "training.max_batch=300"], "training.max_batch"),
        (["training.bands=4", "method.sides=alternate"], "method.sides"),
        (["training.bands=auto", "budget.epsilon=null", "budget.noise_multiplier=1"], "budget.epsilon"),
        (["training.bands=0"], "training.bands"),
    ],
)
def test_configs_that_do_not_go_together(changes, words):
    with pytest.raises(ConfigError, match=words):
        config.load(None, preset="digits-rgp", changes=changes)


def test_a_run_of_the_command_says_which_noise_it_has(tmp_path):
    changes = ["training.bands=4", "method.keep=4", "training.steps=6", "training.epochs=null", "model.name=mlp"]
    changes += ["model.width=16", "run.seed=0", "training.batch_size=64"]
    settings = config.load(None, preset="digits-rgp", changes=changes)
    said = []

    class Heard(Silent):
        def say(self, text):
            said.append(text)

        def start(self, name, done, total):
            said.append(name)

    summary = runner.train(settings, tmp_path / "run", progress=Heard())
    assert summary["bands"] == 4
    assert "correlated over 4 steps: noise in the weights" in summary["noise"]
    assert any("correlated over 4 steps" in line for line in said)
    assert "rgp, noise over 4 steps" in said
    card = json.loads((tmp_path / "run" / "model" / "privacy_card.json").read_text())
    assert card["sampling"]["groups"] == 4
    text = next((tmp_path / "run" / "model").glob("*.md")).read_text()
    assert "dealt into 4 groups" in text
    assert "correlated over 4 steps" in text
    assert "correlated over 4 steps" in (tmp_path / "run" / "report.html").read_text()
    ledger = Ledger.open(tmp_path / "run")
    assert [event.count for event in ledger.events()] == [2]
    assert not list((tmp_path / "run").glob("past-noise*"))


def test_the_plan_counts_past_noise_and_what_it_is_worth():
    found = ask("plan", "--model", "minilm", "--batch", "512", "--epochs", "0.5", "--bands", "8", "--against", "dpsgd")
    rows = {row["name"]: row for row in found["methods"]}
    alone = ask("plan", "--model", "minilm", "--batch", "512", "--epochs", "0.5", "--against", "none")
    assert found["bands"] == 8
    assert rows["dpsgd"]["memory"]["past_noise"] == 7 * 4 * rows["dpsgd"]["trainable"]
    assert rows["rgp"]["memory"]["past_noise"] < rows["dpsgd"]["memory"]["past_noise"] / 10
    assert rows["rgp"]["memory"]["peak"] == alone["methods"][0]["memory"]["peak"] + rows["rgp"]["memory"]["past_noise"]
    assert 1.4 < rows["rgp"]["snr"] / alone["methods"][0]["snr"] < 2


def test_privacy_arguments():
    pytest.importorskip("transformers")
    from rgp.integrations.arguments import PrivacyArguments

    assert PrivacyArguments(epsilon=8.0).number_of_bands is None
    assert PrivacyArguments(epsilon=8.0, bands=4).number_of_bands == 4
    made = PrivacyArguments(epsilon=8.0, bands="auto", keep=20)
    assert (made.number_of_bands, made.make_method().keep) == ("auto", 20)
    with pytest.raises(ValueError, match="bands"):
        PrivacyArguments(epsilon=8.0, bands="0")


def test_an_old_run_of_the_trainer_goes_on_without_being_told_its_bands(tmp_path):
    pytest.importorskip("transformers")
    from types import SimpleNamespace

    from rgp.integrations import transformers as integration
    from rgp.integrations.arguments import PrivacyArguments

    old = PrivacyArguments(epsilon=8.0, bands=1).record()
    assert old["bands"] == "1"
    (tmp_path / integration.RECORD).write_text(json.dumps(old))
    check = integration.PrivateTrainer._check_record
    check(SimpleNamespace(privacy=PrivacyArguments(epsilon=8.0)), tmp_path)
    with pytest.raises(ValueError, match=r"bands is '4'.*made with '1'"):
        check(SimpleNamespace(privacy=PrivacyArguments(epsilon=8.0, bands=4)), tmp_path)


def test_presets_keep_the_noise_that_they_were_measured_with():
    for name in config.presets():
        loaded = config.load(preset=name)
        if loaded.private and loaded.budget.epsilon is not None:
            correlated = name.endswith("-bands") or name == "sst2-mpnet-rgp"
            assert loaded.training.bands == ("auto" if correlated else 1), name


def test_kept_results_of_independent_noise_keep_their_fingerprints():
    """As they were before there was a choice: nothing about bands is in them. The default is another setting."""
    pytest.importorskip("matplotlib")
    from dataclasses import replace

    from rgp.reproduce.items import digest, fingerprint

    pinned = config.load(preset="digits-dpsgd")
    assert pinned.training.bands == 1
    by_default = replace(pinned, training=replace(pinned.training, bands=None))
    auto = replace(pinned, training=replace(pinned.training, bands="auto"))
    assert len({fingerprint(one) for one in (pinned, by_default, auto)}) == 3
    plain = config.Config()
    independent = replace(plain, training=replace(plain.training, bands=1))
    assert fingerprint(independent) == digest({})


def test_the_page_shows_what_was_measured():
    import importlib.util
    from pathlib import Path

    file = Path(__file__).parents[2] / "experiments" / "bands_measured.py"
    spec = importlib.util.spec_from_file_location("bands_measured", file)
    measured = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(measured)
    lines = [json.loads(line) for line in measured.RESULTS.read_text(encoding="utf-8").splitlines()]
    assert {line["setting"] for line in lines} == {"digits", "CIFAR-10", "MiniLM"}
    page = measured.PAGE.read_text(encoding="utf-8")
    for row in measured.table(lines):
        assert row in page
    for line in lines:
        if line["optimizer"] == "SGD":
            assert line["measured"] > 0.97 * line["predicted"], line
