"""`rgp tune` as people meet it: what is released, what stays secret, and what an interruption leaves behind."""

import json
import os
import shutil
import signal
import stat
import threading

import numpy as np
import pytest

pytest.importorskip("yaml")
pytest.importorskip("typer")
pytest.importorskip("safetensors")
pytest.importorskip("sklearn")
from safetensors.torch import load_file
from typer.testing import CliRunner

from rgp import accounting, cli
from rgp import files as files_of_rgp
from rgp.accounting import Event
from rgp.cards.content import NOT_COVERED
from rgp.errors import LedgerError
from rgp.ledger import Ledger
from rgp.rounding import round_up
from rgp.streams import Streams
from rgp.train.errors import RunFolderError
from rgp.tuning import running, trials
from rgp.tuning.law import Law
from rgp.tuning.plan import Shape, make_plan
from rgp.tuning.progress import OverTrials
from rgp.tuning.release import COVERED, TUNED, search_card
from rgp.tuning.scores import Score
from rgp.tuning.trials import Drawn, train_trial

RATES = "optimizer.lr: [0.1, 0.2, 0.4, 0.8]\n"
SMALL = [
    *("model.name=mlp", "model.width=16", "training.steps=4", "training.batch_size=40", "training.microbatch_size=32"),
    *("run.eval_every=4", "run.threads=1", "budget.accountant=rdp"),
]
MEAN = 3.0
RELEASED = {
    *("tune.json", "report.html", "best.yaml", "ledger.jsonl", "model/model.safetensors", "model/model.json"),
    *("model/privacy_card.json", "model/privacy_card.md"),
}


def seed_with(count, name="geometric", mean=MEAN):
    law = Law.named(name, mean)
    return next(s for s in range(999) if Drawn(Streams.from_seed(s), law, {"a": [1]}).count == count)


def rgp(*words):
    return CliRunner().invoke(cli.app, [str(word) for word in words])


def small(path, *more, seed=None, preset="digits-rgp", space=RATES):
    (path / "space.yaml").write_text(space)
    sets = [*SMALL, *([] if seed is None else [f"run.seed={seed}"])]
    words = ["tune", "--preset", preset, "--space", path / "space.yaml", "--epsilon", 6, "--trials", MEAN]
    return [*words, *(word for change in sets for word in ("--set", change)), *more]


def files(path):
    return {str(p.relative_to(path)) for p in path.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """A search with three trials, two copies of it: one that keeps its trials, to look at them, and one that does not."""
    path = tmp_path_factory.mktemp("search")
    seed, found = seed_with(3), {}
    for name, more in (("kept", ["--keep-trials"]), ("out", [])):
        result = rgp(*small(path, "--out", path / name, "--json", *more, seed=seed))
        assert result.exit_code == 0, result.output
        found[name] = result
    return path, found


def test_json(searched):
    path, found = searched
    result = json.loads(found["out"].stdout)
    assert result["trials"] == {"law": "geometric", "mean": 3.0, "chance_of_none": 0.0}
    assert 5.9 < result["epsilon"] <= 6 and result["delta"] == 1e-5
    assert set(result["best"]) == {"settings", "score"} and set(result["best"]["settings"]) == {"optimizer.lr"}
    on_disk = json.loads((path / "out" / "tune.json").read_text())
    assert on_disk["finished"] and on_disk["best"] == result["best"]


def test_epsilon_is_the_searchs_by_an_independent_computation(searched):
    from dp_accounting import NeighboringRelation, dp_event
    from dp_accounting.rdp import RdpAccountant

    path, found = searched
    (event,) = Ledger.open(path / "out").events()
    assert (event.sampling_rate, event.count) == (40 / 1438, 4)
    step = dp_event.PoissonSampledDpEvent(40 / 1438, dp_event.GaussianDpEvent(event.noise_multiplier))
    trial = dp_event.ComposedDpEvent([dp_event.SelfComposedDpEvent(step, 4), dp_event.GaussianDpEvent(5.0)])
    accountant = RdpAccountant(None, NeighboringRelation.ADD_OR_REMOVE_ONE)
    accountant.compose(dp_event.RepeatAndSelectDpEvent(trial, MEAN, 1))
    assert json.loads(found["out"].stdout)["epsilon"] == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-9)


