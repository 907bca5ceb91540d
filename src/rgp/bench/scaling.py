"""The paper's cost table, measured: how time and per-example gradients grow along one axis.

The work is a stack of square linear layers of width d over m sequences. With K power iterations and rank r the paper
has time O(m d^2 + K r d^2) and per-example gradients of O(m r d) for RGP, against O(m d^2) and O(m d^2) for DP-SGD.
The DP-SGD that the paper means keeps every example's gradient: `opacus-hooks` does. Our `dpsgd` chooses for each layer
whether to keep them or to get their norms without them, so its memory need not follow any one power.
A slope is that of a straight line through the logarithms: cost ~ value^slope.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import linear_regression
from typing import Any

from rgp.bench.harness import run_bench
from rgp.bench.settings import Settings

BASE = Settings(model="stack:512", batch=16, microbatch=16, seq=32, optimizer="sgd")


@dataclass(frozen=True)
class Axis:
    values: tuple[int, ...]
    apply: Callable[[Settings, int], Settings]
    memory_slopes: dict[str, int]
    """What the paper's table says of the per-example gradients."""


AXES = {
    "width": Axis((256, 512, 1024, 2048), lambda s, d: replace(s, model=f"stack:{d}"), {"rgp": 1, "opacus-hooks": 2}),
    "batch": Axis((8, 16, 32, 64), lambda s, m: replace(s, batch=m, microbatch=m), {"rgp": 1, "opacus-hooks": 1}),
    "rank": Axis((1, 2, 4, 8, 16, 32), lambda s, r: replace(s, rank=r), {"rgp": 1, "opacus-hooks": 0}),
    "sequence": Axis((16, 32, 64, 128), lambda s, t: replace(s, seq=t), {"rgp": 0, "opacus-hooks": 0}),
    "power-iterations": Axis((1, 2, 4, 8), lambda s, k: replace(s, power_iterations=k), {"rgp": 0, "opacus-hooks": 0}),
}


def run_scaling(
    axis: str,
    settings: Settings = BASE,
    contenders: Sequence[str] = ("rgp", "dpsgd", "opacus-hooks"),
    values: Sequence[int] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure every contender at every value of the axis and fit the slopes.

    settings: everything but the axis; its model is `stack:WIDTH` and its batch is not cut.
    """
    if axis not in AXES:
        raise ValueError(f"scaling={axis!r} must be one of {', '.join(AXES)}")
    points = tuple(values or AXES[axis].values)
    if len(set(points)) < 2:
        raise ValueError(f"values={points} must have two different values or more: a slope needs them")
    reports = []
    for point in points:
        at = AXES[axis].apply(settings, point)
        reports.append(run_bench(at, contenders, say=lambda line, point=point: say(f"{axis} {point}, {line}")))  # type: ignore[misc]
    rows = [scaling_row(axis, points, [report["rows"][i] for report in reports]) for i in range(len(contenders))]
    about = {key: reports[0][key] for key in ("machine", "commit", "date")}
    return {"axis": axis, "values": list(points), "rows": rows, **about, "settings": asdict(settings)}


def scaling_row(axis: str, points: Sequence[int], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One contender's measurements, in the order of the points."""
    name = rows[0]["name"]
    counted = all(row["per_example_bytes"] is not None for row in rows if "error" not in row)
    memory_key = "per_example_bytes" if counted else "peak_bytes"
    seconds = [row["seconds_per_step"] for row in rows]
    memory = [row[memory_key] for row in rows]
    errors = [row["error"] for row in rows if "error" in row]
    return {
        "name": name,
        "seconds_per_step": seconds,
        "time_slope": slope(points, seconds),
        "memory_measure": memory_key,
        "memory_bytes": memory,
        "memory_slope": slope(points, memory),
        "peak_bytes": [row["peak_bytes"] for row in rows],
        "expected_memory_slope": AXES[axis].memory_slopes.get(name),
        **({"error": errors[0]} if errors else {}),
    }


def slope(xs: Sequence[float], ys: Sequence[float | None]) -> float | None:
    """The exponent a of the best fit y = c x^a, or None with fewer than two measurements.

    >>> slope([1, 2, 4], [3, 12, 48])
    2.0
    """
    logs = [(math.log(x), math.log(y)) for x, y in zip(xs, ys, strict=True) if y]
    if len(logs) < 2:
        return None
    return linear_regression(*zip(*logs, strict=True)).slope
