"""A few golden runs, each against itself in another form: stopped and resumed, and with two processes.

Bits differ between machines, so no file of numbers is kept; `python tests/golden/cases.py` compares two versions.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest
import torch

import rgp

sys.path.insert(0, str(Path(__file__).parent))
import cases


@pytest.mark.parametrize(
    "name", ["rgp/adaptive/views", "dpsgd/flat/plain/deferred", "rgp-alternate/flat/plain", "powersgd/flat/plain"]
)
def test_a_stopped_run_ends_with_the_same_bits(name, tmp_path):
    method, clip, option, deferred = cases.cases()[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = cases.train(method, clip, option, deferred, tmp_path / "whole")
        cases.train(method, clip, option, deferred, tmp_path / "stopped", stop_after=2)
        net = cases.model(deferred=deferred)
        optimizer = cases.optimizer(method, net)
        run = rgp.resume(
            tmp_path / "stopped", net, optimizer, cases.dataset(),
            scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 2), augment=cases.OPTIONS[option].get("augment"),
        )  # fmt: skip
        assert cases.finish(run, net, tmp_path / "stopped") == whole