def test_the_card_and_the_page_promise_what_the_search_costs_and_not_the_trial(searched):
    path, found = searched
    spent = json.loads(found["out"].stdout)["epsilon"]
    events = Ledger.open(path / "out").events()
    trials_own = accounting.epsilon([*events, Event(1.0, 5.0)], delta=1e-5, accountant="rdp")
    assert trials_own < 0.9 * spent
    card = json.loads((path / "out" / "model" / "privacy_card.json").read_text())
    assert (card["epsilon"], card["delta"], card["accountant"]) == (spent, 1e-5, "rdp")
    assert "attack_bound" not in card  # the trial's own would be too small
    assert "held-out rows" in card["unit"] and card["search"]["trials"] == {"law": "geometric", "mean": 3.0}
    shown = [(path / "out" / name).read_text() for name in ("model/privacy_card.md", "report.html")]
    for text in (*shown, found["out"].stderr):
        assert round_up(spent) in text and "geometric with mean 3" in text
        for digits in (2, 3):
            assert f"{trials_own:.{digits}f}" not in text


def test_the_attack_that_the_card_bounds_is_one_on_the_search():
    shape, law = Shape(1438, 4), Law.named("geometric", 3)
    score = Score(kind="public", rows=100)
    plan = make_plan([shape], space={"lr": [1]}, dataset_size=1438, law=law, score=score, epsilon=3.0, delta=1e-5)
    trial = accounting.meaning(plan.trials()[0], delta=1e-5).tpr_at_1_percent
    card = {"unit": "one row", "not_covered": [TUNED, "other"], "attack_bound": {"true_positive_rate": trial}}
    made = search_card(card, plan)
    assert 1.2 * trial < made["attack_bound"]["true_positive_rate"] < 1 and made["epsilon"] == plan.epsilon <= 3.0
    assert made["not_covered"] == [COVERED, "other"] and made["unit"] == "one row"
    assert TUNED in NOT_COVERED  # of every card: these words are looked for there


@pytest.mark.parametrize("where", ["held-out", "training"])
@pytest.mark.parametrize("kind", ["public", "private"])
def test_a_private_score_leaves_nothing_exact_of_its_rows(kind, where):
    """Test rows of one's own, protected by the search: the trial's card had their exact accuracy."""
    score = Score(kind=kind, rows=100, where=where, noise=5.0 if kind == "private" else None)
    asked = {"space": {"lr": [1]}, "dataset_size": 60, "law": Law.named("geometric", 3), "epsilon": 3.0, "delta": 1e-5}
    plan = make_plan([Shape(60, 4)], score=score, accountant="rdp", **asked)
    measured = {"accuracy": 0.5, "accuracy_other": 0.5, "perplexity": 2.0}
    made = search_card({"unit": "one row", "not_covered": [], **measured}, plan)
    protected = kind == "private" and where == "held-out"
    assert set(measured) & set(made) == (set() if protected else set(measured))
    assert ("held-out rows" in made["unit"]) == protected


@pytest.mark.slow
def test_test_rows_of_ones_own_are_scored_with_noise(tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(90, 4, 4)).astype(np.float32), rng.integers(0, 3, 90)
    np.savez(tmp_path / "pixels.npz", x_train=x[:60], y_train=y[:60], x_test=x[60:], y_test=y[60:])
    changes = ["--set", f"data.name={tmp_path / 'pixels.npz'}", "--set", "training.batch_size=20"]
    for score, exact in (("default", False), ("public", True)):
        out = tmp_path / score
        more = [] if score == "default" else ["--score", score]
        result = rgp(*small(tmp_path, "--out", out, *changes, *more, seed=seed_with(1)))
        assert result.exit_code == 0, result.output
        card = json.loads((out / "model" / "privacy_card.json").read_text())
        assert (
            ("accuracy" in card)
            == exact
            == ("accuracy" in (out / "model" / "privacy_card.md").read_text().split("Not covered")[0])
        )
        assert ("held-out rows" in card["unit"]) != exact
        assert json.loads(rgp("eval", out, "--json").stdout)["accuracy_is_publishable"] == exact


