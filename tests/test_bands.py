"""Bands: coefficients near the optimum, noise in the weights against dense matrices, accounting against dp-accounting."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from scipy.linalg import toeplitz

from rgp import band_choice, bands

SST2 = {"steps": 60, "sampling_rate": 512 / 62349, "delta": 1e-5}


def lower(column: np.ndarray, steps: int) -> np.ndarray:
    full = np.zeros(steps)
    full[: len(column)] = column[:steps]
    return toeplitz(full, np.zeros(steps))


def dense_noise(c: np.ndarray, steps: int, momentum: float, rates: np.ndarray) -> np.ndarray:
    """Standard deviation in the weights after each step: row norms of S diag(rates) M C^{-1}."""
    S, M = lower(np.ones(steps), steps), lower(momentum ** np.arange(steps), steps)
    return np.linalg.norm(S @ np.diag(rates) @ M @ np.linalg.inv(lower(c, steps)), axis=1)


# ---------------------------------------------------------------------- coefficients


def test_the_closed_form_is_the_square_root_of_prefix_sums():
    c = bands.closed_form(40)
    assert c[:4] / c[0] == pytest.approx([math.comb(2 * k, k) / 4**k for k in range(4)])
    assert c @ c == pytest.approx(1)
    root = lower(c / c[0], 40)
    assert np.allclose(root @ root, lower(np.ones(40), 40))
    root = lower(bands.closed_form(40, momentum=0.9), 40)
    root /= root[0, 0]
    assert np.allclose(root @ root, lower(np.ones(40), 40) @ lower(0.9 ** np.arange(40), 40))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(("count", "steps"), [(1, 10), (2, 50), (8, 60), (60, 60), (16, 1000), (70, 60)])
def test_coefficients_are_normalised_positive_and_decreasing(count, steps, momentum):
    c = bands.coefficients(count, steps, momentum=momentum)
    assert c.shape == (count,)
    assert abs(c @ c - 1) < 1e-12
    assert c[0] > 0 and (c >= 0).all() and (np.diff(c) <= 0).all()
    assert (c[: min(count, steps)] > 0).all()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(("count", "steps"), [(2, 60), (4, 60), (8, 60), (60, 60)])
def test_no_other_coefficients_have_one_percent_less_noise(count, steps, momentum):
    """A search of its own, by the simplex method and then downhill, over all coefficients, decreasing or not."""
    from scipy.optimize import minimize

    A = lower(np.ones(steps), steps) @ lower(momentum ** np.arange(steps), steps)

    def mean_square(c: np.ndarray) -> float:
        with np.errstate(all="ignore"):
            C = lower(c / np.linalg.norm(c), steps)
            value = np.linalg.norm(np.linalg.solve(C.T, A.T)) ** 2 / steps if c[0] > 0.05 else math.inf
        return math.log(value) if value < 1e12 else 50.0

    c = bands.coefficients(count, steps, momentum=momentum)
    ours = math.sqrt(math.exp(mean_square(c)))
    assert ours == pytest.approx(bands.noise_in_weights(c, steps, momentum=momentum)[0])
    few = min(count, 8)  # more than eight free coefficients: those of the front, the others scaled along
    found = minimize(
        lambda x: mean_square(np.concatenate([x[:few], c[few:] * x[few]])),
        np.append(c[:few], 1.0),
        method="Nelder-Mead",
        options={"maxfev": 1500},
    )
    assert ours <= 1.01 * math.sqrt(math.exp(found.fun))
    closed = bands.closed_form(count, momentum=momentum)
    assert ours <= 1.005 * bands.noise_in_weights(closed, steps, momentum=momentum)[0]


def test_single_steps_are_kept_calm():
    """What the noise of single steps would be without its 2% in the objective: at least twice as much."""
    c = bands.coefficients(2, 1000, momentum=0.9)
    wild = np.array([0.713, math.sqrt(1 - 0.713**2)])  # the least noise in the weights, found without it
    noise = [bands.noise_in_weights(x, 1000, momentum=0.9)[0] for x in (c, wild)]
    assert 1 < noise[0] / noise[1] < 1.01
    assert bands.noise_of_a_step(c, 1000) < 0.5 * bands.noise_of_a_step(wild, 1000)


def test_a_long_run_takes_seconds():
    start = time.process_time()
    c = bands.coefficients(64, 10_000, momentum=0.9)
    bands.noise_in_weights(c, 10_000, momentum=0.9, rates=np.linspace(1, 0, 10_000))
    assert time.process_time() - start < 5


# ---------------------------------------------------------------------- noise in the weights


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(("count", "steps"), [(1, 1), (1, 40), (2, 40), (7, 40), (40, 40), (55, 40), (20, 300)])
def test_noise_in_the_weights_is_that_of_dense_matrices(count, steps, momentum):
    c = bands.coefficients(count, steps, momentum=momentum)
    rates = np.random.default_rng(0).random(steps)
    for given in (None, rates, np.linspace(1, 0, steps)):
        expected = dense_noise(c, steps, momentum, np.ones(steps) if given is None else given)
        found = bands.noise_by_step(c, steps, momentum=momentum, rates=given)
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)
        mean, last = bands.noise_in_weights(c, steps, momentum=momentum, rates=given)
        assert (mean, last) == pytest.approx((math.sqrt((expected**2).mean()), expected[-1]))
    single = np.linalg.norm(np.linalg.inv(lower(c, steps)), axis=1)
    assert bands.noise_of_a_step(c, steps) == pytest.approx(math.sqrt((single**2).mean()))


def test_it_is_what_an_optimizer_does_with_a_chains_noise():
    """torch's SGD with momentum and a schedule, over a chain with no gradients; wrong factors are told apart."""
    import torch

    from rgp.correlated import Chain

    steps, c = 30, bands.coefficients(6, 30, momentum=0.9)
    rates = np.linspace(1, 0.1, steps)
    weight = torch.zeros(20_000, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.9)
    chain, g = Chain(c), torch.Generator().manual_seed(0)
    spread = []
    for rate in rates:
        optimizer.param_groups[0]["lr"] = rate
        weight.grad = chain.next(torch.randn(20_000, generator=g, dtype=torch.float64))
        optimizer.step()
        spread.append(float(weight.detach().square().mean().sqrt()))
    assert spread == pytest.approx(bands.noise_by_step(c, steps, momentum=0.9, rates=rates), rel=0.03)


