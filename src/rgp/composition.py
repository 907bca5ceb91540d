"""Events -> privacy loss: composition on dp-accounting's grids, always on the pessimistic side.

What accountants.py makes its accountants of.
"""

from __future__ import annotations

import copy
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

from rgp.validate import check_count

# Privacy losses are put on a grid of this width, always on the pessimistic side. It is dp-accounting's own default, so
# anyone can reproduce our numbers with a bare PLDAccountant.
_INTERVAL = 1e-4
_FINEST_INTERVAL = 1e-5
_TOLERANCE = 1e-3  # relative error of epsilon above which the grid is made finer
_MOST_BINS = 250_000  # about one second of work; a wider range of losses gets a coarser grid
_MANY_KINDS = 4  # a schedule with more kinds of events than this starts on a coarser grid
_MOST_KINDS = 64  # a schedule with more kinds than this is rounded, to the pessimistic side, until it has no more
# enough to know the size of epsilon
_FEW_ORDERS = (1.5, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 128, 256, 1024)


@dataclass(frozen=True)
class Event:
    """One drawn batch and everything released from it; `count` of them, if they are equal.

    sampling_rate: probability q with which each example is drawn
    noise_multiplier: noise standard deviation over sensitivity; `combine` gives it for several quantities of one batch
    max_batch, dataset_size: set both if a larger draw is cut down to `max_batch` examples chosen at random (pld only).
        Accounting then adds one to `dataset_size`, because the larger neighbour may have one example more
    """

    sampling_rate: float
    noise_multiplier: float
    count: int = 1
    max_batch: int | None = None
    dataset_size: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.sampling_rate <= 1:
            raise ValueError(
                f"sampling_rate={self.sampling_rate} must be above 0 and at most 1: it is the expected batch size "
                "divided by the number of examples."
            )
        if not 0 <= self.noise_multiplier < math.inf:
            raise ValueError(f"noise_multiplier={self.noise_multiplier} must be finite, and 0 (no privacy) or more.")
        check_count("count", self.count, least=0)
        if (self.max_batch is None) != (self.dataset_size is None):
            raise ValueError(
                f"max_batch={self.max_batch} and dataset_size={self.dataset_size}: how often a draw is cut depends on "
                "both. Give both, or neither."
            )
        if self.max_batch is not None:
            check_count("max_batch", self.max_batch, least=1)
            check_count("dataset_size", self.dataset_size, least=1)


# Composition. `merged` below is what `merge` returns: few kinds of events, each once, with its count.


def merge(events: Iterable[Event]) -> tuple[Event, ...]:
    counts: Counter[tuple[Any, ...]] = Counter()
    for e in events:
        counts[e.sampling_rate, e.noise_multiplier, e.max_batch, e.dataset_size] += e.count
    kinds = [Event(q, sigma, n, cap, size) for (q, sigma, cap, size), n in counts.items() if n > 0]
    if len(kinds) > _MOST_KINDS and (fewer := merge(coarsen(kinds))) and len(fewer) < len(kinds):
        return fewer
    return tuple(sorted(kinds, key=lambda e: (e.sampling_rate, e.noise_multiplier, e.max_batch or 0)))


def coarsen(events: Sequence[Event]) -> list[Event]:
    """The same events with sigma rounded down and q up, onto grids just coarse enough to leave few kinds of them."""
    noisy = [e for e in events if e.noise_multiplier > 0]
    ratio = 1.001
    rounded = list(events)
    while noisy and len({(e.sampling_rate, e.noise_multiplier) for e in rounded}) > _MOST_KINDS and ratio < 2:
        least, most = min(e.noise_multiplier for e in noisy), max(e.sampling_rate for e in noisy)
        rounded = [_rounded(e, least, most, math.log(ratio)) for e in events]
        ratio = ratio**1.25
    return rounded


def _rounded(event: Event, least_sigma: float, most_q: float, log_ratio: float) -> Event:
    sigma, q = event.noise_multiplier, event.sampling_rate
    if sigma > 0:
        level = math.floor(math.log(sigma / least_sigma) / log_ratio)
        sigma = min(sigma, least_sigma * math.exp(level * log_ratio))
    if event.max_batch is None:  # with a cap, a higher q also means more cutting: it is not the pessimistic side
        level = math.floor(math.log(most_q / q) / log_ratio)
        q = max(q, most_q * math.exp(-level * log_ratio))
    return replace(event, sampling_rate=q, noise_multiplier=sigma)


