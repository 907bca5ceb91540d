"""Small SVG charts, drawn by hand: they take their colours from the page, so dark mode and print come for free."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rgp.report.html import Html, join, tag
from rgp.rounding import round_up

COLOURS = 6  # as many as style.css has, --c0 to --c5
_WIDTH, _HEIGHT = 440, 268
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 14, 14, 42


@dataclass(frozen=True)
class Series:
    """A line, or a trail that ends in a point. `colour` is an index; the dash pattern follows it, for print."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int = 0


@dataclass(frozen=True)
class Frame:
    """Data -> pixels."""

    x: tuple[float, float]
    y: tuple[float, float]
    right: float = _WIDTH - _RIGHT

    def at(self, x: float, y: float) -> tuple[float, float]:
        across = (x - self.x[0]) / ((self.x[1] - self.x[0]) or 1)
        up = (y - self.y[0]) / ((self.y[1] - self.y[0]) or 1)
        return _LEFT + across * (self.right - _LEFT), _HEIGHT - _BOTTOM - up * (_HEIGHT - _BOTTOM - _TOP)


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    x_label: str = "step",
    y_format: Callable[[float], str] = lambda v: f"{v:g}",
    from_zero: bool = False,
    most: float | None = None,
) -> Html:
    """Lines over steps, a dot at the end of each. Empty if there is nothing to draw."""
    series = [s for s in series if s.points]
    if not series:
        return Html("")
    ys = [y for s in series for _, y in s.points]
    low, high = (0.0 if from_zero else min(ys)), max(ys)
    y_ticks = ticks(low, high, most=most)
    x_ticks = ticks(0.0, max(x for s in series for x, _ in s.points), outside=False)
    frame = Frame((0.0, max(x for s in series for x, _ in s.points) or 1), (y_ticks[0], y_ticks[-1]))
    parts = [_axes(frame, x_ticks, y_ticks, x_label, y_format)]
    parts += [_line(frame, s, y_format, x_label) for s in series]
    return _svg(title, series, parts, y_format)


def trade_off(
    title: str, trails: Sequence[Series], without: Sequence[Series], y_format: Callable[[float], str]
) -> Html:
    """Accuracy against epsilon: the way each run went, and its end; runs without privacy in a column of their own."""
    shown = [s for s in (*trails, *without) if s.points]
    if not shown:
        return Html("")
    y_ticks = ticks(min(y for s in shown for _, y in s.points), max(y for s in shown for _, y in s.points), most=1.0)
    x_most = max((x for s in trails for x, _ in s.points), default=1.0)
    x_ticks = ticks(0.0, x_most * 1.02)
    column = 76 if without else 0
    frame = Frame((0.0, x_ticks[-1]), (y_ticks[0], y_ticks[-1]), right=_WIDTH - _RIGHT - column)
    parts = [_axes(frame, x_ticks, y_ticks, "epsilon (less is more private)", y_format)]
    parts += [_line(frame, s, y_format, "epsilon") for s in trails if s.points]
    if without:
        left, right = frame.right + 12, _WIDTH - _RIGHT
        parts.append(
            tag("rect", x=left, y=_TOP, width=right - left, height=_HEIGHT - _BOTTOM - _TOP, class_="column", rx=4)
        )
        parts.append(_text("no privacy", (left + right) / 2, _HEIGHT - _BOTTOM + 17, "middle"))
        for s in without:
            y = frame.at(0, s.points[-1][1])[1]
            parts.append(_dot((left + right) / 2, y, s, f"{s.name}: {y_format(s.points[-1][1])}"))
    return _svg(title, shown, parts, y_format)