# ---------------------------------------------------------------------- accounting


@pytest.mark.parametrize(("count", "sigma"), [(60, 0.5442), (8, 0.534), (1, 0.4307)])
def test_reference_noise_multipliers(count, sigma):
    assert bands.calibrate(epsilon=8, bands=count, **SST2) == pytest.approx(sigma, abs=2.5e-4)


@pytest.mark.parametrize(
    ("count", "steps", "q", "sigma", "delta"),
    [
        (1, 100, 0.01, 0.8, 1e-5),
        (2, 100, 0.01, 0.8, 1e-5),
        (3, 100, 0.01, 0.7, 1e-6),
        (7, 100, 0.01, 0.9, 1e-5),
        (8, 60, 0.0082, 0.534, 1e-5),
        (10, 1000, 0.02, 1.5, 1e-5),
        (16, 500, 0.02, 1.2, 1e-6),
        (32, 1010, 0.03, 2.5, 1e-5),
        (50, 200, 0.02, 2.0, 1e-5),  # every member is in its group's batch
        (60, 60, 0.0082, 0.5442, 1e-5),
    ],
)
def test_an_independent_computation_agrees(count, steps, q, sigma, delta):
    """dp-accounting itself, for the group that is drawn most often, counted step by step."""
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.pld import PLDAccountant

    from rgp import accounting

    turns = sum(step % count == 0 for step in range(steps))
    single = GaussianDpEvent(sigma)
    ledger = PLDAccountant(value_discretization_interval=1e-4)
    ledger.compose(PoissonSampledDpEvent(count * q, single) if count * q < 1 else single, turns)
    planned = bands.events(steps=steps, bands=count, sampling_rate=q, noise_multiplier=sigma)
    assert accounting.epsilon(planned, delta=delta) == pytest.approx(ledger.get_epsilon(delta), rel=2e-3)


