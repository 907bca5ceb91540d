"""How the settings of `rgp demo` were chosen: both methods, the same changes, five seeds, one line of JSON per finished run.

    python experiments/demo_settings.py trials --data ANY         digits, with other rows held out than those the demo shows
    python experiments/demo_settings.py show                      mean, standard error and paired differences

The data come with scikit-learn; --data is not used. A run takes a few seconds. See driver.py.
"""

from __future__ import annotations

from typing import Any

import driver

LIST = driver.HERE / "demo_settings.yaml"
RESULTS = driver.HERE / "results" / "demo.jsonl"
RUNS = driver.HERE / "results" / "demo-runs.jsonl"  # what `rgp demo --json` said, a line per run
STAGES = ("trials",)
SPLIT = 1  # data.seed: which rows are held out; the demo's is 0


def main() -> None:
    given = driver.arguments(__doc__, RESULTS, "anything", STAGES)
    if given.what == "show":
        driver.show(driver.read(given.results), stages=STAGES)
        return
    driver.run_missing(
        planned(given.what),
        given.results,
        lambda job: driver.train(job, given.data, given.out / job["name"]),
        only=given.only,
        share=given.share,
    )


def planned(what: str) -> list[dict[str, Any]]:
    return [{**job, "set": {**job["set"], "data.seed": SPLIT}} for job in driver.planned(LIST, what)]


if __name__ == "__main__":
    main()
