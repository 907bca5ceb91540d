"""`rgp.tune`: a search that the budget covers, around your own training loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from rgp import accounting
from rgp.composition import merge
from rgp.earlier import noticing, runs_of
from rgp.errors import WrongUseError
from rgp.ledger import Ledger
from rgp.members import as_members
from rgp.privatize import privatize
from rgp.run import Run
from rgp.streams import Streams
from rgp.tuning.law import Law
from rgp.tuning.plan import Plan, Shape, make_plan
from rgp.tuning.scores import Score, share
from rgp.tuning.space import check_space, combinations
from rgp.tuning.trials import Drawn


@dataclass(frozen=True)
class Trial:
    """What `train` is given: settings that were drawn, and the noise that is paid for.

    Call `privatize` in place of `rgp.privatize`: batch size, steps, noise and delta are the plan's. What runs of rgp released,
    however they were made, is checked afterwards. A loop with other tools must keep to batch_size, steps and noise_multiplier
    itself.
    """

    settings: Mapping[str, Any]
    noise_multiplier: float
    batch_size: int
    steps: int
    delta: float
    dataset_size: int
    seed: int | None = None  # for this trial alone; None unless the search was given one
    bands: int = 1  # steps over which its noise is correlated
    _runs: list[Run] = field(default_factory=list, repr=False)
    _earlier: Sequence[Ledger] = field(default=(), repr=False)  # of the trials before it

    def privatize(self, model: Any, optimizer: Any, dataset: Any, **options: Any) -> Run:
        """`rgp.privatize` with this trial's batch size, steps and noise; once in a trial."""
        fixed = {"batch_size", "steps", "noise_multiplier", "delta", "seed", "budget", "epochs", "max_batch", "bands"}
        if taken := sorted(fixed & set(options)):
            raise ValueError(f"{', '.join(taken)}: the search has fixed it; leave it out of trial.privatize")
        if self._runs:
            raise WrongUseError("trial.privatize was called twice: a trial pays for one run")
        if any(ledger is other for ledger, _ in runs_of(model) for other in self._earlier):
            raise WrongUseError(
                "this model, or a part of it, was trained by an earlier trial: what that one learned would be released with this "
                "one, and is not paid for. Make a new model in every call of train."
            )
        options["units"] = members = as_members(options.get("units"), options.pop("rows_per_unit", None))
        size, what = (len(dataset), "rows") if members is None else (members.unit.size, f"{members.unit.noun}s (units)")
        if size != self.dataset_size:
            raise ValueError(f"the dataset has {size} {what}, and the search was planned for {self.dataset_size}")
        run = privatize(
            model,
            optimizer,
            dataset,
            batch_size=self.batch_size,
            steps=self.steps,
            noise_multiplier=self.noise_multiplier,
            delta=self.delta,
            seed=self.seed,
            bands=self.bands,
            **options,
        )
        self._runs.append(run)
        return run


@dataclass(frozen=True, kw_only=True)
class Best:
    """The best trial, which is all that a search releases.

    epsilon, delta: of the whole search, scores included
    result: what `train` returned
    score: with its noise, where it was private; between 0 and 1 then
    """

    settings: dict[str, Any]
    result: Any
    score: float
    epsilon: float
    delta: float
    noise_multiplier: float
    law: str


