"""`rgp account` and `rgp calibrate`, as a user types them."""

import importlib.util
import sys

import pytest

pytest.importorskip("typer")
from commands import ask, rgp
from rgp import cli

RUN = "--sampling-rate 0.04 --steps 2250 --delta 1e-5"


def test_account():
    got = ask(f"account --noise-multiplier 1.5 {RUN}")
    assert got["epsilon"] == pytest.approx(6.76879, rel=1e-5)
    assert (got["delta"], got["sampling_rate"], got["steps"], got["accountant"]) == (1e-5, 0.04, 2250, "pld")
    assert 0.001 < got["tpr_at_0.001"] < got["tpr_at_0.01"] < 1 and got["mu"] > 0
    rdp = ask(f"account --noise-multiplier 1.5 {RUN} --accountant rdp")
    assert rdp["epsilon"] == pytest.approx(7.3293, rel=1e-4) and "mu" not in rdp


def test_calibrate():
    got = ask(f"calibrate --epsilon 8 {RUN}")
    assert got["noise_multiplier"] == pytest.approx(1.3459, rel=1e-3)
    assert got["epsilon"] <= 8
    assert ask(f"calibrate --epsilon 8 {RUN} --accountant rdp")["noise_multiplier"] == pytest.approx(1.416, rel=1e-3)


def test_sizes_in_place_of_rate_and_steps():
    got = ask("account --noise-multiplier 1.5 --dataset-size 50000 --batch-size 2000 --epochs 90 --accountant rdp")
    assert (got["sampling_rate"], got["steps"], got["delta"]) == (0.04, 2250, pytest.approx(2e-6))


def test_tables_are_for_people():
    spent = rgp(f"account --noise-multiplier 1.5 {RUN}")
    assert spent.exit_code == 0 and "6.7688" in spent.stdout and "An attacker who sees every" in spent.stdout
    least = rgp(f"calibrate --epsilon 8 {RUN} --accountant rdp")
    assert least.exit_code == 0 and "noise multiplier" in least.stdout and "less would not" in least.stdout


def test_no_noise_is_null_in_json_and_a_word_in_the_table():
    got = ask(f"account --noise-multiplier 0 {RUN}")
    assert got["epsilon"] is None and got["mu"] is None and got["tpr_at_0.001"] == 1.0
    assert "infinite" in rgp(f"account --noise-multiplier 0 {RUN}").stdout


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("calibrate --epsilon 8", "Given: none of them"),
        ("calibrate --epsilon 8 --sampling-rate 0.1", "Given: --sampling-rate."),
        (f"calibrate --epsilon 8 {RUN} --dataset-size 100", "--sampling-rate --steps --dataset-size"),
        ("calibrate --epsilon 8 --dataset-size 100 --epochs 3", "Given: --dataset-size --epochs"),
        ("calibrate --epsilon 8 --sampling-rate 0.1 --steps 3", "--delta is needed"),
        ("calibrate --epsilon 8 --dataset-size 9 --batch-size 10 --epochs 3", "--batch-size 10 must be at most"),
        ("calibrate --epsilon 8 --dataset-size 9 --batch-size 1 --epochs 3 --delta 0.2", "delta=0.2 must be below 1/N"),
        (f"calibrate --epsilon -1 {RUN}", r"epsilon must be positive and finite; got -1.0"),
        (f"account --noise-multiplier 1 {RUN} --accountant prv", "accountant='prv' must be"),
        (f"account --noise-multiplier -1 {RUN}", "noise_multiplier=-1.0 must be"),
    ],
)
def test_user_errors_are_one_line_and_exit_code_2(line, message):
    result = rgp(line)
    assert result.exit_code == 2
    assert message in result.stderr and "Traceback" not in result.output and not result.stdout


def test_help_teaches_by_example():
    for command in ("account", "calibrate"):
        assert f"rgp {command} --" in rgp(f"{command} --help").stdout
    assert "account" in rgp("--help").stdout


def test_without_the_extra_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "typer", None)
    spec = importlib.util.spec_from_file_location("cli_without_typer", cli.__file__)
    bare = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bare)
    with pytest.raises(SystemExit) as stop:
        bare.main()
    assert stop.value.code == 1
    assert "pip install 'rgp[cli]'" in capsys.readouterr().err
