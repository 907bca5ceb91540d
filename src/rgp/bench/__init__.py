"""What a private step costs, in time and in memory, against plain training and against Opacus.

The parent (`harness`) starts one `worker` process for each contender and lets them step in turn, so that only one
computes at a time and slow drifts of the machine hit all alike. A worker builds the `workload` (model and data), then the
`contender` (how one logical step is taken), and measures itself. `scaling` repeats that along one axis and fits slopes.

Nothing here imports torch in the parent, and nothing but the contender in question imports Opacus or the engine.
"""

from rgp.bench.harness import run_bench
from rgp.bench.settings import CONTENDERS, Settings

__all__ = ["CONTENDERS", "Settings", "run_bench"]