@lru_cache(maxsize=2)  # megabytes each
def composed_pld(merged: tuple[Event, ...], delta: float) -> Any:
    """The composed PLD, on a grid fine enough for `delta`.

    Every grid gives an upper bound. Its error shrinks with the square of the interval, so two grids, one of which is
    cheap, tell how much is left.
    """
    first = 10 * grid_interval(merged, rough_epsilon(merged, delta))
    coarse = coarse_epsilon(merged, delta)
    interval = min(first / 10, grid_interval(merged, coarse))
    finer = first / interval
    while True:
        pld = compose(pld_ledger(interval), merged)
        fine = read_epsilon(pld, delta, fft_rounding(merged))
        error = (coarse - fine) / (finer**2 - 1) / max(fine, 1e-9)
        if error <= _TOLERANCE or interval <= _FINEST_INTERVAL:
            return pld
        finer = min(1.2 * math.sqrt(error / _TOLERANCE), interval / _FINEST_INTERVAL)
        interval, coarse = interval / finer, fine


@lru_cache(maxsize=4096)
def coarse_epsilon(merged: tuple[Event, ...], delta: float) -> float:
    """An upper bound, at a tenth of the work of `composed_pld`."""
    return read_epsilon(compose(coarse_ledger(merged, delta), merged), delta, fft_rounding(merged))


def coarse_ledger(merged: Sequence[Event], delta: float) -> EitherNeighbour:
    """A PLD ledger, still empty, on a grid ten times coarser than these events deserve: an upper bound that is cheap."""
    return pld_ledger(10 * grid_interval(merged, rough_epsilon(merged, delta)))


def pld_profile(merged: tuple[Event, ...], delta: float) -> Callable[[float], float]:
    """delta as a function of epsilon, rounded up, on the grid that is fine enough for the given delta."""
    pld, slack = composed_pld(merged, delta), fft_rounding(merged)

    def profile(epsilon: float) -> float:
        return min(1.0, max(0.0, float(pld.get_delta(epsilon))) + slack)

    return profile


def renyi_best_of(merged: tuple[Event, ...], mean: float, shape: float, delta: float) -> float:
    """The epsilon of the best of K such runs, K from dp-accounting's repeat-and-select (Papernot and Steinke 2022)."""
    from dp_accounting import dp_event

    runs = [dp_event.SelfComposedDpEvent(poisson_event(e), int(e.count)) for e in merged]
    ledger = renyi_ledger()
    with _without_absl_warnings():
        ledger.compose(dp_event.RepeatAndSelectDpEvent(dp_event.ComposedDpEvent(runs), mean, shape))
    return float(ledger.get_epsilon(delta))


def grid_interval(merged: Sequence[Event], size: float) -> float:
    """Interval for an epsilon of about `size`: `_INTERVAL`, unless the losses range so widely that it takes minutes."""
    widest = size
    for e in merged:
        sigma = e.noise_multiplier / (math.sqrt(e.count) if _is_plain(e) else 1)
        if sigma > 0:
            widest = max(widest, 0.5 / sigma**2 + 10 / sigma)
    many = 10 if len(merged) > _MANY_KINDS else 1
    return _INTERVAL * many * max(1, math.ceil(widest / (_INTERVAL * _MOST_BINS)))


def rough_epsilon(merged: Sequence[Event], delta: float) -> float:
    """The size of epsilon, in milliseconds: to choose grids and first guesses, never to report."""
    # Cutting a draw exchanges examples, which at worst doubles the sensitivity.
    plain = [
        e if e.max_batch is None else Event(e.sampling_rate, e.noise_multiplier / 2, e.count)
        for e in merged
        if e.noise_multiplier > 0
    ]
    return read_epsilon(compose(renyi_ledger(_FEW_ORDERS), plain), delta)


def pld_ledger(interval: float = _INTERVAL) -> EitherNeighbour:
    from dp_accounting import NeighboringRelation

    neighbours = NeighboringRelation.ADD_OR_REMOVE_ONE
    return EitherNeighbour(_quick_accountant()(neighbours, value_discretization_interval=interval))


def renyi_ledger(orders: Sequence[float] | None = None) -> Any:
    from dp_accounting import NeighboringRelation
    from dp_accounting.rdp import RdpAccountant

    return RdpAccountant(orders, NeighboringRelation.ADD_OR_REMOVE_ONE)


