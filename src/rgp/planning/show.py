"""The plan for people: tables of at most 80 columns, and what they come to in one sentence."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table


def show(plan: dict[str, Any], *, layers: bool = False, console: Console | None = None) -> None:
    console = console or Console(highlight=False)
    _facts(plan, console)
    if layers:
        _layers(plan, console)
    _memory(plan, console)
    _costs(plan, console)
    console.print(conclusion(plan))


_PREFIXES = ("", "k", "M", "G", "T", "P", "E")


def size(n: float) -> str:
    """Bytes in three figures, powers of ten."""
    return _scaled(n, _PREFIXES) + "B" if n >= 1000 else f"{n:.0f} B"


def _scaled(n: float, units: tuple[str, ...]) -> str:
    unit = 0
    while n >= 999.5 and unit < len(units) - 1:
        n, unit = n / 1000, unit + 1
    return f"{n:.3g} {units[unit]}".rstrip()


def _facts(plan: dict[str, Any], console: Console) -> None:
    title = f"{plan['method']} on {plan['model']}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_header=False)
    table.add_column(style="dim")
    table.add_column()
    kinds: dict[str, int] = {}
    for layer in plan["layers"]:
        kinds[layer["treatment"]] = kinds.get(layer["treatment"], 0) + 1
    batch = f"{plan['batch']:,} of {plan['dataset_size']:,} examples, {plan['microbatch']} at once"
    if plan["rows_per_unit"] > 1:
        people = f"{plan['batch']:,} of {plan['dataset_size']:,} persons"
        batch = f"{people}, at most {plan['rows_per_unit']} rows of each, {plan['microbatch']} rows at once"
    if plan["world_size"] > 1:
        batch += f" on each of {plan['world_size']} {'sharded ' if plan['sharded'] else ''}ranks"
    table.add_row("parameters", f"{plan['parameters']:,}; {plan['trainable']:,} trained")
    table.add_row("layers", ", ".join(f"{n} {treatment}" for treatment, n in kinds.items()))
    table.add_row("batch", f"{batch}; {plan['steps']:,} steps")
    if plan["epsilon"] is not None:
        table.add_row("noise dimensions", f"{plan['noise_dimensions']:,}")
        noise = f"{plan['noise_multiplier']:g} times the clipping norm"
        table.add_row("noise", f"{noise}, for epsilon {plan['epsilon']:g} at delta {plan['delta']:.3g}")
        if plan["bands"] > 1:
            own = next(row for row in plan["methods"] if row["name"] == plan["method"])
            table.add_row("", f"{plan['noise']}; {size(own['memory']['past_noise'])} of past noise are kept")
    console.print(table)


def _layers(plan: dict[str, Any], console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD, title="What each parameter gets", title_justify="left")
    table.add_column("parameter", overflow="fold")
    for column in ("shape", "gets", "rank", "noise dims"):
        table.add_column(column, justify="left" if column == "gets" else "right", no_wrap=True)
    for e in plan["layers"]:
        shape = " x ".join(map(str, e["shape"])) or "scalar"
        table.add_row(e["name"], shape, e["treatment"], str(e["rank"] or ""), f"{e['noise_dimensions']:,}")
    console.print(table)


_SHORT = {
    "initial": "W_0",
    "optimizer": "optim.",
    "gradients": "grads",
    "activations": "activ.",
    "per_example": "per ex.",
    "past_noise": "noise",
}


def _memory(plan: dict[str, Any], console: Console) -> None:
    where = {"gpu": "GPU", "cpu": "CPU"}[plan["device"]]
    unit, name = _unit(max(row["memory"]["peak"] for row in plan["methods"]))
    table = _table(f"Memory of one {where} in {name} ({plan['dtype']}, {plan['optimizer']})")
    parts = ["weights", "optimizer", "gradients", "activations", "per_example"]
    if any(row["memory"]["initial"] for row in plan["methods"]):
        parts.insert(1, "initial")
    if any(row["memory"]["past_noise"] for row in plan["methods"]):
        parts.append("past_noise")
    for part in parts:
        table.add_column(_SHORT.get(part, part), justify="right", no_wrap=True)
    table.add_column("peak", justify="right", style="bold", no_wrap=True)
    table.add_column("in", no_wrap=True)
    for row in plan["methods"]:
        memory = row["memory"]
        cells = [_figure(memory[part] / unit) if memory[part] else "-" for part in parts]
        table.add_row(row["name"], *cells, _figure(memory["peak"] / unit), memory["phase"])
    console.print(table)


def _costs(plan: dict[str, Any], console: Console) -> None:
    table = _table("One step: flops, bytes in and out of a rank, noise")
    columns = ["flops", "network", "noise dims", "signal/noise"]
    if plan["device_memory"] is not None:
        columns.append("most at once")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for row in plan["methods"]:
        snr = "-" if row["snr"] is None else f"{row['snr']:.3g}"
        sent = size(row["network_bytes_per_step"]) if row["network_bytes_per_step"] else "-"
        cells = [_scaled(row["flops_per_step"], _PREFIXES), sent, f"{row['noise_dimensions']:,}", snr]
        if plan["device_memory"] is not None:
            most = row["largest_microbatch"]
            cells.append(f"{most:,}" if most else "none fits")
        table.add_row(row["name"], *cells)
    console.print(table)


def _table(title: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", padding=(0, 1, 0, 0))
    table.add_column("method", no_wrap=True)
    return table


def _unit(largest: int) -> tuple[float, str]:
    return next(((10**e, name) for e, name in ((12, "TB"), (9, "GB"), (6, "MB")) if largest >= 10**e), (1e3, "kB"))


def _figure(n: float) -> str:
    """Three figures, but whole numbers whole."""
    return f"{n:,.0f}" if n >= 100 else f"{n:.1f}" if n >= 10 else f"{n:.2f}"


def conclusion(plan: dict[str, Any]) -> str:
    """One sentence: the chosen method against the first private rival, and against plain training."""
    rows = {row["name"]: row for row in plan["methods"]}
    own = rows[plan["method"]]
    said = []
    rival = next((rows[n] for n in ("dpsgd-ghost", "dpsgd") if n in rows and n != plan["method"]), None)
    if rival is not None and own["snr"] is not None:
        ratio = own["snr"] / rival["snr"]
        said.append(f"signal to noise is at most {own['snr']:.3g}, {ratio:.3g} times that of DP-SGD")
    elif own["snr"] is not None:
        said.append(f"signal to noise is at most {own['snr']:.3g}")
    plain = rows.get("plain")
    if plain is not None and plan["method"] != "plain":
        memory = own["memory"]["peak"] / plain["memory"]["peak"]
        flops = own["flops_per_step"] / plain["flops_per_step"]
        said.append(f"a step takes {memory:.2f} of plain training's memory and {flops:.2f} of its flops")
    if plan["device_memory"] is not None:
        most = own["largest_microbatch"]
        device = f"{size(plan['device_memory'])} with {plan['reserve']:.0%} in reserve"
        said.append(f"{most} examples at once fit in {device}" if most else f"not even one example fits in {device}")
    return f"{plan['method']}: {'; '.join(said) or 'nothing to compare with'}."
