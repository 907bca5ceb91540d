"""Checkpoints that do not belong to what they are resumed with are refused by name."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

import rgp
from resuming import (
    SIZE,
    Net,
    again,
    crashed,
    data,
    start,
    train,
    weights,
)
from rgp.errors import LedgerError
from rgp.ledger import FILE

# ---------------------------------------------------------------------- refused


class Wider(Net):
    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed, width=13)


class Renamed(Net):
    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.last = self.head
        del self.head


class Halved(Net):
    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.double()


class Shared(Net):
    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.norm.bias = self.second.bias


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset": data(SIZE + 1)}, "dataset size is 49, and was 48"),
        ({"batch_size": 13}, "batch_size at step 0 is 13, and was 12"),
        ({"method": rgp.DPSGD()}, "method is DPSGD, and was RGP"),
        ({"method": rgp.RGP(rank=3, warmup_steps=2)}, "method's rank is 3, and was 2"),
        ({"net": Wider}, r"model's 'first.weight' is \[13, 6\] float32, and was \[12, 6\] float32"),
        ({"net": Renamed}, r"model's 'head.weight' is missing, and was .*'last.weight' is .*, and was missing"),
        ({"net": Halved}, "float64, and was"),
        ({"net": Shared}, "'norm.bias' is .* tied to second.bias, and was"),
        ({"optimizer": "momentum"}, "optimizer is SGD, and was Adam"),
        ({"optimizer": "groups"}, "parameter groups hold other parameters"),
        ({"scheduler": "cosine"}, "scheduler is CosineAnnealingLR, and was None"),
    ],
)
def test_another_run_is_refused_by_name(tmp_path, options, message):
    crashed(tmp_path)
    before = (tmp_path / FILE).read_bytes()
    with pytest.raises(ValueError, match=message):
        again(tmp_path, **options)
    assert (tmp_path / FILE).read_bytes() == before
    again(tmp_path, batch_size=12, method=rgp.RGP(rank=2, warmup_steps=2))  # what was true before still is


def test_settings_that_the_ledger_does_not_know_are_refused(tmp_path):
    run = crashed(tmp_path)
    path = next(tmp_path.glob("checkpoint-*")) / "state.json"
    state = json.loads(path.read_text())
    for key, value in {"delta": 1e-4, "steps": 9, "sigmas": [[2.0, 8]], "batch_sizes": [[9, 8]]}.items():
        path.write_text(json.dumps({**state, "settings": {**state["settings"], key: value}}))
        with pytest.raises((ValueError, IndexError)):
            again(tmp_path)
    path.write_text(json.dumps({**state, "format": 2}))
    with pytest.raises(ValueError, match="has format 2; this version of rgp reads 1"):
        again(tmp_path)
    assert run.step_index == 5


def test_a_public_loss_must_come_along(tmp_path):
    crashed(tmp_path)
    with pytest.raises(ValueError, match="give public_loss"):
        again(tmp_path, public_loss=lambda: torch.zeros(()))


def test_random_numbers_of_a_public_loss_are_the_same_after_a_resume(tmp_path):
    inputs = torch.stack([x for x, _ in data()])[:6]

    def start_or_resume(make, folder, **options):
        def logits():
            return run.model(inputs)

        run = make(folder, public_loss=rgp.without_labels(logits), **options)
        return run

    method = rgp.RGP(rank=2, source="public")
    whole = start_or_resume(start, None, method=method)
    train(whole)
    run = start_or_resume(start, tmp_path, method=method)
    train(run, 4)
    run.save(tmp_path)
    run.close()
    run = start_or_resume(again, tmp_path)
    train(run)
    assert all(torch.equal(a, b) for a, b in zip(weights(whole).values(), weights(run).values(), strict=True))


def test_a_rolled_back_ledger_is_refused(tmp_path):
    run = start(tmp_path)
    train(run, 2)
    shutil.copy(tmp_path / FILE, tmp_path / "old")
    train(run, 4)
    run.save(tmp_path)
    run.ledger.close()
    shutil.move(tmp_path / "old", tmp_path / FILE)
    with pytest.raises(LedgerError, match=r"the checkpoint knows 4 releases.*under-report epsilon"):
        again(tmp_path)


def test_a_missing_ledger_is_refused(tmp_path):
    crashed(tmp_path)
    (tmp_path / FILE).unlink()
    with pytest.raises(LedgerError, match="no record of what was released"):
        again(tmp_path)


def test_an_edited_ledger_is_refused(tmp_path):
    crashed(tmp_path)
    text = (tmp_path / FILE).read_text()
    (tmp_path / FILE).write_text(text.replace('"sigma": 1.0', '"sigma": 9.0', 1))
    with pytest.raises(LedgerError, match="line 1"):
        again(tmp_path)


def test_a_folder_without_a_checkpoint_is_refused(tmp_path):
    train(start(tmp_path), 2)
    with pytest.raises(FileNotFoundError, match=r"holds no checkpoint.*were made nevertheless"):
        again(tmp_path)


def test_checkpoints_belong_next_to_their_ledger(tmp_path):
    run = start(tmp_path / "a")
    with pytest.raises(ValueError, match="its checkpoints belong next to it"):
        run.save(tmp_path / "b")
    with pytest.raises(LedgerError, match="another run's releases"):
        start().save(tmp_path / "a")


def test_a_folder_with_another_runs_checkpoint_is_refused(tmp_path):
    crashed(tmp_path)
    (tmp_path / FILE).unlink()
    other = start(tmp_path, seed=1)
    with pytest.raises(LedgerError, match="belongs to another run"):
        other.save(tmp_path)


def test_the_older_run_cannot_go_on_after_it_was_resumed(tmp_path):
    run = crashed(tmp_path)
    again(tmp_path)
    with pytest.raises(LedgerError, match="resumed after this one"):
        train(run)


def test_a_closed_run_is_not_saved(tmp_path):
    run = start(tmp_path)
    run.close()
    with pytest.raises(ValueError, match="save it before closing"):
        run.save(tmp_path)
