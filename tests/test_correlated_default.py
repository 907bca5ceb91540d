"""When noise is correlated without being asked for, what a run says of it, and that carriers that turn are not overrated."""

import math
import re
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import rgp
from rgp import accounting, band_choice, bands
from rgp.mechanism import Workload, plan_mechanism
from rgp.optimizers import AdamCorrected
from rgp.workload import bands_by_default, rate_words
from toys import examples, loss_of, toy

pytestmark = pytest.mark.filterwarnings("ignore:the examples that were looked at")

BUDGET = rgp.Budget(8.0, 1e-5)
SHORT = {"steps": 12, "dataset_size": 2000, "batch_size": 20, "epsilon": 8.0, "delta": 1e-5}


# ---------------------------------------------------------------------- the default


def decided(method, optimizer=torch.optim.SGD, **given):
    made = optimizer(toy().parameters(), lr=0.1)
    return bands_by_default(method, made, **{"budget": BUDGET, "batch_size": 4, "max_batch": None, **given})


@pytest.mark.parametrize(
    "method", [rgp.DPSGD(), rgp.LinearProbe(), rgp.BiTFiT(), rgp.RGP(keep=9), rgp.RGPRandom(keep=9)], ids=str
)
def test_it_is_the_default_where_it_can_be_used(method):
    assert decided(method) == "auto"


@pytest.mark.parametrize(
    ("method", "given"),
    [
        (rgp.DPSGD(), {"budget": None}),
        (rgp.DPSGD(), {"batch_size": lambda t: 4}),
        (rgp.DPSGD(), {"max_batch": 9}),
        (rgp.DPSGD(), {"optimizer": AdamCorrected}),
        (rgp.DPSGD(), {"optimizer": torch.optim.AdamW}),  # divides by single steps, at a rate that nobody raised
        (rgp.DPPowerSGD(), {}),
        (rgp.RGP(), {}),
        (rgp.RGP(keep=9, sides="alternate"), {}),
        (rgp.RGP(keep=9, source="momentum"), {}),
    ],
)
def test_elsewhere_noise_is_independent(method, given):
    assert decided(method, **given) == 1


def started(method=None, optimizer=torch.optim.SGD, **options):
    model = toy()
    made = optimizer(model.parameters(), lr=0.1)
    options = {"budget": BUDGET, "batch_size": 4, "steps": 6, "probe": False, **options}
    return rgp.privatize(model, made, examples(200), method=method or rgp.DPSGD(), **options)


def test_a_run_says_what_it_chose():
    with pytest.warns(UserWarning, match=r"noise correlated over \d+ steps: .*times smaller.*bands=1 makes it") as said:
        run = started()
    assert run.mechanism.bands > 1
    assert not any("learning rate" in str(one.message) for one in said), "SGD's stays as it is"
    run.close()


def test_adam_is_told_by_how_much_its_rate_may_be_raised():
    run = started(optimizer=torch.optim.Adam, bands="auto")
    words = rate_words(run.mechanism, run.optimizer)
    assert re.search(r"Adam divides by the latter, .* its learning rate may be up to \d\.\d times", words)
    assert run.mechanism.worth.of_a_step > 1
    run.close()


@pytest.mark.parametrize(
    "options",
    [{"bands": 1}, {"method": rgp.RGP(rank=2)}, {"budget": None, "noise_multiplier": 1.0}, {"max_batch": 9}],
    ids=str,
)
def test_independent_noise_is_silent(options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="Try method=rgp.DPSGD")  # the model is small
        run = started(**options)
    assert run.mechanism.bands == 1
    assert "group" not in run.mechanism.charge(0)
    run.close()


def test_a_checkpoint_goes_on_with_what_it_was(tmp_path):
    """Of a version without the default, or with bands=1: nobody is asked again."""
    run = started(bands=1, folder=tmp_path, seed=0)
    sigma = run.mechanism.sigmas
    for batch in run:
        run.step(loss_of(run.model, batch))
        if run.step_index == 3:
            break
    run.save(tmp_path)
    run.ledger.close()
    model = toy()
    again = rgp.resume(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.1), examples(200))
    assert (again.mechanism.bands, again.mechanism.sigmas) == (1, sigma)
    again.close()


# ---------------------------------------------------------------------- the choice


def test_no_more_bands_than_steps_for_which_carriers_stay():
    found = band_choice.choose(**SHORT, stay=4, momentum=0.9)
    assert 1 < found.bands <= 4
    rate = {"steps": 12, "sampling_rate": 0.01, "epsilon": 8.0, "delta": 1e-5, "momentum": 0.9}
    free = band_choice.evaluate(found.bands, **rate)
    assert 1 < found.factor_mean < 0.97 * free.factor_mean, "each turn loses something"


@pytest.mark.slow
def test_what_earlier_runs_spent_is_taken_off_first():
    plan = {"size": 2000, "method": "x", "batch_size": 20, "steps": 12, "bands": "auto"}
    spent = [accounting.Event(0.01, 0.6, 12)]
    before = accounting.epsilon(spent, delta=1e-5)
    assert 1 < before < 7
    rest = plan_mechanism(**plan, budget=BUDGET, spent=spent)
    alone = plan_mechanism(**plan, budget=rgp.Budget(8.0 - before, 1e-5))
    assert (rest.bands, rest.worth) == (alone.bands, alone.worth)
    assert rest.worth.in_weights < band_choice.choose(**SHORT).factor_mean


