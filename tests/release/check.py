"""`make release-check`: what would be uploaded, installed in a fresh environment, and tried there.

Builds sdist and wheel (the wheel from the sdist, so that both are complete), makes an environment, installs the wheel with
[cli] into it, and runs smoke.py there, outside of the repository.
"""

import argparse
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
WANTED = ("rgp/py.typed", "rgp/report/style.css", "rgp/train/presets/digits-rgp.yaml", "rgp/reproduce/configs/")
LARGEST = 5_000_000  # bytes; data, weights and results do not belong into a package


def call(*words: object, cwd: Path = ROOT) -> None:
    print("$", *words, flush=True)
    subprocess.run([str(word) for word in words], check=True, cwd=cwd)


def check_contents(wheel: Path, sdist: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    lacks = [name for name in WANTED if not any(found.startswith(name) for found in names)]
    assert not lacks, f"the wheel lacks {lacks}"
    assert not [name for name in names if name.startswith(("tests", "docs", "benchmarks"))], "more than the package"
    assert any(name.endswith("LICENSE") for name in names), "the wheel has no licence"
    with tarfile.open(sdist) as archive:
        assert {"README.md", "CHANGELOG.md"} <= {Path(name).name for name in archive.getnames()}
    for path in (wheel, sdist):
        print(f"{path.name}: {path.stat().st_size / 1e6:.2f} MB")
        assert path.stat().st_size < LARGEST, f"{path.name} is too large"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="interpreter of the fresh environment")
    parser.add_argument(
        "--constraint", default=str(ROOT / "constraints.txt"), help="versions to install; '' for the newest"
    )
    parser.add_argument("--out", type=Path, help="keep sdist and wheel in this folder")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        dist = (given.out or folder / "dist").absolute()
        pins = ["--constraint", given.constraint] if given.constraint else []
        call(given.python, "-m", "venv", folder / "tools")
        call(folder / "tools/bin/pip", "install", "--quiet", "build")
        call(folder / "tools/bin/python", "-m", "build", "--outdir", dist)
        [wheel], [sdist] = dist.glob("*.whl"), dist.glob("*.tar.gz")
        check_contents(wheel, sdist)
        call(given.python, "-m", "venv", folder / "fresh")
        call(folder / "fresh/bin/pip", "install", "--quiet", *pins, f"{wheel}[cli]")
        empty = folder / "empty"
        empty.mkdir()
        call(folder / "fresh/bin/python", Path(__file__).with_name("smoke.py"), cwd=empty)


if __name__ == "__main__":
    main()