def test_what_is_released_is_the_best_trial(searched):
    path, _ = searched
    scores = json.loads((path / "kept" / "trials" / "scores.json").read_text())
    assert set(scores) == {"0", "1", "2"} and len(set(scores.values())) == 3
    best = max(scores, key=scores.get)
    for i in scores:
        weights = load_file(path / "kept" / "trials" / f"trial-{int(i):05}" / "model" / "model.safetensors")
        for name in ("kept", "out"):  # a search from one seed is the same search
            released = load_file(path / name / "model" / "model.safetensors")
            assert all(released[k].equal(weights[k]) for k in weights) == (i == best)
    told = json.loads((path / "kept" / "tune.json").read_text())["best"]["score"]
    assert told == pytest.approx(min(1, max(0, scores[best] / 359)))


def test_trials_are_secrets(searched):
    path, found = searched
    assert files(path / "out") == RELEASED
    kept = path / "kept" / "trials"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o700 and "secret" in found["kept"].stderr
    for name in ("secret.json", "scores.json"):
        assert stat.S_IMODE((kept / name).stat().st_mode) == 0o600
    assert stat.S_IMODE((path / "out").stat().st_mode) == 0o700


def test_what_is_released_tells_nothing_of_the_others(searched):
    """Two searches that differ in everything but the best trial release the same."""
    path, found = searched
    scores = json.loads((path / "kept" / "trials" / "scores.json").read_text())
    best = max(scores, key=scores.get)
    plan, other = running.read_plan(path / "kept"), path / "other"
    other.mkdir()
    result = running.release(
        other,
        plan,
        path / "kept" / "trials" / f"trial-{int(best):05}",
        json.loads((path / "out" / "tune.json").read_text())["best"]["settings"],
        scores[best],
    )
    for name in sorted(RELEASED):
        a, b = ((path / folder / name).read_bytes() for folder in ("out", "other"))
        if name.startswith("model/privacy_card") or name == "report.html":
            a, b = (b"\n".join(line for line in t.split(b"\n") if b"made" not in line) for t in (a, b))
            b = b.replace(b">other<", b">out<").replace(b">other:", b">out:")
        assert a == b, name
    assert "count" not in json.dumps(result["trials"])
    assert found["out"].stderr.count("rgp: warning: Try method=rgp.DPSGD()") == 1  # and not by every trial
    assert "trial 3 of 3" in found["out"].stderr and "of 3" not in found["out"].stdout  # the screen is not published


# ---------------------------------------------------------------------- interruptions


def test_an_interrupted_search_goes_on_and_comes_to_the_same_end(searched, tmp_path, monkeypatch):
    path, _ = searched
    out = tmp_path / "out"
    steps = OverTrials.step
    seen = []

    def interrupt(self, done, **more):
        seen.append(done)
        if len(seen) == 6:  # in the second trial
            os.kill(os.getpid(), signal.SIGINT)
        steps(self, done, **more)

    monkeypatch.setattr(OverTrials, "step", interrupt)
    first = rgp(*small(tmp_path, "--out", out, "--json", seed=seed_with(3)))
    assert first.exit_code == 130 and "rgp tune --resume" in first.stderr and not first.stdout.strip()
    assert {name.split("/")[0] for name in files(out)} == {"trials", "tune.json"}  # nothing is released yet
    told = json.loads((out / "tune.json").read_text())
    assert told["best"] is None and not told["finished"]
    assert stat.S_IMODE((out / "trials").stat().st_mode) == 0o700

    again = rgp(*small(tmp_path, "--out", out, seed=seed_with(3)))
    assert again.exit_code == 2 and "--resume" in again.stderr

    second = rgp("tune", "--resume", "--out", out, "--json")
    assert second.exit_code == 0, second.output
    whole = json.loads((path / "out" / "tune.json").read_text())
    assert json.loads((out / "tune.json").read_text()) == whole and files(out) == RELEASED
    a, b = (load_file(folder / "model" / "model.safetensors") for folder in (out, path / "out"))
    assert all(a[k].equal(b[k]) for k in b)
    assert Ledger.open(out).count == 4  # no step was charged twice

    third = rgp("tune", "--resume", "--out", out, "--json")
    assert third.exit_code == 0 and json.loads(third.stdout) == json.loads(second.stdout)


