"""Tables as columns: .csv, .tsv, .jsonl with Python's own readers, .parquet with pyarrow or pandas."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rgp.data.spec import DataError, listing

ENDINGS = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")
_LONGEST_FIELD = 2**31 - 1


def read_table(path: Path) -> dict[str, list[Any]]:
    """Column name -> values. In .tsv files quotes are ordinary characters, as in GLUE's; in .csv files they quote."""
    if not path.is_file():
        raise DataError(f"{path} is not there.")
    ending = path.suffix.lower()
    try:
        if ending in (".csv", ".tsv"):
            columns = _read_csv(path, tabs=ending == ".tsv")
        elif ending in (".jsonl", ".ndjson"):
            columns = _read_jsonl(path)
        elif ending == ".parquet":
            columns = _read_parquet(path)
        else:
            raise DataError(f"{path}: tables end in {', '.join(ENDINGS)}.")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 (byte {error.start}): save it as UTF-8.") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    if not columns or not next(iter(columns.values())):
        raise DataError(f"{path} has no rows; columns: {listing(columns)}.")
    return columns


def column(table: dict[str, list[Any]], name: str, path: Path | str) -> list[Any]:
    if name not in table:
        raise DataError(f"{path} has no column {name!r}; its columns are {listing(table)}.")
    return table[name]


def _read_csv(path: Path, *, tabs: bool) -> dict[str, list[Any]]:
    before = csv.field_size_limit(_LONGEST_FIELD)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            if tabs:
                reader = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
            else:
                reader = csv.reader(file)
            header = [name.strip() for name in next(reader, [])]
            if len(set(header)) < len(header):
                raise DataError(f"{path}: two columns have the same name; its columns are {listing(header)}.")
            rows = []
            for row in reader:
                if not row:
                    continue
                if len(row) != len(header):
                    hint = " Quotes do not protect tabs in .tsv files; .csv has quotes." if tabs else ""
                    raise DataError(
                        f"{path}, line {reader.line_num}: {len(row)} fields, but {len(header)} columns "
                        f"({listing(header)}).{hint}"
                    )
                rows.append(row)
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: {error}.") from error
    finally:
        csv.field_size_limit(before)
    return {name: [row[i] for row in rows] for i, name in enumerate(header)}


def _read_jsonl(path: Path) -> dict[str, list[Any]]:
    rows: list[dict[str, Any]] = []
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(f"{path}, line {number}: not JSON ({error.msg}).") from error
            if not isinstance(row, dict):
                raise DataError(f"{path}, line {number}: {type(row).__name__} where an object is needed.")
            rows.append(row)
    names: Iterable[str] = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def _read_parquet(path: Path) -> dict[str, list[Any]]:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        parquet = None
    try:
        if parquet is not None:
            return parquet.read_table(path).to_pydict()
        import pandas

        return {str(name): values.tolist() for name, values in pandas.read_parquet(path).items()}
    except ImportError as error:
        raise DataError(f"{path}: reading Parquet needs pyarrow: pip install pyarrow.") from error
    except OSError:
        raise
    except Exception as error:  # pyarrow's ArrowInvalid, a ValueError; other engines have their own
        raise DataError(f"{path} cannot be read as Parquet: {error}") from error
