"""What the paper says, each claim checked by the numbers: held, did not hold, level, or not run.

A difference counts if it is above two standard errors: of the paired differences over seeds, or, of one seed, of the two
accuracies on a finite number of test rows. Claims that something is small or near have a margin, stated with the claim.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from typing import Any

from rgp.reproduce.items import Column
from rgp.reproduce.numbers import Numbers, Place, paired_difference, rows_tested, sampling_error

HELD, FAILED, LEVEL, NOT_RUN = "held", "did not hold", "level", "not run"
NEAR_FULL = 2.1  # points: RGP N.P. below full training in the paper, at most (CIFAR-10)
NEAR_COIN = 1.0  # points from 50%: the paper's are at most 0.4 away, from more test rows
NOTHING = 0.1  # share of what RGP N.P. learns that counts as almost nothing
LOW_RANK = 10.0  # "in practice we typically choose the rank r smaller than 10"
CHANCE = {"SST-2": 50.9, "QNLI": 50.5, "QQP": 63.2, "MNLI": 35.4}  # the largest class; of ten classes it is about 10%
SLOPES = {("rgp", "width"): 1, ("opacus-hooks", "width"): 2, ("rgp", "rank"): 1}


@dataclass(frozen=True)
class Verdict:
    claim: str
    item: str
    where: str
    verdict: str
    why: str = ""

    def as_json(self) -> dict[str, str]:
        return asdict(self)


def judge(margin: float, error: float, *, within: bool = False) -> str:
    """The verdict on a margin that should be above zero. within: at or above zero is enough."""
    if margin > 2 * error or (within and margin >= 0):
        return HELD
    return FAILED if margin < -2 * error else LEVEL


def check(found: Mapping[str, Numbers]) -> list[Verdict]:
    """All claims about the items that are there, in the order of the paper."""
    verdicts: list[Verdict] = []
    for name, claims in CLAIMS.items():
        if name in found:
            for claim in claims:
                verdicts += claim(found[name])
    return verdicts


def above(
    higher: str, lower: str, *, columns: tuple[str, ...] = (), said: str = ""
) -> Callable[[Numbers], Iterator[Verdict]]:
    """One row has the higher numbers."""

    def claim(numbers: Numbers) -> Iterator[Verdict]:
        words = said or f"{higher} above {lower}"
        for column in numbers.item.columns:
            if columns and (column.beside or column.name) not in columns:
                continue
            xs: list[float | None] = [*numbers.xs(higher, column.name)]
            for x in xs or [None]:
                where = _where(numbers, column, x)
                a, b = numbers.place(higher, column.name, x), numbers.place(lower, column.name, x)
                if a.wanted and b.wanted:
                    yield _compared(words, numbers, where, a, b, column)

    return claim


def _compared(words: str, numbers: Numbers, where: str, a: Place, b: Place, column: Column) -> Verdict:
    difference = _difference(a, b, numbers.metric, column)
    if difference is None:
        return Verdict(words, numbers.item.name, where, NOT_RUN)
    return Verdict(words, numbers.item.name, where, judge(difference[0], difference[1]), _said(*difference))


def near_full(numbers: Numbers) -> Iterator[Verdict]:
    words = f"RGP (N.P.) near full training: at most {NEAR_FULL:g} points below"
    for column in numbers.item.columns:
        full, ours = numbers.place("Full (N.P.)", column.name), numbers.place("RGP (N.P.)", column.name)
        if not (full.wanted and ours.wanted):
            continue
        difference = _difference(ours, full, numbers.metric, column)
        if difference is None:
            yield Verdict(words, numbers.item.name, column.name, NOT_RUN)
        else:
            verdict = judge(difference[0] + NEAR_FULL, difference[1], within=True)
            yield Verdict(words, numbers.item.name, column.name, verdict, _said(*difference))


def learns_nothing(numbers: Numbers) -> Iterator[Verdict]:
    words = f"without the residual weight almost nothing is learned: below {NOTHING:.0%} of what RGP (N.P.) learns over chance"
    for column in numbers.item.columns:
        off, on = numbers.place("residual off (N.P.)", column.name), numbers.place("RGP (N.P.)", column.name)
        if not (off.wanted and on.wanted):
            continue
        a, b = off.mean(), on.mean()
        if a is None or b is None:
            yield Verdict(words, numbers.item.name, column.name, NOT_RUN)
            continue
        chance = CHANCE.get(column.beside or column.name, 10.0)
        error = off.error() or sampling_error(a, rows_tested(off, column))
        verdict = judge(NOTHING * (b - chance) - (a - chance), error)
        said = f"{a:.1f}% without it, {b:.1f}% with it; chance is {chance:.1f}%"
        yield Verdict(words, numbers.item.name, column.name, verdict, said)


def rank_trade_off(numbers: Numbers) -> Iterator[Verdict]:
    up = "without noise, a higher rank comes nearer to full training"
    down = "with noise, the highest rank is not the best"
    for column in numbers.item.columns:
        for row, words in (("RGP (N.P.)", up), ("RGP (ε = 8)", down)):
            xs = numbers.xs(row, column.name)
            if len(xs) < 2:
                continue
            places = {x: numbers.place(row, column.name, x) for x in xs}
            means = {x: place.mean() for x, place in places.items()}
            if any(mean is None for mean in means.values()):
                yield Verdict(words, numbers.item.name, column.name, NOT_RUN)
                continue
            best = xs[0] if row == "RGP (N.P.)" else max(xs[:-1], key=lambda x: means[x] or 0.0)
            higher, lower = (xs[-1], best) if row == "RGP (N.P.)" else (best, xs[-1])
            difference = _difference(places[higher], places[lower], numbers.metric, column)
            assert difference is not None
            said = f"rank {higher:g} against {lower:g}: {_said(*difference)}"
            yield Verdict(words, numbers.item.name, column.name, judge(difference[0], difference[1]), said)


def near_coin(numbers: Numbers) -> Iterator[Verdict]:
    words = f"the attack on RGP (ε = 8) is no better than guessing: within {NEAR_COIN:g} point of 50%"
    for column in numbers.item.columns:
        place = numbers.place("RGP (ε = 8)", column.name)
        rate = place.mean("success_rate")
        if rate is None:
            yield Verdict(words, numbers.item.name, column.name, NOT_RUN)
            continue
        errors = [100 * row["standard_error"] for row in place.seeds.values()]
        error = statistics.mean(errors) / len(errors) ** 0.5
        verdict = judge(NEAR_COIN - abs(rate - 50), error, within=True)
        yield Verdict(words, numbers.item.name, column.name, verdict, f"{rate:.1f}% ± {error:.1f}")


def low_stable_rank(numbers: Numbers) -> Iterator[Verdict]:
    words = f"gradients have a low stable rank: its median over training is below {LOW_RANK:g}"
    for where, matrices in _spectra(numbers):
        if matrices is None:
            yield Verdict(words, numbers.item.name, where, NOT_RUN)
            continue
        medians = {label: _median(m["stable_rank"]) for label, m in matrices.items()}
        known = {label: value for label, value in medians.items() if value is not None}
        if not known:
            yield Verdict(words, numbers.item.name, where, NOT_RUN)
            continue
        said = ", ".join(f"{label} {value:.1f}" for label, value in known.items())
        yield Verdict(words, numbers.item.name, where, HELD if max(known.values()) < LOW_RANK else FAILED, said)


def history_aligns(numbers: Numbers) -> Iterator[Verdict]:
    words = "an earlier gradient's subspace leaves about as little as the gradient's own: nearer to that than to a random one's"
    for where, matrices in _spectra(numbers):
        if matrices is None:
            yield Verdict(words, numbers.item.name, where, NOT_RUN)
            continue
        said, good = [], []
        for label, matrix in matrices.items():
            old, own = _median(matrix["residual"]["historical"]), _median(matrix["residual"]["self"])
            if old is not None and own is not None:
                chance = matrix["residual"]["random"]
                good.append(old - own < chance - old)
                said.append(f"{label}: earlier {old:.2f}, own {own:.2f}, random {chance:.2f}")
        if not good:
            yield Verdict(words, numbers.item.name, where, NOT_RUN)
        else:
            yield Verdict(words, numbers.item.name, where, HELD if all(good) else FAILED, "; ".join(said))


def cost_grows(numbers: Numbers) -> Iterator[Verdict]:
    names = {"rgp": "RGP", "opacus-hooks": "DP-SGD that keeps every example's gradient"}
    for (contender, axis), expected in SLOPES.items():
        words = f"per-example gradients of {names[contender]} grow like {axis}" + ("²" if expected == 2 else "")
        record = numbers.costs.get(axis)
        row = next((r for r in (record or {}).get("rows", []) if r["name"] == contender), None)
        if row is None or row.get("memory_slope") is None:
            yield Verdict(words, numbers.item.name, axis, NOT_RUN)
            continue
        slope = row["memory_slope"]
        verdict = HELD if abs(slope - expected) <= 0.25 else FAILED
        measure = row["memory_measure"].replace("_", " ")
        yield Verdict(words, numbers.item.name, axis, verdict, f"{measure} ~ {axis}^{slope:.2f}; within 0.25 counts")


CLAIMS: dict[str, tuple[Callable[[Numbers], Iterator[Verdict]], ...]] = {
    "table1": (cost_grows,),
    "table2": (
        above("RGP (ε = 8)", "DP-SGD (ε = 8)"),
        above("RGP (ε = 8)", "DP-PowerSGD (ε = 8)"),
        above("DP-PowerSGD (ε = 8)", "DP-SGD (ε = 8)"),
        above("DP-SGD (ε = 8)", "RGP-random (ε = 8)", columns=("CIFAR-10",)),
        above("RGP (ε = 8)", "RGP-random (ε = 8)"),
        near_full,
    ),
    "table3": tuple(above(f"RGP (ε = {e})", f"DP-SGD (ε = {e})") for e in (2, 4, 6)),
    "table4": (
        above("RGP (ε = 8)", "DP-SGD (ε = 8)"),
        above("RGP (ε = 8)", "RGP-random (ε = 8)"),
        above("RGP-random (ε = 8)", "DP-SGD (ε = 8)"),
        near_full,
    ),
    "table5": (
        near_coin,
        above("Full (N.P.)", "RGP (N.P.)", said="the attack does better on Full (N.P.) than on RGP (N.P.)"),
    ),
    "fig2": (low_stable_rank,),
    "fig3": (history_aligns,),
    "fig4": (above("RGP", "RGP-random"), above("RGP-random", "DP-SGD")),
    "fig5": (rank_trade_off,),
    "fig6": (learns_nothing,),
}


# ---------------------------------------------------------------------- parts


def _difference(a: Place, b: Place, metric: str, column: Column) -> tuple[float, float, int] | None:
    """(mean paired difference, its standard error, seeds), over the seeds that both have."""
    x, y = a.values(metric), b.values(metric)
    if not x.keys() & y.keys():
        return None
    difference, error, seeds = paired_difference(x, y)
    if error is None:
        (only,) = x.keys() & y.keys()
        errors = [sampling_error(v[only], rows_tested(p, column)) for v, p in ((x, a), (y, b))]
        error = (errors[0] ** 2 + errors[1] ** 2) ** 0.5
    return difference, error, seeds


def _said(difference: float, error: float, seeds: int) -> str:
    return f"{difference:+.1f} ± {error:.1f} points, {'one seed' if seeds == 1 else f'{seeds} seeds'}"


def _where(numbers: Numbers, column: Column, x: float | None) -> str:
    return column.name if x is None or numbers.item.x is None else f"{column.name}, {numbers.item.x['label']} {x:g}"


def _spectra(numbers: Numbers) -> Iterator[tuple[str, dict[str, Any] | None]]:
    for column in numbers.item.columns:
        for row in numbers.item.rows:
            if (row, column.name, None) not in numbers.places:
                continue
            record = numbers.spectra.get((row, column.name))
            matrices: dict[str, Any] | None = None
            if record is not None:
                named = [
                    (label, m)
                    for label, p in column.matrices.items()
                    for m in record["matrices"]
                    if fnmatch(m["name"], p)
                ]
                matrices = {}
                for label, matrix in named:
                    matrices.setdefault(label, matrix)
            yield f"{column.name}, {row}", matrices


def _median(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