# ---------------------------------------------------------------------- carriers that turn


def dense(c, steps, momentum, stay):
    """Row norms of S M blockdiag(C^{-1}): a chain of its own for each stay."""
    whole = np.zeros((steps, steps))
    for first in range(0, steps, stay):
        size = min(stay, steps - first)
        column = np.zeros(size)
        column[: min(size, len(c))] = c[:size]
        C = sum(np.diag(np.full(size - k, column[k]), -k) for k in range(size))
        whole[first : first + size, first : first + size] = np.linalg.inv(C)
    lag = np.subtract.outer(np.arange(steps), np.arange(steps))
    M = np.where(lag >= 0, momentum ** np.maximum(lag, 0), 0.0)
    return np.linalg.norm(np.cumsum(M @ whole, axis=0), axis=1), np.linalg.norm(whole, axis=1)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(("count", "steps", "stay"), [(1, 20, 4), (3, 20, 4), (8, 60, 15), (15, 60, 15), (9, 40, 40)])
def test_noise_with_turns_is_that_of_dense_matrices(count, steps, stay, momentum):
    c = bands.coefficients(count, steps, momentum=momentum, stay=stay)
    assert abs(c @ c - 1) < 1e-12 and len(c) == count
    weights, single = dense(c, steps, momentum, stay)
    found = bands.noise_by_step(c, steps, momentum=momentum, stay=stay)
    np.testing.assert_allclose(found, weights, rtol=1e-9)
    assert bands.noise_of_a_step(c, steps, stay=stay) == pytest.approx(math.sqrt((single**2).mean()))


@pytest.mark.parametrize(("count", "stay", "momentum"), [(15, 15, 0.9), (4, 5, 0.9), (8, 15, 0.0), (30, 30, 0.9)])
def test_no_other_coefficients_do_much_better_where_carriers_turn(count, stay, momentum):
    """A search of its own, downhill from what was found, over all decreasing coefficients."""
    from scipy.optimize import minimize

    def noise(logits):
        raw = np.concatenate([[1.0], np.cumprod(1 / (1 + np.exp(-logits)))])
        return math.log(dense(raw / np.linalg.norm(raw), 60, momentum, stay)[0].mean())

    c = bands.coefficients(count, 60, momentum=momentum, stay=stay)
    ratios = np.clip(c[1:] / c[:-1], 1e-4, 0.999)[:7]
    few = np.log(ratios / (1 - ratios))
    rest = np.log(np.clip(c[8:] / c[7:-1], 1e-4, 0.999) / (1 - np.clip(c[8:] / c[7:-1], 1e-4, 0.999)))
    found = minimize(lambda x: noise(np.concatenate([x, rest])), few, method="Nelder-Mead", options={"maxfev": 250})
    assert math.exp(noise(np.concatenate([few, rest])) - found.fun) < 1.03


def moved(method, count, momentum, steps=24):
    """Root mean square over the steps of how far noise of sigma 1 has moved the weights."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(40, 40, bias=False) for _ in range(3))).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=momentum)
    begin = [p.detach().clone() for p in model.parameters()]
    data = [torch.ones(40).double() for _ in range(200)]
    squares = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {"noise_multiplier": 1.0, "batch_size": 4, "steps": steps, "seed": 0, "probe": False}
        run = rgp.privatize(model, optimizer, data, method=method, bands=count, **options)
    with run:
        for _ in range(steps):
            run._step.begin()
            run._step.end()  # an empty draw: noise alone
            squares.append(
                sum(float((p.detach() - b).square().sum()) for p, b in zip(model.parameters(), begin, strict=True))
            )
    return run.mechanism.coefficients, math.sqrt(sum(squares))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("source", ["random", "history", "weight"])
@pytest.mark.parametrize("stay", [3, 8, 24])
def test_no_more_is_promised_than_is_delivered(source, momentum, stay):
    """Measured with empty batches, in units of independent noise; five percent for chance."""
    method = rgp.RGP(rank=8, source=source, keep=stay, warmup_steps=0, overrides={"*": 8})
    _, alone = moved(method, 1, momentum)
    c, together = moved(method, min(8, stay), momentum)

    def predicted(stay):
        weights = [bands.noise_in_weights(x, 24, momentum=momentum, stay=stay)[0] for x in ([1.0], c)]
        return weights[0] / weights[1]

    assert alone / together > 0.95 * predicted(stay)
    if stay == 24:
        assert alone / together < 1.05 * predicted(stay)
    if stay == 3 and source == "random":
        assert alone / together < 0.95 * predicted(None), "carriers that stay would be promised too much"


def test_a_number_of_bands_gets_coefficients_for_its_carriers():
    plan = {"size": 62349, "method": "x", "batch_size": 512, "steps": 60, "noise_multiplier": 1.0, "bands": 15}
    stays = plan_mechanism(**plan, workload=Workload(momentum=0.9))
    turns = plan_mechanism(**plan, workload=Workload(momentum=0.9, stay=15))
    noise = [bands.noise_in_weights(m.coefficients, 60, momentum=0.9, stay=15)[0] for m in (stays, turns)]
    assert noise[1] < 0.85 * noise[0]
