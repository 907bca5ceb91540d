"""An accountant is one entry in accountants.py: a made-up third one works everywhere, and nobody asks for a name."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import rgp
from rgp import accountants
from rgp.accountants import ACCOUNTANTS, accountant_label, find_accountant
from rgp.accounting import Event, epsilon, epsilon_curve, meaning

SOURCE = Path(rgp.__file__).parent

THIRD = """
from dataclasses import replace
from rgp import accountants

PLD = accountants.PLD
twice = replace(
    PLD, name="twice", label="twice the truth", words="for a test",
    epsilon=lambda merged, delta: 2 * PLD.epsilon(merged, delta),
    coarse_epsilon=None, max_batch=False,
)
bare = replace(twice, name="bare", label="no profile at all", profile=None)
accountants.ACCOUNTANTS |= {"twice": twice, "bare": bare}

import json, torch, rgp
from typer.testing import CliRunner
from rgp import accounting, cli, tuning
from rgp.cards import card_text, make_card
from rgp.train.checks import ConfigError
from rgp.train.config import load
from rgp.integrations.arguments import PrivacyArguments

events, once = [accounting.Event(0.1, 1.0, 20)], {}
for name in ("pld", "twice", "bare"):
    sigma = accounting.calibrate(epsilon=3.0, delta=1e-5, sampling_rate=0.1, steps=20, accountant=name)
    once[name] = sigma, accounting.epsilon(events, delta=1e-5, accountant=name)
assert once["twice"][1] == 2 * once["pld"][1] and once["twice"][0] > once["pld"][0], once
assert accounting.epsilon_curve(events[0], 20, delta=1e-5, accountant="twice")[-1][1] > 0

model = torch.nn.Linear(4, 2)
run = rgp.privatize(
    model, torch.optim.SGD(model.parameters(), lr=0.1), [(torch.ones(4), i % 2) for i in range(64)],
    method=rgp.DPSGD(), budget=rgp.Budget(3.0, 1e-3, accountant="{name}"), batch_size=8, steps=2, seed=1,
)
with run:
    for x, y in run:
        run.step(torch.nn.functional.cross_entropy(model(x), y))
    assert 0 < run.epsilon() <= 3.0
    card = make_card(run, method="dpsgd", dataset="ones", model="linear", seed_known=True, secure_noise=False)
words = card_text(card)
assert accountants.ACCOUNTANTS["{name}"].label in words, words
assert ("recognises at most" in words) == ("{name}" == "twice"), words

settings = ["budget.accountant={name}"]
assert load(preset="digits-rgp", changes=settings).budget.accountant == "{name}"
try:
    load(preset="digits-rgp", changes=[*settings, "training.max_batch=40"])
    raise SystemExit("max_batch was not refused")
except ConfigError as error:
    assert "needs budget.accountant = pld" in str(error), error
assert PrivacyArguments(epsilon=3.0, accountant="{name}").accountant == "{name}"

asked = "account --noise-multiplier 1 --sampling-rate 0.1 --steps 20 --delta 1e-5 --json --accountant {name}"
shown = CliRunner().invoke(cli.app, asked.split())
assert shown.exit_code == 0, shown.output
assert ("mu" in json.loads(shown.output)) == ("{name}" == "twice")
assert "twice: for a test" in CliRunner(env={"COLUMNS": "200"}).invoke(cli.app, ["calibrate", "--help"]).output
"""


@pytest.mark.parametrize("name", ["twice", pytest.param("bare", marks=pytest.mark.slow)])
def test_a_third_accountant_is_one_entry(name):
    """In a process of its own, because configs and help read the table when they are imported."""
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", THIRD.replace("{name}", name)],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert found.returncode == 0, found.stderr[-3000:]


def test_no_other_file_asks_for_an_accountant_by_name():
    """Defaults may name one, error messages too; a comparison, a table or an argument may not."""
    places = []
    for path in SOURCE.rglob("*.py"):
        if path.name == "accountants.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            asked: list[ast.expr | None] = []
            if isinstance(node, ast.Compare):
                asked = [node.left, *node.comparators]
            elif isinstance(node, ast.Call):
                asked = [*node.args, *(k.value for k in node.keywords)]
            elif isinstance(node, ast.Dict):
                asked = [*node.keys]
            elif isinstance(node, (ast.Tuple, ast.List, ast.Set)):
                asked = [*node.elts]
            elif isinstance(node, ast.MatchValue):
                asked = [node.value]
            if any(isinstance(a, ast.Constant) and a.value in ACCOUNTANTS for a in asked):
                places.append(f"{path.relative_to(SOURCE)}:{node.lineno}")
    allowed = {"train/sections.py", "integrations/arguments.py"}  # the default of a setting
    assert {p for p in places if p.partition(":")[0] not in allowed} == set()


def test_unknown_names_are_refused_with_those_that_are_known():
    with pytest.raises(ValueError, match=r'accountant=\'gdp\' must be "pld" \(tight, the default\) or "rdp"'):
        find_accountant("gdp")
    assert accountant_label("gdp") == "gdp"
    assert accountant_label(None) == "none"


def test_what_an_accountant_has_no_bound_for_is_refused():
    capped = Event(0.1, 1.0, 5, max_batch=20, dataset_size=100)
    for ask in (epsilon, lambda events, **kw: epsilon_curve(events[0], 5, **kw)):
        with pytest.raises(ValueError, match=r"max_batch=20: Rényi.*Use accountant=pld, or no max_batch"):
            ask([capped], delta=1e-5, accountant="rdp")
    with pytest.raises(ValueError, match="'rdp' has no privacy profile"):
        meaning([Event(0.1, 1.0, 5)], delta=1e-5, accountant="rdp")
    assert accountants.with_max_batch() == "pld"
