"""Arguments of `rgp.privatize`, settings of methods, and kinds of datasets."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import rgp
from toys import examples, loss_of, start, toy

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


# -------- wrong arguments

WRONG_ARGUMENTS = {
    "method": ({"method": "rgp"}, TypeError, "method.*'rgp'"),
    "budget": ({"noise_multiplier": None, "budget": 8.0}, (TypeError, ValueError), r"budget.*8\.0"),
    "both": ({"budget": rgp.Budget(8.0, 1e-5)}, ValueError, "budget.*noise_multiplier"),
    "neither": ({"noise_multiplier": None}, ValueError, "budget.*noise_multiplier"),
    "two deltas": (
        {"noise_multiplier": None, "budget": rgp.Budget(8.0, 1e-5), "delta": 1e-5},
        ValueError,
        "delta.*Budget",
    ),
    "delta": ({"delta": 0.5}, ValueError, r"delta=0\.5"),
    "delta 0": ({"delta": 0.0}, ValueError, r"delta.*0\.0"),
    "negative noise": ({"noise_multiplier": -1.0}, ValueError, r"noise_multiplier.*-1\.0"),
    "noise not a number": ({"noise_multiplier": "1"}, ValueError, "noise_multiplier.*'1'"),
    "noise nan": ({"noise_multiplier": math.nan}, ValueError, "noise_multiplier.*nan"),
    "noise schedule": (
        {"noise_multiplier": lambda t: -1.0 if t else 1.0},
        ValueError,
        r"noise_multiplier at step 1.*-1\.0",
    ),
    "epochs and steps": ({"epochs": 3}, ValueError, "epochs=3.*steps=3"),
    "no length": ({"steps": None}, ValueError, "epochs=None.*steps=None"),
    "steps": ({"steps": 0}, ValueError, "steps.*0"),
    "fractional steps": ({"steps": 2.5}, ValueError, r"steps.*2\.5"),
    "epochs": ({"steps": None, "epochs": -1}, ValueError, "epochs.*-1"),
    "epochs inf": ({"steps": None, "epochs": math.inf}, ValueError, "epochs.*inf"),
    "batch size 0": ({"batch_size": 0}, ValueError, "batch_size.*0"),
    "batch size too large": ({"batch_size": 13}, ValueError, "batch_size.*12.*13"),
    "fractional batch size": ({"batch_size": 6.0}, ValueError, r"batch_size.*6\.0"),
    "batch size True": ({"batch_size": True}, ValueError, "batch_size.*True"),
    "clip 0": ({"clip": 0}, ValueError, "clip.*0"),
    "clip negative": ({"clip": -2.0}, ValueError, r"clip.*-2\.0"),
    "clip inf": ({"clip": math.inf}, ValueError, "clip.*inf"),
    "clip None with noise": ({"clip": None}, ValueError, "clip=None.*noise_multiplier=0"),
    "clip None with a budget": (
        {"clip": None, "noise_multiplier": None, "budget": rgp.Budget(8.0, 1e-5)},
        ValueError,
        "clip=None",
    ),
    "micro-batch": ({"microbatch_size": 0}, ValueError, "microbatch_size.*0"),
    "max_batch": ({"max_batch": -3}, ValueError, "max_batch.*-3"),
    "reduction": ({"loss_reduction": "avg"}, ValueError, "loss_reduction.*'avg'"),
    "seed": ({"seed": -1}, ValueError, "seed.*-1"),
    "fractional seed": ({"seed": 1.5}, ValueError, r"seed.*1\.5"),
    "public loss": ({"public_loss": lambda: None}, ValueError, "public_loss"),
    "no public loss": ({"method": rgp.RGP(source="public")}, ValueError, "public_loss"),
    "scheduler": ({"scheduler": 3}, (TypeError, ValueError), "scheduler.*3"),
    "optimizer": ({"optimizer": "adam"}, (TypeError, ValueError), "optimizer.*'adam'"),
}


@pytest.mark.parametrize("name", WRONG_ARGUMENTS)
def test_wrong_arguments_are_named_with_their_value(name):
    options, kind, message = WRONG_ARGUMENTS[name]
    with pytest.raises(kind, match=message):
        start(**options)


def test_a_model_that_is_none():
    with pytest.raises((TypeError, ValueError), match=r"model.*function"):
        rgp.privatize(
            lambda x: x,
            torch.optim.SGD(toy().parameters(), lr=1),
            examples(),
            noise_multiplier=1.0,
            batch_size=2,
            steps=1,
        )


WRONG_METHODS = {
    "rank": ({"rank": 0}, "rank.*0"),
    "rank by name": ({"rank": {"*": 0}}, r"rank\['\*'\].*0"),
    "rank word": ({"rank": "full"}, "rank.*'full'"),
    "sides": ({"sides": "top"}, "sides.*'top'"),
    "source": ({"source": "gradient"}, "source.*'gradient'"),
    "norm": ({"norm": "l1"}, "norm.*'l1'"),
    "power iterations": ({"power_iterations": 0}, "power_iterations.*0"),
    "warm-up": ({"warmup_steps": -1}, "warmup_steps.*-1"),
    "head scale": ({"head_scale": 0.0}, r"head_scale.*0\.0"),
    "head scale nan": ({"head_scale": math.nan}, "head_scale.*nan"),
    "override": ({"overrides": {"a": "thawed"}}, r"overrides\['a'\].*'thawed'"),
    "override rank": ({"overrides": {"a": 0}}, r"overrides\['a'\].*0"),
}


@pytest.mark.parametrize("name", WRONG_METHODS)
def test_wrong_settings_of_a_method(name):
    options, message = WRONG_METHODS[name]
    with pytest.raises(ValueError, match=message):
        rgp.RGP(**options)


def test_methods_are_frozen_values():
    with pytest.raises(AttributeError):
        rgp.RGP().rank = 3
    assert rgp.RGP(rank=3) == rgp.RGP(rank=3)
    assert rgp.DPSGD() != rgp.DPSGD(head_scale=0.1)


def test_nothing_to_train():
    model = toy().requires_grad_(False)
    with pytest.raises(ValueError, match="trains nothing"):
        start(model)


# -------- datasets


class Squares(Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, i):
        return {"x": torch.full((8,), float(i), dtype=torch.float64), "y": i % 3}


class ManyAtOnce(Squares):
    def __getitems__(self, indices):
        return [self[i] for i in indices]


def test_kinds_of_datasets():
    tensors = TensorDataset(torch.randn(10, 8, dtype=torch.float64), torch.zeros(10, dtype=torch.long))
    for data in (examples(10), tuple(examples(10)), tensors, torch.utils.data.Subset(tensors, range(8))):
        model, run = start(data=data)
        for x, y in run:
            run.step(loss_of(model, (x, y)))
        run.close()
    for data in (Squares(), ManyAtOnce()):
        model, run = start(data=data)
        for batch in run:
            run.step(loss_of(model, (batch["x"], batch["y"])))
        run.close()


def test_a_collate_function():
    model, run = start(data=[("1 2", 0), ("3", 1), ("4 5 6", 2), ("7", 0)], batch_size=2, collate_fn=_pad)
    for x, y in run:
        run.step(loss_of(model, (x, y)))
    run.close()


def _pad(batch):
    x = torch.zeros(len(batch), 8, dtype=torch.float64)
    for row, (text, _) in zip(x, batch, strict=True):
        numbers = [float(word) for word in text.split()]
        row[: len(numbers)] = torch.tensor(numbers)
    return x, torch.tensor([label for _, label in batch])


def test_worker_processes_load_the_same_batches():
    def train(workers: int):
        model, run = start(data=Squares(), workers=workers, steps=2)
        with run:
            for batch in run:
                run.step(loss_of(model, (batch["x"], batch["y"])))
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(train(0), train(1))


def test_datasets_that_cannot_be_sampled():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(examples())

    cases = {
        "IterableDataset": Stream(),
        r"DataLoader.*loader\.dataset": DataLoader(examples()),
        "empty": [],
        r"len\(\)": iter(examples()),
        r"len\(\).*int": 5,
    }
    model = toy()
    for message, data in cases.items():
        with pytest.raises(ValueError, match=message):
            rgp.privatize(
                model, torch.optim.SGD(model.parameters(), lr=1), data, noise_multiplier=1.0, batch_size=2, steps=1
            )


# ---------------------------------------------------------------------- what somebody should know


def told(model: nn.Module, method: rgp.methods.Method) -> list[str]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        rows = [(torch.zeros(4).long(), 0)] * 64
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        rgp.privatize(model, optimizer, rows, method=method, noise_multiplier=1.0, batch_size=8, steps=1).close()
    return [str(w.message) for w in said]


class Texts(nn.Module):
    def __init__(self, words: int, width: int = 16) -> None:
        super().__init__()
        self.table, self.body, self.head = nn.Embedding(words, width), nn.Linear(width, width), nn.Linear(width, 2)


def test_privatize_says_once_what_is_frozen_and_how_much_is_trained():
    (said,) = told(Texts(70_000), rgp.RGP(rank=64))  # the rest is exact: carriers would be no smaller
    assert said.startswith("RGP leaves 1,120,000 of the model's 1,120,306 parameters frozen ('table.weight')")
    assert "trains 306, 0.027%" in said and "overrides={'table.weight': 'exact'}" in said
    assert told(Texts(300), rgp.DPSGD()) == []  # 5,106 of 5,106
    model = Texts(300)
    model.table.weight.requires_grad_(False)
    (said,) = told(model, rgp.DPSGD())
    assert (
        said == "DPSGD trains 306, 6% of the model's 5,106 parameters; the others are frozen (requires_grad is False)."
    )
    model = Texts(16)
    model.table.weight.requires_grad_(False)  # more than a half is trained
    assert told(model, rgp.DPSGD()) == []
    assert told(Texts(300), rgp.LinearProbe()) == []  # which says so


def test_privatize_says_that_a_model_is_small_for_carriers():
    (said,) = told(Texts(100, width=64), rgp.RGP(rank=2))
    assert said.startswith("Try method=rgp.DPSGD() first: 10,690 trained parameters are few.")
    assert told(Texts(100, width=64), rgp.DPSGD()) == []
    assert told(Texts(100, width=400), rgp.RGP(rank=2)) == []
