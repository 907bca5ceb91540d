"""Finished cells -> the numbers of a table: mean and standard error over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from typing import Any

from rgp.reproduce.items import Cell, Column, Item
from rgp.reproduce.store import Store

TEST_ROWS = {"CIFAR-10": 10000, "SVHN": 26032, "SST-2": 872, "digits": 359, "QNLI": 5463, "QQP": 40430, "MNLI": 9815}
MOST_SEEDS = 5
KINDS = {"self": "the gradient itself", "historical": "one epoch earlier", "update": "the update so far"}


@dataclass
class Place:
    """The runs of one place of a table, by seed: a dictionary of what was measured."""

    seeds: dict[int, dict[str, Any]] = field(default_factory=dict)
    wanted: int = 0
    state: str = ""  # why there is nothing, or not all

    def values(self, metric: str = "accuracy") -> dict[int, float]:
        return {seed: 100 * row[metric] for seed, row in self.seeds.items() if row.get(metric) is not None}

    def mean(self, metric: str = "accuracy") -> float | None:
        values = self.values(metric)
        return statistics.mean(values.values()) if values else None

    def error(self, metric: str = "accuracy") -> float | None:
        return standard_error(list(self.values(metric).values()))

    def as_json(self, metrics: Sequence[str]) -> dict[str, Any]:
        found = {
            metric: {"mean": self.mean(metric), "standard_error": self.error(metric), "seeds": self.values(metric)}
            for metric in metrics
        }
        first = next(iter(found.values()))
        seconds = [row["wall_seconds"] for row in self.seeds.values() if row.get("wall_seconds") is not None]
        return {
            "ours": first["mean"],
            "standard_error": first["standard_error"],
            "metrics": found,
            "seeds": len(self.seeds),
            "seeds_wanted": self.wanted,
            "state": self.state or "run",
            "seconds": statistics.mean(seconds) if seconds else None,
        }


class Numbers:
    """All places of one item."""

    def __init__(self, item: Item, store: Store, problems: Mapping[str, str] | None = None) -> None:
        self.item = item
        self.places: dict[tuple[str, str, float | None], Place] = {}
        self.spectra: dict[tuple[str, str], dict[str, Any]] = {}
        self.costs: dict[str, dict[str, Any]] = {}
        for cell in item.cells:
            record = store.get(cell)
            place = self.places.setdefault((cell.row, cell.column.name, cell.x), Place())
            place.wanted += 1
            if record is None:
                place.state = place.state or (problems or {}).get(cell.name, "not run")
                continue
            place.seeds[cell.seed] = record
            place.seeds |= _more_seeds(cell, store) if cell.seed == 0 else {}
            if cell.record == "spectra":
                self.spectra.setdefault((cell.row, cell.column.name), record)
            elif cell.record == "cost":
                self.costs[cell.column.name] = record

    def place(self, row: str, column: str, x: float | None = None) -> Place:
        return self.places.get((row, column, x), Place(state="not part of this scale"))

    @property
    def metric(self) -> str:
        return "success_rate" if self.item.measure == "attack" else "accuracy"

    def metrics(self, column: Column) -> tuple[str, ...]:
        return ("success_rate",) if self.item.measure == "attack" else column.metrics

    def mean(self, row: str, column: Column, x: float | None = None) -> float | None:
        """The mean over seeds and over the column's metrics, such as MNLI's two test sets, as in the paper's figures."""
        found = [self.place(row, column.name, x).mean(metric) for metric in self.metrics(column)]
        known = [value for value in found if value is not None]
        return statistics.mean(known) if known else None

    def xs(self, row: str, column: str) -> list[float]:
        return sorted(x for r, c, x in self.places if (r, c) == (row, column) and x is not None)

    def lines(self, column: Column) -> dict[str, list[tuple[float, float]]]:
        """What a figure draws in this column's panel: name of a line -> points."""
        if self.item.measure in ("stable_rank", "residual"):
            return self._spectral_lines(column)
        found: dict[str, list[tuple[float, float]]] = {}
        every = sorted({x for row in self.item.rows for x in self.xs(row, column.name)})
        for row in self.item.rows:
            one_for_all = (row, column.name, None) in self.places
            points = [(x, self.mean(row, column, None if one_for_all else x)) for x in every]
            known = [(x, y) for x, y in points if y is not None]
            if known:
                found[row] = known
        return found

    def _spectral_lines(self, column: Column) -> dict[str, list[tuple[float, float]]]:
        found: dict[str, list[tuple[float, float]]] = {}
        for row in self.item.rows:
            record = self.spectra.get((row, column.name))
            if record is None:
                continue
            for label, pattern in column.matrices.items():
                matrix = next((m for m in record["matrices"] if fnmatch(m["name"], pattern)), None)
                if matrix is None:
                    continue
                if self.item.measure == "stable_rank":
                    series = {f"{row}, {label}": matrix["stable_rank"]}
                else:
                    series = {f"{row}, {label}: {KINDS[k]}": matrix["residual"][k] for k in KINDS}
                    series[f"{row}, {label}: random subspaces"] = [matrix["residual"]["random"]] * len(record["epochs"])
                for name, values in series.items():
                    points = [(x, y) for x, y in zip(record["epochs"], values, strict=True) if y is not None]
                    if points:
                        found[name] = points
        return found

    def as_json(self) -> dict[str, Any]:
        item = self.item
        columns = []
        for column in item.columns:
            about: dict[str, Any] = {"name": column.name, "data": column.data}
            if item.measure == "cost":
                about["rows"] = self.costs.get(column.name, {}).get("rows")
            elif item.measure in ("stable_rank", "residual"):
                about["lines"] = {name: [list(p) for p in points] for name, points in self.lines(column).items()}
            else:
                about["cells"] = [
                    {"row": row, "x": x, "paper": item.of_paper(row, column), **place.as_json(self.metrics(column))}
                    for (row, name, x), place in self.places.items()
                    if name == column.name
                ]
            columns.append(about)
        done = sum(min(len(place.seeds), place.wanted) for place in self.places.values())
        return {
            "name": item.name,
            "title": item.title,
            "measure": item.measure,
            "covered_by_the_guarantee": item.measure in ("accuracy", "cost"),
            "cells": len(item.cells),
            "finished": done,
            "columns": columns,
        }