def roc_chart(title: str, series: Sequence[Series], *, smallest: float = 1e-4) -> Html:
    """True- against false-positive rates, both axes logarithmic from `smallest` to 1; a thin diagonal is chance."""
    series = [s for s in series if s.points]
    if not series:
        return Html("")
    least = round(math.log10(smallest))
    powers = [float(k) for k in range(least, 1)]
    frame = Frame((float(least), 0.0), (float(least), 0.0))

    def percent(power: float) -> str:
        return f"{100 * 10**power:g}%"

    def logged(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
        return [(math.log10(max(x, smallest)), math.log10(max(y, smallest))) for x, y in points]

    parts = [_axes(frame, powers, powers, "false alarms", percent, percent)]
    (x1, y1), (x2, y2) = frame.at(least, least), frame.at(0, 0)
    parts.append(tag("line", x1=_px(x1), y1=_px(y1), x2=_px(x2), y2=_px(y2), class_="grid"))
    for s in series:
        pixels = [frame.at(x, y) for x, y in logged(s.points)]
        path = " ".join(f"{'M' if i == 0 else 'L'}{_px(x)} {_px(y)}" for i, (x, y) in enumerate(pixels))
        parts.append(tag("path", tag("title", s.name), d=path, class_=f"line s{s.colour % COLOURS}"))
    return _svg(title, series, parts, lambda rate: f"{100 * rate:g}%")


def ticks(low: float, high: float, *, outside: bool = True, most: float | None = None) -> list[float]:
    """Four to seven round numbers around (or, with `outside=False`, within) an interval, none above `most`."""
    if high - low < 1e-9 * max(1.0, abs(high)):
        pad = abs(high) * 0.05 or 1.0
        low, high = low - pad, high + pad
    if most is not None:
        high = min(high, most)
    step = 10 ** math.floor(math.log10((high - low) / 4))
    step = next(step * k for k in (1, 2, 2.5, 5, 10) if (high - low) / (step * k) <= 5)
    start, stop = low / step, high / step
    first = math.floor(start + 1e-9) if outside else math.ceil(start - 1e-9)
    last = math.ceil(stop - 1e-9) if outside else math.floor(stop + 1e-9)
    values = [round(i * step, 12) for i in range(first, last + 1)]
    return [v for v in values if most is None or v <= most + 1e-9]


def _axes(
    frame: Frame,
    x_ticks: Sequence[float],
    y_ticks: Sequence[float],
    x_label: str,
    y_format: Callable[[float], str],
    x_format: Callable[[float], str] = lambda v: f"{v:,g}",
) -> Html:
    parts: list[Html] = []
    for value in y_ticks:
        x, y = frame.at(frame.x[0], value)
        parts.append(tag("line", x1=_px(x), x2=_px(frame.right), y1=_px(y), y2=_px(y), class_="grid"))
        parts.append(_text(y_format(value), x - 8, y + 4, "end"))
    for value in x_ticks:
        x, y = frame.at(value, frame.y[0])
        parts.append(tag("line", x1=_px(x), x2=_px(x), y1=_px(y), y2=_px(y + 4), class_="axis"))
        parts.append(_text(x_format(value), x, y + 17, "end" if x > _WIDTH - 24 else "middle"))
    bottom = _HEIGHT - _BOTTOM
    parts.append(tag("line", x1=_LEFT, x2=_px(frame.right), y1=bottom, y2=bottom, class_="axis"))
    parts.append(_text(x_label, (_LEFT + frame.right) / 2, _HEIGHT - 6, "middle"))
    return join(*parts)


def _line(frame: Frame, s: Series, y_format: Callable[[float], str], x_label: str) -> Html:
    pixels = [frame.at(x, y) for x, y in s.points]
    path = " ".join(f"{'M' if i == 0 else 'L'}{_px(x)} {_px(y)}" for i, (x, y) in enumerate(pixels))
    line = tag("path", d=path, class_=f"line s{s.colour % COLOURS}")
    (x, y), (px, py) = s.points[-1], pixels[-1]
    where = x_label.split(" (")[0]
    shown = round_up(x) if where == "epsilon" else f"{x:,.4g}"
    return join(line, _dot(px, py, s, f"{s.name}: {y_format(y)} at {where} {shown}"))


def _dot(x: float, y: float, s: Series, words: str) -> Html:
    return tag("circle", tag("title", words), cx=_px(x), cy=_px(y), r=5, class_=f"dot s{s.colour % COLOURS}")


def _text(words: str, x: float, y: float, anchor: str) -> Html:
    return tag("text", words, x=_px(x), y=_px(y), text_anchor=anchor)


def _svg(title: str, series: Sequence[Series], parts: Sequence[Html], y_format: Callable[[float], str]) -> Html:
    ends = "; ".join(f"{s.name} ends at {y_format(s.points[-1][1])}" for s in series)
    drawing = tag(
        "svg",
        *parts,
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        role="img",
        aria_label=f"{title}. {ends}",
        xmlns="http://www.w3.org/2000/svg",
    )
    return tag("figure", tag("figcaption", title), drawing)


def _px(value: float) -> str:
    return f"{value:.1f}"
