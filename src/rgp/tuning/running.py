"""One search from its config to its release. It can be interrupted at any moment and resumed.

config, space -> plan -> trials, one after the other, each scored -> the best one released -> the trials removed
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from rgp import accounting
from rgp.files import NEW, make_folder
from rgp.members import Members
from rgp.train import config as configs
from rgp.train import runner, setup
from rgp.train.config import Config, ConfigError
from rgp.train.errors import Interrupted, RunFolderError
from rgp.train.folder import RunFolder, check_writable, free_name
from rgp.train.sections import IMAGES, TEXTS, scalar
from rgp.train.weights import load_trained
from rgp.tuning.law import Law
from rgp.tuning.plan import Plan, Shape, make_plan
from rgp.tuning.progress import OverTrials
from rgp.tuning.release import finish, release
from rgp.tuning.scores import Score, default_noise
from rgp.tuning.space import check_space, combinations
from rgp.tuning.trials import Drawn, Trials, best_of, train_trial

FIXED = ("data", "budget", "run")  # sections that no trial may differ in: rows, privacy, randomness


class SearchInterrupted(Interrupted):
    """A search was asked to stop by a signal, and is saved."""

    def __init__(self, out: Path, signal: int) -> None:
        self.signal = signal
        Exception.__init__(self, f"stopped; everything is saved. Go on with: rgp tune --resume --out {out}")


def read_space(path: Path) -> dict[str, list[Any]]:
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"--space {path} does not exist") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"--space {path} cannot be read: {' '.join(str(error).split())}") from error
    space = check_space(content)
    for key in space:
        if key not in configs.KEYS:
            raise ConfigError([f"{path}: {key}: there is no such key; rgp train --print-config lists them"])
        if key.partition(".")[0] in FIXED:
            raise ConfigError([f"{path}: {key}: all trials have the same rows, budget and way to run; take it out"])
    return space


Load = Callable[[list[str]], Config]  # changes, as of --set -> the config with them


def plan_search(
    load: Load,
    space: dict[str, list[Any]],
    *,
    law: Law,
    epsilon: float | None = None,
    score: str | None = None,
    score_rows: str = "held-out",
    score_noise: float | None = None,
) -> Plan:
    """Every setting is checked against the config and the data before anything is trained."""
    base = load([])
    epsilon = base.budget.epsilon if epsilon is None else epsilon
    if epsilon is None:
        raise ConfigError(["budget.epsilon = null: a search needs a budget; give --epsilon"])
    tried = [load(changes(settings)) for settings in combinations(space)]
    if not all(config.private for config in [base, *tried]):
        raise ConfigError([f"method.name = {base.method.name}: a search over runs without noise protects nobody"])
    if any(config.training.bands == "auto" for config in [base, *tried]):
        raise ConfigError(
            ["training.bands = auto: a search fixes the noise of its trials beforehand; give a number of steps, or 1"]
        )
    data = setup.make(base).data
    shapes = [shape_of(config, setup.check_against_data(config, data)) for config in tried]
    made = make_score(data, score, score_rows, score_noise, known=not is_own(base.data.name))
    private = data.units + (made.rows if made.kind == "private" and made.where == "held-out" else 0)
    delta = accounting.default_delta(private) if base.budget.delta is None else base.budget.delta
    accounting.check_delta(delta, private)
    return make_plan(
        shapes,
        space=space,
        dataset_size=data.units,
        law=law,
        score=made,
        epsilon=epsilon,
        delta=delta,
        accountant=base.budget.accountant,
        unit="row" if data.members is None else data.members.unit.noun,
    )


def is_own(name: str) -> bool:
    """Whether the data are files of the user, whose test rows may be as private as the others."""
    return name not in (*IMAGES, *TEXTS) and Path(name).expanduser().exists()


def make_score(data: Any, kind: str | None, where: str, noise: float | None, *, known: bool = True) -> Score:
    """public by default where there is a test split that is known to be published, private elsewhere."""
    published = known and data.published_test
    kind = kind or ("public" if published and where == "held-out" and noise is None else "private")
    if kind == "public" and (where == "training" or not data.published_test):
        raise ValueError(
            f"--score public: the {where} rows of these data are private. Use --score private, which adds noise to the score "
            "and charges for it, or data that come with a published test split."
        )
    rows, unit = len(data.train if where == "training" else data.test), "row"
    if kind == "private" and data.members is not None:
        if (members := scored(data, where)) is None:
            raise ValueError(
                f"--score private: nothing says whose the test rows are, and a {data.members.unit.noun} may have many. Give the "
                "test split the same column, or use --score public if it is published."
            )
        rows, unit = members.unit.size, members.unit.noun
    noise = default_noise(rows) if kind == "private" and noise is None else noise
    return Score(kind=kind, rows=rows, where=where, noise=noise, unit=unit)


def scored(data: Any, where: str) -> Members | None:
    """Whose the rows are that trials are scored on."""
    return data.members if where == "training" else data.test_members


def changes(settings: dict[str, Any]) -> list[str]:
    return [f"{key}={scalar(value)}" for key, value in settings.items()]


# ---------------------------------------------------------------------- the search


def begin(out: Path, base: Config, plan: Plan) -> None:
    """OUT, with its plan, which is public, and with the settings that all trials share.

    A search that was killed in here, before it had drawn anything, is begun again as if it had never been.
    """
    trials = Trials(out)
    if stillborn(out, trials):
        (out / f"tune.json{NEW}").unlink(missing_ok=True)
        trials.remove()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        unfinished = (out / "tune.json").exists() and not RunFolder.read_json(out / "tune.json")["finished"]
        go_on = f" Go on with the search in it: rgp tune --resume --out {out}. Or c" if unfinished else " C"
        raise RunFolderError(f"{out} exists and is not empty; it was not touched.{go_on}hoose --out {free_name(out)}")
    check_writable(out)
    make_folder(out)
    trials.make()
    folder = RunFolder(out)
    folder.write_text(trials.base, base.to_yaml())
    folder.write_json(out / "tune.json", {**plan.to_dict(), "finished": False, "best": None})


def stillborn(out: Path, trials: Trials) -> bool:
    """Whether OUT holds what `begin` had made when it was killed, and nothing else: no plan, so no secret and no trial."""
    if not out.is_dir() or not trials.path.is_dir():
        return False
    inside = {path.name for path in trials.path.iterdir()} - {trials.base.name, trials.base.name + NEW}
    return not inside and {path.name for path in out.iterdir()} <= {trials.path.name, f"tune.json{NEW}"}


def read_plan(out: Path) -> Plan:
    """The plan of the search that was begun in OUT."""
    if not (out / "tune.json").exists():
        raise RunFolderError(f"there is no search in {out} to resume; leave --resume out to start one")
    return Plan.from_dict(RunFolder.read_json(out / "tune.json"))


def go_on(out: Path, *, keep_trials: bool = False, say: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """All that is left of the search in OUT. Returns what tune.json holds at its end."""
    found, plan, trials = RunFolder.read_json(out / "tune.json"), read_plan(out), Trials(out)
    if found["finished"]:  # perhaps interrupted while it was tidying up
        if not keep_trials:
            trials.remove()
        return found
    with trials.locked():
        base = configs.load(trials.base)
        trials.begin(base.run.seed)
        drawn = Drawn(trials.streams(), plan.law, plan.space)
        run_trials(out, plan, trials, drawn, keep_trials=keep_trials)
        scores = trials.scores()
        best = best_of(scores)
        if best is None:
            result = finish(out, plan, None)
        else:
            result = release(out, plan, trials.folder(best), drawn.settings(best), scores[best])
        if keep_trials:
            say(f"{trials.path} was kept: what is in it is secret, and the guarantee does not cover it")
        else:
            trials.remove()
    return result


def run_trials(out: Path, plan: Plan, trials: Trials, drawn: Drawn, *, keep_trials: bool) -> None:
    done = trials.scores()
    progress = OverTrials(drawn.count, len(done))
    try:
        for i in range(drawn.count):
            if i in done:
                continue
            progress.trial(i)
            config = trial_config(trials.base, plan, drawn, i)
            shape = shape_of(config, steps_of(config, plan))

            def run(resume: bool, config: Config = config, i: int = i) -> None:
                runner.train(config, trials.folder(i), progress=progress, resume=resume)

            train_trial(run, trials.folder(i), shape.events(plan.dataset_size, plan.noise[shape]))
            done = trials.add(i, drawn.score(i, right_answers(trials.folder(i), plan.score), plan.score))
            if not keep_trials:
                trials.drop_beaten(done)
    except Interrupted as error:
        raise SearchInterrupted(out, error.signal) from error
    finally:
        progress.close()


def trial_config(base: Path, plan: Plan, drawn: Drawn, trial: int) -> Config:
    """The settings that were drawn, with the noise that was planned for them."""
    given = changes(drawn.settings(trial))
    config = configs.load(base, changes=given)
    shape = shape_of(config, steps_of(config, plan))
    given += [f"budget.noise_multiplier={scalar(plan.noise[shape])}", f"budget.delta={scalar(plan.delta)}"]
    if (seed := drawn.seed(trial)) is not None:
        given.append(f"run.seed={seed}")
    return configs.load(base, changes=given)


def shape_of(config: Config, steps: int) -> Shape:
    training = config.training
    return Shape(training.batch_size, steps, training.max_batch, training.bands or 1)


def steps_of(config: Config, plan: Plan) -> int:
    training = config.training
    if training.steps is not None:
        return training.steps
    assert training.epochs is not None
    return accounting.planned_steps(training.epochs, plan.dataset_size, training.batch_size)


def right_answers(folder: Path, score: Score) -> float:
    """The score of the trial's published model. At most 1 for each row, or person, whatever the model does."""
    settings, parts, _ = load_trained(folder)
    rows = parts.data.train if score.where == "training" else parts.data.test
    batch = settings.training.microbatch_size or 32
    _, right = setup.example_losses(
        parts.model, rows, collate_fn=parts.data.collate_fn, device=parts.device, batch_size=batch
    )
    shares = right.double().nan_to_num(0.0).clamp(0, 1).cpu().numpy()
    members = scored(parts.data, score.where)
    if score.unit == "row" or members is None:
        return float(shares.sum())
    return float((np.bincount(members.of_rows, shares) / np.bincount(members.of_rows)).sum())
