"""Ledgers and checkpoints of earlier releases are read, mean what they meant, and go on."""

import json
import shutil
import sys
import warnings
from pathlib import Path

import pytest
import torch

import rgp
from rgp import accounting
from rgp.ledger import Ledger

pytest.importorskip("safetensors")
sys.path.insert(0, str(Path(__file__).parent))
import make

KEPT = sorted(path.parent for path in Path(__file__).parent.glob("*/expected.json"))


def test_files_of_the_first_release_are_kept():
    assert "0.1" in [folder.name for folder in KEPT]


@pytest.mark.parametrize("folder", KEPT, ids=lambda folder: folder.name)
def test_a_kept_ledger_means_what_it_meant(folder):
    expected = json.loads((folder / "expected.json").read_text())
    ledger = Ledger.open(folder)
    assert ledger.count == expected["steps"]
    assert accounting.epsilon(ledger.events(), delta=make.DELTA) == pytest.approx(expected["epsilon"], rel=1e-6)


@pytest.mark.parametrize("folder", KEPT, ids=lambda folder: folder.name)
def test_a_kept_checkpoint_goes_on(folder, tmp_path):
    expected = json.loads((folder / "expected.json").read_text())
    shutil.copytree(folder, tmp_path / "run")
    model, optimizer = make.parts()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = rgp.resume(tmp_path / "run", model, optimizer, make.rows())
        for parameter, kept in zip(model.parameters(), expected["weights"], strict=True):
            torch.testing.assert_close(parameter.detach().flatten(), torch.tensor(kept))
        assert run.step_index == expected["steps"] and run.epsilon() == pytest.approx(expected["epsilon"], rel=1e-6)
        make.train(run, model)
        run.close()
    assert run.step_index == make.STEPS and run.ledger.count == make.STEPS and run.epsilon() > expected["epsilon"]
