"""All that is fixed before the first trial: law, score, settings to try, and the noise that keeps the search in its budget.

Nothing here depends on private data, so a plan may be published; it is written to OUT/tune.json when a search begins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rgp import accounting, bands
from rgp.accounting import RESOLUTION, Event
from rgp.rounding import round_up
from rgp.tuning import accounting as search
from rgp.tuning.law import Law
from rgp.tuning.scores import Score


@dataclass(frozen=True)
class Shape:
    """What a trial's privacy depends on, besides its noise."""

    batch_size: int
    steps: int
    max_batch: int | None = None
    bands: int = 1  # steps over which noise is correlated

    def __post_init__(self) -> None:
        if self.bands > self.steps:
            raise ValueError(f"bands={self.bands} (correlated noise) must be at most {self.steps}, the number of steps")

    def events(self, dataset_size: int, sigma: float) -> tuple[Event, ...]:
        if self.bands > 1:  # the most that a unit of any group takes part in, whichever group it is dealt into
            rate = self.batch_size / dataset_size
            return bands.events(steps=self.steps, bands=self.bands, sampling_rate=rate, noise_multiplier=sigma)
        size = None if self.max_batch is None else dataset_size
        return (Event(self.batch_size / dataset_size, sigma, self.steps, max_batch=self.max_batch, dataset_size=size),)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A search, before it begins.

    epsilon: what the whole search costs, scores included, whatever comes out
    target: what it may cost
    noise: the noise multiplier of a trial's training, by its shape
    alone: the noise multiplier of a single run with the target's epsilon, by its shape
    """

    epsilon: float
    target: float
    delta: float
    accountant: str
    law: Law
    score: Score
    space: dict[str, list[Any]]
    dataset_size: int
    unit: str = "row"  # whose presence the search hides
    shapes: tuple[Shape, ...]  # of every combination of settings
    noise: dict[Shape, float] = field(default_factory=dict)
    alone: dict[Shape, float] = field(default_factory=dict)

    def trials(self) -> list[tuple[Event, ...]]:
        """The releases of each kind of trial, its score included."""
        return [shape.events(self.dataset_size, self.noise[shape]) + self.score.events for shape in self.shapes]

    @property
    def trial_epsilon(self) -> float:
        """What the costliest trial would cost if it were all. Not what the search promises."""
        return max(
            accounting.epsilon(events, delta=self.delta, accountant=self.accountant) for events in set(self.trials())
        )

    @property
    def cost(self) -> float:
        """By how much a trial's noise is above that of a single run with the same epsilon."""
        return max(self.noise[shape] / self.alone[shape] for shape in self.noise)

    def to_dict(self) -> dict[str, Any]:
        return {
            "epsilon": self.epsilon,
            "target_epsilon": self.target,
            "delta": self.delta,
            "accountant": self.accountant,
            "trials": {"law": self.law.name, "mean": self.law.mean, "chance_of_none": self.law.chance_of_none},
            "score": self.score.to_dict(),
            "space": self.space,
            "dataset_size": self.dataset_size,
            "unit": self.unit,
            "shapes": [[shape.batch_size, shape.steps, shape.max_batch, shape.bands] for shape in self.shapes],
            "noise": [
                {
                    "batch_size": shape.batch_size,
                    "steps": shape.steps,
                    "max_batch": shape.max_batch,
                    "bands": shape.bands,
                    "noise_multiplier": sigma,
                    "noise_multiplier_of_one_run": self.alone[shape],
                }
                for shape, sigma in self.noise.items()
            ],
            "noise_ratio": self.cost,
            "words": {"law": self.law.words, "score": self.score.words},
        }

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> Plan:
        kinds = [
            (Shape(row["batch_size"], row["steps"], row["max_batch"], row.get("bands", 1)), row)
            for row in found["noise"]
        ]
        return cls(
            epsilon=found["epsilon"],
            target=found["target_epsilon"],
            delta=found["delta"],
            accountant=found["accountant"],
            law=Law.named(found["trials"]["law"], found["trials"]["mean"]),
            score=Score(**found["score"]),
            space=found["space"],
            dataset_size=found["dataset_size"],
            unit=found.get("unit", "row"),
            shapes=tuple(Shape(*row) for row in found["shapes"]),
            noise={shape: row["noise_multiplier"] for shape, row in kinds},
            alone={shape: row["noise_multiplier_of_one_run"] for shape, row in kinds},
        )

    def words(self) -> str:
        """What tuning costs, for people."""
        settings = math.prod(len(values) for values in self.space.values())
        none = self.law.chance_of_none
        lines = [
            f"search    {settings} settings; the number of trials is random: {self.law.words}"
            + (f"; with probability {none:.2g} there is none, and nothing is released" if none else ""),
            f"privacy   epsilon {round_up(self.epsilon)} at delta {self.delta:g} for the whole search, scores included "
            f"({self.accountant})",
            f"score     {self.score.words}",
        ]
        for shape, sigma in self.noise.items():
            kind = f" (batch size {shape.batch_size}, {shape.steps} steps)" if len(self.noise) > 1 else ""
            kind += f", correlated over {shape.bands} steps" if shape.bands > 1 else ""
            one = self.alone[shape]
            lines.append(
                f"noise     {sigma:g} times the clipping norm in each trial{kind}; one run with the same epsilon and no tuning "
                f"would need {one:g}: tuning costs {sigma / one:.2f} times the noise"
            )
        return "\n".join(lines)


def make_plan(
    shapes: Sequence[Shape],
    *,
    space: dict[str, list[Any]],
    dataset_size: int,
    law: Law,
    score: Score,
    epsilon: float,
    delta: float,
    accountant: str = "pld",
    unit: str = "row",
) -> Plan:
    """The least noise with which the search stays within epsilon. `shapes`: of every combination of settings.

    Where shapes differ, each gets the noise that it would need if it were the only one, and all of it is then scaled together.
    """
    budget: dict[str, Any] = {"epsilon": epsilon, "delta": delta, "accountant": accountant}

    def trial(shape: Shape, sigma: float) -> tuple[Event, ...]:
        return shape.events(dataset_size, sigma) + score.events

    def needed(kind: Shape) -> float:
        return search.calibrate(lambda s: [trial(kind, s)], law, **budget)

    def needed_alone(kind: Shape) -> float:
        return accounting.calibrate_scale(lambda s: kind.events(dataset_size, s), **budget)

    kinds = list(dict.fromkeys(shapes))
    noise = {kind: needed(kind) for kind in kinds}
    if len(kinds) > 1:
        scale = search.calibrate(lambda s: [trial(shape, s * noise[shape]) for shape in shapes], law, **budget)
        noise = {kind: math.ceil(scale * sigma * RESOLUTION) / RESOLUTION for kind, sigma in noise.items()}
    trials = [trial(shape, noise[shape]) for shape in shapes]
    return Plan(
        epsilon=search.epsilon(trials, law, delta=delta, accountant=accountant),
        target=epsilon,
        delta=delta,
        accountant=accountant,
        law=law,
        score=score,
        space=space,
        dataset_size=dataset_size,
        unit=unit,
        shapes=tuple(shapes),
        noise=noise,
        alone={kind: needed_alone(kind) for kind in kinds},
    )
