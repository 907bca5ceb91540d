"""Bands: how strongly the noise of a step takes back the noise of the steps before it, and what that is worth.

The mechanism (docs/correlated-noise.md): with coefficients c_0 > 0, c_1 .. c_{b-1} whose squares sum to 1,

    c_0 w_t = z_t - c_1 w_{t-1} - .. - c_{b-1} w_{t-b+1}        z_t ~ N(0, sigma^2 I), independent

so w = C^{-1} z with C lower triangular, Toeplitz and b bands wide. b = 1 is independent noise. What a model feels is not
w but what the optimizer makes of it, the noise in the weights: u_t = sum_{s<=t} rate_s m_s, m_s = momentum m_{s-1} + w_s.

Everything here is a function of public numbers: steps, rates, sizes, budget. Shapes: c (b,); T = steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from rgp import accounting
from rgp.composition import Event, merge
from rgp.validate import check_count

_CALM = 0.02  # weight, on logarithmic scales, of the noise of single steps beside the noise in the weights
_LARGEST_RATIO = 1 - 1e-6  # of neighbouring coefficients; at 1 the inverse no longer decays


# Coefficients


def closed_form(bands: int, *, momentum: float = 0.0) -> np.ndarray:
    """The square root of the workload, cut at `bands` and normalised: binom(2k, k) / 4^k without momentum.

    >>> closed_form(3).round(4).tolist()
    [0.848, 0.424, 0.318]

    With momentum, the series of 1 / sqrt((1 - x) (1 - momentum x)).
    """
    check_count("bands", bands, least=1)
    _check_momentum(momentum)
    k = np.arange(1, bands)
    root = np.concatenate([[1.0], np.cumprod((2 * k - 1) / (2 * k))])
    if momentum:
        root = _product(root, root * momentum ** np.arange(bands), bands)
    return root / np.linalg.norm(root)


def coefficients(bands: int, steps: int, *, momentum: float = 0.0, stay: int | None = None) -> np.ndarray:
    """Coefficients (bands,) that leave little noise in the weights over `steps` steps, by its mean square.

    stay: steps for which the released numbers mean the same, where that is less than the run: carriers turn then, and past
        noise counts as lost (docs/correlated-noise.md).

    What is minimised has the noise of a single step in it with a weight of 2%. Without it the last bit of noise in the
    weights is bought with steps that shake wildly (momentum 0.9, 20,000 steps, 6 bands: 0.5% less noise in the weights
    for 3.3 times the noise in a step), and optimizers like Adam look at single steps.

    Formal guarantees (tests/test_bands.py):
    - the squares sum to 1; all are positive and none is larger than the one before, so the inverse is stable
    - at a constant rate the noise in the weights is within 1% of the least that any coefficients reach, and within 3% where
      carriers turn

    Rates are not asked for: what is best for a constant rate has at most 0.9% more noise than what is best for the
    schedule where bands <= steps / 4, and 2.1% more for bands = steps (120 steps; bands 4, 8, 32, 120; momentum 0 and 0.9;
    linear and cosine decay, a warm-up before it, a drop to a tenth). At the last step alone it is up to 6.5% more.
    The closed form has up to 25% more noise, for 64 bands and 10,000 steps; within 3% it is only where bands come close to
    steps, or with momentum where they are few.
    """
    check_count("bands", bands, least=1)
    check_count("steps", steps, least=1)
    stay = _staying(stay, steps)
    if stay < steps:
        # What a turn leaves behind nobody takes back, and with momentum that is much. So coefficients that count with fewer
        # steps or less momentum than there is may do better.
        lengths = dict.fromkeys((stay, min(steps, 2 * stay), steps))
        tried = [
            _padded(coefficients(min(bands, stay), length, momentum=m), bands)
            for length in lengths
            for m in dict.fromkeys((0.0, momentum / 2, momentum))
        ]
        return min(tried, key=lambda c: noise_in_weights(c, steps, momentum=momentum, stay=stay)[0])
    start = closed_form(min(bands, steps), momentum=momentum)
    found = start if len(start) == 1 else _least_noise(start, steps, momentum)
    return _padded(found, bands)  # a run shorter than b never reaches the last ones


def _padded(c: np.ndarray, bands: int) -> np.ndarray:
    return np.concatenate([c, np.zeros(bands - len(c))])


def _staying(stay: int | None, steps: int) -> int:
    return steps if stay is None else min(steps, check_count("stay", stay, least=1))


def _least_noise(start: np.ndarray, steps: int, momentum: float) -> np.ndarray:
    """Quasi-Newton on the logits of c_k / c_{k-1}: decreasing coefficients have all roots outside the unit circle."""
    from scipy.optimize import minimize

    workloads = ((1.0, _workload(steps, momentum)), (_CALM, np.ones(1)))
    remaining = np.arange(steps, 0, -1)  # the steps at which a number drawn j steps before is felt

    def unpack(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        ratios = _LARGEST_RATIO / (1 + np.exp(-logits))
        return ratios, np.concatenate([[1.0], np.cumprod(ratios)])

    def objective(logits: np.ndarray) -> tuple[float, np.ndarray]:
        ratios, raw = unpack(logits)
        norm = np.linalg.norm(raw)
        c = raw / norm
        inverse = _inverse(c, steps)
        total, slope = 0.0, np.zeros_like(c)
        for weight, workload in workloads:
            felt = _product(workload, inverse, steps)
            square = float(remaining @ felt**2)
            total += weight * math.log(square)
            # d felt / d c_k is -(felt / c), k places later
            moved = _product((remaining * felt)[::-1], _product(felt, inverse, steps), steps)[::-1]
            slope -= 2 * weight / square * moved[: len(c)]
        slope = (slope - c * (slope @ c)) / norm
        return total, np.cumsum((raw * slope)[::-1])[::-1][1:] * (1 - ratios / _LARGEST_RATIO)

    ratios = np.clip(start[1:] / start[:-1], 1e-6, 0.999)
    first = np.log(ratios / (1 - ratios))
    options = {"maxiter": 200, "ftol": 1e-7}  # of a mean square's logarithm: nothing else here is as accurate
    found = unpack(minimize(objective, first, jac=True, method="L-BFGS-B", options=options).x)[1]
    return found / np.linalg.norm(found)


# What the noise does


def noise_in_weights(
    coefficients: Sequence[float] | np.ndarray,
    steps: int,
    *,
    momentum: float = 0.0,
    rates: Sequence[float] | np.ndarray | None = None,
    stay: int | None = None,
) -> tuple[float, float]:
    """Standard deviation of the noise in a weight per unit sigma: root mean square over the steps, at the last step.

    stay: after every so many steps past noise is lost, and nothing of it is taken back any more.

    >>> noise_in_weights([1.0], 100)[1]
    10.0
    """
    variance = np.square(noise_by_step(coefficients, steps, momentum=momentum, rates=rates, stay=stay))
    return math.sqrt(variance.mean()), math.sqrt(variance[-1])


def noise_by_step(
    coefficients: Sequence[float] | np.ndarray,
    steps: int,
    *,
    momentum: float = 0.0,
    rates: Sequence[float] | np.ndarray | None = None,
    stay: int | None = None,
) -> np.ndarray:
    """The same after each step, (T,). Exact: O(T log T) for a constant rate, O(T b) for a schedule or with turns."""
    check_count("steps", steps, least=1)
    _check_momentum(momentum)
    c = check_coefficients(coefficients)
    inverse = _inverse(c, steps)
    stay = _staying(stay, steps)
    if rates is None and stay == steps:
        return np.sqrt(np.cumsum(_product(_workload(steps, momentum), inverse, steps) ** 2))
    schedule = np.ones(steps) if rates is None else np.asarray(rates, dtype=np.float64)
    if schedule.shape != (steps,) or not np.isfinite(schedule).all():
        raise ValueError(f"rates must be {steps} finite numbers, one per step; got shape {schedule.shape}")
    return np.sqrt(_variances(c, inverse, momentum, schedule, stay))


def noise_of_a_step(coefficients: Sequence[float] | np.ndarray, steps: int, *, stay: int | None = None) -> float:
    """Root mean square over the steps of w_t per unit sigma: what an optimizer sees that looks at single steps."""
    chain = noise_of_steps(coefficients, _staying(stay, steps))
    return math.sqrt(np.square(np.resize(chain, steps)).mean())  # after a turn a new chain begins


def noise_of_steps(coefficients: Sequence[float] | np.ndarray, steps: int) -> np.ndarray:
    """Standard deviation of each w_t per unit sigma, (T,)."""
    check_count("steps", steps, least=1)
    return np.sqrt(np.cumsum(_inverse(check_coefficients(coefficients), steps) ** 2))


def _variances(c: np.ndarray, inverse: np.ndarray, momentum: float, rates: np.ndarray, stay: int) -> np.ndarray:
    """Var u_t for every t, carrying the covariances of u and m with the last b - 1 of the w along.

    After every `stay` steps these w are forgotten: those that follow are independent of them.
    """
    steps, past = len(rates), len(c) - 1
    taken = c[1:] / c[0]
    earlier = np.concatenate([np.zeros(past), inverse])
    # w_past: Cov(w_t, w_{t-k}), k = 0 .. b-1; C^{-1} is Toeplitz, so each step adds one term
    # u_past, m_past: Cov(u_t, w_{t-k}), Cov(m_t, w_{t-k}), k = 0 .. b-2
    u_u = u_m = m_m = 0.0
    found = np.empty(steps)
    for t, rate in enumerate(rates):
        age = t % stay
        if age == 0:
            w_past, u_past, m_past = np.zeros(past + 1), np.zeros(past), np.zeros(past)
        w_past = w_past + inverse[age] * earlier[age : age + past + 1][::-1]
        m_w, u_w = -(taken @ m_past), -(taken @ u_past)  # Cov(m_{t-1}, w_t), Cov(u_{t-1}, w_t)
        m_past = momentum * np.concatenate([[m_w], m_past[:-1]])[:past] + w_past[:past]
        u_m_next = momentum * u_m + u_w  # Cov(u_{t-1}, m_t)
        m_m = momentum**2 * m_m + 2 * momentum * m_w + w_past[0]
        u_past = np.concatenate([[u_w], u_past[:-1]])[:past] + rate * m_past
        u_u = u_u + 2 * rate * u_m_next + rate**2 * m_m
        u_m = u_m_next + rate * m_m
        found[t] = u_u
    return np.maximum(found, 0.0)


def _workload(steps: int, momentum: float) -> np.ndarray:
    """What a number in w_s has become in the weights j steps later: 1 + momentum + .. + momentum^j."""
    return np.cumsum(momentum ** np.arange(steps))


def _inverse(c: np.ndarray, size: int) -> np.ndarray:
    """The series of 1 / c(x), `size` terms, by Newton's method: each round doubles the number of right terms."""
    found = np.array([1 / c[0]])
    while len(found) < size:
        length = min(2 * len(found), size)
        error = -_product(c[:length], found, length)
        error[0] += 1
        correction = _product(found, error, length)
        found = correction + np.pad(found, (0, length - len(found)))
    return found


