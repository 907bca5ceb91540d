"""A run's folder -> what the report says about it. Files may be missing or cut short; summary.json may not."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rgp.accounting import Event, Meaning, epsilon, meaning
from rgp.errors import LedgerError
from rgp.files import read_json_lines
from rgp.ledger import Ledger
from rgp.rounding import finite


class RunError(ValueError):
    """The folder does not hold a run."""


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """What was found in one run's folder.

    public: metrics.jsonl, which may be published; private: private.jsonl, which may not
    attack: results of the membership attacks, or None; private
    audit: result of an audit of these settings, or None
    meaning: what the guarantee lets an attacker do; None for runs without one
    problems: sentences about what does not add up
    """

    name: str
    folder: Path
    summary: dict[str, Any]
    public: list[dict[str, Any]]
    private: list[dict[str, Any]]
    plan: list[dict[str, Any]]
    attack: dict[str, Any] | None
    audit: dict[str, Any] | None
    meaning: Meaning | None
    problems: tuple[str, ...]

    def number(self, key: str) -> float | None:
        return finite(self.summary.get(key))

    def text(self, key: str) -> str:
        value = self.summary.get(key)
        return "" if value is None else str(value)

    @property
    def epsilon(self) -> float | None:
        return self.number("epsilon")

    @property
    def publishable_accuracy(self) -> bool:
        """Accuracy is on a published test split, not on rows of the private data."""
        return bool(self.summary.get("accuracy_is_publishable", False))

    def curve(self, key: str, *, by: str = "step") -> list[tuple[float, float]]:
        """Points of a quantity, from whichever file it is in, in the order of the steps."""
        rows: dict[float, dict[str, Any]] = {}
        for row in self.private + self.public:
            step = finite(row.get("step"))
            if step is not None:
                rows[step] = rows.get(step, {}) | {k: v for k, v in row.items() if finite(v) is not None}
        found = ((finite(row.get(by)), finite(row.get(key))) for _, row in sorted(rows.items()))
        return [(x, y) for x, y in found if x is not None and y is not None]


def read_run(folder: Path) -> RecordedRun:
    path = folder / "summary.json"
    if not path.is_file():
        there = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) if folder.is_dir() else ""
        raise RunError(
            f"{folder} is not a finished run: there is no summary.json in it"
            + (f", only {there}." if there else "; the folder is empty or missing.")
        )
    summary = read_json(path)
    if not isinstance(summary, dict):
        raise RunError(f"{path} does not hold a JSON object.")
    public, private = (read_json_lines(folder / f"{name}.jsonl") for name in ("metrics", "private"))
    attack = next((row["attack"] for row in reversed(private) if "attack" in row), None)  # the demo's
    if (folder / "attack.json").is_file():
        attack = read_json(folder / "attack.json")
    audit = read_json(folder / "audit.json") if (folder / "audit.json").is_file() else None
    plan = read_json(folder / "plan.json") if (folder / "plan.json").is_file() else []
    means, problems = _guarantee(folder, summary)
    if isinstance(audit, dict) and audit.get("broken"):
        problems.append(
            f"THE MECHANISM IS BROKEN: an audit of these settings found epsilon to be at least "
            f"{audit.get('epsilon_lower'):.3f}, and {audit.get('epsilon_proven'):.3f} was promised there."
        )
    return RecordedRun(
        name=folder.resolve().name,
        folder=folder,
        summary=summary,
        public=public,
        private=private,
        plan=[row for row in plan if isinstance(row, dict)] if isinstance(plan, list) else [],
        attack=attack if isinstance(attack, dict) else None,
        audit=audit if isinstance(audit, dict) else None,
        meaning=means,
        problems=tuple(problems),
    )


def _guarantee(folder: Path, summary: dict[str, Any]) -> tuple[Meaning | None, list[str]]:
    """From the ledger, which is what counts; from the summary where there is no ledger."""
    spent, delta = finite(summary.get("epsilon")), finite(summary.get("delta"))
    if spent is None or delta is None:
        return None, []
    try:
        events = Ledger.open(folder).events()
        counted = epsilon(events, delta=delta, accountant=str(summary.get("accountant") or "pld"))
        problems = []
        if counted > spent * 1.001 + 1e-6:
            problems.append(f"The ledger adds up to epsilon {counted:.4f}, more than the {spent:.4f} of summary.json.")
        return meaning(events, delta=delta), problems
    except (LedgerError, KeyError, ValueError, OSError) as error:
        problems = [f"The ledger could not be checked: {error}"]
    q, sigma, steps = (finite(summary.get(key)) for key in ("sampling_rate", "noise_multiplier", "steps"))
    try:
        assert q is not None and sigma is not None and steps is not None
        turns = -(-int(steps) // int(finite(summary.get("bands")) or 1))  # of the group that is drawn most often
        return meaning([Event(q, sigma, turns)], delta=delta), problems
    except (AssertionError, ValueError):
        return None, problems


def read_json(path: Path) -> Any:
    """What a file holds; RunError if it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise RunError(f"{path} cannot be read: {error}") from error
