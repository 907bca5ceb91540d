"""A question -> the plan: memory, flops, traffic and noise of a run, method beside method."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

from torch import nn

from rgp import accounting, methods
from rgp.band_choice import Choice, choose, evaluate
from rgp.plan import Entry, Plan, make_plan
from rgp.planning import models
from rgp.planning.lora import add_lora
from rgp.planning.question import DTYPES, METHODS, Question
from rgp.planning.step import (
    EVERY_MICROBATCH,
    Cost,
    extrapolate,
    plain_step,
    private_step,
    stack_of_layers,
)
from rgp.workload import LEAST_MEMORY

RESERVE = 0.1  # share of a device's memory for what no plan sees: its context, workspaces of libraries, fragmentation
DEPTHS = (4, 5)  # layers that stand for a deeper stack: first, second, inner and last, then one more
DEEP = 12  # deeper stacks are extrapolated from DEPTHS


class Contender:
    """One method's plan and costs."""

    def __init__(self, name: str, question: Question, subject: models.Subject) -> None:
        self.name, self.question, self.subject = name, question, subject
        self._costs: dict[int, Cost] = {}
        self.bands = 1

    @property
    def past_noise(self) -> int:
        """Bytes that correlated noise keeps, on the first rank."""
        return 0 if self.name == "plain" else (self.bands - 1) * 4 * self.released

    @property
    def method(self) -> methods.Method:
        if self.name == "rgp":
            q = self.question
            return methods.RGP(
                rank=q.rank, sides=q.sides, source=q.source, warmup_steps=0, state=q.state, rounding=q.rounding
            )
        return methods.NonPrivate() if self.name == "plain" else methods.DPSGD()

    def build(self, depth: int | None = None) -> nn.Module:
        model = self.subject.build(depth)
        if self.name == "dp-lora":
            add_lora(model, make_plan(model, methods.RGP(rank=self.question.rank)))
        return model

    @cached_property
    def whole(self) -> nn.Module:
        return self.build()

    @cached_property
    def plan(self) -> Plan:
        return make_plan(self.whole, self.method)

    @property
    def trainable(self) -> int:
        return sum(e.size for e in self.plan.trained)

    @property
    def noise_dimensions(self) -> int:
        return 0 if self.name == "plain" else sum(noise_dimensions(e, self.question.sides) for e in self.plan)

    @property
    def released(self) -> int:
        """Numbers that ranks add up: thin carrier gradients, or whole gradients."""
        sides = {"left": (1, 0), "right": (0, 1), "alternate": (0.5, 0.5)}.get(self.question.sides, (1, 1))
        sizes = [
            e.rank * round(sides[0] * e.p + sides[1] * e.d) if e.treatment == "carried" else e.size
            for e in self.plan.trained
        ]
        return sum(sizes)

    def cost(self, m: int) -> Cost:
        """One step with micro-batches of m."""
        if m not in self._costs:
            depth = self.subject.depth
            if depth is None or depth <= DEEP:
                self._costs[m] = self._step(None, m)
            else:
                low, high = (self._step(n, m) for n in DEPTHS)
                self._costs[m] = extrapolate(low, high, (depth - DEPTHS[0]) / (DEPTHS[1] - DEPTHS[0]))
        return self._costs[m]

    def _step(self, depth: int | None, m: int) -> Cost:
        q, model = self.question, self.build(depth)
        first = m >= q.share and not self._scattered  # as if there were a sum already: its size is counted separately
        given: dict[str, Any] = {"first": first, "optimizer": q.optimizer, "device": q.device}
        if self.name == "plain":
            return plain_step(model, self.subject, m, **given)
        materialise = self.name in ("dpsgd", "dp-lora")  # per-example gradients of thin factors are small
        return private_step(model, self.subject, self.method, m, materialise=materialise, **given)

    # memory of one rank

    def memory(self, m: int) -> dict[str, Any]:
        cost = self.cost(m)
        parts = {
            "weights": cost.weights,
            "initial": cost.initial,
            "optimizer": cost.optimizer,
            "gradients": cost.gradients,
        }
        if self.question.sharded:
            whole = ("optimizer", "gradients") if self._thin else ()
            parts = {n: size if n in whole else -(-size // self.question.world_size) for n, size in parts.items()}
        peaks = self._peaks(cost)
        phase = max(peaks, key=lambda name: peaks[name])
        return {
            **parts,
            "activations": cost.activations,
            "per_example": cost.per_example,
            "past_noise": self.past_noise,
            "peak": peaks[phase],
            "phase": phase.partition(":")[0],
        }

    def _peaks(self, cost: Cost) -> dict[str, int]:
        return {phase: peak + self.past_noise for phase, peak in self._peaks_of(cost).items()}

    def _peaks_of(self, cost: Cost) -> dict[str, int]:
        if not self.question.sharded:
            return cost.peaks
        w = self.question.world_size
        gathered = 2 * self._largest_layer  # the one in use and the one on its way
        shared = cost.weights + cost.initial + cost.optimizer
        whole = cost.total  # the engine's sum is whole on every rank; elsewhere it is scattered like the weights
        if self._thin:  # so is what lives in its coordinates: the optimizer's state, and the sum of updates
            shared -= cost.optimizer
            whole += cost.optimizer + cost.total
        if self._scattered:
            whole = 0
            shared += cost.total
        peaks = {}
        for phase, peak in cost.peaks.items():
            if phase.partition(":")[0] in (*EVERY_MICROBATCH, "carriers"):
                peaks[phase] = peak - shared + shared // w + gathered
            else:
                peaks[phase] = (peak - whole) // w + whole
        return peaks

    @property
    def _thin(self) -> bool:
        return self.name == "rgp" and self.question.state == "thin"

    @property
    def _scattered(self) -> bool:
        """Whether the sum of gradients is divided among the ranks."""
        return self.question.sharded and self.name in ("plain", "dpsgd")

    @cached_property
    def _largest_layer(self) -> int:
        layers = [sum(p.nbytes for p in layer.parameters()) for layer in stack_of_layers(self.whole)]
        return max([*layers, *(p.nbytes for p in self.whole.parameters())])

    def largest_microbatch(self) -> int | None:
        """Examples at once that fit in the memory, less the reserve, where about one more would not; 0 if none does."""
        q = self.question
        if q.memory is None:
            return None
        room = q.memory * (1 - RESERVE)
        low = min(q.microbatch, q.share)
        high, too_many = 2 * low, q.share + 1
        while True:  # the guess from a line through two sizes, until one was itself counted and fits
            guess = max(1, min(self._on_line(low, high, room), too_many - 1))
            if max(self._peaks(self.cost(guess)).values()) <= room:
                return guess
            if guess == 1:
                return 0
            too_many = guess
            low, high = max(1, guess // 2), max(2, guess)

    def _on_line(self, low: int, high: int, room: float) -> int:
        one, two = (self._peaks(self.cost(m)) for m in (low, high))

        def fits(m: int) -> bool:
            at = (m - low) / (high - low)
            return all(one[phase] + (two[phase] - one[phase]) * at <= room for phase in one)

        inside, outside = 0, self.question.share + 1
        while outside - inside > 1:
            middle = (inside + outside) // 2
            inside, outside = (middle, outside) if fits(middle) else (inside, middle)
        return inside

    # the network

    def network_bytes(self, m: int) -> int:
        """In and out of each rank in a step, as `run.traffic` counts them: the sum goes in, and comes out."""
        q = self.question
        if q.world_size == 1:
            return 0
        payload = self.released * (DTYPES[q.dtype].itemsize if self.name == "plain" else 4)
        if not q.sharded:
            return 2 * payload
        # the other ranks' parts of every weight, for every forward and every backward pass
        gathers = 2 * math.ceil(q.share / m) * self.cost(m).weights * (q.world_size - 1) // q.world_size
        return gathers + 2 * payload


def noise_dimensions(entry: Entry, sides: str) -> int:
    """Dimensions in which a step's noise reaches the weight; with one side released it is the span of that side."""
    if entry.treatment == "carried" and sides != "both":
        width = {"left": entry.p, "right": entry.d, "alternate": (entry.p + entry.d) / 2}[sides]
        return round(entry.rank * width)
    return entry.noise_dimensions


def signal_to_noise(batch: int, sigma: float, dimensions: int) -> float:
    """B C / (sigma C sqrt(D)): the longest that the clipped sum can be, over the length of the noise to be expected.

    An upper bound: it is reached only if every example's gradient has norm C or more and all point the same way.
    """
    return batch / (sigma * math.sqrt(dimensions))


def plan(question: Question) -> dict[str, Any]:
    """The plan, as `rgp plan --json` prints it."""
    q = question
    delta = accounting.default_delta(q.dataset_size) if q.delta is None else q.delta
    accounting.check_delta(delta, q.dataset_size)
    steps, rate = accounting.planned_steps(q.epochs, q.dataset_size, q.batch), q.batch / q.dataset_size
    subject = models.find(
        q.model,
        task=q.task,
        labels=q.labels,
        seq=q.seq,
        dtype=DTYPES[q.dtype],
        checkpointing=q.checkpointing,
    )
    names = [name for name in METHODS if name in (q.method, *q.against)]
    contenders = {name: Contender(name, q, subject) for name in names}
    chosen = contenders[q.method]
    noise = _noise(q, chosen, delta=delta, rate=rate, steps=steps)
    for contender in contenders.values():
        contender.bands = 1 if noise is None else noise.bands
    sigma = felt = (
        accounting.calibrate(epsilon=q.epsilon, delta=delta, sampling_rate=rate, steps=steps)
        if noise is None
        else noise.noise_multiplier
    )
    if noise is not None:  # independent noise that would leave as much in the weights
        felt = accounting.calibrate(epsilon=q.epsilon, delta=delta, sampling_rate=rate, steps=steps) / noise.factor_mean
    rows = [_row(contender, sigma, felt) for contender in contenders.values()]
    top = next(row for row in rows if row["name"] == q.method)
    return {
        "model": q.model,
        "method": q.method,
        "parameters": sum(p.numel() for p in subject.build(None).parameters()),
        "trainable": chosen.trainable,
        **{key: top[key] for key in ("noise_dimensions", "noise_multiplier", "snr")},
        "sampling_rate": rate,
        "steps": steps,
        "bands": chosen.bands,
        "noise": "independent noise" if noise is None else str(noise),
        "epsilon": None if q.method == "plain" else q.epsilon,
        "delta": None if q.method == "plain" else delta,
        "dataset_size": q.dataset_size,
        "rows_per_unit": q.rows_per_unit,
        "batch": q.batch,
        "microbatch": min(q.microbatch, q.share),
        "seq": q.seq,
        "rank": q.rank,
        "sides": q.sides,
        "source": q.source,
        "state": q.state,
        "rounding": q.rounding,
        "world_size": q.world_size,
        "sharded": q.sharded,
        "device": q.device,
        "device_memory": q.memory,
        "reserve": RESERVE,
        "dtype": q.dtype,
        "optimizer": q.optimizer,
        "checkpointing": q.checkpointing,
        "layers": [
            {
                "name": e.name,
                "kind": e.kind,
                "treatment": e.treatment,
                "shape": list(e.shape),
                "rank": e.rank,
                "noise_dimensions": 0 if q.method == "plain" else noise_dimensions(e, q.sides),
            }
            for e in chosen.plan
        ],
        "methods": rows,
    }


def _noise(q: Question, chosen: Contender, *, delta: float, rate: float, steps: int) -> Choice | None:
    """What bands were asked for or are best, in as much memory as the model takes and a gigabyte at least; None: independent."""
    if q.bands == "1" or q.method == "plain":
        return None
    momentum = 0.9 if q.optimizer == "sgd" else 0.0
    asked: dict[str, Any] = {"steps": steps, "epsilon": q.epsilon, "delta": delta, "momentum": momentum}
    if q.bands != "auto":
        if int(q.bands) > steps:
            raise ValueError(f"bands={q.bands} must be at most the number of steps, {steps}")
        return evaluate(int(q.bands), sampling_rate=rate, **asked)
    room = max(LEAST_MEMORY, sum(p.numel() * DTYPES[q.dtype].itemsize for p in chosen.whole.parameters()))
    found = choose(
        dataset_size=q.dataset_size, batch_size=q.batch, vector_bytes=4 * chosen.released, most_bytes=room, **asked
    )
    return found if found.bands > 1 else None


def _row(contender: Contender, sigma: float, felt: float) -> dict[str, Any]:
    """felt: the independent noise that leaves as much in the weights as this run's."""
    q = contender.question
    m = min(q.microbatch, q.share)
    private, dimensions = contender.name != "plain", contender.noise_dimensions
    return {
        "name": contender.name,
        "trainable": contender.trainable,
        "memory": contender.memory(m),
        "flops_per_step": contender.cost(m).flops_of(q.batch * q.rows_per_unit / m, ranks=q.world_size),
        "network_bytes_per_step": contender.network_bytes(m),
        "noise_dimensions": dimensions,
        "noise_multiplier": sigma if private else None,
        "snr": signal_to_noise(q.batch, felt, dimensions) if private else None,
        "largest_microbatch": contender.largest_microbatch(),
    }
