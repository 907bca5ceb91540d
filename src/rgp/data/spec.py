"""What to load, and what comes out."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rgp.files import cache_folder
from rgp.members import Members
from rgp.units import ROWS_PER_UNIT


class DataError(ValueError):
    """A data set that cannot be found or read. Names the file, the column, and what is there instead."""


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """A data set by name or path: `DataSpec(name="digits")`, `DataSpec(name="reviews.csv", text="review")`.

    name: a built-in name (`rgp data list`), a file or folder, or a Hugging Face data set as "owner/name" or
        "hf:owner/name:config"
    text: column or columns with text; by default "text" or "sentence"
    label: column with the class; by default "label"
    held_out: share of the rows kept for testing, where no test split was published
    seed: which rows those are; each one's side follows from it and from the row alone (data/splits.py)
    folder: where built-in data sets are kept; by default $RGP_DATA, or a folder in the user's cache
    tokenizer: for text: name or folder of a Hugging Face tokenizer, or such a tokenizer
    max_length: tokens of a text that are kept
    unit: for language models: what one example is, "document", "line" or "block" (see data/language.py); None for classifiers
    block: tokens of a block
    units: a table's column with the person of each row: what is protected is then a person with all their rows. For language
        models with unit="block" also "document": a document with all its blocks
    rows_per_unit: rows of a person, or blocks of a document, that a step uses at most
    image_size: for image folders and the hub: height and width that images are resized to; by default all must have the same
    """

    name: str
    text: str | tuple[str, ...] | None = None
    label: str | None = None
    held_out: float = 0.2
    seed: int = 0
    folder: str | os.PathLike[str] | None = None
    tokenizer: Any = None
    max_length: int = 128
    unit: str | None = None
    block: int = 128
    units: str | None = None
    rows_per_unit: int = ROWS_PER_UNIT
    image_size: int | None = None

    def __post_init__(self) -> None:
        if not str(self.name):
            raise DataError("name is empty: give a data set's name (see `rgp data list`) or a path.")
        if not 0 < self.held_out < 1:
            raise DataError(f"held_out={self.held_out} must lie between 0 and 1: it is a share of the rows.")
        if self.seed < 0:
            raise DataError(f"seed={self.seed} must be 0 or more.")
        if self.max_length < 1:
            raise DataError(f"max_length={self.max_length} must be 1 or more: it counts tokens.")
        if self.unit not in (None, "document", "line", "block"):
            raise DataError(f"unit={self.unit!r} must be 'document', 'line' or 'block', or None for a classifier.")
        if self.block < 2:
            raise DataError(f"block={self.block} must be 2 or more: it counts tokens.")
        if self.rows_per_unit < 1:
            raise DataError(f"rows_per_unit={self.rows_per_unit} must be 1 or more: it counts rows of a person.")
        if self.image_size is not None and self.image_size < 1:
            raise DataError(f"image_size={self.image_size} must be 1 or more: it counts pixels.")
        if isinstance(self.text, list):  # as configuration files have it
            object.__setattr__(self, "text", tuple(self.text))
        if self.text_columns is not None and not 1 <= len(self.text_columns) <= 2:
            raise DataError(f"text={self.text} must be one column, or two for pairs of texts.")

    @property
    def text_columns(self) -> tuple[str, ...] | None:
        return (self.text,) if isinstance(self.text, str) else self.text

    @property
    def where(self) -> Path:
        return data_folder(self.folder)


@dataclass(frozen=True, kw_only=True)
class Data:
    """Two map-style data sets and the facts a model needs.

    train, test: images give `(x, y)`, channels first, float32; texts give dicts with input_ids, attention_mask, labels
    shape: of one image, channels first; `(max_length,)` for texts
    collate_fn: pads texts to the longest of a batch; None for images
    description: one line for people
    published_test: False if the test rows were held out of the training data by us
    public_constants: every number that preprocessing used; none was computed from the data
    label_names: what the classes 0, 1, ... are called
    row: what one row is, where that needs words
    members: which training rows belong to which person, where `units` says so; private
    test_members: the same of the test rows, where they have that column; for attacks alone
    more_tests: further test sets by name, such as MNLI's "mismatched"
    """

    train: Any
    test: Any
    classes: int
    kind: Literal["image", "text"]
    shape: tuple[int, ...]
    collate_fn: Callable[[list[Any]], Any] | None
    description: str
    published_test: bool
    public_constants: dict[str, Any]
    label_names: tuple[str, ...] = field(default=())
    row: str = ""
    members: Members | None = None
    test_members: Members | None = None
    more_tests: dict[str, Any] = field(default_factory=dict)

    @property
    def units(self) -> int:
        """Number of units for training: persons, where there are any, or rows. Public."""
        return len(self.train) if self.members is None else self.members.unit.size


def data_folder(folder: str | os.PathLike[str] | None = None) -> Path:
    """Where built-in data sets are kept: the argument, $RGP_DATA, or the user's cache."""
    if folder is not None:
        return Path(folder).expanduser()
    if os.environ.get("RGP_DATA"):
        return Path(os.environ["RGP_DATA"]).expanduser()
    return cache_folder()


def listing(names: Any, most: int = 12) -> str:
    """Names for an error message: the first few, and how many more there are."""
    names = [str(name) for name in names]
    shown = ", ".join(names[:most]) or "nothing"
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")