def test_a_crash_between_release_and_tidying_up_leaves_no_trials(searched, tmp_path, monkeypatch):
    out = tmp_path / "out"
    with monkeypatch.context() as patched:
        patched.setattr(trials.Trials, "remove", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
        assert rgp(*small(tmp_path, "--out", out, seed=seed_with(1))).exit_code == 130
    assert (out / "trials").exists()
    assert rgp("tune", "--resume", "--out", out).exit_code == 0 and files(out) == RELEASED


def test_a_trial_with_other_releases_than_planned_is_begun_again(tmp_path, monkeypatch):
    """A crash can charge a step twice: what the trial then spent is not what the search pays for."""
    planned = (Event(0.1, 2.0, 4),)
    for damage in ("twice", "stillborn"):
        folder, runs = tmp_path / damage, []
        folder.mkdir()
        (folder / "config.yaml").touch()
        (folder / "old").touch()

        def run(resume, folder=folder, runs=runs, damage=damage):
            runs.append(resume)
            if resume and damage == "stillborn":
                raise RunFolderError("releases on record and no checkpoint")
            folder.mkdir(exist_ok=True)

        def released(path, runs=runs):
            return (Event(0.1, 2.0, 5 if runs[-1] else 4),)

        monkeypatch.setattr(trials, "released", released)
        train_trial(run, folder, planned)
        assert runs == [True, False] and not (folder / "old").exists()
    monkeypatch.setattr(trials, "released", lambda path: (Event(0.1, 1.0, 4),))
    with pytest.raises(LedgerError, match="planned"):
        train_trial(run, tmp_path / "new", planned)


def test_a_search_that_was_killed_before_it_drew_anything_is_begun_again(tmp_path):
    """Before its plan is on disk there is nothing to resume; while its secret is written, nothing has been drawn."""
    out = tmp_path / "out"
    (out / "trials").mkdir(parents=True)
    (out / "trials" / "base.yaml.new").touch()
    (out / "tune.json.new").touch()
    found = trials.Trials(out)
    assert running.stillborn(out, found)
    for other in (out / "mine.txt", out / "trials" / "secret.json", out / "tune.json"):
        other.touch()
        assert not running.stillborn(out, found)  # somebody's file, or a search
        other.unlink()
    result = rgp(*small(tmp_path, "--out", out, seed=seed_with(1)))
    assert result.exit_code == 0 and files(out) == RELEASED, result.output
    half = trials.Trials(tmp_path)
    half.make()
    (half.path / "secret.json.new").touch()
    half.begin(None)
    assert half.streams().secret


def test_two_processes_do_not_work_on_one_search(tmp_path, monkeypatch):
    found, again = trials.Trials(tmp_path), trials.Trials(tmp_path)
    found.make()
    with monkeypatch.context() as patched, found.locked():
        patched.setattr(trials, "PATIENCE", 0.2)
        with pytest.raises(ValueError, match="another process"), again.locked():
            pass
    # The workers of a process that was killed hold its lock for a few seconds more.
    held = os.open(found.path, os.O_RDONLY)
    assert files_of_rgp.lock(held, patience=0)
    threading.Timer(0.3, os.close, [held]).start()
    with again.locked():
        pass


def test_a_secret_that_is_lost_is_not_drawn_again(tmp_path):
    found = trials.Trials(tmp_path)
    found.make()
    found.begin(None)
    assert found.streams().secret == found.streams().secret and not found.streams().known
    found.folder(0).mkdir()
    (found.path / "secret.json").unlink()
    with pytest.raises(ValueError, match=r"secret\.json"):
        found.begin(None)


# ---------------------------------------------------------------------- no trial; plans; refusals


def test_no_trial_at_all_releases_nothing(tmp_path):
    out = tmp_path / "out"
    words = [*small(tmp_path, "--out", out, "--json", "--law", "poisson", seed=seed_with(0, "poisson"))]
    result = rgp(*words)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["best"] is None and files(out) == {"tune.json", "report.html"}
    assert "no trial" in (out / "report.html").read_text()


def test_the_plan_says_what_tuning_costs_and_trains_nothing(tmp_path):
    out = tmp_path / "out"
    result = rgp(*small(tmp_path, "--plan", "--out", out))
    assert result.exit_code == 0 and not out.exists()
    assert "tuning costs" in result.stdout and "one run with the same epsilon" in result.stdout
    found = json.loads(rgp(*small(tmp_path, "--plan", "--json")).stdout)
    assert found["noise_ratio"] > 1 and "best" not in found


@pytest.mark.parametrize(
    ("more", "space", "named"),
    [
        (["--score", "public"], RATES, "--score private"),
        (["--score-noise", 0], RATES, "score_noise"),
        (["--trials", 0], RATES, "trials"),
        (["--law", "fixed"], RATES, "law="),
        ([], "optimizer.rate: [1]", "no such key"),
        ([], "budget.epsilon: [1, 2]", "budget"),
        ([], "data.held_out: [0.1, 0.2]", "same rows"),
        ([], "run.seed: [1, 2]", "take it out"),
        ([], "optimizer.lr: 0.1", "list"),
        ([], "optimizer.lr: [0.1, -1]", "optimizer.lr"),
        (["--preset", "digits-nonprivate"], RATES, "protects nobody"),
        (["--resume"], RATES, "leave out"),
    ],
)
def test_refusals(tmp_path, more, space, named):
    out = tmp_path / "out"
    result = rgp(*small(tmp_path, "--out", out, *more, space=space))
    assert result.exit_code == 2 and named in result.stderr and not out.exists()


def test_there_must_be_a_search_to_go_on_with(tmp_path):
    assert "no search" in rgp("tune", "--resume", "--out", tmp_path).stderr
    assert "--space" in rgp("tune", "--preset", "digits-rgp").stderr


def test_progress_tells_the_time_that_is_left(capsys):
    progress = OverTrials(4)
    progress.trial(0)
    progress.start("rgp", 0, 10)
    progress.step(5, epsilon=1.0, examples=3)
    assert 0.4 < progress._done < 0.6
    progress.trial(1)
    said = capsys.readouterr().err
    assert "trial 1 of 4" in said and "trial 2 of 4, about" in said and "epsilon" not in said


# ---------------------------------------------------------------------- rgp eval, rgp report


def test_eval_measures_the_best_model_and_tells_the_epsilon_of_the_search(searched, tmp_path):
    path, found = searched
    result = json.loads(rgp("eval", path / "out", "--json").stdout)
    told = json.loads(found["out"].stdout)
    assert result["epsilon"] == told["epsilon"] and result["delta"] == told["delta"] and result["search"]
    assert result["rows"] == 359 and not result["accuracy_is_publishable"]
    assert abs(result["accuracy"] - told["best"]["score"]) < 5 * 5 / 359  # the score has noise of 5 rows
    assert "for the whole search, of which this is the best run" in rgp("eval", path / "out").stdout
    refused = rgp("attack", path / "out")  # its limit would be the trial's, and its results lie among what is published
    assert refused.exit_code == 2 and "holds a search" in refused.stderr, refused.output
    assert files(path / "out") == RELEASED
    other = tmp_path / "changed"
    shutil.copytree(path / "out", other)
    changed = json.loads((other / "tune.json").read_text())
    (other / "tune.json").write_text(json.dumps({**changed, "epsilon": 0.1}))
    assert "more than the 0.1000 of the search" in rgp("eval", other).stderr


def test_report_writes_the_page_of_a_search_again_from_what_is_published(searched, tmp_path):
    path, _ = searched
    before = (path / "out" / "report.html").read_text()
    assert rgp("report", path / "out", "--out", tmp_path / "again.html").exit_code == 0
    assert (tmp_path / "again.html").read_text() == before
    both = rgp("report", path / "out", path / "kept")
    assert both.exit_code == 2 and "give it alone" in both.stderr


def test_an_unfinished_or_empty_search_has_nothing_to_show(searched, tmp_path):
    path, _ = searched
    found = json.loads((path / "out" / "tune.json").read_text())
    for changed, words in (
        ({"finished": False, "best": None}, "tune --resume --out"),
        ({"finished": True, "best": None}, "drew no trial"),
    ):
        (tmp_path / "tune.json").write_text(json.dumps({**found, **changed}))
        assert words in rgp("eval", tmp_path).stderr
    (tmp_path / "tune.json").write_text(json.dumps({**found, "finished": False}))
    assert "not finished" in rgp("report", tmp_path).stderr
