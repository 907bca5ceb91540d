"""SST-2 with an epsilon that covers the choice of learning rates: `rgp tune`, then the accuracy on rows that it never saw.

    python experiments/sst2_tune.py --data FOLDER --out FOLDER       continues where it was stopped

FOLDER of --data holds sst2/ and minilm/. It trains on the 62,349 rows of the tables, with a public score on the validation set,
and measures the 5,000 held-out rows at the end. One line of JSON goes to results/tune.jsonl, with neither the number of trials
nor how long they took: both are secrets of the search (docs/tuning.md).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import driver
import sst2

SPACE = driver.HERE / "sst2_tune.yaml"
RESULTS = driver.HERE / "results" / "tune.jsonl"
PRESET, EPSILON, TRIALS = "sst2-minilm-rgp-bands", 8, 5
SET = {  # as on the map, where `bands: auto` found 10; a search needs the number
    "training.steps": 20,
    "training.batch_size": 256,
    "training.bands": 10,
    "training.precision": "bfloat16",
    "method.keep": 20,
    "run.threads": 1,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    folders = sst2.split(given.data)
    command = [sys.executable, "-m", "rgp", "tune", "--out", str(given.out)]
    if given.out.exists():
        command.append("--resume")
    else:
        changes = {**SET, "data.folder": str(folders["tables"])}
        command += ["--preset", PRESET, "--space", str(SPACE), "--trials", str(TRIALS), "--epsilon", str(EPSILON)]
        command += [word for key, value in changes.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    subprocess.run(command, check=True)
    found = json.loads((given.out / "tune.json").read_text(encoding="utf-8"))
    row = {
        "name": f"tune/rgp-e{EPSILON}-steps{SET['training.steps']}/0",
        "preset": PRESET,
        "set": SET,
        "search": {key: value for key, value in found.items() if key != "settings"},
        "accuracy_held_out": sst2.accuracy(given.out, folders["held_out"], search=True),
        "commit": driver.commit(),
    }
    with RESULTS.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