def test_no_group_has_more_turns_than_are_accounted():
    for steps, count in ((60, 8), (61, 60), (7, 9), (100, 10), (1, 1)):
        turns = max(sum(step % count == group for step in range(steps)) for group in range(count))
        (event,) = bands.events(steps=steps, bands=count, sampling_rate=0.001, noise_multiplier=1.0)
        assert (event.count, event.sampling_rate) == (turns, pytest.approx(0.001 * count))


def test_groups_are_charged_for_their_own_releases():
    one, other = bands.Event(0.1, 1.0), bands.Event(0.1, 2.0)
    turns = [(step % 3, one) for step in range(8)]  # 3, 3 and 2 turns
    assert bands.charged_groups(turns) == [(bands.Event(0.1, 1.0, 3),)]
    assert bands.charged_groups([]) == []
    # a step drawn again, by which the last group has as many: neither outdoes the other if it was another event
    assert bands.charged_groups([*turns, (2, one)]) == [(bands.Event(0.1, 1.0, 3),)]
    assert bands.charged_groups([*turns, (2, one), (2, one)]) == [(bands.Event(0.1, 1.0, 4),)]
    assert len(bands.charged_groups([*turns, (2, other)])) == 2
    assert len(bands.charged_groups([*turns, (1, other)])) == 1


def test_more_bands_than_groups_can_be_filled_are_refused():
    assert 3 / 147 * 49 < 1 == bands.group_rate(3 / 147, 49)  # a bit below in floating point, elsewhere a bit above
    assert bands.group_rate((1 + 2**-52) / 4, 4) == 1
    with pytest.raises(ValueError, match=r"bands=5 times sampling_rate=0.25 .* Use at most 4 bands"):
        bands.events(steps=10, bands=5, sampling_rate=0.25, noise_multiplier=1.0)
    with pytest.raises(ValueError, match="sampling_rate=0"):
        bands.group_rate(0.0, 2)


# ---------------------------------------------------------------------- the choice


@pytest.mark.parametrize(
    ("epsilon", "count", "mean", "last"),
    [(8, 60, 2.02, 2.51), (3, 8, 1.56, 1.69), (1, 2, 1.19, 1.21), (1, 4, 1.32, 1.37), (1, 30, 1.02, 1.22)],
)
def test_what_bands_are_worth_is_the_table_of_the_method(epsilon, count, mean, last):
    found = band_choice.evaluate(count, epsilon=epsilon, **SST2)
    assert (found.factor_mean, found.factor_last) == (pytest.approx(mean, abs=0.015), pytest.approx(last, abs=0.015))
    assert len(found.coefficients) == count


def test_a_single_steps_noise_is_larger():
    found = band_choice.evaluate(60, epsilon=8, **SST2)
    assert found.noise_multiplier * bands.noise_of_a_step(found.coefficients, 60) == pytest.approx(0.88, abs=0.02)
    assert found.step_factor == pytest.approx(0.88 / 0.4307, abs=0.05)


RUN = {"steps": 60, "dataset_size": 62349, "batch_size": 512, "delta": 1e-5}


def test_the_choice_at_epsilon_8():
    start = time.process_time()
    found = band_choice.choose(epsilon=8, **RUN)
    assert time.process_time() - start < 20
    assert found.bands == 60
    assert found.noise_multiplier == bands.calibrate(epsilon=8, bands=60, **SST2)
    assert found.factor_mean == pytest.approx(2.02, abs=0.015)
    assert "2.0 times smaller than independent noise (2.5 at the last step)" in str(found)