def _product(a: np.ndarray, b: np.ndarray, size: int) -> np.ndarray:
    """The first `size` terms of the product of two series."""
    if min(len(a), len(b)) <= 16:
        full = np.convolve(a[:size], b[:size])[:size]
        return np.pad(full, (0, size - len(full)))
    length = 1 << (2 * size - 1).bit_length()
    return np.fft.irfft(np.fft.rfft(a[:size], length) * np.fft.rfft(b[:size], length), length)[:size]


# What it costs


def events(*, steps: int, bands: int, sampling_rate: float, noise_multiplier: float) -> tuple[Event, ...]:
    """What one example may take part in: ceil(steps / bands) draws of its group, each at `bands` times the rate.

    `sampling_rate` is the ordinary one, batch size over number of examples. Epsilon of the run is that of these events,
    because the first group has as many draws as any.

    >>> events(steps=60, bands=8, sampling_rate=0.01, noise_multiplier=0.5)
    (Event(sampling_rate=0.08, noise_multiplier=0.5, count=8, max_batch=None, dataset_size=None),)
    """
    check_count("steps", steps, least=1)
    rate = group_rate(sampling_rate, bands)
    return (Event(rate, noise_multiplier, -(-steps // bands)),)


def group_rate(sampling_rate: float, bands: int) -> float:
    """The probability with which each member of a group is drawn when it is the group's turn."""
    check_count("bands", bands, least=1)
    rate = sampling_rate * bands
    if not 0 < rate <= 1 + 1e-12:  # b B / N = 1 may come out a bit above it, or below
        raise ValueError(
            f"bands={bands} times sampling_rate={sampling_rate} is {rate:.6g}, and must be above 0 and at most 1: a batch "
            f"comes out of 1/{bands} of the examples. Use at most {max(1, int(1 / sampling_rate))} bands, or smaller batches."
            if sampling_rate > 0
            else f"sampling_rate={sampling_rate} must be above 0 and at most 1"
        )
    return 1.0 if rate > 1 - 1e-12 else rate


def calibrate(
    *, epsilon: float, delta: float, sampling_rate: float, steps: int, bands: int = 1, accountant: str = "pld"
) -> float:
    """The smallest noise multiplier, in steps of 0.0001, with which `steps` steps with `bands` stay within epsilon.

    >>> calibrate(epsilon=8, delta=1e-5, sampling_rate=512 / 62349, steps=60, bands=60)
    0.5442
    """
    check_count("steps", steps, least=1)
    return accounting.calibrate(
        epsilon=epsilon,
        delta=delta,
        sampling_rate=group_rate(sampling_rate, bands),
        steps=-(-steps // bands),
        accountant=accountant,
    )


def charged_groups(charges: Iterable[tuple[int, Event]]) -> list[tuple[Event, ...]]:
    """What each group was charged, from (group, event) pairs: only groups that another one does not outdo in everything.

    Epsilon of the run is the largest of theirs. Groups that are drawn in turn differ by one event at most, so that there is
    one of them to account, and not b.

    >>> [[e.count for e in group] for group in charged_groups([(0, Event(0.1, 1.0)), (1, Event(0.1, 1.0)), (0, Event(0.1, 1.0))])]
    [[2]]
    """
    by_group: dict[int, list[Event]] = {}
    for group, event in charges:
        by_group.setdefault(group, []).append(event)
    found = list(dict.fromkeys(merge(charged) for charged in by_group.values()))
    return [one for one in found if not any(one is not other and _outdone(one, other) for other in found)]


def _outdone(one: Sequence[Event], other: Sequence[Event]) -> bool:
    counts = {replace(event, count=1): event.count for event in other}
    return all(counts.get(replace(event, count=1), 0) >= event.count for event in one)


# Checks


def check_coefficients(coefficients: Sequence[float] | np.ndarray) -> np.ndarray:
    """The coefficients as an array, or an error: with a sum of squares above 1 the accounted sensitivity would be wrong."""
    c = np.asarray(coefficients, dtype=np.float64)
    if c.ndim != 1 or len(c) == 0 or not np.isfinite(c).all() or c[0] <= 0 or not math.isclose(c @ c, 1, rel_tol=1e-9):
        raise ValueError(
            f"coefficients={c.tolist()} must be finite numbers whose squares sum to 1, the first above 0: "
            "`rgp.bands.coefficients` gives them"
        )
    return c


def _check_momentum(momentum: float) -> None:
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum={momentum} must be 0 or more and below 1; for Adam give beta_1")
