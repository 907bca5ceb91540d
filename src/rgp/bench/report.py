"""Reports for people: tables and bars in the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rgp.bench.harness import unequal_work

BAR_WIDTH = 40
BUSY = 0.1  # cores that others may have while steps are measured


def show_bench(report: dict[str, Any], console: Console) -> None:
    settings, rows = report["settings"], report["rows"]
    pieces = settings["batch"] // settings["microbatch"]
    table = Table(
        title=f"{settings['model']}, batch {settings['batch']} as {pieces} x {settings['microbatch']}, "
        f"rank {settings['rank']}, {settings['sides']}, {settings['source']} carriers kept for {settings['keep']}, "
        f"{settings['state']} state, {settings['optimizer']}"
        + (f", noise correlated over {settings['bands']} steps" if settings.get("bands", 1) > 1 else "")
    )
    table.add_column("contender", no_wrap=True)
    for heading in ("s/step", "x plain", "x bound", "peak", "x plain", "per-example"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        if "error" in row:
            table.add_row(row["name"], Text("failed", style="red"))
            continue
        table.add_row(
            row["name"],
            f"{row['seconds_per_step']:.4g}",
            with_range(row["ratio_to_plain"], row["ratio_to_plain_range"]),
            with_range(row["ratio_to_bound"], row["ratio_to_bound_range"]),
            size(row["peak_bytes"]),
            ratio(row["memory_ratio_to_plain"]),
            size(row["per_example_bytes"]),
        )
    console.print(table)
    for title, key, as_text in (("s/step", "seconds_per_step", "{:.4g}".format), ("peak memory", "peak_bytes", size)):
        console.print(f"\n{title}")
        longest = max((row[key] for row in rows if row[key]), default=1)
        for row in rows:
            if row[key] is not None:
                bar = "█" * max(1, round(BAR_WIDTH * row[key] / longest))
                colour = "green" if row["name"] == "rgp" else "blue"
                console.print(Text(f"{row['name']:>14} ").append(bar, style=colour).append(f" {as_text(row[key])}"))
    show_circumstances(report, console)
    show_errors(report, console)
    if (difference := unequal_work(rows)) is not None:
        console.print(f"[red]{difference}[/red]")


def show_scaling(report: dict[str, Any], console: Console) -> None:
    table = Table(title=f"cost ~ {report['axis']}^slope")
    table.add_column("contender")
    table.add_column("", justify="left")
    for value in report["values"]:
        table.add_column(str(value), justify="right")
    table.add_column("slope", justify="right")
    table.add_column("paper", justify="right")
    for row in report["rows"]:
        times = [f"{s:.4g}" if s is not None else "" for s in row["seconds_per_step"]]
        table.add_row(row["name"], "s/step", *times, ratio(row["time_slope"]), "")
        label = "per-example" if row["memory_measure"] == "per_example_bytes" else "peak memory"
        expected = row["expected_memory_slope"]
        paper = "" if expected is None else str(expected)
        table.add_row("", label, *map(size, row["memory_bytes"]), ratio(row["memory_slope"]), paper)
    console.print(table)
    show_circumstances(report, console)
    show_errors(report, console)


def show_circumstances(report: dict[str, Any], console: Console) -> None:
    machine = report["machine"]
    console.print(
        f"\n{machine['cpu']}, {machine['threads']} of {machine['cores']} cores, device {machine.get('device')}, "
        f"torch {machine.get('torch')}, Python {machine['python']}, commit {report['commit']}",
        highlight=False,
    )
    load = machine["load_before"]
    if load is not None and load > 0.5:
        console.print(f"[yellow]the load average was {load} before the start: something else was running[/yellow]")
    if busy := busy_note(machine):
        console.print(
            f"[yellow]{busy}: take no number from this run but ratios of CPU time (cpu_ratio_to_bound in --json)[/yellow]"
        )


def busy_note(machine: dict[str, Any]) -> str | None:
    """Whether the times were measured while other programs were at work; None on a quiet machine."""
    busy = machine.get("busy_elsewhere")
    if busy is None or busy <= BUSY:
        return None
    return f"other programs kept {busy} cores busy while steps were measured"


def show_errors(report: dict[str, Any], console: Console) -> None:
    for row in report["rows"]:
        if "error" in row:
            console.print(Text(f"{row['name']}: {row['error']}", style="red"))


def with_range(value: float | None, ends: list[float] | None) -> str:
    """The median, and in brackets the smallest and the largest of a round where they differ."""
    if value is None or ends is None:
        return ""
    low, high = (f"{end:.2f}" for end in ends)
    return f"{value:.2f}" if low == high else f"{value:.2f} ({low}-{high})"


def ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def size(value: float | None) -> str:
    if value is None:
        return ""
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if value >= scale:
            return f"{value / scale:.2f} {unit}"
    return f"{value / 1e3:.0f} kB"
