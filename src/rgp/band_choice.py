"""The choice of b, the number of steps over which noise is correlated, and what it is worth.

More bands take back more of the noise (`rgp.bands.noise_in_weights` falls), and hide less by sampling (`rgp.bands.calibrate`
rises, because a batch comes out of a b-th of the examples). The product is least somewhere; all of it is public.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from rgp.accountants import coarse_bound
from rgp.bands import calibrate, coefficients, events, group_rate, noise_in_weights, noise_of_a_step
from rgp.composition import Event, merge, rough_epsilon
from rgp.validate import check_count, check_positive

SAME = 1.01  # two numbers of bands whose noise differs by less than this ratio count as equal: the smaller one wins
WORTH = 1.05  # and against independent noise, whose single steps are quieter, correlated noise must win by this one
_ROUGH = 1.25  # how far Rényi accounting with a few orders may be off when two numbers of bands are compared
_SPACING = 1.4  # ratio of neighbouring numbers of bands that `choose` looks at


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A number of bands, and what it is worth.

    bands: b; 1 is independent noise
    coefficients: c_0 .. c_{b-1}
    noise_multiplier: sigma that keeps the run within its budget
    factor_mean: how many times smaller the noise in the weights is than with independent noise of the same epsilon,
        root mean square over the steps
    factor_last: the same after the last step
    step_factor: how many times larger the noise of a single step is
    """

    bands: int
    coefficients: tuple[float, ...]
    noise_multiplier: float
    factor_mean: float
    factor_last: float
    step_factor: float

    def __str__(self) -> str:
        if self.bands == 1:
            return "independent noise"
        return (
            f"noise correlated over {self.bands} steps: in the weights {self.factor_mean:.1f} times smaller than "
            f"independent noise ({self.factor_last:.1f} at the last step), in a single step {self.step_factor:.1f} times larger"
        )


