"""What a private step costs, in time and in memory, against plain training and against Opacus.

The parent (`harness`) starts one `worker` process for each contender and lets them step in turn, so that only one
computes at a time and slow drifts of the machine affect all equally. A worker builds the `workload` (model and data), then
the `contender` (how one logical step is taken), and measures itself. `scaling` repeats that along one axis and fits
slopes. `report` and `chart` are for people, `command` is `rgp bench`.

Only workers compute, and only the contender in question imports Opacus.
"""

from rgp.bench.harness import run_bench
from rgp.bench.settings import CONTENDERS, Settings

__all__ = ["CONTENDERS", "Settings", "run_bench"]
