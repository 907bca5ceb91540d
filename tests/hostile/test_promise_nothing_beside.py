"""Nothing beside the noisy sum reaches the model, and no row reaches another before it: side doors, tried one by one."""

from __future__ import annotations

import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_review import Centres
from test_silent_ways import ROWS, data, mean, net, private
from torch import nn
from torch.utils.data import ConcatDataset, Subset, default_collate

import rgp


def train(model: nn.Module, body: Any, **options: Any) -> rgp.Run:
    with private(model, **options) as run:
        for x, y in run:
            body(run, model, x, y)
    return run


def plainly(run: rgp.Run, model: nn.Module, x: Any, y: Any) -> None:
    run.step(mean(model, x, y))


# ---------------------------------------------------------------------- the model, after run.step


def imprinted(run: rgp.Run, model: Any, x: Any, y: Any) -> None:
    """Weight imprinting: features of the examples become weights."""
    run.step(mean(model, x, y))
    with torch.no_grad():
        model[-1].bias.copy_(x.mean(0)[:2])


def imprinted_at_the_end(run: rgp.Run, model: Any, x: Any, y: Any) -> None:
    if run.step(mean(model, x, y)):
        with torch.no_grad():
            model[-1].bias.copy_(x.mean(0)[:2])


def centred_at_the_end(run: rgp.Run, model: Any, x: Any, y: Any) -> None:
    if run.step(mean(model, x, y)):
        model.centres.lerp_(x.mean(0).expand(2, 6), 0.1)


def clamped(run: rgp.Run, model: nn.Module, x: Any, y: Any) -> None:
    """A WGAN's, after every micro-batch: a function of the weights alone."""
    run.step(mean(model, x, y))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-1, 1)


def test_examples_in_a_parameter_after_the_step():
    with pytest.raises(rgp.UnsupportedError, match=r"'4.bias' was changed by the forward pass, or by the loop"):
        train(net(), imprinted)


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize(("kind", "body"), [(net, imprinted_at_the_end), (Centres, centred_at_the_end)])
def test_examples_in_the_model_where_a_logical_batch_ends(kind, body, steps):
    """No rehearsal gets there, so it is said, once."""
    with pytest.warns(UserWarning, match="was changed after run.step") as found:
        train(kind(), body, steps=steps)
    assert sum("was changed after run.step" in str(one.message) for one in found) == 1


def test_a_clamp_of_the_weights_is_let_through():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert train(net(), clamped, steps=4).step_index == 4


def test_an_evaluation_with_the_averaged_weights_changes_nothing():
    def evaluated(run: rgp.Run, model: nn.Module, x: Any, y: Any) -> None:
        if run.step(mean(model, x, y)):
            with run.averaged(), torch.no_grad():
                model(x)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert train(net(), evaluated, steps=4, ema=0.9).step_index == 4


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_gradient_of_the_loops_own(when):
    def body(run: rgp.Run, model: Any, x: Any, y: Any) -> None:
        loss = mean(model, x, y)
        if when == "after":
            run.step(loss)
        model[0].weight.grad = x.mean() * torch.ones_like(model[0].weight)
        if when == "before":
            run.step(loss)

    with pytest.raises(rgp.WrongUseError, match="cannot be clipped per example"):
        train(net(), body)


# ---------------------------------------------------------------------- the dataset


class Before(list):
    """dataset[i] looks at the row that was loaded before it."""

    last: Any = torch.zeros(6)

    def __getitem__(self, index: Any) -> Any:
        x, y = super().__getitem__(index)
        found, self.last = (x + 0.5 * self.last, y), x
        return found


class Counting(list):
    count = 0

    def __getitem__(self, index: Any) -> Any:
        self.count += 1
        x, y = super().__getitem__(index)
        return x / self.count, y


class OwnGenerator(list):
    rng = np.random.default_rng(0)

    def __getitem__(self, index: Any) -> Any:
        x, y = super().__getitem__(index)
        return x * float(self.rng.random()), y


class GlobalGenerators(list):
    """What the run seeds."""

    def __getitem__(self, index: Any) -> Any:
        x, y = super().__getitem__(index)
        return x * float(np.random.rand()) + random.random() * torch.rand(6), y


def test_a_row_that_depends_on_the_one_before_it():
    with pytest.raises(rgp.UnsupportedError, match="depends on the row that was loaded before it"):
        train(net(), plainly, rows=Before(data()))


@pytest.mark.parametrize("kind", [Counting, OwnGenerator])
def test_a_row_that_comes_out_differently_is_said(kind):
    with pytest.warns(UserWarning, match="came out differently when it was asked again"):
        train(net(), plainly, rows=kind(data()))


def test_random_numbers_of_the_generators_that_the_run_seeds():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert train(net(), plainly, rows=GlobalGenerators(data())).step_index == 2


@pytest.mark.parametrize("kind", ["subset", "of a subset", "concatenated", "overlapping"])
def test_a_row_that_is_there_twice(kind):
    rows: Any = data()
    twice = {
        "subset": Subset(rows, [0, 0, *range(22)]),
        "of a subset": Subset(Subset(rows, [3, 3, *range(4, 24)]), [0, 1, *range(5, 20)]),
        "concatenated": ConcatDataset([rows, rows]),
        "overlapping": ConcatDataset([Subset(rows, range(14)), Subset(rows, range(10, 24))]),
    }[kind]
    with pytest.raises(ValueError, match="dataset holds a row"):
        train(net(), plainly, rows=twice)


def test_rows_that_are_there_once():
    rows: Any = data()
    once = ConcatDataset([Subset(rows, range(12)), Subset(Subset(rows, range(12, 24)), range(12))])
    assert train(net(), plainly, rows=once).step_index == 2
    copies = Subset(rows, [*range(12), *range(12)])
    assert train(net(), plainly, rows=copies, units=copies.indices, batch_size=6).step_index == 2


def test_a_dataset_that_grows_has_the_rows_that_were_promised():
    rows, seen = data(), []

    def body(run: rgp.Run, model: nn.Module, x: Any, y: Any) -> None:
        plainly(run, model, x, y)
        rows.append((torch.full((6,), 99.0), 0))
        if not run.rehearsing:
            seen.append(float(x.abs().max()))

    train(net(), body, rows=rows, steps=6)
    assert max(seen) < 99 and len(rows) > ROWS


# ---------------------------------------------------------------------- collate_fn, functional calls


class Remembers:
    def __init__(self) -> None:
        self.mean: Any = 0

    def __call__(self, rows: list[Any]) -> Any:
        x, y = default_collate(rows)
        found, self.mean = (x + self.mean, y), x.mean(0)
        return found


def test_a_collate_fn_that_remembers():
    with pytest.raises(rgp.UnsupportedError, match="keeps something of earlier batches"):
        train(net(), plainly, collate_fn=Remembers())


def test_a_functional_call_is_captured_and_vmap_is_not():
    def functional(run: rgp.Run, model: nn.Module, x: Any, y: Any) -> None:
        outputs = torch.func.functional_call(model, dict(model.named_parameters()), (x,))
        run.step(F.cross_entropy(outputs, y))

    def mapped(run: rgp.Run, model: nn.Module, x: Any, y: Any) -> None:
        weights = dict(model.named_parameters())

        def loss(a: Any, b: Any) -> Any:
            return F.cross_entropy(torch.func.functional_call(model, weights, (a[None],)), b[None])

        run.step(torch.func.vmap(loss)(x, y).mean())

    assert train(net(), functional).step_index == 2
    with pytest.raises(RuntimeError, match="functorch"):
        train(net(), mapped)
