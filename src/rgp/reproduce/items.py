"""One small file per table or figure of the paper -> its cells, each of them one run of `rgp train`.

The files are experiments/paper/NAME.yaml in a checkout; a wheel carries the same ones. Their keys:

title, about   what it shows, and how the paper measured it
measure        accuracy, attack, stable_rank, residual (the last two follow a training) or cost
x              {label, key, values}: a setting that varies along a figure's axis
rows           name -> {method, set, scales, x: false}: what fills {method} in the preset's name, settings that are changed, on
               which scales the row is there, whether it is one run for the whole axis
paper          row -> column -> the paper's number; a list where it has two
scales         scale -> {seeds, columns}; column -> {preset, set, rows, leave_out, metrics, beside, matrices, minutes, x}:
               rows: like the above, for this column alone; beside: the paper's column to compare with; minutes: of one run
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from rgp.train import config
from rgp.train.config import Config, ConfigError
from rgp.train.sections import scalar

SCALES = ("mini", "paper")
MEASURES = ("accuracy", "attack", "stable_rank", "residual", "cost")
_KEYS = {"title", "about", "measure", "x", "rows", "paper", "scales", "options", "note"}
_COLUMN_KEYS = {"preset", "set", "rows", "leave_out", "metrics", "beside", "matrices", "minutes", "x", "data", "values"}
# settings that say where and how fast a run is computed: they do not change its result
_NOT_IN_FINGERPRINT = {
    "data": ("folder",),
    "training": ("microbatch_size",),
    "run": ("device", "threads", "workers", "eval_every", "checkpoint_seconds"),
}


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of a table, or a panel of a figure."""

    name: str
    data: str  # what is measured on, in a word or two: which model, which rows
    metrics: tuple[str, ...] = ("accuracy",)
    beside: str | None = None
    minutes: float | None = None  # of one run
    matrices: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, eq=False)
class Cell:
    """One run, and its place."""

    item: str
    row: str
    column: Column
    x: float | None
    seed: int
    measure: str
    preset: str
    changes: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        place = [self.item, self.column.name, self.row, *([] if self.x is None else [f"{self.x:g}"])]
        return "/".join([*place, f"seed {self.seed}"])

    @property
    def record(self) -> str:
        """The kind of record that holds this cell's number: two figures are drawn from one followed training."""
        return {"stable_rank": "spectra", "residual": "spectra"}.get(self.measure, self.measure)

    def settings(self, data: Path | None = None) -> Config:
        made = _loaded(self.preset, tuple(as_changes(self.changes)))
        folder = made.data.folder if data is None else str(data)
        return replace(made, run=replace(made.run, seed=self.seed), data=replace(made.data, folder=folder))

    @property
    def exists(self) -> bool:
        """Whether its preset exists: without it, the cell can neither run nor be found among the finished ones."""
        return self.measure == "cost" or self.preset in _presets()

    @functools.cached_property
    def key(self) -> str:
        if self.measure == "cost":
            return digest({"axis": self.column.name, **self.options})
        try:
            about: Any = fingerprint(self.settings())
        except ConfigError:  # no such preset, or settings that do not fit: it has no fingerprint
            return digest([self.preset, dict(self.changes), self.seed])
        return about if self.record != "spectra" else digest([about, dict(self.options)])


@dataclass(frozen=True, kw_only=True)
class Item:
    """A table or a figure."""

    name: str
    title: str
    about: str
    measure: str
    note: str
    x: Mapping[str, Any] | None
    rows: tuple[str, ...]
    columns: tuple[Column, ...]
    paper: Mapping[str, Mapping[str, Any]]
    cells: tuple[Cell, ...]
    scale: str

    def of_paper(self, row: str, column: Column) -> list[float] | None:
        value = self.paper.get(row, {}).get(column.beside or column.name)
        return None if value is None else list(value) if isinstance(value, Sequence) else [value]


PINNED = ("*embeddings.weight", "frozen")


def fingerprint(settings: Config) -> str:
    """The same for the same training, wherever it is computed.

    A key that a later version adds changes no fingerprint while it has its default. Nor does PINNED in overrides: presets say
    it since embeddings are trained by default, and it is what they meant before. Nor does independent noise, for which the
    same is true, and which is all that there can be without a budget.
    """
    plain = Config().to_dict()
    plain["training"]["bands"] = None if settings.budget.epsilon is None and settings.training.bands is None else 1
    about = {
        f"{section}.{name}": value
        for section, keys in settings.to_dict().items()
        for name, value in keys.items()
        if value != plain[section][name] and name not in _NOT_IN_FINGERPRINT.get(section, ())
    }
    overrides = about.pop("method.overrides", {})
    if rest := {pattern: value for pattern, value in overrides.items() if (pattern, value) != PINNED}:
        about["method.overrides"] = rest
    return digest(about)


