"""The secret and past noise are in their own files while a run is unfinished, and nowhere afterwards, wherever it was killed."""

from __future__ import annotations

import json
import logging
import os
import traceback
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from test_silent_ways import data, mean, net, private

import rgp

STEPS = 4


def train(run: rgp.Run, until: int = STEPS) -> None:
    for x, y in run:
        run.step(mean(run.model, x, y))
        if run.step_index == until:
            break


def made(folder: Path, **options: Any) -> rgp.Run:
    return private(net(), steps=STEPS, batch_size=6, bands=2, folder=folder, probe=False, **options)


def resumed(folder: Path) -> rgp.Run:
    model = net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return rgp.resume(folder, model, torch.optim.SGD(model.parameters(), lr=0.1), data(), probe=False)


def holders(folder: Path, *secrets: bytes) -> set[str]:
    """Files that hold one of these."""
    return {
        path.name
        for path in folder.rglob("*")
        if path.is_file() and any(secret in path.read_bytes() for secret in secrets)
    }


def secrets_of(run: rgp.Run) -> list[bytes]:
    past = [vector.numpy().tobytes()[:64] for vector in run.past_noise()]
    return [run._streams.secret, run._streams.secret.hex().encode(), *past]


def killed_at(operation: int, folder: Path) -> bool:
    """A child goes on with the run and saves it, and dies at this operation on files. Whether it died."""
    child = os.fork()
    if child == 0:
        count = 0

        def counted(whole: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal count
                count += 1
                if count == operation:
                    os._exit(9)
                return whole(*args, **kwargs)

            return call

        try:
            run = resumed(folder)
            train(run, run.step_index + 1)
            for name in ("replace", "rename", "fsync", "unlink", "mkdir", "open", "write", "rmdir"):
                setattr(os, name, counted(getattr(os, name)))
            run.save(folder)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 9)
    return status == 9


@pytest.mark.parametrize("saved", [2, 3])
def test_killed_in_every_window_of_a_save(saved, tmp_path):
    """saved: after which step the run was saved; the save that is killed is the next one, which may be the last."""
    operation, died = 0, True
    while died:
        operation += 1
        folder = tmp_path / str(operation)
        run = made(folder, seed=None)
        train(run, saved)
        run.save(folder)
        secrets = secrets_of(run)
        assert holders(folder, *secrets) <= {"secret.json", f"past-noise.checkpoint-{saved}"}
        run.ledger.close()
        died = killed_at(operation, folder)
        last = resumed(folder)
        with last:
            train(last)
            secrets += secrets_of(last)
            last.save(folder)
        assert last.step_index == STEPS and not holders(folder, *secrets), operation
        assert not list(folder.glob("past-noise*")) and not list(folder.glob("secret*"))
    assert operation > 20


def test_an_unfinished_folder_keeps_it_for_the_owner_alone(tmp_path):
    run = made(tmp_path / "run", seed=None)
    train(run, 2)
    run.save(tmp_path / "run")
    for name in holders(tmp_path / "run", *secrets_of(run)):
        assert (tmp_path / "run" / name).stat().st_mode & 0o077 == 0
    assert (tmp_path / "run").stat().st_mode & 0o077 == 0


def test_what_a_run_says_of_itself(tmp_path, caplog, capsys):
    """Words for people: repr, warnings, logs, a traceback with its local variables."""
    run = made(tmp_path, seed=None)
    found = []
    with caplog.at_level(logging.DEBUG), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        train(run, 2)
        run.save(tmp_path)
        parts = (run, run._streams, run.releases, run.releases.source, run.releases.chain, run._loop, run._step)
        found += [text for part in parts for text in (repr(part), str(part), f"{part}")]
        found += [repr(run.ledger.header), run.ledger.text().decode(), json.dumps(run.mechanism.to_json())]
        try:
            run.step(torch.zeros(()))
        except rgp.WrongUseError as error:
            found.append("".join(traceback.TracebackException.from_exception(error, capture_locals=True).format()))
    found += [*map(str, warned), caplog.text, *capsys.readouterr()]
    secret = run._streams.secret
    for text in found:
        assert secret.hex() not in text and repr(secret)[2:-1] not in text


def test_the_command_shows_no_local_variables():
    typer = pytest.importorskip("typer")
    from rgp import cli

    assert isinstance(cli.app, typer.Typer) and cli.app.pretty_exceptions_show_locals is False


def test_the_run_id_says_nothing_of_the_secret():
    ids = {private(net(), seed=None)._streams.run_id for _ in range(20)}
    assert len(ids) == 20 and all(len(one) == 16 for one in ids)