@cache
def _quick_accountant() -> Any:
    """dp-accounting's PLD accountant, which keeps the distribution of a sampled Gaussian: making it is most of the work, and
    a run that asks for epsilon at every step asks with the same one."""
    from dp_accounting import dp_event
    from dp_accounting.pld import PLDAccountant

    class QuickAccountant(PLDAccountant):
        def _maybe_compose(self, event: Any, count: int, do_compose: bool) -> Any:
            sampled = isinstance(event, dp_event.PoissonSampledDpEvent)
            if not (do_compose and sampled and isinstance(event.event, dp_event.GaussianDpEvent)):
                return super()._maybe_compose(event, count, do_compose)
            if event.event.noise_multiplier <= 0 or not 0 < event.sampling_probability < 1:
                return super()._maybe_compose(event, count, do_compose)
            interval = self._value_discretization_interval
            one = _sampled_gaussian(event.sampling_probability, event.event.noise_multiplier, interval)
            self._pld: Any = self._pld.compose(one.self_compose(count))
            return None

    return QuickAccountant


@lru_cache(maxsize=8)  # megabytes each
def _sampled_gaussian(rate: float, sigma: float, interval: float) -> Any:
    from dp_accounting import NeighboringRelation
    from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism

    return from_gaussian_mechanism(
        standard_deviation=sigma,
        value_discretization_interval=interval,
        sampling_prob=rate,
        neighboring_relation=NeighboringRelation.ADD_OR_REMOVE_ONE,
    )


class EitherNeighbour:
    """A PLD accountant that keeps a second one where draws are cut.

    There the neighbours with one example more and with one less differ: an example of N is drawn more often than
    one of N + 1. Whatever is asked, the larger answer is given.
    """

    def __init__(self, accountant: Any) -> None:
        self._more, self._less = accountant, None

    def compose(self, release: Any, count: int, less: Any = None) -> None:
        """less: the release for a neighbour with one example less, where that is another one."""
        if less is not None and self._less is None:
            self._less = copy.deepcopy(self._more)
        self._more.compose(release, count)
        if self._less is not None:
            self._less.compose(release if less is None else less, count)

    def get_epsilon(self, delta: float) -> float:
        return max(accountant.get_epsilon(delta) for accountant in self._both())

    def get_delta(self, epsilon: float) -> float:
        return max(accountant.get_delta(epsilon) for accountant in self._both())

    def _both(self) -> list[Any]:
        return [self._more] if self._less is None else [self._more, self._less]


def compose(ledger: Any, merged: Iterable[Event]) -> Any:
    """Add the events to a ledger of dp-accounting's. Only a PLD ledger takes events with `max_batch`."""
    from dp_accounting import dp_event

    with _without_absl_warnings():
        for e in merged:
            if e.max_batch is not None and e.dataset_size is not None:
                more, less = (
                    dp_event.TruncatedSubsampledGaussianDpEvent(size, e.sampling_rate, e.max_batch, e.noise_multiplier)
                    for size in (e.dataset_size + 1, e.dataset_size)
                )
                ledger.compose(more, int(e.count), less)
            else:
                ledger.compose(poisson_event(e), int(e.count))
    return ledger


def poisson_event(event: Event) -> Any:
    """One such release as dp-accounting's event, where draws are not cut."""
    from dp_accounting import dp_event

    release = dp_event.GaussianDpEvent(event.noise_multiplier)
    return release if event.sampling_rate == 1 else dp_event.PoissonSampledDpEvent(event.sampling_rate, release)


def read_epsilon(ledger: Any, delta: float, slack: float = 0.0) -> float:
    """Epsilon at delta. slack: by how much rounding may have lowered the ledger's deltas (`fft_rounding`)."""
    if delta <= 2 * slack:
        raise ValueError(
            f"delta={delta} is too small for PLD accounting of so many batches, whose rounding errors reach "
            f'{slack:.1g}. Use a delta above {2 * slack:.1g}, or accountant="rdp".'
        )
    return max(0.0, float(ledger.get_epsilon(delta - slack)))


def fft_rounding(merged: Iterable[Event]) -> float:
    """More than floating point can take away from a composed delta.

    Raising a spectrum to the power `steps` multiplies its rounding errors by `steps`. Measured against the Gaussian
    closed form, up to a million steps: at most 0.2 steps 2^-52. Uncorrected, epsilon at delta = 1e-12 is 0.04 too small
    after 90,000 steps.
    """
    return sum((50 + (0 if _is_plain(e) else int(e.count))) * 2.0**-51 for e in merged)


def _is_plain(event: Event) -> bool:
    """No sampling at all: dp-accounting then folds all steps into one release with less noise, without an FFT."""
    return event.sampling_rate == 1 and event.max_batch is None


@contextmanager
def _without_absl_warnings() -> Iterator[None]:
    # dp-accounting warns of every Rényi order it leaves out. One order less is still an upper bound.
    logger = logging.getLogger("absl")

    def reject(record: logging.LogRecord) -> bool:
        return record.levelno > logging.WARNING

    logger.addFilter(reject)
    try:
        yield
    finally:
        logger.removeFilter(reject)
