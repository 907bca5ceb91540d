"""A name or a path -> data, through the reader for its kind."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rgp.data import tables
from rgp.data.catalogue import IMAGES, TEXTS, Texts
from rgp.data.images import load_digits, load_folder, load_mat, load_npz
from rgp.data.labels import index_labels
from rgp.data.language import load_language
from rgp.data.people import members_of
from rgp.data.spec import Data, DataError, DataSpec, listing
from rgp.data.splits import content, hold_out
from rgp.data.text import check_texts, text_data
from rgp.members import Members

_TESTS = ("test", "validation", "valid", "dev")


def load(spec: DataSpec) -> Data:
    """Read a data set; nothing is downloaded except from the Hugging Face hub when `spec.name` says so.

    >>> data = load(DataSpec(name="digits"))
    >>> len(data.train), len(data.test), data.shape
    (1438, 359, (1, 8, 8))
    """
    name = str(spec.name)
    if spec.unit is not None:
        return load_language(spec)
    if name == "digits":
        return load_digits(spec)
    if name in IMAGES:
        return _load_images(name, spec)
    if name in TEXTS:
        return _load_texts(name, spec)
    path = Path(name).expanduser()
    if path.is_file():
        return _load_file(path, spec)
    if path.is_dir():
        return _load_folder(path, spec)
    if name.startswith("hf:") or (name.count("/") == 1 and not path.suffix and not name.startswith((".", "/", "~"))):
        from rgp.data.hub import load_hub

        return load_hub(spec)
    built_in = [*IMAGES, *TEXTS]
    close = get_close_matches(name, built_in, 1)
    raise DataError(
        f"There is no file or folder {name!r}"
        + (f"; did you mean {close[0]!r}?" if close else f", and it is none of {', '.join(built_in)}.")
        + " A data set of the Hugging Face hub is written hf:owner/name."
    )


def _load_images(name: str, spec: DataSpec) -> Data:
    entry, file, folder = IMAGES[name], spec.where / f"{name}.npz", spec.where / name
    if file.is_file():
        return load_npz(file, spec, entry.pixels, entry.labels)
    if name == "svhn" and (folder / "train_32x32.mat").is_file():
        return load_mat(folder, spec)
    mats = " or train_32x32.mat and test_32x32.mat in its folder svhn" if name == "svhn" else ""
    raise DataError(f"{name} is not in {spec.where}{mats}: fetch it with `{_get(name, spec)}`, or set data.folder.")


def _load_texts(name: str, spec: DataSpec) -> Data:
    entry, folder = TEXTS[name], spec.where / name
    if not folder.is_dir():
        raise DataError(
            f"{name} is not in {spec.where}: fetch it with `{_get(name, spec)}`, or put {supply(name)} there, or set "
            "data.folder."
        )
    return _load_tables(folder, spec, entry)


def _get(name: str, spec: DataSpec) -> str:
    return f"rgp data get {name}" + ("" if spec.folder is None else f" --to {spec.folder}")


def supply(name: str) -> str:
    """How to supply a built-in set of texts by hand."""
    entry = TEXTS[name]
    columns = ", ".join((*entry.text[0], entry.label[0]))
    return f"{name}/train.tsv and {name}/{entry.test[0]}.tsv with the columns {columns} (also .csv, .jsonl, .parquet)"


def _load_file(path: Path, spec: DataSpec) -> Data:
    ending = path.suffix.lower()
    if ending == ".npz":
        return load_npz(path, spec)
    if ending == ".mat":
        return load_mat(path, spec)
    if ending in tables.ENDINGS:
        return _load_tables(path, spec, None)
    raise DataError(f"{path}: endings that can be read are .npz, .mat, {', '.join(tables.ENDINGS)}; or a folder.")


def _load_folder(path: Path, spec: DataSpec) -> Data:
    if (path / "train_32x32.mat").is_file():
        return load_mat(path, spec)
    if _split_file(path, ("train",)) is not None:
        return _load_tables(path, spec, None)
    return load_folder(path, spec)


def _load_tables(path: Path, spec: DataSpec, entry: Texts | None) -> Data:
    """A file, which is split here, or a folder with train.* and a test split. `entry` knows a built-in's columns."""
    if path.is_dir():
        tests = entry.test if entry else _TESTS
        train, test = _split_file(path, ("train",)), _split_file(path, tests)
        if train is None or (test is None and entry is not None):
            raise DataError(
                f"{path} must hold train.tsv and {' or '.join(f'{name}.tsv' for name in tests)} "
                f"(or {', '.join(e for e in tables.ENDINGS if e != '.tsv')}); "
                f"it holds {listing(sorted(p.name for p in path.iterdir()))}."
            )
        files = [train] if test is None else [train, test]
        further = {name: _split_file(path, splits) for name, splits in (entry.more if entry else {}).items()}
        more = {name: file for name, file in further.items() if file is not None}
        files += more.values()
    else:
        files, more = [path], {}
    read = [tables.read_table(file) for file in files]
    text_choices = [spec.text_columns] if spec.text_columns else entry.text if entry else [("text",), ("sentence",)]
    label_choices = [(spec.label,)] if spec.label else [(name,) for name in (entry.label if entry else ("label",))]
    text_names = _choose(read[0], text_choices, "text", files[0])
    (label_name,) = _choose(read[0], label_choices, "label", files[0])
    texts = [[tables.column(table, n, file) for n in text_names] for table, file in zip(read, files, strict=True)]
    values = [tables.column(table, label_name, file) for table, file in zip(read, files, strict=True)]
    labels, names = index_labels(values, [str(file) for file in files], label_name, entry.labels if entry else ())
    for columns, file in zip(texts, files, strict=True):
        check_texts(columns, str(file))
    members: list[Members | None] = [None, None]  # of training and test rows
    ids = None
    if spec.units is not None:
        ids = tables.column(read[0], spec.units, files[0])
        members[0] = members_of(ids, spec, str(files[0]), column=spec.units)
        if len(files) > 1 and spec.units in read[1]:
            members[1] = members_of(read[1][spec.units], spec, str(files[1]), column=spec.units)
    if len(files) == 1:
        classes = [names[label] for label in labels[0]]  # the same, however the file writes them
        keys = zip(*texts[0], classes, strict=True) if ids is None else zip(map(str, ids), strict=True)
        rows = hold_out((content(*key) for key in keys), spec.held_out, spec.seed, str(path))
        if ids is not None:
            members = [members_of([ids[i] for i in part], spec, str(files[0]), column=spec.units) for part in rows]
        texts = [[[column[i] for i in part] for column in texts[0]] for part in rows]
        labels = [labels[0][part] for part in rows]
    parts = list(zip(texts, labels, strict=True))
    return text_data(parts, names, str(path), len(files) > 1, spec, list(more), tuple(members))


def _split_file(folder: Path, names: tuple[str, ...]) -> Path | None:
    return next((file for n in names for e in tables.ENDINGS if (file := folder / f"{n}{e}").is_file()), None)


def _choose(
    table: dict[str, list[Any]], choices: Sequence[tuple[str, ...]], setting: str, file: Path
) -> tuple[str, ...]:
    """The first choice of columns that the table has."""
    for names in choices:
        if all(name in table for name in names):
            return names
    wanted = " or ".join(" and ".join(repr(name) for name in names) for names in choices)
    raise DataError(
        f"{file} has no column {wanted}; its columns are {listing(table)}. Say which one it is with {setting}."
    )
