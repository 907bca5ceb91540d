"""The numbers of a run: summary.json and plan.json."""

from __future__ import annotations

from typing import Any

import torch

from rgp._version import __version__
from rgp.cards.content import counts, unit_of
from rgp.rounding import finite
from rgp.run import Run
from rgp.train.config import Config
from rgp.train.setup import Parts


def summarize(
    config: Config,
    parts: Parts,
    run: Run,
    *,
    scores: dict[str, float],
    wall_seconds: float,
    step_seconds: float,
    peak_memory_bytes: int | None,
) -> dict[str, Any]:
    """The content of summary.json. `epsilon` is null where nothing is protected, never Infinity."""
    mechanism, private = run.mechanism, config.private
    return {
        "method": config.method.name,
        "dataset": config.data.name,
        "model": config.model.name,
        "accuracy": scores.get("accuracy"),
        **{name: value for name, value in scores.items() if name != "accuracy"},
        "accuracy_is_publishable": parts.published_test,
        "epsilon": finite(run.epsilon()) if private else None,
        "delta": mechanism.delta if private else None,
        "accountant": mechanism.accountant if private else None,
        "noise_multiplier": run.noise_multiplier if private else None,
        "clip": mechanism.clip.first,
        "steps": run.step_index,
        "batch_size": mechanism.batch_size(0),
        "bands": mechanism.bands,
        "noise": mechanism.noise_words() if private else None,
        "sampling_rate": mechanism.rate(0),
        "seed": config.run.seed,
        "wall_seconds": wall_seconds,
        "step_seconds": step_seconds,
        "peak_memory_bytes": peak_memory_bytes,
        "parameters": sum(e.size for e in run.plan),
        "trained_parameters": sum(e.size for e in run.plan.trained),
        "noise_dimensions": run.plan.noise_dimensions if private else 0,
        "finished": run.finished,
        "planned_steps": mechanism.steps,
        **counts(run),
        "held_out_rows": None if mechanism.unit.rows is None else len(parts.data.test),  # public where rows are units
        "unit": unit_of(run, parts.data.row),
        "secure_noise": config.run.secure_noise,
        "releases": run.ledger.count,
        "ledger_head": run.ledger.head,
        "device": str(parts.device),
        "threads": torch.get_num_threads(),
        "ranks": run.ranks.size,
        "bytes_per_step": run.traffic.bytes_per_step,
        "plain_bytes_per_step": run.traffic.plain_bytes_per_step,
        "version": __version__,
    }


def plan_rows(run: Run) -> list[dict[str, Any]]:
    return [
        {
            "name": e.name,
            "shape": list(e.shape),
            "treatment": e.treatment,
            "rank": e.rank,
            "noise_dimensions": e.noise_dimensions,
            "why": e.why,
        }
        for e in run.plan
    ]
