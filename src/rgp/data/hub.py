"""Data sets of the Hugging Face hub, where it can be reached. Only this file imports the package `datasets`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from rgp.data.catalogue import GENERIC, Images, Texts
from rgp.data.images import ReadImages, channels_first, decode, image_data
from rgp.data.labels import index_labels
from rgp.data.people import members_of
from rgp.data.spec import Data, DataError, DataSpec, listing
from rgp.data.splits import content, hold_out
from rgp.data.text import check_texts, text_data

TIMEOUT = 10.0  # seconds until the hub counts as unreachable
_TESTS = ("test", "validation", "valid", "dev")


class HubError(DataError):
    """The hub has no answer; another source may."""


def load_hub(spec: DataSpec) -> Data:
    """`spec.name` is "owner/name", "hf:owner/name" or "hf:owner/name:config"."""
    name, _, config = spec.name.removeprefix("hf:").partition(":")
    source = spec.name
    try:
        splits = download(name, config or None)
    except HubError as error:
        raise DataError(
            f"{error} Give a file instead: .npz, .csv, .tsv, .jsonl, .parquet or a folder of images."
        ) from error
    if "train" not in splits:
        raise DataError(f"{source} has no split 'train'; its splits are {listing(splits)}.")
    train = splits["train"]
    label = _label_column(train, spec, source)
    test_name = next((s for s in _TESTS if s in splits and _has_labels(splits[s], label)), None)
    if spec.units is not None:
        _check_columns(train, [spec.units], source)
        members_of(train[spec.units], spec, source)
    if test_name is None:
        rows = hold_out(_keys(train, spec), spec.held_out, spec.seed, source)
        parts = [train.select(part) for part in rows]
    else:
        parts = [train, splits[test_name]]
    members = [
        members_of(part[spec.units], spec, source, column=spec.units) if spec.units in part.features else None
        for part in parts
    ]
    known = tuple(getattr(train.features[label], "names", None) or ())
    labels, names = index_labels([part[label] for part in parts], [source] * 2, label, known)
    picture = _image_column(train)
    if picture is not None and spec.text is None:
        reads = [_HubReader(part, picture, spec.image_size, source) for part in parts]
        shape = channels_first(reads[0](0)[None], source).shape[1:]
        sets = [
            ReadImages(read, range(len(part)), torch.from_numpy(y), GENERIC)
            for read, part, y in zip(reads, parts, labels, strict=True)
        ]
        found = image_data(sets, names, source, test_name is not None, tuple(shape), GENERIC)
        if members[0] is None:
            return found
        return replace(found, members=members[0], test_members=members[1], description=source)
    columns = _text_columns(train, spec, source)
    texts = [[list(part[column]) for column in columns] for part in parts]
    for part in texts:
        check_texts(part, source)
    return text_data(list(zip(texts, labels, strict=True)), names, source, test_name is not None, spec, members=members)


def _keys(rows: Any, spec: DataSpec) -> Iterator[bytes]:
    """What decides on which side a row falls: its unit, or its content; of images the file, as it is stored."""
    if spec.units is not None:
        yield from (content(str(name)) for name in rows[spec.units])
        return
    for name, kind in rows.features.items():
        if type(kind).__name__ == "Image":
            rows = rows.cast_column(name, type(kind)(decode=False))
    for row in rows:
        yield content(*(_stored(row[name]) for name in sorted(row)))


def _stored(value: Any) -> Any:
    if isinstance(value, dict) and set(value) == {"bytes", "path"}:
        return value["path"] if value["bytes"] is None else value["bytes"]
    return value


def image_arrays(entry: Images) -> dict[str, np.ndarray]:
    """A built-in set of images as the four arrays of its .npz."""
    splits = download(entry.hub, entry.hub_config)
    arrays = {}
    for split in ("train", "test"):
        rows = splits[split]
        picture = _image_column(rows)
        assert picture is not None, f"{entry.hub} has no images any more"
        arrays[f"x_{split}"] = np.stack([decode(image, None) for image in rows[picture]])
        arrays[f"y_{split}"] = np.array(rows["label"], np.uint8)
    return arrays


def text_rows(entry: Texts) -> dict[str, list[dict[str, Any]]]:
    """Split -> rows of a built-in set of texts, the splits with labels only."""
    splits = download(entry.hub, entry.hub_config)
    return {name: list(rows) for name, rows in splits.items() if not name.startswith("test")}


def download(name: str, config: str | None) -> Any:
    """All splits, from the hub or from the library's own cache."""
    try:
        import datasets
        from huggingface_hub import HfApi
    except ImportError as error:
        raise HubError(f"{name} would come from the Hugging Face hub, which needs: pip install 'rgp[data]'.") from error
    try:
        HfApi().dataset_info(name, timeout=TIMEOUT)  # answers or fails at once, where `datasets` tries for minutes
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise HubError(
            f"{name}: the Hugging Face hub cannot be reached, or has no such data set ({reason})."
        ) from error
    try:
        return datasets.load_dataset(name, config)
    except Exception as error:
        raise HubError(f"{name}: {(str(error).splitlines() or [type(error).__name__])[0].rstrip('.')}.") from error


class _HubReader:
    def __init__(self, rows: Any, column: str, size: int | None, source: str) -> None:
        self._rows, self._column, self._size, self._source = rows, column, size, source
        self._shape: tuple[int, ...] | None = None

    def __call__(self, index: int) -> np.ndarray:
        image = decode(self._rows[int(index)][self._column], self._size)
        self._shape = self._shape or image.shape
        if image.shape != self._shape:
            raise DataError(
                f"{self._source}, row {index + 1}: an image of {image.shape}, others {self._shape}: set image_size."
            )
        return image


def _image_column(rows: Any) -> str | None:
    return next((name for name, kind in rows.features.items() if type(kind).__name__ == "Image"), None)


def _label_column(rows: Any, spec: DataSpec, source: str) -> str:
    label = spec.label or next((name for name in ("label", "labels") if name in rows.features), "label")
    _check_columns(rows, [label], source)
    return label


def _text_columns(rows: Any, spec: DataSpec, source: str) -> Sequence[str]:
    columns = spec.text_columns or (next((name for name in ("text", "sentence") if name in rows.features), "text"),)
    _check_columns(rows, columns, source)
    return columns


def _check_columns(rows: Any, columns: Sequence[str], source: str) -> None:
    for name in columns:
        if name not in rows.features:
            raise DataError(f"{source} has no column {name!r}; its columns are {listing(rows.features)}.")


def _has_labels(rows: Any, label: str) -> bool:
    return label in rows.features and any(value not in (-1, None) for value in rows[label])