def choose(
    *,
    steps: int,
    dataset_size: int,
    batch_size: float,
    epsilon: float,
    delta: float,
    accountant: str = "pld",
    momentum: float = 0.0,
    rates: Sequence[float] | np.ndarray | None = None,
    stay: int | None = None,
    vector_bytes: int = 0,
    most_bytes: float = math.inf,
) -> Choice:
    """The number of bands with the least noise in the weights over the run, from public numbers alone.

    Independent noise (1) unless something else is 5% better; of two numbers within 1%, the smaller one.

    stay: steps for which carriers stay. Past noise counts as lost when they turn, so no more is promised than is delivered;
        and noise is not taken back over more steps than that.
    vector_bytes, most_bytes: b - 1 vectors of this size are kept, and may take that much

    Formal guarantees (tests/test_bands.py): bands x batch_size <= dataset_size; bands <= stay;
    (bands - 1) x vector_bytes <= most_bytes; `calibrate` of the chosen number gives the noise multiplier.
    """
    check_count("steps", steps, least=1)
    check_count("dataset_size", dataset_size, least=1)
    check_positive("batch_size", batch_size)
    q = group_rate(batch_size / dataset_size, 1)
    most = min(steps, int(dataset_size / batch_size + 1e-9), steps if stay is None else stay)
    if vector_bytes > 0 and most_bytes < math.inf:
        most = min(most, 1 + max(0, int(most_bytes // vector_bytes)))
    budget = (q, steps, epsilon, delta)

    # Rényi accounting and a constant rate tell in milliseconds which numbers cannot be the best one.
    by_bands = {b: coefficients(b, steps, momentum=momentum, stay=stay) for b in _candidates(steps, most)}
    rough: dict[int, tuple[float, float]] = {}
    sigma = 1.0
    for b, c in by_bands.items():
        sigma = _approximate_sigma(lambda e: rough_epsilon(merge(e), delta), b, *budget, guess=sigma)
        rough[b] = (sigma, sigma * noise_in_weights(c, steps, momentum=momentum, stay=stay)[0])
    least = min(noise for _, noise in rough.values())

    def cost(planned: Iterable[Event]) -> float:
        return coarse_bound(merge(planned), delta, accountant)

    sigmas, noise = {}, {}
    for b in (b for b, (_, value) in rough.items() if b == 1 or value <= _ROUGH * least):
        sigmas[b] = _approximate_sigma(cost, b, *budget, guess=rough[b][0])
        noise[b] = sigmas[b] * noise_in_weights(by_bands[b], steps, momentum=momentum, rates=rates, stay=stay)[0]
    best = min(b for b, value in noise.items() if value <= SAME * min(noise.values()))
    best = 1 if noise[1] <= WORTH * noise[best] else best
    return evaluate(
        best,
        steps=steps,
        sampling_rate=q,
        epsilon=epsilon,
        delta=delta,
        accountant=accountant,
        momentum=momentum,
        rates=rates,
        stay=stay,
        independent=sigmas[1] if best > 1 else None,  # to a thousandth, for a factor that is shown with one digit
    )


def evaluate(
    bands: int,
    *,
    steps: int,
    sampling_rate: float,
    epsilon: float,
    delta: float,
    accountant: str = "pld",
    momentum: float = 0.0,
    rates: Sequence[float] | np.ndarray | None = None,
    stay: int | None = None,
    independent: float | None = None,
) -> Choice:
    """What this number of bands is worth at this budget. `independent`: sigma of independent noise, if it is known."""

    def sigma_at(b: int) -> float:
        return calibrate(
            epsilon=epsilon, delta=delta, sampling_rate=sampling_rate, steps=steps, bands=b, accountant=accountant
        )

    c = coefficients(bands, steps, momentum=momentum, stay=stay)
    sigma = sigma_at(bands)
    independent = sigma_at(1) if independent is None else independent
    here = noise_in_weights(c, steps, momentum=momentum, rates=rates, stay=stay)
    alone = noise_in_weights([1.0], steps, momentum=momentum, rates=rates)
    return Choice(
        bands=bands,
        coefficients=tuple(c.tolist()),
        noise_multiplier=sigma,
        factor_mean=independent * alone[0] / (sigma * here[0]),
        factor_last=independent * alone[1] / (sigma * here[1]),
        step_factor=sigma * noise_of_a_step(c, steps, stay=stay) / independent,
    )


def _candidates(steps: int, most: int) -> list[int]:
    """Numbers of bands up to `most`, about `_SPACING` apart; of those with equally many draws per group, the smallest q'.

    More bands with the same ceil(steps / bands) only raise q', so only the least of them is looked at.
    """
    least = sorted({-(-steps // -(-steps // b)) for b in range(1, most + 1)})
    kept = least[:1]
    for b in least[1:]:
        if b >= _SPACING * kept[-1] or b == least[-1]:
            kept.append(b)
    return kept


def _approximate_sigma(
    cost: Callable[[tuple[Event, ...]], float],
    bands: int,
    q: float,
    steps: int,
    epsilon: float,
    delta: float,
    *,
    guess: float,
) -> float:
    """The noise multiplier to a thousandth, by secants on logarithmic axes within a bracket."""
    low, high, sigma, slope, before = 1e-3, 1e6, guess, -1.5, None
    for _ in range(60):
        value = cost(events(steps=steps, bands=bands, sampling_rate=q, noise_multiplier=sigma))
        low, high = (sigma, high) if value > epsilon else (low, sigma)
        step = 2.0 if value > epsilon else 0.5
        if 0 < value < math.inf:
            if before is not None and before[0] != sigma and before[1] != value:
                secant = math.log(value / before[1]) / math.log(sigma / before[0])
                slope = secant if secant < -0.1 else slope
            before = (sigma, value)
            step = math.exp(min(2.0, max(-2.0, math.log(epsilon / value) / slope)))
        following = sigma * step
        if not low < following < high:
            following = math.sqrt(low * high)
        if abs(math.log(following / sigma)) < 1e-3:
            return following
        sigma = following
    return sigma
