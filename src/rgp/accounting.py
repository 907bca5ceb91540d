"""Budget -> sigma, and releases -> epsilon: a thin layer over Google's dp-accounting.

Two datasets are neighbours when one example is added or removed. A drawn batch is one `Event`: every example was taken
with probability `sampling_rate` on its own (Poisson), and the sum over the batch was released with Gaussian noise of
standard deviation `noise_multiplier` times its sensitivity.

    >>> round(epsilon([Event(0.04, 1.5, count=2250)], delta=1e-5), 3)
    6.769
    >>> calibrate(epsilon=8.0, delta=1e-5, sampling_rate=0.04, steps=2250)
    1.3459

`accountant` is a name in accountants.py: "pld", tight and the default, or "rdp", larger, as in the paper.
dp-accounting takes over a second to import, so functions import it when they need it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass, replace
from fractions import Fraction

from rgp.accountants import coarse_bound, composed_epsilon, find_accountant
from rgp.attack_bounds import Meaning as Meaning
from rgp.attack_bounds import meaning as meaning
from rgp.composition import Event, coarsen, compose, merge, read_epsilon, rough_epsilon
from rgp.validate import check_count, check_positive, check_probability

RESOLUTION = 10_000  # calibration answers in steps of 1 / RESOLUTION, rounded up


@dataclass(frozen=True)
class Budget:
    """What a run may spend: `Budget(epsilon=8.0, delta=1e-5)`.

    epsilon: the bound that no run exceeds
    delta: the probability with which epsilon may not hold; by default `default_delta` of the dataset's size
    accountant: "pld" (tight) or "rdp" (larger, as in the paper)
    """

    epsilon: float
    delta: float | None = None
    _: KW_ONLY
    accountant: str = "pld"

    def __post_init__(self) -> None:
        check_positive("epsilon", self.epsilon)
        if self.delta is not None:
            check_probability("delta", self.delta)
        find_accountant(self.accountant)


def epsilon(events: Iterable[Event], *, delta: float, accountant: str = "pld") -> float:
    """The epsilon of all these releases together.

    Formal guarantees:
    - the result is an upper bound, with rounding of the grid, the tails and the FFT included
    - order and grouping of the events do not matter: `count=2` is the same as two events
    - no events cost 0; one event without noise costs infinity
    - the result does not fall when an event is added, up to the accuracy of the grid (1e-3 relative; `epsilon_curve`
      removes even that)
    """
    check_probability("delta", delta)
    find_accountant(accountant)
    return composed_epsilon(merge(events), float(delta), accountant)


def quick_epsilon(
    events: Iterable[Event], *, delta: float, planned: Iterable[Event] = (), accountant: str = "pld"
) -> float:
    """An upper bound on `epsilon` for a line at every step: milliseconds, and mostly nothing at all.

    Counts are rounded up on a ladder of 2%, and answered from what was computed for the same rung; the grid is coarser.
    planned: everything that will be released. As long as no more than that was, its epsilon is a bound as well.

    Formal guarantees:
    - an upper bound on the epsilon of these releases, as `epsilon` is one
    - never more than `epsilon` of `planned`, while every kind of event in `events` is in it and as often
    """
    check_probability("delta", delta)
    plan = {replace(e, count=1): e.count for e in merge(planned)}
    merged = merge(events)
    rungs = tuple(replace(e, count=_rung(e.count)) for e in merged)
    found = coarse_bound(rungs, float(delta), accountant)
    if plan and all(e.count <= plan.get(replace(e, count=1), 0) for e in merged):
        found = min(found, composed_epsilon(merge(planned), float(delta), accountant))
    return found


def _rung(count: int) -> int:
    """The smallest of 1, 2, ..., 50, 51, 53, ... (2% apart) that is no less than `count`; epsilon grows by half as much."""
    rung = min(count, 50)
    while rung < count:
        rung = math.ceil(1.02 * rung)
    return rung


def calibrate(
    *,
    epsilon: float,
    delta: float,
    sampling_rate: float,
    steps: int,
    accountant: str = "pld",
    max_batch: int | None = None,
    dataset_size: int | None = None,
) -> float:
    """The smallest noise multiplier, in steps of 0.0001, with which `steps` batches stay within epsilon.

    Formal guarantees:
    - `epsilon` of the planned events with the returned value is at most the epsilon asked for
    - with 0.0001 less it is above it
    """
    check_count("steps", steps, least=1)
    return calibrate_scale(
        lambda sigma: [Event(sampling_rate, sigma, steps, max_batch, dataset_size)],
        epsilon=epsilon,
        delta=delta,
        accountant=accountant,
    )


def calibrate_scale(
    events_at_scale: Callable[[float], Iterable[Event]], *, epsilon: float, delta: float, accountant: str = "pld"
) -> float:
    """`calibrate` for a schedule: the smallest s, in steps of 0.0001, for which `events_at_scale(s)` is within epsilon.

    >>> calibrate_scale(lambda s: [Event(0.1, s, 50), Event(0.1, 2 * s, 50)], epsilon=2.0, delta=1e-5)
    1.8542

    Formal guarantees: those of `calibrate`, if every noise multiplier grows with s.
    """
    check_positive("epsilon", epsilon)
    check_probability("delta", delta)

    # Each stage costs ten times the one before and starts from its answer; only the last one counts.
    stages: list[Callable[[tuple[Event, ...]], float]] = [lambda merged: rough_epsilon(merged, float(delta))]
    if find_accountant(accountant).coarse_epsilon is not None:
        stages.append(lambda merged: coarse_bound(merged, float(delta), accountant))
    stages.append(lambda merged: composed_epsilon(merged, float(delta), accountant))
    most = 10**6 * RESOLUTION
    smallest = RESOLUTION
    for stage in stages:

        def cost(k: int, stage: Callable[[tuple[Event, ...]], float] = stage) -> float:
            return stage(merge(events_at_scale(k / RESOLUTION)))

        _, smallest = _boundary(cost, epsilon, guess=smallest, slope=-1.5, most=most)
    if smallest > most:
        raise ValueError(
            f"epsilon={epsilon} at delta={delta} is out of reach: not even a noise multiplier of {most // RESOLUTION} "
            "is enough. Ask for a larger epsilon or plan fewer steps."
        )
    return smallest / RESOLUTION


def affordable_steps(
    event: Event,
    *,
    epsilon: float,
    delta: float,
    at_most: int,
    spent: Iterable[Event] = (),
    accountant: str = "pld",
) -> int:
    """How many more batches like `event` fit in the budget, up to `at_most`, after `spent`.

    Formal guarantees:
    - `epsilon` of `spent` and that many batches is at most the epsilon asked for (unless `spent` alone is above it)
    - with one batch more it is above it, or `at_most` is reached
    """
    check_positive("epsilon", epsilon)
    check_probability("delta", delta)
    find_accountant(accountant)
    check_count("at_most", at_most, least=0)
    before = list(spent)

    def cost(count: int) -> float:
        return composed_epsilon(merge([*before, replace(event, count=count)]), float(delta), accountant)

    if at_most == 0 or cost(1) > epsilon:
        return 0
    return _boundary(cost, epsilon, guess=at_most, slope=0.5, most=at_most)[0]


def epsilon_curve(
    event: Event | Callable[[int], Event],
    steps: int,
    *,
    delta: float,
    accountant: str = "pld",
    points: int = 20,
) -> list[tuple[int, float]]:
    """[(step, epsilon after that many steps)] at evenly spaced steps, the last one at `steps`; cheap, for progress.

    `event` is the same for every step, or a function of the step (from 0). Between two points, show the later one:
    what a run has spent by then is at most that.

    Formal guarantees:
    - every epsilon is an upper bound at its step, on a coarser grid than `epsilon` uses; at `steps` it is no larger
      than `epsilon`
    - they never fall from one point to the next
    """
    check_count("steps", steps, least=1)
    check_count("points", points, least=1)
    check_probability("delta", delta)
    chosen = find_accountant(accountant)
    plan = coarsen([replace(event(t), count=1) for t in range(steps)]) if callable(event) else []

    def between(start: int, stop: int) -> list[Event]:
        return plan[start:stop] if callable(event) else [replace(event, count=stop - start)]

    everything = merge(between(0, steps))
    chosen.check(everything)
    ledger = chosen.start(everything, delta)

    curve, done = [], 0
    for stop in sorted({-(-steps * i // points) for i in range(1, points + 1)}):
        compose(ledger, merge(between(done, stop)))
        curve.append((stop, read_epsilon(ledger, delta, chosen.rounding(merge(between(0, stop))))))
        done = stop

    # What will have been spent later bounds what has been spent now: the coarse grid never shows more than the total.
    bound = composed_epsilon(everything, float(delta), accountant)
    for i in reversed(range(len(curve))):
        bound = min(bound, curve[i][1])
        curve[i] = (curve[i][0], bound)
    return curve


def combine(pairs: Iterable[tuple[float, float]]) -> float:
    """The one noise multiplier of several noisy quantities computed from the SAME batch.

    Each pair is (sensitivity, noise standard deviation). They are one Gaussian release of all quantities side by side;
    counting them as separate events would treat one draw as several independent ones, and under-report.

    >>> round(combine([(1.0, 2.0), (0.5, 5.0)]), 4)
    1.9612

    Formal guarantees:
    - 1 / sigma^2 = sum_k (sensitivity_k / std_k)^2
    - a quantity without noise makes it 0; one with sensitivity 0 changes nothing
    """
    total = 0.0
    for sensitivity, std in pairs:
        if not (0 <= sensitivity < math.inf and 0 <= std < math.inf):
            raise ValueError(
                f"(sensitivity, standard deviation)=({sensitivity}, {std}): both must be finite and not negative."
            )
        if sensitivity > 0:
            total += (sensitivity / std) ** 2 if std > 0 else math.inf
    if total == 0:
        raise ValueError(
            "no pair has a sensitivity above 0: nothing private was released, so there is no event to record."
        )
    return 1 / math.sqrt(total)


def default_delta(n: int) -> float:
    """A delta for n examples, ten times below 1/n and never above 1e-5."""
    check_count("n", n, least=1)
    return min(1e-5, 1 / (10 * n))


def check_delta(delta: float, n: int) -> None:
    """Refuse a delta of 1/n or more: publishing one example outright would satisfy it."""
    check_probability("delta", delta)
    check_count("n", n, least=1)
    if delta * n >= 1:
        raise ValueError(
            f"delta={delta} must be below 1/N = {1 / n:.3g} for N={n} examples: at that delta, publishing one example "
            f"outright would count as private. Use {default_delta(n):.3g} or less, or leave delta out."
        )


def planned_steps(epochs: float, dataset_size: int, batch_size: int) -> int:
    """Steps of `batch_size` that make `epochs` passes over the data on average; at least 1.

    >>> planned_steps(30, 67349, 2000)
    1010
    """
    check_positive("epochs", epochs)
    check_count("dataset_size", dataset_size, least=1)
    check_count("batch_size", batch_size, least=1)
    # Through the decimal text: 0.1 epochs means a tenth, not the binary number next to it.
    return max(1, round(Fraction(str(epochs)) * int(dataset_size) / int(batch_size)))


# Search


def _boundary(cost: Callable[[int], float], target: float, *, guess: int, slope: float, most: int) -> tuple[int, int]:
    """Neighbouring integers with the target between their costs; (most, most + 1) if it lies beyond `most`.

    Cost is close to a power law k^slope, so secants on logarithmic axes need a handful of evaluations where bisection
    needs twenty.
    """
    low, high = 0, most + 1
    k, before, tries = min(max(guess, 1), most), None, 0
    while high - low > 1:
        value, tries = cost(k), tries + 1
        if (value <= target) == (slope > 0):
            low = k
        else:
            high = k
        if not 0 < value < math.inf:
            step = 4.0 if low == k else 0.25
        else:
            here = (math.log(k), math.log(value))
            if before is not None and before[0] != here[0]:
                secant = (here[1] - before[1]) / (here[0] - before[0])
                # A slope of the wrong sign, or none, comes from rounding between close points.
                slope = secant if secant / slope > 0.1 else slope
            before = here
            step = math.exp(min(3.0, max(-3.0, (math.log(target) - here[1]) / slope)))
        k = math.ceil(k * step)
        if tries > 8 and tries % 2:  # no power law here, such as a cost that jumps: halve the interval as well
            k = math.isqrt(max(low, 1) * high)
        k = min(max(k, low + 1), high - 1)
    return low, high
