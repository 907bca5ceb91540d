"""The results on SST-2 with MiniLM-L6 (docs/results-sst2.md): one line of JSON per finished run.

    python experiments/sst2.py tuning --data FOLDER      how the settings were chosen, on 3,000 rows of the training set
    python experiments/sst2.py tables --data FOLDER      the runs of the tables: validation set, and 5,000 held-out training rows
    python experiments/sst2.py few --data FOLDER         the same with 2,000 rows to train on
    python experiments/sst2.py noisy --data FOLDER       the same at epsilon 0.5, with correlated noise, four rates each
    python experiments/sst2.py bands --data FOLDER       independent and correlated noise, three rates each, on tuning's rows
    python experiments/sst2.py mpnet --data FOLDER       a model of BERT-base's size: FOLDER holds mpnet/ too
    python experiments/sst2.py map --data FOLDER         RGP and DP-SGD over epsilon, rows and steps
    python experiments/sst2.py mpnet-rates --data FOLDER its learning rates, 20 steps of 256 on tuning's rows
    python experiments/sst2.py show [--plots FOLDER]     mean, standard error and paired differences of what is there

FOLDER holds sst2/ and minilm/ (`rgp data get sst2 minilm --to FOLDER`). No run trains on the 5,000 rows of the tables; tuning
leaves out 3,000 others as well, on which it measures. See driver.py.
"""

from __future__ import annotations

import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import driver
import numpy as np

LIST = driver.HERE / "sst2.yaml"
RESULTS = driver.HERE / "results" / "sst2.jsonl"
HELD_OUT, TUNING, FEW = 5000, 3000, 2000  # rows
STAGES = (*driver.STAGES, "few", "noisy", "bands", "map", "mpnet", "mpnet-rates")
# The map: every combination, with correlated noise and the settings of the presets, in steps of 256
EPSILONS, ROWS, STEPS = (0.5, 1, 3, 8), (2000, 8000, 62000), (20, 60)


def main() -> None:
    given = driver.arguments(__doc__, RESULTS, "sst2/ and minilm/", STAGES)
    if given.what == "show":
        driver.show(driver.read(given.results), also="accuracy_held_out", stages=STAGES)
        if given.plots is not None:
            from sst2_plots import draw

            draw(driver.read(given.results), given.plots)
        return
    folders = split(given.data)

    def run(job: dict[str, Any]) -> dict[str, Any]:
        out = given.out / job["name"]
        every = 20 if given.what == "tables" else 30 if given.what == "mpnet" else 10**6
        tuning = given.what in ("tuning", "bands", "mpnet-rates")
        rows = "tuning" if tuning else job.get("rows", "few" if given.what in ("few", "noisy") else "tables")
        found = driver.train(job, folders[rows], out, run__eval_every=every)
        return found if tuning else {**found, "accuracy_held_out": accuracy(out, folders["held_out"])}

    driver.run_missing(planned(given.what), given.results, run, only=given.only, share=given.share)


def planned(what: str) -> list[dict[str, Any]]:
    return _map() if what == "map" else driver.planned(LIST, what)


def _map() -> list[dict[str, Any]]:
    """Two runs for every cell of the map, those of a cell next to each other."""
    jobs = []
    for steps, epsilon, rows, method in product(STEPS, EPSILONS, ROWS, ("rgp", "dpsgd")):
        changes = {
            "budget.epsilon": epsilon,
            "training.steps": steps,
            "training.batch_size": 256,
            "training.precision": "bfloat16",
            **({"method.keep": steps} if method == "rgp" else {}),
        }
        name = f"map/{method}-e{epsilon}-rows{rows}-steps{steps}/0"
        jobs.append(
            {"name": name, "preset": f"sst2-minilm-{method}-bands", "set": changes, "seed": 0, "rows": f"rows{rows}"}
        )
    return jobs


def split(data: Path) -> dict[str, Path]:
    """Folders like FOLDER with other rows in them: `tuning`, `tables`, and `held_out`, whose test rows are the 5,000."""
    header, *rows = (data / "sst2" / "train.tsv").read_text(encoding="utf-8").splitlines()
    validation = (data / "sst2" / "valid.tsv").read_text(encoding="utf-8").splitlines()[1:]
    order = np.random.Generator(np.random.PCG64(0)).permutation(len(rows))
    parts = np.split(order, [HELD_OUT, HELD_OUT + TUNING])
    held_out, tuning, rest = ([rows[i] for i in np.sort(part)] for part in parts)
    content = {
        "tuning": (rest, tuning),
        "tables": ([rows[i] for i in np.sort(order[HELD_OUT:])], validation),
        "held_out": (rest[:10], held_out),
        "few": ([rows[i] for i in parts[2][:FEW]], validation),
        **{f"rows{count}": ([rows[i] for i in order[HELD_OUT:][:count]], validation) for count in ROWS},
    }
    folders = {}
    for name, (train, test) in content.items():
        folders[name] = Path(tempfile.gettempdir()) / "rgp-sst2" / name
        (folders[name] / "sst2").mkdir(parents=True, exist_ok=True)
        for file, lines in (("train", train), ("valid", test)):
            path = folders[name] / "sst2" / f"{file}.tsv"
            if not path.exists():
                path.write_text("\n".join([header, *lines]) + "\n", encoding="utf-8")
        for model in ("minilm", "mpnet"):
            link = folders[name] / model
            if (data / model).exists() and not link.exists():
                link.symlink_to((data / model).resolve())
    return folders


def accuracy(out: Path, data: Path, *, search: bool = False) -> float:
    """A finished run's accuracy on the test rows of another folder. search: that of the best run of a search."""
    from rgp.train import setup, weights

    settings, parts, _ = weights.load_trained(out, search=search)
    rows = rows_in(data, settings)
    _, right = setup.example_losses(
        parts.model, rows.test, collate_fn=rows.collate_fn, device=parts.device, batch_size=128
    )
    return round(right.double().mean().item(), 5)


def rows_in(folder: Path, settings: Any) -> Any:
    """The data of a run's settings, from another folder."""
    from dataclasses import replace

    from rgp.train import language, setup

    elsewhere = replace(settings, data=replace(settings.data, folder=str(folder)))
    return setup.load_data(elsewhere, language.load_tokenizer(elsewhere))


if __name__ == "__main__":
    main()
