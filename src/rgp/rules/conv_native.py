"""The thin gradients of a convolution in C++ (conv_native.cpp), where torch's own operations leave half of the speed unused.

For float32 on Linux machines with AVX-512: there torch's matrix products of the sizes needed here reach half of the speed of its
convolutions or less (MKL takes AVX2 on AMD), and unfolding goes through memory. The machine's C++ compiler builds the file once
for each user, in a few seconds, at the first such convolution. Without a compiler, on other machines, for other types and where
the environment has RGP_NATIVE=0, conv.py works with torch's operations; the results differ by rounding.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import subprocess
import sys
import warnings
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rgp.files import cache_folder, write_atomically

if TYPE_CHECKING:
    from rgp.rules.conv import Geometry
    from rgp.slots import CarriedSlot

SOURCE = Path(__file__).with_suffix(".cpp")
COMPILE = ("-O3", "-std=c++17", "-mavx512f", "-mfma", "-fopenmp", "-fPIC")
LANES = 16  # carriers that are worked on together
FEWEST = 5  # carriers for which it is worth it: with 4, torch is as fast


def takes(slot: CarriedSlot, geometry: Geometry, x: Tensor, g: Tensor) -> bool:
    """Whether `fill` is there for this convolution."""
    # subclasses hold numbers elsewhere, or none while a graph is made (compiled/)
    plain = all(
        type(t) is Tensor and t.device.type == "cpu" and t.dtype == torch.float32 for t in (x, g, slot.Lt, slot.R)
    )
    fits = geometry.n <= 2 and geometry.groups == 1 and prod(g.shape[2:]) >= LANES and slot.entry.rank >= FEWEST
    return plain and fits and len(x) > 0 and library() is not None


def fill(slot: CarriedSlot, geometry: Geometry, x: Tensor, g: Tensor) -> None:
    """Give the slot dL_i and dR_i of a convolution of x, whose result has the gradient g."""
    native = library()
    assert native is not None
    Lt, R = slot.Lt if slot.needs_right else None, slot.R if slot.needs_left else None
    room = slot.room(x.dtype) if slot.entry.rank <= LANES else None
    if room is None:
        slot.add_thin(*thin_gradients(native, geometry, x, g, Lt, R))
    else:
        _write(native, geometry, x, g, Lt, R, *room, projects=slot.projects)
        slot.wrote()


def thin_gradients(native: ctypes.CDLL, geometry: Geometry, x: Tensor, g: Tensor, Lt: Tensor | None, R: Tensor | None):
    """dL_i transposed (m, r, p) from R (r, d), dR_i (m, r, d) from Lt (r, p); None where the carrier is."""
    m, rank = len(x), len(R if Lt is None else Lt)  # type: ignore[arg-type]
    dLt = None if R is None else x.new_empty(m, rank, g.shape[1])
    dR = None if Lt is None else x.new_empty(m, rank, x.shape[1] * prod(geometry.k))
    for first in range(0, rank, LANES):
        lanes = slice(first, first + LANES)
        carriers = (None if t is None else t[lanes] for t in (Lt, R))
        results = (None if t is None else t[:, lanes] for t in (dLt, dR))
        _write(native, geometry, x, g, *carriers, *results, projects=False)
    return dLt, dR


def _write(native, geometry, x, g, Lt, R, dLt, dR, *, projects: bool) -> None:
    """Write up to 16 rows of dL_i and dR_i into tensors whose entries of one example lie side by side."""
    x, g = x.contiguous(), g.contiguous()
    Lt, R = (None if t is None else t.contiguous() for t in (Lt, R))
    one, nothing = (1,) * (2 - geometry.n), (0,) * (2 - geometry.n)  # a one-dimensional input is an image of one row
    shape = (
        *(x.shape[1], *one, *x.shape[2:], g.shape[1], *one, *g.shape[2:]),
        *(*one, *geometry.k, *one, *geometry.stride, *nothing, *geometry.padding, *one, *geometry.dilation),
    )
    native.rgp_thin_gradients(
        *(ctypes.c_void_p(None if t is None else t.data_ptr()) for t in (x, g, Lt, R, dLt, dR)),
        *(ctypes.c_int64(0 if t is None else t.stride(0)) for t in (dLt, dR)),
        *map(ctypes.c_int64, (len(x), len(R if Lt is None else Lt), projects, torch.get_num_threads())),
        (ctypes.c_int64 * len(shape))(*shape),
    )


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled file, built if it is not there yet; None where it cannot be built or gives wrong numbers."""
    wanted = os.environ.get("RGP_NATIVE") != "0" and sys.platform == "linux" and platform.machine() == "x86_64"
    if not wanted or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return None
    digest = hashlib.sha256(SOURCE.read_bytes() + " ".join(COMPILE).encode()).hexdigest()[:16]
    try:
        path = cache_folder() / f"conv_native-{digest}.so"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, _build, shared=True)
        native = ctypes.CDLL(str(path))
    except (OSError, RuntimeError, subprocess.SubprocessError):  # RuntimeError: nobody's home
        return None
    if not is_right(native):
        warnings.warn(f"{path} gives wrong gradients of convolutions and is not used. Which compiler built it?")
        return None
    return native


def _build(path: Path) -> None:
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    objects = path.with_name(path.name + ".o")
    run = functools.partial(subprocess.run, check=True, capture_output=True, timeout=300)
    try:
        run([*compiler, *COMPILE, "-c", str(SOURCE), "-o", str(objects)])
        # without -fopenmp: its functions are those that torch has loaded already, so that there is one pool of threads
        run([*compiler, "-shared", str(objects), "-o", str(path)])
    finally:
        objects.unlink(missing_ok=True)


def is_right(native: ctypes.CDLL) -> bool:
    """Does it give the carrier gradients of a small convolution, compared with torch's kernel gradients in float64?"""
    from rgp.rules.conv import Geometry

    geometry = Geometry((20, 19, 3, 2), (2, 1), (1, 0), (1, 2), 1)
    generator = torch.Generator().manual_seed(0)
    x, Lt, R = (torch.randn(*size, generator=generator) for size in ((3, 19, 9, 13), (18, 20), (18, 114)))
    g = torch.randn(3, 20, 5, 11, generator=generator)
    dLt, dR = thin_gradients(native, geometry, x, g, Lt, R)
    for i in range(3):
        one = slice(i, i + 1)
        G = geometry.kernel_gradient(g[one].double(), x[one].double(), (20, 19, 3, 2)).flatten(1)
        for found, right in ((dLt[i], R.double() @ G.T), (dR[i], Lt.double() @ G)):
            if not (found - right).norm() < 1e-5 * right.norm():
                return False
    projected, dR = torch.empty_like(dLt[:, :16]), torch.empty_like(dR[:, :16])
    _write(native, geometry, x, g, Lt[:16], R[:16], projected, dR, projects=True)
    right = dLt[:, :16] - dLt[:, :16] @ Lt[:16].T @ Lt[:16]
    return bool((projected - right).norm() < 1e-5 * right.norm())