def digest(about: Any) -> str:
    return hashlib.sha256(json.dumps(about, sort_keys=True, default=list).encode()).hexdigest()[:16]


def as_changes(changes: Mapping[str, Any]) -> list[str]:
    return [f"{name}={value if isinstance(value, str) else scalar(value)}" for name, value in changes.items()]


@functools.cache
def _presets() -> frozenset[str]:
    return frozenset(config.presets())


@functools.lru_cache(maxsize=1024)
def _loaded(preset: str, changes: tuple[str, ...]) -> Config:
    return config.load(preset=preset, changes=changes)


def folder() -> Path:
    """experiments/paper of a checkout, or the same files in a wheel."""
    here = Path(__file__).resolve()
    checkout = here.parents[3] / "experiments" / "paper"
    return checkout if checkout.is_dir() else here.parent / "configs"


def files() -> dict[str, Path]:
    """Name -> file, tables first."""
    found = {path.stem: path for path in folder().glob("*.yaml")}
    if not found:
        raise FileNotFoundError(f"{folder()} holds no configs of tables and figures: this installation is not complete")
    return {name: found[name] for name in sorted(found, key=lambda name: (name.startswith("fig"), name))}


def read(
    path: Path, scale: str, *, seeds: int | None = None, changes: Mapping[str, Any] | None = None, name: str = ""
) -> Item:
    """An item at a scale. seeds: how many, in place of the file's own; changes: settings of every run."""
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    name = name or path.stem
    _known(content, _KEYS, path.name)
    if content["measure"] not in MEASURES:
        raise ValueError(f"{path.name}: measure = {content['measure']} must be one of {', '.join(MEASURES)}")
    chosen = content["scales"].get(scale) or {}
    _known(chosen, {"seeds", "columns"}, f"{path.name}, {scale}")
    count = seeds if seeds is not None else chosen.get("seeds", 1)
    rows = {row: about or {} for row, about in content["rows"].items() if scale in (about or {}).get("scales", SCALES)}
    columns, cells = [], []
    for title, about in chosen.get("columns", {}).items():
        _known(about, _COLUMN_KEYS, f"{path.name}, {title}")
        column = Column(
            name=title,
            data=about.get("data", ""),
            metrics=tuple(about.get("metrics", ("accuracy",))),
            beside=about.get("beside"),
            minutes=about.get("minutes"),
            matrices=about.get("matrices", {}),
        )
        columns.append(column)
        options = dict(content.get("options", {}))
        if "values" in about:
            options["values"] = about["values"]
        if content["measure"] == "cost":
            cells.append(
                Cell(
                    item=name,
                    row="",
                    column=column,
                    x=None,
                    seed=0,
                    measure="cost",
                    preset="",
                    changes={},
                    options=options,
                )
            )
            continue
        for row, shared in rows.items():
            if row in about.get("leave_out", ()):
                continue
            own = about.get("rows", {}).get(row) or {}
            _known(shared, {"method", "set", "scales", "x"}, f"{path.name}, {row}")
            _known(own, {"method", "set", "preset"}, f"{path.name}, {title}, {row}")
            method = own.get("method", shared.get("method", ""))
            for x in _values(content.get("x"), about, shared):
                made = {**about.get("set", {}), **shared.get("set", {}), **own.get("set", {})}
                words = {"method": method, "x": "" if x is None else f"{x:g}"}
                if x is not None:
                    made[content["x"]["key"]] = x
                made |= dict(changes or {})
                preset = own.get("preset", about["preset"]).format(**words)
                for seed in range(count):
                    cells.append(
                        Cell(
                            item=name,
                            row=row,
                            column=column,
                            x=x,
                            seed=seed,
                            measure=content["measure"],
                            preset=preset,
                            changes=made,
                            options=options,
                        )
                    )
    return Item(
        name=name,
        title=content["title"],
        about=content["about"],
        measure=content["measure"],
        note=content.get("note", ""),
        x=content.get("x"),
        rows=tuple(rows),
        columns=tuple(columns),
        paper=content.get("paper", {}),
        cells=tuple(cells),
        scale=scale,
    )


def _values(
    axis: Mapping[str, Any] | None, column: Mapping[str, Any], row: Mapping[str, Any]
) -> Sequence[float | None]:
    if axis is None:
        return [None]
    return column.get("x", axis["values"]) if row.get("x", True) else [None]


def _known(content: Mapping[str, Any], keys: set[str], where: str) -> None:
    strange = sorted(set(content) - keys)
    if strange:
        raise ValueError(f"{where}: there is no key {', '.join(strange)}; there are {', '.join(sorted(keys))}")
