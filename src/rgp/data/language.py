"""Text without labels, for language models: what one row is, and with it what is protected, is the user's choice.

unit       a .txt file                      a table (.csv, .tsv, .jsonl, .parquet)     a folder without train.*
document   the text between blank lines     a row                                      a .txt file
line       a line
block      all of the text, documents joined by the end-of-text token, cut into pieces of `block` tokens

A document or line longer than max_length tokens is cut off there; the rest of it is not used.

With `units`, what is protected is larger than an example: "document" (with unit block: every document is cut into blocks of its
own, and protected with all of them), or a column of a table (an author, with all their documents or blocks).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from rgp.data import tables
from rgp.data.people import members_of
from rgp.data.spec import Data, DataError, DataSpec
from rgp.data.splits import content, hold_out
from rgp.data.text import Pad, check_texts, find_tokenizer, pad_token, tokenizer_name

TESTS = ("test", "validation", "valid", "dev")
_CHUNK = 1024


@dataclass(frozen=True)
class Documents:
    """texts, and the unit of each (None: each is its own)."""

    texts: list[str]
    ids: Sequence[Any] | None


@dataclass(frozen=True)
class Sequences:
    """Tokens of the examples, and the unit of each."""

    rows: list[np.ndarray]
    ids: Sequence[Any] | None


class TokenSequences(Dataset):
    """Dicts of input_ids, attention_mask and labels, which are the same tokens: models shift them by themselves."""

    def __init__(self, rows: Sequence[np.ndarray]) -> None:
        self._rows = [torch.from_numpy(np.asarray(row, np.int32)) for row in rows]

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(row) for row in self._rows])

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = self._rows[index].long()
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def load_language(spec: DataSpec) -> Data:
    assert spec.unit is not None
    path = Path(str(spec.name)).expanduser()
    tokenizer = find_tokenizer(spec, str(path))
    files = _files(path)
    published = len(files) == 2
    texts = [read_documents(file, spec) for file in files]
    if not published:
        texts = _split(texts[0], tokenizer, spec, str(path)) if spec.units or spec.unit != "block" else texts
    parts = [_tokenise(tokenizer, text, spec, str(path)) for text in texts]
    if len(parts) == 1:  # blocks across documents
        train, test = hold_out(map(content, parts[0].rows), spec.held_out, spec.seed, str(path))
        parts = [Sequences([parts[0].rows[i] for i in rows], None) for rows in (train, test)]
    sets = [TokenSequences(part.rows) for part in parts]
    row = row_words(spec)
    token = pad_token(tokenizer)
    held_out = "published test" if published else "held-out"
    counts = f"{len(sets[0]):,} training and {len(sets[1]):,} {held_out} examples, each {row}"
    members, others, noun = None, None, "document" if spec.units == "document" else "person"
    if parts[0].ids is not None:
        column = None if spec.units == "document" else spec.units
        members = members_of(parts[0].ids, spec, str(path), noun=noun, column=column, row=str(spec.unit))
        assert parts[1].ids is not None
        others = members_of(parts[1].ids, spec, str(path), noun=noun, column=column, row=str(spec.unit))
        counts = f"training text of {members.unit.size:,} {noun}s, and {held_out} text"
    return Data(
        train=sets[0],
        test=sets[1],
        classes=len(tokenizer),
        kind="text",
        shape=(spec.block if spec.unit == "block" else spec.max_length,),
        collate_fn=Pad(token),
        description=f"{path}: {counts}",
        published_test=published,
        public_constants={
            "tokenizer": tokenizer_name(tokenizer),
            "unit": spec.unit,
            **({"block": spec.block} if spec.unit == "block" else {"max_length": spec.max_length}),
            "pad_token_id": token,
        },
        row=row,
        members=members,
        test_members=others,
    )


def row_words(spec: DataSpec) -> str:
    """What one row is, in words."""
    if spec.unit == "block":
        return f"one block of {spec.block} tokens; a text that spans several blocks is not protected as a whole"
    return f"one {spec.unit} of the training text"


def read_documents(path: Path, spec: DataSpec) -> Documents:
    """Texts, and the unit of each if `units` names one."""
    if spec.units == "document" and spec.unit != "block":
        raise DataError(
            f"units='document' goes with unit='block'; with unit={spec.unit!r} an example is not part of a document."
        )
    if spec.units not in (None, "document") and path.suffix.lower() not in tables.ENDINGS:
        raise DataError(f"units={spec.units!r} must be a column of a table, or 'document'; {path} is not a table.")
    ids: Sequence[Any] | None = None
    if path.is_dir():
        found = [_read(file) for file in sorted(path.glob("*.txt"))]
    elif path.suffix.lower() == ".txt":
        text = _read(path)
        found = text.splitlines() if spec.unit == "line" else re.split(r"\n[ \t]*\n", text)
    elif path.suffix.lower() in tables.ENDINGS:
        if spec.unit == "line":
            raise DataError(
                f"unit='line' is for .txt files; {path} is a table, whose rows are documents: unit='document'."
            )
        name = (spec.text_columns or ("text",))[0]
        table = tables.read_table(path)
        found = tables.column(table, name, path)
        check_texts([found], str(path))
        if spec.units not in (None, "document"):
            ids = tables.column(table, spec.units, path)
            members_of(ids, spec, str(path))
    else:
        raise DataError(f"{path}: text is read from .txt files, folders of them, and {', '.join(tables.ENDINGS)}.")
    found = [document.strip() for document in found]
    kept = [i for i, document in enumerate(found) if document]
    if not kept:
        raise DataError(f"{path} holds no text.")
    if spec.units == "document":
        ids = range(len(found))
    return Documents([found[i] for i in kept], None if ids is None else [ids[i] for i in kept])


def _split(documents: Documents, tokenizer: Any, spec: DataSpec, source: str) -> list[Documents]:
    """Each document on a side of its own; all documents of a person on one side. Those without tokens are left out."""
    texts, ids = documents.texts, documents.ids
    if spec.unit != "block":
        long = [len(row) > 1 for row in _token_ids(tokenizer, texts, spec)]
        texts = [text for text, keep in zip(texts, long, strict=True) if keep]
        ids = None if ids is None else [name for name, keep in zip(ids, long, strict=True) if keep]
        if not texts:
            raise DataError(f"{source}: no {spec.unit} has two tokens or more.")
    keys = texts if ids is None or spec.units == "document" else [str(name) for name in ids]
    sides = hold_out(map(content, keys), spec.held_out, spec.seed, source)
    return [Documents([texts[i] for i in rows], None if ids is None else [ids[i] for i in rows]) for rows in sides]


def _files(path: Path) -> list[Path]:
    """One file or folder, or a training and a test file."""
    if not path.exists():
        raise DataError(f"{path} is not there; language models are trained on a file or a folder.")
    if path.is_dir():
        endings = (".txt", *tables.ENDINGS)
        train = next((f for e in endings if (f := path / f"train{e}").is_file()), None)
        if train is not None:
            test = next((f for n in TESTS for e in endings if (f := path / f"{n}{e}").is_file()), None)
            return [train] if test is None else [train, test]
        if not any(path.glob("*.txt")):
            raise DataError(f"{path} holds neither train.txt (or {', '.join(tables.ENDINGS)}) nor other .txt files.")
    return [path]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 (byte {error.start}): save it as UTF-8.") from error


def _token_ids(tokenizer: Any, texts: Sequence[str], spec: DataSpec) -> list[list[int]]:
    rows: list[list[int]] = []
    cut = {} if spec.unit == "block" else {"truncation": True, "max_length": spec.max_length}
    for start in range(0, len(texts), _CHUNK):
        rows += tokenizer(list(texts[start : start + _CHUNK]), **cut)["input_ids"]
    return rows


def _tokenise(tokenizer: Any, documents: Documents, spec: DataSpec, source: str) -> Sequences:
    rows, ids = _token_ids(tokenizer, documents.texts, spec), documents.ids
    if spec.unit == "block" and ids is not None:  # of each document its own blocks, the last one shorter
        pieces = [
            (np.asarray(row[at : at + spec.block]), name)
            for row, name in zip(rows, ids, strict=True)
            for at in range(0, len(row), spec.block)
        ]
    elif spec.unit != "block":
        pieces = [(np.asarray(row), name) for row, name in zip(rows, ids or [None] * len(rows), strict=True)]
    if spec.unit != "block" or ids is not None:
        pieces = [(row, name) for row, name in pieces if len(row) > 1]  # of one token nothing can be predicted
        found = [row for row, _ in pieces]
        ids = None if ids is None else [name for _, name in pieces]
    else:
        end = getattr(tokenizer, "eos_token_id", None)
        end = getattr(tokenizer, "sep_token_id", None) if end is None else end
        flat = np.concatenate([np.asarray([*row, *([] if end is None else [end])]) for row in rows])
        whole = len(flat) // spec.block * spec.block  # what is left over at the end is not used
        found = list(flat[:whole].reshape(-1, spec.block))
    if len(found) < 2 and spec.unit == "block" and ids is None:
        raise DataError(
            f"{source}: {len(flat)} tokens are not enough for two blocks of {spec.block}; choose a smaller block."
        )
    if not found:
        raise DataError(f"{source}: no {spec.unit} has two tokens or more.")
    return Sequences(found, ids)
