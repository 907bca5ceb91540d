"""Images: arrays (.npz), the published SVHN files (.mat), folders with one subfolder per class, scikit-learn's digits.

x of an array is (N, H, W), (N, H, W, C), (N, C, H, W) or (N, features); what comes out is channels first, float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from rgp.data.catalogue import GENERIC, IMAGES, Pixels
from rgp.data.labels import index_labels
from rgp.data.people import refuse_units
from rgp.data.spec import Data, DataError, DataSpec, listing
from rgp.data.splits import content, hold_out, hold_out_published

_ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")
_TEST_FOLDERS = ("test", "validation", "valid", "val")


class ArrayImages(Dataset):
    """Images in memory, uint8 where the source had that; normalised when they are asked for."""

    def __init__(self, x: Tensor, y: Tensor, pixels: Pixels | None) -> None:
        self._x, self._y, self._pixels = x, y, pixels

    def __len__(self) -> int:
        return len(self._y)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return _normalise(self._x[index], self._pixels), self._y[index]

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
        x, y = _normalise(self._x[indices], self._pixels), self._y[indices]
        return list(zip(x, y, strict=True))


class ReadImages(Dataset):
    """Images decoded when they are asked for. `read(i)` gives one as (H, W) or (H, W, C), uint8."""

    def __init__(self, read: Callable[[int], np.ndarray], rows: Sequence[int], y: Tensor, pixels: Pixels) -> None:
        self._read, self._rows, self._y, self._pixels = read, rows, y, pixels

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = channels_first(self._read(int(self._rows[index]))[None], "image")[0]
        return _normalise(torch.from_numpy(x.copy()), self._pixels), self._y[index]


def load_digits(spec: DataSpec) -> Data:
    try:
        from sklearn.datasets import load_digits as read
    except ImportError as error:
        raise DataError("digits comes with scikit-learn: pip install 'rgp[demo]' or scikit-learn.") from error
    bunch = read()
    x, y = bunch.images.astype(np.uint8), bunch.target
    train, test = hold_out_published(len(y), spec.held_out, spec.seed)
    arrays = {"x_train": x[train], "y_train": y[train], "x_test": x[test], "y_test": y[test]}
    return from_arrays(arrays, "digits", spec, IMAGES["digits"].pixels, IMAGES["digits"].labels, split_here=True)


def load_npz(path: Path, spec: DataSpec, pixels: Pixels | None = None, names: tuple[str, ...] = ()) -> Data:
    """x_train, y_train, x_test, y_test, or x and y, which are split here."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
    except (OSError, ValueError, EOFError, KeyError) as error:
        raise DataError(f"{path} cannot be read as .npz ({error}). Write it with numpy.savez.") from error
    except Exception as error:  # zipfile's own errors, for a cut file
        raise DataError(f"{path} is damaged: {error}") from error
    return from_arrays(arrays, str(path), spec, pixels, names)


def from_arrays(
    arrays: dict[str, np.ndarray],
    source: str,
    spec: DataSpec,
    pixels: Pixels | None,
    names: tuple[str, ...],
    *,
    split_here: bool = False,
) -> Data:
    """split_here: the test rows among the arrays were held out by us."""
    refuse_units(spec, source)
    apart = {"x_train", "y_train", "x_test", "y_test"} <= arrays.keys()
    published = apart and not split_here
    if apart:
        parts = [(arrays["x_train"], arrays["y_train"]), (arrays["x_test"], arrays["y_test"])]
    elif {"x", "y"} <= arrays.keys():
        x, y = arrays["x"], arrays["y"]
        _check_lengths(x, y, source)
        keys = (content(np.asarray(image), str(label)) for image, label in zip(x, y.reshape(-1), strict=True))
        parts = [(x[rows], y[rows]) for rows in hold_out(keys, spec.held_out, spec.seed, source)]
    else:
        raise DataError(
            f"{source} must hold x_train, y_train, x_test and y_test, or x and y; it holds {listing(sorted(arrays))}."
        )
    for x, y in parts:
        _check_lengths(x, y, source)
    labels, names = index_labels([part[1].reshape(-1) for part in parts], [source] * 2, "y", names)
    integers = parts[0][0].dtype == np.uint8
    if not integers and parts[0][0].dtype.kind != "f":
        raise DataError(
            f"{source}: x is {parts[0][0].dtype}; it must be uint8 (0 to 255) or floats, which are used as they are."
        )
    images = [channels_first(x, source) for x, _ in parts]
    if images[0].shape[1:] != images[1].shape[1:] or images[0].dtype != images[1].dtype:
        raise DataError(
            f"{source}: training images are {images[0].dtype} {images[0].shape[1:]}, "
            f"test images {images[1].dtype} {images[1].shape[1:]}; they must match."
        )
    chosen = (pixels or GENERIC) if integers else None
    sets = [
        ArrayImages(torch.from_numpy(np.ascontiguousarray(x)), torch.from_numpy(y), chosen)
        for x, y in zip(images, labels, strict=True)
    ]
    return image_data(sets, names, source, published, tuple(images[0].shape[1:]), chosen)


