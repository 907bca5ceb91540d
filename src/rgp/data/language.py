"""Text without labels, for language models: what one row is, and with it what is protected, is the user's choice.

unit       a .txt file                      a table (.csv, .tsv, .jsonl, .parquet)     a folder without train.*
document   the text between blank lines     a row                                      a .txt file
line       a line
block      all of the text, documents joined by the end-of-text token, cut into pieces of `block` tokens

A document or line longer than max_length tokens is cut off there; the rest of it is not used.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from rgp.data import tables
from rgp.data.spec import Data, DataError, DataSpec
from rgp.data.splits import hold_out
from rgp.data.text import Pad, check_texts, find_tokenizer, pad_token, tokenizer_name

TESTS = ("test", "validation", "valid", "dev")
_CHUNK = 1024


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
    parts = [_tokenise(tokenizer, read_documents(file, spec), spec, str(file)) for file in _files(path)]
    published = len(parts) == 2
    if not published:
        train, test = hold_out(len(parts[0]), spec.held_out, spec.seed, str(path))
        parts = [[parts[0][i] for i in rows] for rows in (train, test)]
    sets = [TokenSequences(rows) for rows in parts]
    row = row_words(spec)
    token = pad_token(tokenizer)
    return Data(
        train=sets[0],
        test=sets[1],
        classes=len(tokenizer),
        kind="text",
        shape=(spec.block if spec.unit == "block" else spec.max_length,),
        collate_fn=Pad(token),
        description=f"{path}: {len(sets[0]):,} training and {len(sets[1]):,} "
        f"{'published test' if published else 'held-out'} examples, each {row}",
        published_test=published,
        public_constants={
            "tokenizer": tokenizer_name(tokenizer),
            "unit": spec.unit,
            **({"block": spec.block} if spec.unit == "block" else {"max_length": spec.max_length}),
            "pad_token_id": token,
        },
        row=row,
    )


def row_words(spec: DataSpec) -> str:
    """What one row is, in words."""
    if spec.unit == "block":
        return f"one block of {spec.block} tokens; a text that spans several blocks is not protected as a whole"
    return f"one {spec.unit} of the training text"


def read_documents(path: Path, spec: DataSpec) -> list[str]:
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
        found = tables.column(tables.read_table(path), name, path)
        check_texts([found], str(path))
    else:
        raise DataError(f"{path}: text is read from .txt files, folders of them, and {', '.join(tables.ENDINGS)}.")
    found = [document.strip() for document in found]
    found = [document for document in found if document]
    if not found:
        raise DataError(f"{path} holds no text.")
    return found


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


def _tokenise(tokenizer: Any, documents: list[str], spec: DataSpec, source: str) -> list[np.ndarray]:
    rows: list[list[int]] = []
    cut = {} if spec.unit == "block" else {"truncation": True, "max_length": spec.max_length}
    for start in range(0, len(documents), _CHUNK):
        rows += tokenizer(documents[start : start + _CHUNK], **cut)["input_ids"]
    if spec.unit != "block":
        found = [np.asarray(row) for row in rows if len(row) > 1]  # of one token nothing can be predicted
    else:
        end = getattr(tokenizer, "eos_token_id", None)
        end = getattr(tokenizer, "sep_token_id", None) if end is None else end
        flat = np.concatenate([np.asarray([*row, *([] if end is None else [end])]) for row in rows])
        whole = len(flat) // spec.block * spec.block  # what is left over at the end is not used
        found = list(flat[:whole].reshape(-1, spec.block))
    if len(found) < 2 and spec.unit == "block":
        raise DataError(
            f"{source}: {len(flat)} tokens are not enough for two blocks of {spec.block}; choose a smaller block."
        )
    if not found:
        raise DataError(f"{source}: no {spec.unit} has two tokens or more.")
    return found
