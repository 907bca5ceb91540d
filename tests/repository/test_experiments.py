"""The experiments: every planned run is a valid config, and what counts as a win."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from rgp.reproduce.items import fingerprint
from rgp.train import config, setup

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
sys.path.insert(0, str(EXPERIMENTS))
import demo_settings  # noqa: E402
import driver  # noqa: E402
import pages  # noqa: E402
import sst2  # noqa: E402
import sst2_page  # noqa: E402
import vision  # noqa: E402
import vision_page  # noqa: E402

STAGES = {script: script.STAGES for script in (vision, sst2, demo_settings)}
ALL = pytest.mark.parametrize("script", STAGES, ids=lambda script: script.__name__)


@pytest.mark.parametrize(("script", "what"), [(script, what) for script, stages in STAGES.items() for what in stages])
def test_every_planned_run_has_valid_settings(script, what):
    jobs = script.planned(what)
    assert len({job["name"] for job in jobs}) == len(jobs)
    for job in jobs:
        changes = [f"{key}={json.dumps(value)}" for key, value in job["set"].items()]
        settings = config.load(preset=job["preset"], changes=changes)
        assert setup.make_method(settings.method).name


@ALL
def test_the_kept_results_are_planned_runs(script):
    planned = {job["name"]: job for what in STAGES[script] for job in script.planned(what)}
    rows = driver.read(script.RESULTS)
    assert rows
    assert len({row["name"] for row in rows}) == len(rows)
    for row in rows:
        job = planned[row["name"]]["set"]  # may say more: what a preset said at the time
        assert {key: job[key] for key in row["set"]} == row["set"]
        assert 0 < row["accuracy"] < 1


@ALL
def test_the_kept_results_have_the_settings_that_the_list_says_today(script):
    """A preset that changes later would otherwise give old results a new meaning."""
    planned = {job["name"]: job for what in STAGES[script] for job in script.planned(what)}
    for row in driver.read(script.RESULTS):
        job = planned[row["name"]]
        changes = [f"{key}={json.dumps(value)}" for key, value in {**job["set"], "run.seed": job["seed"]}.items()]
        assert fingerprint(config.load(preset=job["preset"], changes=changes)) == row["settings"], row["name"]


@pytest.mark.parametrize("page", [sst2_page, vision_page], ids=lambda page: page.__name__)
def test_the_tables_of_the_pages_are_those_of_the_kept_results(page):
    text = "".join(path.read_text(encoding="utf-8") for path in page.PAGES)
    rows = pages.rows_in(page.RESULTS)
    assert all(f"<!-- {name} -->" in text for name in page.TABLES)
    assert pages.filled(text, rows, page.TABLES) == text, f"run: python experiments/{page.__name__}.py"
    rows[0] = {**rows[0], "accuracy": rows[0]["accuracy"] + 0.01}
    assert pages.filled(text, rows, page.TABLES) != text


def test_the_page_compares_planned_runs():
    tuned = {job["name"].split("/")[1] for job in sst2.planned("tuning")}
    tried = {name for names in sst2_page.TRIED.values() for name in names}
    bodiless = {f"linear-clip2-{change}" for change in ("headlr3e-3", "head-first")}  # linear is a head alone
    assert tried - tuned == bodiless


def test_a_win_is_a_paired_difference_above_two_standard_errors():
    base = {0: 50.0, 1: 52.0, 2: 48.0}
    assert driver.verdict({s: v + 1 for s, v in base.items()}, base) == (1.0, 0.0, "win")
    assert driver.verdict(base, {s: v + 1 for s, v in base.items()})[2] == "loss"
    difference, error, word = driver.verdict({0: 51.0, 1: 52.0, 2: 49.0}, base)
    assert (round(difference, 3), round(error, 3), word) == (0.667, 0.333, "level")
    assert driver.verdict({0: 51.0}, base) == (1.0, None, "too few seeds")
    assert driver.verdict({0: 51.0, 1: 53.0}, base) == (1.0, None, "too few seeds")
    assert driver.verdict({1: 60.0, 2: 1.0}, {0: 1.0, 1: 50.0})[0] == 10.0  # only the seed that both have


def test_finished_runs_are_skipped_and_shares_do_not_meet(tmp_path):
    jobs = [{"name": f"tables/{letter}/0", "set": {}} for letter in "abcde"]
    results, ran = tmp_path / "results.jsonl", []

    def run(job):
        ran.append(job["name"][7])
        return {"accuracy": 0.5, "wall_seconds": 1.0}

    driver.run_missing(jobs, results, run, share="2/2")
    assert ran == ["b", "d"]
    driver.run_missing(jobs, results, run, only="[ab]/0")
    driver.run_missing(jobs, results, run)
    assert ran == ["b", "d", "a", "c", "e"]
    assert [row["name"] for row in driver.read(results)] == [f"tables/{letter}/0" for letter in "bdace"]


def test_a_computation_is_remembered_by_its_arguments():
    calls = []
    twice = driver.remembered(lambda x, *, y=0: calls.append(x) or x + y)
    assert [twice(1, y=2), twice(1, y=2), twice(2, y=2)] == [3, 3, 4]
    assert calls == [1, 2]


def test_the_rows_of_sst2_are_split_once_and_none_is_in_two_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(sst2.tempfile, "gettempdir", lambda: str(tmp_path))
    data = tmp_path / "data"
    (data / "sst2").mkdir(parents=True)
    (data / "minilm").mkdir()
    rows = [f"row {i}\t{i % 2}" for i in range(11000)]
    (data / "sst2" / "train.tsv").write_text("\n".join(["sentence\tlabel", *rows]) + "\n")
    (data / "sst2" / "valid.tsv").write_text("sentence\tlabel\nvalidation\t1\n")
    folders = sst2.split(data)

    def held(part, file):
        return (folders[part] / "sst2" / f"{file}.tsv").read_text().splitlines()[1:]

    assert held("tables", "valid") == ["validation\t1"]
    assert len(held("held_out", "valid")) == 5000 and len(held("tuning", "valid")) == 3000
    assert set(held("tables", "train")) == set(rows) - set(held("held_out", "valid"))
    assert set(held("tuning", "train")) == set(held("tables", "train")) - set(held("tuning", "valid"))
    assert len(held("few", "train")) == 2000 and set(held("few", "train")) <= set(held("tuning", "train"))
    assert (folders["tuning"] / "minilm").is_dir()
