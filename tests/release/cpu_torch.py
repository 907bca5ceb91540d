"""torch from PyPI on a Linux machine without a GPU, and without the gigabytes of CUDA that it asks for.

    PYTHON -m venv ENV
    python cpu_torch.py ENV 2.15.0      PyPI's wheel without its dependencies; CUDA's libraries are replaced by empty ones
    ENV/bin/pip install rgp-*.whl[cli]; ENV/bin/python smoke.py

So versions can be tried for which no CPU build is at hand (docs/install.md). Every function of the empty libraries answers with
the error "no device", so torch finds no GPU and works on the CPU. Needs gcc, nm and readelf. For tests only.
"""

import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

CUDA = re.compile(r"lib(cu|nccl|nvrtc|nvshmem|nvJit|nvToolsExt)")
NO_DEVICE = 100  # cudaErrorNoDevice, CUDA_ERROR_NO_DEVICE
NEEDED_BY_CPU = ("filelock", "typing_extensions", "sympy", "networkx", "jinja2", "fsspec", "setuptools")


def read(*command: object) -> list[str]:
    return subprocess.run(list(map(str, command)), capture_output=True, text=True).stdout.splitlines()


def empty_libraries(folder: Path) -> dict[str, dict[str, set[str]]]:
    """For each CUDA library that torch's own need: version -> names of the functions that they look for."""
    home: dict[str, str] = {}  # version -> the library that must define it
    libraries: dict[str, dict[str, set[str]]] = {}
    lacking: set[tuple[str, str]] = set()
    defined: set[str] = set()
    for file in [*folder.glob("lib*torch*.so"), *folder.glob("lib[cs]*.so"), *folder.parent.glob("_C*.so")]:
        for line in read("readelf", "--wide", "-d", file):
            if (found := re.search(r"NEEDED.*\[(.*)\]", line)) and CUDA.match(found[1]):
                libraries.setdefault(found[1], defaultdict(set))
        library = ""
        for line in read("readelf", "--wide", "-V", file):
            if found := re.search(r"File: (\S+)", line):
                library = found[1]
            elif (found := re.search(r"Name: (\S+)\s+Flags", line)) and library:
                home[found[1]] = library
        for line in read("nm", "-D", file):
            kind, symbol = line.split()[-2:]
            name, _, version = symbol.replace("@@", "@").partition("@")
            if kind == "U":
                lacking.add((name, version))
            else:
                defined.add(name)
    runtime = next(
        name for name in libraries if name.startswith("libcudart")
    )  # any will do for names without a version
    for name, version in lacking:
        if name in defined:
            continue
        if home.get(version) in libraries:
            libraries[home[version]][version].add(name)
        elif not version and re.match(r"(__)?(cu|nccl|nv)[A-Za-z]", name):
            libraries[runtime][""].add(name)
    return libraries


def build(library: Path, functions: dict[str, set[str]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        source, versions = Path(name, "empty.c"), Path(name, "versions.map")
        source.write_text(
            "".join(f"int {f}(void) {{ return {NO_DEVICE}; }}\n" for names in functions.values() for f in names)
        )
        versions.write_text("".join(f"{v} {{ {'; '.join(sorted(n))}; }};\n" for v, n in functions.items() if v and n))
        script = [f"-Wl,--version-script={versions}"] if versions.stat().st_size else []
        options = ["-w", "-fno-builtin", "-shared", "-fPIC", *script, f"-Wl,-soname,{library.name}"]
        subprocess.run(["gcc", *options, source, "-o", library], check=True)


def main(environment: Path, version: str) -> None:
    pip = [environment / "bin/pip", "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", f"torch=={version}"], check=True)
    [metadata] = environment.glob(f"lib/python*/site-packages/torch-{version}*.dist-info/METADATA")
    cuda = re.compile(r"^Requires-Dist: (?:nvidia|cuda|triton).*\n", re.MULTILINE)
    metadata.write_text(
        cuda.sub("", metadata.read_text(encoding="utf-8")), encoding="utf-8"
    )  # or pip would fetch them later
    subprocess.run([*pip, *NEEDED_BY_CPU], check=True)
    folder = metadata.parents[1] / "torch" / "lib"
    for name, functions in empty_libraries(folder).items():
        build(folder / name, functions)
    check = (
        "import torch; print(torch.__version__, torch.cuda.is_available(), torch.linalg.qr(torch.randn(9, 9))[0].shape)"
    )
    subprocess.run([environment / "bin/python", "-c", check], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
