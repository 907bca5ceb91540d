"""The micro-batch that is chosen where the user gives none: by shapes, alike everywhere, kept in the checkpoint."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import rgp
from rgp.microbatch import choose_microbatch, row_bytes
from rgp.plan import make_plan


def cnn(width: int = 16) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, width, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * width, 10)
    )


def images(side: int, channels: int = 1) -> TensorDataset:
    return TensorDataset(torch.zeros(4, channels, side, side), torch.zeros(4).long())


def bert_sized() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Embedding(30522, 768), *(nn.Linear(768, 3072) for _ in range(12)), nn.Linear(768, 2))


class Broken:
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        raise OSError("no such file")


def reader() -> nn.Module:
    return nn.Sequential(nn.Embedding(99, 16), nn.Linear(16, 2))


CASES = {
    "digits": (images(8), cnn(), 256),
    "mnist": (images(28), cnn(), 256),
    "large images": (images(224), cnn(64), 32),
    "features": (TensorDataset(torch.zeros(4, 20), torch.zeros(4).long()), nn.Linear(20, 2), 256),
    "numpy": ([(np.zeros((1, 28, 28), np.float32), 0)] * 4, cnn(), 256),
    "a small reader of texts": ([{"ids": torch.zeros(9).long(), "label": 1}] * 4, reader(), 64),
    "a short text, and a large model": ([{"ids": torch.zeros(3).long()}] * 4, bert_sized(), 32),
    "something else": (["a text", "another"], cnn(), 32),
    "a row that cannot be read": (Broken(), cnn(), 32),
}


@pytest.mark.parametrize("name", CASES)
def test_the_size_follows_the_model_and_the_first_row(name):
    dataset, model, expected = CASES[name]
    plan = make_plan(model, rgp.DPSGD())
    assert choose_microbatch(dataset, plan, 1000) == expected
    assert choose_microbatch(dataset, plan, 20) == 20  # never more than are expected


def test_the_estimate_is_no_less_than_what_a_pass_keeps():
    """Outputs of all layers, counted while a row goes through."""
    model, kept = cnn(), 0

    def count(_module: Any, _inputs: Any, output: torch.Tensor) -> None:
        nonlocal kept
        kept += output.numel() * 4

    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            module.register_forward_hook(count)
    model(torch.zeros(1, 1, 28, 28))
    estimate = row_bytes(images(28), make_plan(model, rgp.DPSGD()))
    assert estimate is not None and kept <= estimate


def test_reading_the_first_row_draws_nothing():
    class Augmented:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.randn(3)

    plan = make_plan(nn.Linear(3, 2), rgp.DPSGD())
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    row_bytes(Augmented(), plan)
    assert torch.equal(torch.rand(1), expected)


def test_the_chosen_size_is_kept_and_the_users_own_wins(tmp_path):
    model = nn.Linear(6, 2)
    rows = [(torch.zeros(6), 0)] * 400
    options: dict[str, Any] = {"method": rgp.DPSGD(), "noise_multiplier": 1.0, "batch_size": 200, "steps": 2}

    def start(**more: Any) -> rgp.Run:
        return rgp.privatize(model, torch.optim.SGD(model.parameters(), lr=0.1), rows, **options, **more, after=())

    with start(folder=tmp_path) as run:
        assert run.loading.microbatch_size == 200
        run.save(tmp_path)
    with rgp.resume(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.1), rows) as resumed:
        assert resumed.loading.microbatch_size == 200
    with start(microbatch_size=7) as run:
        assert run.loading.microbatch_size == 7