def load_mat(path: Path, spec: DataSpec) -> Data:
    """SVHN as published: X (32, 32, 3, N) and y (N, 1), where 10 stands for the digit 0.

    `path` is train_32x32.mat, with test_32x32.mat beside it, or the folder of both; a single file is split here.
    """
    folder = path if path.is_dir() else path.parent
    train = folder / "train_32x32.mat" if path.is_dir() else path
    test = folder / train.name.replace("train", "test")
    if train.name.startswith("train") and test.is_file():
        (x, y), (xt, yt) = _read_mat(train), _read_mat(test)
        arrays = {"x_train": x, "y_train": y, "x_test": xt, "y_test": yt}
    else:
        x, y = _read_mat(train)
        arrays = {"x": x, "y": y}
    return from_arrays(arrays, str(path), spec, IMAGES["svhn"].pixels, IMAGES["svhn"].labels)


def _read_mat(path: Path) -> tuple[np.ndarray, np.ndarray]:
    try:
        from scipy.io import loadmat
    except ImportError as error:
        raise DataError(f"{path}: reading .mat files needs scipy: pip install scipy.") from error
    if not path.is_file():
        raise DataError(
            f"{path} is not there; in its folder: {listing(sorted(p.name for p in path.parent.glob('*')))}."
        )
    try:
        content = loadmat(path)
    except (ValueError, TypeError, OSError, NotImplementedError, EOFError) as error:
        raise DataError(f"{path} cannot be read as a .mat file: {error}") from error
    there = {key: value for key, value in content.items() if not key.startswith("__")}
    if not {"X", "y"} <= there.keys():
        raise DataError(f"{path} must hold X and y, as SVHN's published files do; it holds {listing(sorted(there))}.")
    x, y = there["X"], there["y"].reshape(-1).astype(np.int64)
    if x.ndim != 4:
        raise DataError(f"{path}: X must be height x width x channels x N; it is {x.shape}.")
    return x.transpose(3, 0, 1, 2), y % 10


def load_folder(path: Path, spec: DataSpec) -> Data:
    """One subfolder per class; or train/ and test/ with those inside."""
    refuse_units(spec, str(path))
    tests = next((path / name for name in _TEST_FOLDERS if (path / name).is_dir()), None)
    published = (path / "train").is_dir() and tests is not None
    if published and tests is not None:
        parts = [_files(path / "train"), _files(tests)]
    else:
        files = _files(path)
        keys = (content(file.relative_to(path).as_posix()) for file, _ in files)
        split = hold_out(keys, spec.held_out, spec.seed, str(path))
        parts = [[files[i] for i in rows] for rows in split]
    labels, names = index_labels([[name for _, name in part] for part in parts], [str(path)] * 2, "subfolder")
    size, shape = spec.image_size, None
    for file, _ in parts[0] + parts[1]:  # headers only: better to find a bad file now than after an hour
        found = _header(file, size)
        if shape is not None and found != shape:
            raise DataError(f"{file} has {found} (channels, height, width), others {shape}: set image_size.")
        shape = found
    assert shape is not None
    pixels = GENERIC
    sets = [
        ReadImages(_FileReader([file for file, _ in part], size), range(len(part)), torch.from_numpy(y), pixels)
        for part, y in zip(parts, labels, strict=True)
    ]
    return image_data(sets, names, str(path), published, shape, pixels)


