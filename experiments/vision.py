"""The vision results (docs/results-vision.md): real CIFAR-10 and MNIST, every method, one line of JSON per finished run.

    python experiments/vision.py tables --data FOLDER        the runs of the tables, on the published test set
    python experiments/vision.py tuning --data FOLDER        how the settings were chosen, on 5,000 rows of the training set
    python experiments/vision.py wrn --data FOLDER           a WRN-16-1, for twenty minutes a run, on the published test set
    python experiments/vision.py wrn-rates --data FOLDER     its learning rates, 200 steps on tuning's rows
    python experiments/vision.py show [--plots FOLDER]       mean, standard error and paired differences of what is there

FOLDER holds cifar10.npz and mnist.npz (`rgp data get cifar10 mnist --to FOLDER`). Settings are presets of `rgp train`, changed by
what vision.yaml lists; each run is what `rgp train --preset NAME --set KEY=VALUE ...` does. See driver.py.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import driver
import numpy as np

LIST = driver.HERE / "vision.yaml"
RESULTS = driver.HERE / "results" / "vision.jsonl"
STAGES = (*driver.STAGES, "wrn", "wrn-rates")
HELD_OUT = 5000  # rows of the training set on which settings are chosen


def main() -> None:
    given = driver.arguments(__doc__, RESULTS, "cifar10.npz and mnist.npz", STAGES)
    if given.what == "show":
        driver.show(driver.read(given.results), stages=STAGES)
        if given.plots is not None:
            from vision_plots import draw

            draw(driver.read(given.results), given.plots)
        return
    folder = given.data if given.what in ("tables", "wrn") else tuning_folder(given.data)
    driver.run_missing(
        planned(given.what),
        given.results,
        lambda job: driver.train(
            job, folder, given.out / job["name"], run__eval_every=200 if "wrn" in given.what else 75
        ),
        only=given.only,
        share=given.share,
    )


def tuning_folder(data: Path) -> Path:
    """The same files with 5,000 training rows in the place of the test set, which tuning must not see."""
    folder = Path(tempfile.gettempdir()) / "rgp-vision-tuning"
    folder.mkdir(exist_ok=True)
    for name in ("cifar10", "mnist"):
        if (data / f"{name}.npz").exists() and not (folder / f"{name}.npz").exists():
            with np.load(data / f"{name}.npz") as file:
                x, y = file["x_train"], file["y_train"]
            order = np.random.Generator(np.random.PCG64(0)).permutation(len(x))
            test, rows = np.sort(order[:HELD_OUT]), np.sort(order[HELD_OUT:])
            np.savez(folder / f"{name}.npz", x_train=x[rows], y_train=y[rows], x_test=x[test], y_test=y[test])
    return folder


def planned(what: str) -> list[dict[str, Any]]:
    return driver.planned(LIST, what)


if __name__ == "__main__":
    main()
