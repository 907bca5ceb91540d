"""Faults of the ledger and its disk."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import rgp
from faults.small import (
    STEPS,
    again,
    fault,
    saved,
    start,
    train,
    weight,
)
from rgp import ledger
from rgp.ledger import FILE


@fault
def folder_in_use(tmp_path):
    start(tmp_path)
    start(tmp_path)


@fault
def disk_full(tmp_path):
    run = train(start(tmp_path), 2)
    before = weight(run)

    def full(_handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ledger.os, "fsync", full)
        try:
            train(run)
        finally:
            assert torch.equal(weight(run), before)


@fault
def ledger_removed(tmp_path):
    run = train(start(tmp_path), 2)
    (tmp_path / FILE).unlink()
    train(run)


@fault
def torn_line(tmp_path):
    saved(tmp_path).close()
    with open(tmp_path / FILE, "ab") as file:
        file.write(b'{"C": 1.0, "atte')
    run = train(again(tmp_path))
    assert run.ledger.count == STEPS + 1


def rewrite(folder: Path, change: Callable[[list[str]], list[str]]) -> None:
    path = folder / FILE
    path.write_text("".join(change(path.read_text().splitlines(keepends=True))))


@fault
def edited_line(tmp_path):
    saved(tmp_path).close()
    rewrite(tmp_path, lambda lines: [line.replace('"sigma": 1.0', '"sigma": 5.0') for line in lines])
    again(tmp_path)


@fault
def repeated_line(tmp_path):
    saved(tmp_path).close()
    rewrite(tmp_path, lambda lines: [*lines[:2], lines[1], *lines[2:]])
    again(tmp_path)


@fault
def removed_line(tmp_path):
    saved(tmp_path).close()
    rewrite(tmp_path, lambda lines: [*lines[:2], *lines[3:]])
    again(tmp_path)


@fault
def two_processes(tmp_path):
    run = saved(tmp_path)
    code = "import sys; from rgp import ledger; ledger.PATIENCE = 0.1; ledger.Ledger.open(sys.argv[1], append=True)"
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True)
    assert run.ledger.count == 4 and done.returncode != 0
    raise rgp.LedgerError(done.stderr)