def _files(folder: Path) -> list[tuple[Path, str]]:
    classes = sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    files = [(file, cls.name) for cls in classes for file in sorted(cls.rglob("*")) if file.suffix.lower() in _ENDINGS]
    if not files:
        raise DataError(
            f"{folder} must have one subfolder per class with images ({', '.join(_ENDINGS[:3])}, ...) in it; "
            f"it has {listing(sorted(p.name for p in folder.iterdir()))}."
        )
    return files


class _FileReader:
    """A class and not a closure: DataLoader workers may have to pickle it."""

    def __init__(self, files: list[Path], size: int | None) -> None:
        self._files, self._size = files, size

    def __call__(self, index: int) -> np.ndarray:
        with _pillow().open(self._files[index]) as image:
            return decode(image, self._size)


def decode(image: Any, size: int | None) -> np.ndarray:
    """A Pillow image as uint8, grey (H, W) or RGB (H, W, 3)."""
    image = image.convert(_mode(image))
    return np.asarray(image.resize((size, size)) if size else image)


def _mode(image: Any) -> str:
    return "L" if image.mode in ("1", "L", "LA", "I", "I;16") else "RGB"


def _header(file: Path, size: int | None) -> tuple[int, int, int]:
    try:
        with _pillow().open(file) as image:
            width, height = (size, size) if size else image.size
            return (1 if _mode(image) == "L" else 3), height, width
    except OSError as error:
        raise DataError(f"{file} cannot be read as an image: {error}") from error


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError("Reading image files needs Pillow: pip install pillow.") from error
    return Image


def channels_first(x: np.ndarray, source: str) -> np.ndarray:
    if x.ndim == 2:
        return x
    if x.ndim == 3:
        return x[:, None]
    if x.ndim == 4:
        for channels in ((1, 3), (4,)):  # in this order: (N, 1, 4, 4) is grey, not four channels
            if x.shape[-1] in channels:
                return x.transpose(0, 3, 1, 2)
            if x.shape[1] in channels:
                return x
    raise DataError(
        f"{source}: x has shape {x.shape}; it must be (N, height, width), (N, height, width, channels), "
        "(N, channels, height, width) with 1, 3 or 4 channels, or (N, features)."
    )


def _normalise(x: Tensor, pixels: Pixels | None) -> Tensor:
    x = x.to(torch.float32)
    if pixels is None:
        return x
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (pixels.mean, pixels.std))
    return (x / pixels.scale - mean) / std if x.ndim >= 3 else (x / pixels.scale - mean.mean()) / std.mean()


def image_data(
    sets: Sequence[Any],
    names: tuple[str, ...],
    source: str,
    published: bool,
    shape: tuple[int, ...],
    pixels: Pixels | None,
) -> Data:
    train, test = sets
    size = " x ".join(str(n) for n in shape)
    return Data(
        train=train,
        test=test,
        classes=len(names),
        kind="image",
        shape=shape,
        collate_fn=None,
        description=f"{source}: {len(train):,} training and {len(test):,} "
        f"{'published test' if published else 'held-out'} images of {size} in {len(names)} classes",
        published_test=published,
        public_constants=asdict(pixels) if pixels else {},
        label_names=names,
    )


def _check_lengths(x: np.ndarray, y: np.ndarray, source: str) -> None:
    if x.ndim < 2 or len(x) != y.size:
        raise DataError(f"{source}: x has shape {x.shape} and y {y.shape}; both need one row per image.")
    if len(x) == 0:
        raise DataError(f"{source} is empty: x has shape {x.shape}.")