def tune(
    train: Callable[[Trial], tuple[Any, float]],
    space: Mapping[str, Sequence[Any]],
    *,
    dataset_size: int,
    batch_size: int | Callable[[Mapping[str, Any]], int],
    steps: int | Callable[[Mapping[str, Any]], int],
    bands: int | Callable[[Mapping[str, Any]], int] = 1,
    epsilon: float,
    score: str,
    score_rows: int | None = None,
    score_noise: float | None = None,
    delta: float | None = None,
    trials: float = 10,
    law: str = "geometric",
    accountant: str = "pld",
    seed: int | None = None,
    say: Callable[[str], None] | None = None,
) -> Best | None:
    """The best of a random number of private trainings, at a price that covers all of them and their scores.

    Example:
        def train(trial):
            model = make_model()
            optimizer = torch.optim.SGD(model.parameters(), lr=trial.settings["lr"])
            run = trial.privatize(model, optimizer, train_set, clip=1.0)
            for x, y in run:
                run.step(F.cross_entropy(model(x), y))
            return model, right_answers(model, held_out)  # the exact number: tune adds the noise

        best = rgp.tune(
            train, {"lr": [0.1, 0.3, 1.0]}, dataset_size=len(train_set), batch_size=256, steps=400, epsilon=8,
            score="private", score_rows=len(held_out), score_noise=20,
        )

    train: called once for each trial, with a new model in every call; returns (result, score). Nothing that it learns may leave
        it another way: a line that it prints or a file that it writes is not paid for, nor is an exception
    space: keys with lists of values; each trial gets one combination, drawn at random
    batch_size, steps: of each training; or functions of the settings, if these change them
    bands: steps over which the noise of each training is correlated; 1 is independent noise
    score: "public": `train` returns any number measured on public rows, the higher the better. "private": it returns the exact
        number of right answers on `score_rows` private rows, to which one row adds at most 1; noise of standard deviation
        `score_noise` is added here. Where persons are protected (`units`), a person with all their rows may add at most 1:
        return the sum of each person's share of right answers, and let score_rows be the number of persons
    trials, law: mean and law of the number of trials, which is random and secret
    seed: repeats a search exactly; who knows it can undo the protection
    say: called with the plan, in words

    Returns the best trial, or None if the law drew no trial (poisson alone can do so). There is no way to get another one, nor
    their number.

    Formal guarantees (tests/tuning/test_tuning_api.py):
    - the returned `Best` is (epsilon, delta)-differentially private for one row, training rows and scored ones; or for one
      person, if `trial.privatize` is given units
    - a trial whose runs of rgp released anything but what was planned raises, and nothing is returned
    - so does one that trains on from an earlier trial's parameters
    - trials that lost are not kept
    """
    values = check_space(space)
    tried = combinations(values)
    shapes = [
        Shape(_of(batch_size, s, "batch_size"), _of(steps, s, "steps"), bands=_of(bands, s, "bands")) for s in tried
    ]
    if score == "private" and score_rows is None:
        raise ValueError("score_rows=None: a private score needs the number of rows that it counts right answers on")
    for shape in shapes:
        if shape.batch_size > dataset_size:
            raise ValueError(f"batch_size={shape.batch_size} must be at most dataset_size={dataset_size}")
    rows = 1 if score_rows is None else score_rows
    private = dataset_size + (rows if score == "private" else 0)
    chosen = accounting.default_delta(private) if delta is None else delta
    accounting.check_delta(chosen, private)
    plan = make_plan(
        shapes,
        space=values,
        dataset_size=dataset_size,
        law=Law.named(law, trials),
        score=Score(kind=score, rows=rows, noise=score_noise),
        epsilon=epsilon,
        delta=chosen,
        accountant=accountant,
    )
    if say is not None:
        say(plan.words())
    drawn = Drawn(Streams.from_system() if seed is None else Streams.from_seed(seed), plan.law, values)
    best: tuple[float, Any, Trial] | None = None
    earlier: list[Ledger] = []
    for i in range(drawn.count):
        settings = drawn.settings(i)
        shape = shapes[place_of(settings, tried)]
        trial = Trial(
            MappingProxyType(settings),
            plan.noise[shape],
            shape.batch_size,
            shape.steps,
            chosen,
            dataset_size,
            drawn.seed(i),
            shape.bands,
            _earlier=tuple(earlier),
        )
        with noticing() as made:
            result, value = _pair(train(trial))
        _check(trial, shape, made)
        earlier += made
        value = _scored(drawn, i, value, plan)
        if best is None or value > best[0]:
            best = value, result, trial
        del result
    if best is None:
        return None
    value, result, trial = best
    return Best(
        settings=dict(trial.settings),
        result=result,
        score=value if plan.score.noise is None else share(value, plan.score),
        epsilon=plan.epsilon,
        delta=plan.delta,
        noise_multiplier=trial.noise_multiplier,
        law=plan.law.words,
    )


def _of(value: Any, settings: Mapping[str, Any], name: str) -> int:
    found = value(settings) if callable(value) else value
    if isinstance(found, bool) or not isinstance(found, int) or found < 1:
        raise ValueError(
            f"{name}={found!r} must be a whole number, 1 or more, or a function of the settings that gives one."
        )
    return found


def _pair(returned: Any) -> tuple[Any, float]:
    if not isinstance(returned, tuple) or len(returned) != 2 or isinstance(returned[1], bool):
        raise WrongUseError("train must return two things: (result, score)")
    return returned[0], float(returned[1])


def _scored(drawn: Drawn, trial: int, value: float, plan: Plan) -> float:
    if plan.score.noise is None:
        return -math.inf if math.isnan(value) else value
    return drawn.score(trial, value, plan.score)


def place_of(settings: Mapping[str, Any], tried: Sequence[Mapping[str, Any]]) -> int:
    """Which combination was drawn: the one with the same objects, because 1, 1.0 and True are equal."""
    return next(i for i, one in enumerate(tried) if all(one[key] is value for key, value in settings.items()))


def _check(trial: Trial, shape: Shape, made: Sequence[Ledger]) -> None:
    """What runs of rgp released in this trial is what was planned."""
    planned = merge(shape.events(trial.dataset_size, trial.noise_multiplier))
    newest = {ledger.header["hash"]: ledger for ledger in made}  # a run that was resumed has another ledger
    found = [merge(ledger.events()) for ledger in newest.values() if ledger.count]
    if not found and not trial._runs:
        return  # trained with other tools
    if found != [planned]:
        raise WrongUseError(
            f"a trial released {' and '.join(map(str, found)) or 'nothing'}, and {planned} is what the search pays for: make one "
            "run, with trial.privatize, and go with `for batch in run` to its end, once. Nothing was returned."
        )