def test_no_number_of_bands_is_much_better_than_the_chosen_one():
    found = band_choice.choose(epsilon=1, **RUN)
    assert 3 <= found.bands <= 8
    others = [band_choice.evaluate(b, epsilon=1, **SST2).factor_mean for b in (2, 4, 8)]
    assert found.factor_mean > max(others) / 1.012


def test_momentum_is_part_of_the_choice():
    rates = np.linspace(1, 0, 60)
    found = band_choice.choose(epsilon=1, momentum=0.9, rates=rates, **RUN)
    again = band_choice.evaluate(found.bands, epsilon=1, momentum=0.9, rates=rates, **SST2)
    assert found.factor_mean == pytest.approx(again.factor_mean, rel=3e-3)
    assert found.factor_mean > band_choice.evaluate(4, epsilon=1, **SST2).factor_mean


def test_memory_limits_the_choice():
    found = band_choice.choose(epsilon=1, vector_bytes=100, most_bytes=350, **RUN)
    assert found.bands == 4  # three vectors
    assert band_choice.choose(epsilon=1, vector_bytes=100, most_bytes=99, **RUN).bands == 1


def test_batches_limit_the_choice():
    found = band_choice.choose(steps=50, dataset_size=1000, batch_size=400, epsilon=50, delta=1e-5)
    assert found.bands <= 2
    independent = band_choice.choose(steps=50, dataset_size=1000, batch_size=1000, epsilon=5, delta=1e-5)
    assert (independent.bands, independent.factor_mean, str(independent)) == (1, 1.0, "independent noise")


def test_where_little_is_gained_noise_stays_independent(monkeypatch):
    """Digits at epsilon 3: nearly every example is in every fifth batch as it is."""
    digits = {"steps": 112, "dataset_size": 1437, "batch_size": 256, "epsilon": 3, "delta": 1e-5, "momentum": 0.9}
    assert band_choice.choose(**digits).bands == 1
    monkeypatch.setattr(band_choice, "WORTH", 1.0)
    found = band_choice.choose(**digits)
    assert found.bands > 1 and 1 < found.factor_mean < 1.05


def test_of_two_that_are_nearly_equal_the_smaller_is_taken(monkeypatch):
    best = band_choice.choose(epsilon=1, **RUN)
    monkeypatch.setattr(band_choice, "SAME", 1.13)
    smaller = band_choice.choose(epsilon=1, **RUN)
    assert 1 < smaller.bands < best.bands
    assert best.factor_mean / 1.13 < smaller.factor_mean < best.factor_mean


def test_rates_are_part_of_the_choice():
    """Where the first step alone moves the weights there is nothing to take back."""
    assert band_choice.choose(epsilon=1, rates=[1.0] + [0.0] * 59, **RUN).bands == 1


def test_renyi_accounting_chooses_too():
    found = band_choice.choose(epsilon=3, accountant="rdp", **RUN)
    assert found.bands > 1
    assert found.noise_multiplier == bands.calibrate(epsilon=3, bands=found.bands, accountant="rdp", **SST2)


@pytest.mark.slow
def test_the_page_shows_what_the_script_prints():
    experiments = Path(__file__).parents[1] / "experiments"
    sys.path.insert(0, str(experiments))
    import bands_worth

    page = (experiments.parent / "docs" / "correlated-noise.md").read_text(encoding="utf-8")
    for line in [*bands_worth.table(), *bands_worth.choices()]:
        assert line in page


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bands.closed_form(0), "bands must be an integer of at least 1; got 0"),
        (lambda: bands.coefficients(2, 10, momentum=1.0), "momentum=1.0 must be 0 or more and below 1"),
        (lambda: bands.noise_in_weights([1.0], 3, rates=[1, 2]), "rates must be 3 finite numbers"),
        (lambda: bands.noise_in_weights([0.9], 3), "squares sum to 1"),
    ],
)
def test_wrong_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
