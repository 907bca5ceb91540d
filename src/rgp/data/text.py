"""Texts -> token ids. Tokenised once, kept as one flat array; padded to the longest of a batch when collated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from rgp.data.spec import Data, DataError, DataSpec
from rgp.files import bare_name
from rgp.members import Members

_CHUNK = 4096
IGNORED = -100  # a label that Hugging Face's losses leave out


class TokenTexts(Dataset):
    """Dicts of input_ids, attention_mask, labels; for pairs token_type_ids too, if the tokenizer has them."""

    def __init__(self, ids: Sequence[Sequence[int]], types: Sequence[Sequence[int]] | None, labels: np.ndarray) -> None:
        self._start = np.concatenate([[0], np.cumsum([len(row) for row in ids])])
        self._ids = _flat(ids)
        self._types = None if types is None else _flat(types)
        self._labels = torch.from_numpy(labels)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of every text: what `privatize(lengths=...)` takes. Private, like the texts."""
        return np.diff(self._start)

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        here = slice(int(self._start[index]), int(self._start[index + 1]))
        ids = self._ids[here].long()
        item = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": self._labels[index]}
        if self._types is not None:
            item["token_type_ids"] = self._types[here].long()
        return item


class Pad:
    """Collates dicts of sequences, padded on the tokenizer's side to the longest of the batch."""

    def __init__(self, token: int, *, left: bool = False) -> None:
        self.token, self.left = token, left

    def __call__(self, items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        length = max(len(item["input_ids"]) for item in items)
        batch = {}
        for key in items[0]:
            if items[0][key].dim() == 0:
                batch[key] = torch.stack([item[key] for item in items])
                continue
            batch[key] = torch.full((len(items), length), {"input_ids": self.token, "labels": IGNORED}.get(key, 0))
            for row, item in zip(batch[key], items, strict=True):
                n = len(item[key])
                row[length - n if self.left else 0 :][:n] = item[key]
        return batch


def text_data(
    parts: Sequence[tuple[Sequence[Sequence[Any]], np.ndarray]],
    names: tuple[str, ...],
    source: str,
    published: bool,
    spec: DataSpec,
    more: Sequence[str] = (),
    members: Sequence[Members | None] = (None, None),
) -> Data:
    """`parts`: for train, test and further tests (named in `more`): text columns (one list of texts each) and labels.

    members: the units of the training texts, and of the test texts; the number of texts is then private, and not in the
    description.
    """
    tokenizer = find_tokenizer(spec, source)
    sets = [TokenTexts(*_tokenise(tokenizer, texts, spec.max_length, source), labels) for texts, labels in parts]
    token = pad_token(tokenizer)
    train, test, *further = sets
    held_out = "published test" if published else "held-out"
    counts = f"{len(train):,} training and {len(test):,} {held_out} texts"
    if members[0] is not None:
        counts = f"training texts of {members[0].unit.size:,} {members[0].unit.noun}s, and {held_out} texts,"
    return Data(
        train=train,
        test=test,
        classes=len(names),
        kind="text",
        shape=(spec.max_length,),
        collate_fn=Pad(token, left=getattr(tokenizer, "padding_side", "right") == "left"),
        description=f"{source}: {counts} in {len(names)} classes",
        published_test=published,
        public_constants={
            "tokenizer": tokenizer_name(tokenizer),
            "max_length": spec.max_length,
            "pad_token_id": token,
        },
        label_names=names,
        members=members[0],
        test_members=members[1],
        more_tests=dict(zip(more, further, strict=True)),
    )


def tokenizer_name(tokenizer: Any) -> str:
    return bare_name(str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__))


def pad_token(tokenizer: Any) -> int:
    known = (tokenizer.pad_token_id, getattr(tokenizer, "eos_token_id", None), 0)
    return next(token for token in known if token is not None)


def check_texts(columns: Sequence[Sequence[Any]], source: str) -> None:
    """Check that every value is a text."""
    for values in columns:
        for number, value in enumerate(values, 1):
            if not isinstance(value, str):
                raise DataError(f"{source}, row {number}: {value!r} where a text is needed.")


def find_tokenizer(spec: DataSpec, source: str) -> Any:
    if spec.tokenizer is None:
        raise DataError(f"{source} is text: set tokenizer to the name or the folder of the model's tokenizer.")
    if callable(spec.tokenizer):
        return spec.tokenizer
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise DataError(f"{source} is text, which needs transformers: pip install 'rgp[hf]'.") from error
    try:
        return AutoTokenizer.from_pretrained(str(spec.tokenizer))
    except (OSError, ValueError) as error:
        raise DataError(
            f"tokenizer={str(spec.tokenizer)!r} could not be loaded: it is not a folder with a tokenizer in it, and the "
            f"Hugging Face hub has none of that name or cannot be reached. `rgp data get minilm` fetches one. "
            f"({str(error).splitlines()[0]})"
        ) from error


def _tokenise(
    tokenizer: Any, texts: Sequence[Sequence[Any]], max_length: int, source: str
) -> tuple[list[list[int]], list[list[int]] | None]:
    ids: list[list[int]] = []
    types: list[list[int]] = []
    for start in range(0, len(texts[0]), _CHUNK):
        chunk = [list(values[start : start + _CHUNK]) for values in texts]
        out = tokenizer(*chunk, truncation=True, max_length=max_length)
        ids += out["input_ids"]
        if len(texts) > 1 and "token_type_ids" in out:
            types += out["token_type_ids"]
    if not all(ids):
        number = next(i for i, row in enumerate(ids) if not row)
        raise DataError(f"{source}: a text has no tokens: {texts[0][number]!r}.")
    return ids, types or None


def _flat(rows: Sequence[Sequence[int]]) -> Tensor:
    return torch.from_numpy(np.concatenate([np.asarray(row, np.int32) for row in rows]))
