"""Code on pages that starts in the middle: run with what a reader has by then. And no block that nobody runs."""

import re
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from page_commands import BLOCK, DOCS, ROOT, blocks, pages, shell_lines
from test_docs import RUN, commands
from torch import nn

import rgp

ELSEWHERE = {"opacus": "tests/repository/test_opacus_page.py"}  # pages whose blocks another test runs
SMALL = {"noise_multiplier": 1.0, "steps": 2}


def rows():
    """Something to train on, and the settings that pages leave out as `...`."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    return {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "data": [(torch.randn(8), i % 2) for i in range(512)],
        "patient_ids": [i // 2 for i in range(512)],
        "settings": SMALL,
    }


def tokens():
    transformers = pytest.importorskip("transformers")
    from tiny_models import gpt2_config

    model = transformers.GPT2LMHeadModel(gpt2_config(20, 16)).train()
    return {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "dataset": [{"input_ids": torch.randint(1, 20, (12,))} for _ in range(64)],
        "settings": SMALL | {"batch_size": 16},
        "TOKENS": 12,
    }


def texts():
    """A saved classifier, with rows for the loop of the README and for the Trainer."""
    transformers = pytest.importorskip("transformers")
    from tiny_models import bert_config

    transformers.BertForSequenceClassification(bert_config(20, 16)).save_pretrained("run")
    Path("vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmno"]))
    rows = [{"input_ids": torch.randint(5, 20, (6,)), "labels": i % 2} for i in range(2048)]
    return {
        "BertForSequenceClassification": transformers.BertForSequenceClassification,
        "TrainingArguments": transformers.TrainingArguments,
        "model": transformers.BertForSequenceClassification.from_pretrained("run"),
        "tokenizer": transformers.BertTokenizer("vocab.txt"),
        "folder": "run",
        "dataset": rows,
        "data": rows,
        "held_out": rows[:20],
        "loss_fn": lambda model, batch: F.cross_entropy(model(batch["input_ids"]).logits, batch["labels"]),
    }


def arguments():
    pytest.importorskip("accelerate")
    from rgp.integrations.transformers import PrivacyArguments

    return {"PrivacyArguments": PrivacyArguments}


def many_rows():
    """As many rows as the page speaks of, so that its numbers come out."""
    return {**rows(), "data": [(torch.zeros(8), 0)] * 62349}


def with_inputs():
    return {**rows(), "inputs": torch.randn(32, 8), "dataset": rows()["data"], "settings": SMALL | {"batch_size": 64}}


FRAGMENTS = {  # page -> the names that its text has spoken of
    "README": texts,
    "correlated-noise": many_rows,
    "language": texts,
    "method": with_inputs,
    "pitfalls": tokens,
    "rules": dict,
    "thin": dict,
    "units": lambda: {**rows(), **arguments()},
}


def page(name):
    return ROOT / "README.md" if name == "README" else DOCS / f"{name}.md"


def whole(language, code):
    """A block that Python reads: the new side of a diff, and settings in place of the dots."""
    if language == "diff":
        code = "".join(line[1:] or "\n" for line in code.splitlines(keepends=True) if line[0] in "+ \n")
    return code.replace("(..., ", "(model, optimizer, dataset, **settings, ").replace(", ...)", ", **settings)")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n == "language" else ()) for n in FRAGMENTS]
)
def test_fragments_of_a_page_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DISABLE_MLFLOW_INTEGRATION", "true")
    torch.manual_seed(0)
    names = {"__name__": "__main__", "torch": torch, "F": F, "rgp": rgp, **FRAGMENTS[name]()}
    found = [
        (line, whole(language, code)) for language in ("python", "diff") for line, code in blocks(page(name), language)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for line, code in sorted(found):
            exec(compile("\n" * line + code, str(page(name)), "exec"), names)  # errors name the line of the page
    assert found


def unrun(path, known):
    """Lines where a block of Python begins that no test runs and that does not say why."""
    return [line for line, _ in (*blocks(path, "python"), *blocks(path, "diff")) if path not in known]


def test_no_python_on_any_page_is_left_out():
    known = {*RUN, *map(page, FRAGMENTS), *map(page, ELSEWHERE)}
    assert {path.name: lines for path in pages() if (lines := unrun(path, known))} == {}


def test_python_that_nobody_runs_is_noticed(tmp_path):
    path = tmp_path / "page.md"
    path.write_text("<!-- not run: why -->\n```python\n1 / 0\n```\n\nText.\n\n```python\n1 / 0\n```\n")
    assert unrun(path, set()) == [9]


def test_reasons_are_given():
    for path in pages():
        for match in BLOCK.finditer(path.read_text(encoding="utf-8")):
            if (match["before"] or "").startswith("<!-- not run"):
                assert re.match(r"<!-- not run: .{10,} -->$", match["before"].strip()), path.name


RUN_AS_THEY_STAND = ("rgp account", "rgp calibrate", "rgp plan", "rgp reproduce")
OWN_TESTS = {  # commands that train or wait for minutes, or need a network: who runs them, smaller
    "rgp analyze": "tests/analysis/",
    "rgp attack": "tests/attacks/",
    "rgp audit": "tests/audit/",
    "rgp bench": "tests/bench/",
    "rgp data get": "tests/data/",  # from a stand-in of the hub; the network itself is not tested
    "rgp demo": "tests/demo/",
    "rgp doctor": "tests/doctor/",
    "rgp eval": "tests/train/",
    "rgp report": "tests/report/",
    "rgp train": "tests/train/",
    "rgp tune": "tests/tuning/",
}


def command_lines():
    """(page, line, command) of every `rgp ...` in a block of a page, without its comment."""
    for path in pages():
        for line, text in shell_lines(path):
            if match := re.match(r"(?:(?:torchrun|accelerate launch) .*-m )?(rgp (?!--).*)", text):
                yield path, line, match[1]


def test_every_command_on_a_page_is_run_by_a_test():
    known = commands()
    for path, line, text in command_lines():
        words = text.split()
        name = next(n for n in (" ".join(words[:3]), " ".join(words[:2])) if n in known)
        assert name in OWN_TESTS or name in RUN_AS_THEY_STAND, f"{path.name}:{line}: {text}"
    for name, folder in OWN_TESTS.items():
        tests = "".join(file.read_text(encoding="utf-8") for file in (ROOT / folder).rglob("test_*.py"))
        assert f'"{name.split()[1]}"' in tests, f"{folder} does not call {name}"


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n == "rgp plan" else ()) for n in RUN_AS_THEY_STAND]
)
def test_quick_commands_of_the_pages_run_as_they_stand(name, tmp_path, monkeypatch):
    pytest.importorskip("typer")
    import shlex

    from typer.testing import CliRunner

    from rgp.cli import app

    monkeypatch.chdir(tmp_path)
    lines = {text for _, _, text in command_lines() if text.startswith(name)}
    assert lines
    for text in sorted(lines):
        if "..." in text or "./my-gpt2" in text:  # the reader's own
            continue
        result = CliRunner().invoke(app, shlex.split(text)[1:])
        assert result.exit_code == 0, f"{text}\n{result.output}"


def test_settings_of_training_commands_are_settings():
    """`rgp train` on a page names a preset and keys that exist: the config can be made."""
    pytest.importorskip("yaml")
    import shlex

    from rgp.train.config import load

    seen = 0
    for _, _, text in command_lines():
        if not text.startswith("rgp train --preset"):
            continue
        words = shlex.split(text)
        changes = [words[i + 1] for i, word in enumerate(words) if word == "--set" and "photos/" not in words[i + 1]]
        load(None, preset=words[words.index("--preset") + 1], changes=changes)
        seen += 1
    assert seen >= 8


@pytest.mark.slow  # trains twice, for one epoch
def test_the_first_commands_of_the_start_page(tmp_path):
    pytest.importorskip("typer")
    import os
    import subprocess
    import sys

    [code] = [code for _, code in blocks(DOCS / "index.md", "console") if "rgp train" in code]
    short = code.replace("$ ", "").replace(" --out", " --set training.epochs=1 --out")
    script = re.sub("^rgp ", f"{sys.executable} -m rgp ", short, flags=re.M)
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["sh", "-e", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs/second/report.html").exists() and (tmp_path / "runs/first/model/privacy_card.md").exists()