def _more_seeds(cell: Cell, store: Store) -> dict[int, dict[str, Any]]:
    """Further runs of the same cell, with seeds that were not asked for: they count as well."""
    if cell.measure not in ("accuracy", "attack"):
        return {}
    found = {seed: store.get(replace(cell, seed=seed)) for seed in range(1, MOST_SEEDS)}
    return {seed: record for seed, record in found.items() if record is not None}


def paired_difference(a: Mapping[int, float], b: Mapping[int, float]) -> tuple[float, float | None, int]:
    """Mean of a - b over the seeds that both have, its standard error, and how many seeds these are."""
    found = [a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())]
    return statistics.mean(found), standard_error(found), len(found)


def standard_error(values: Sequence[float]) -> float | None:
    """The standard error of the mean; None for fewer than two values."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def sampling_error(percent: float, rows: int) -> float:
    """The standard error of an accuracy in percent, from the finite number of test rows alone."""
    p = min(max(percent / 100, 0.0), 1.0)
    return 100 * math.sqrt(max(p * (1 - p), 0.25 / rows) / rows)


def rows_tested(place: Place, column: Column) -> int:
    known = [row["held_out_rows"] for row in place.seeds.values() if row.get("held_out_rows")]
    known += [row["nonmembers"] for row in place.seeds.values() if row.get("nonmembers")]
    return known[0] if known else TEST_ROWS.get(column.beside or column.name, 1000)
