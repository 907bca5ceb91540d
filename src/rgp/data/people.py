"""The person each row belongs to: a column of a table -> the units of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rgp.data.spec import DataError, DataSpec
from rgp.members import Members


def members_of(
    ids: Sequence[Any],
    spec: DataSpec,
    source: str,
    *,
    noun: str = "person",
    column: str | None = None,
    row: str = "row",
) -> Members:
    """The units of rows with these ids; DataError for an id that is missing."""
    try:
        return Members(ids, rows_per_unit=spec.rows_per_unit, noun=noun, column=column, row=row)
    except ValueError as error:
        raise DataError(f"{source}: {error}") from error


def refuse_units(spec: DataSpec, source: str) -> None:
    """Refuse units for data that have no columns."""
    if spec.units is not None:
        raise DataError(
            f"units={spec.units!r}: {source} has no columns that could say whose a row is; units are for tables (.csv, .tsv, "
            ".jsonl, .parquet), data of the Hugging Face hub and text for language models. In Python: privatize(units=...)."
        )
