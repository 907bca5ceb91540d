"""`rgp reproduce`: the paper's numbers, cells and their hashes, what is run, kept, shared and said of it."""

import json
import math
import os
import signal

import pytest

pytest.importorskip("yaml")
pytest.importorskip("typer")
pytest.importorskip("safetensors")
pytest.importorskip("sklearn")
import yaml
from typer.testing import CliRunner

from rgp import cli
from rgp.reproduce import claims, items, page
from rgp.reproduce.checking import StandIns
from rgp.reproduce.items import Column, Item, read
from rgp.reproduce.numbers import Numbers
from rgp.reproduce.reproducing import Reproduction
from rgp.reproduce.store import Store
from rgp.train import config, runner
from rgp.train.errors import Interrupted
from rgp.train.progress import Silent

TABLES = ["table1", "table2", "table3", "table4", "table5", "fig2", "fig3", "fig4", "fig5", "fig6"]
TINY = {
    "model.name": "mlp",
    "model.width": 16,
    "budget.noise_multiplier": 0,  # accounting takes longer than four steps
    "training.clip": None,
    "training.steps": 4,
    "training.batch_size": 64,
    "run.eval_every": 4,
}


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A table of three rows on digits, one of which cannot be had and one of which fails."""
    folder = tmp_path / "configs"
    folder.mkdir()
    content = {
        "title": "A small table",
        "about": "nothing",
        "measure": "accuracy",
        "rows": {
            "broken": {"method": "rgp", "set": {**TINY, "training.batch_size": 100000}},
            "RGP": {"method": "rgp", "set": {**TINY, "method.rank": 2}},
            "DP-SGD": {"method": "dpsgd", "set": TINY},
        },
        "paper": {"RGP": {"digits": 12.5}},
        "scales": {
            "mini": {"columns": {"digits": {"preset": "digits-{method}"}}},
            "paper": {"seeds": 3, "columns": {"SVHN": {"preset": "digits-{method}", "set": {"data.name": "svhn"}}}},
        },
    }
    (folder / "table2.yaml").write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    content["measure"] = "attack"
    (folder / "table5.yaml").write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    monkeypatch.setattr(items, "folder", lambda: folder)
    return tmp_path


def rgp(*words):
    return CliRunner().invoke(cli.app, ["reproduce", *(str(word) for word in words)])


def reproduction(path, *what, **options):
    given = {
        "scale": "mini",
        "seeds": None,
        "only": (),
        "data": path,
        "out": path / "out",
        "results": None,
        "shares": (),
    }
    return Reproduction(what or ("table2",), **{**given, "changes": (), "progress": Silent(), **options})


def run(path, *what, resume=False, minutes=None, **options):
    made = reproduction(path, *what, **options)
    return made.run(resume=resume, minutes=minutes)


def place(result, row, name="table2", column=0):
    item = next(item for item in result["items"] if item["name"] == name)
    return next(cell for cell in item["columns"][column]["cells"] if cell["row"] == row)


def forbid(monkeypatch):
    def trained(*_, **__):
        raise AssertionError("a finished run was trained again")

    monkeypatch.setattr(runner, "train", trained)


# ---------------------------------------------------------------------- the files


def test_every_table_and_figure_is_there_at_both_scales():
    assert list(items.files()) == TABLES
    for path in items.files().values():
        for scale in items.SCALES:
            assert read(path, scale).cells


def test_every_cell_has_a_preset_and_valid_settings():
    cells = [c for path in items.files().values() for scale in items.SCALES for c in read(path, scale, seeds=1).cells]
    assert {cell.preset for cell in cells if not cell.exists} == set()
    for cell in cells:
        if cell.measure != "cost":
            assert cell.settings().run.seed == 0
    names = [cell.name for path in items.files().values() for cell in read(path, "mini").cells]
    assert len(set(names)) == len(names)


def test_the_papers_numbers_agree_with_its_sums():
    """Table 3 gives improvements, table 4 averages: neither is in our files."""
    table3, table4 = (read(items.files()[name], "paper") for name in ("table3", "table4"))
    gains = {"SVHN": (4.1, 3.4, 3.9), "CIFAR-10": (6.6, 6.4, 7.9)}
    for column, values in gains.items():
        for epsilon, gain in zip((2, 4, 6), values, strict=True):
            ours, other = (table3.paper[f"{m} (ε = {epsilon})"][column] for m in ("RGP", "DP-SGD"))
            assert ours - other == pytest.approx(gain)
    means = {"Full (N.P.)": 88.7, "Linear (N.P.)": 64.2, "RGP (N.P.)": 88.1, "DP-SGD (ε = 8)": 65.7}
    means |= {"RGP-random (ε = 8)": 79.9, "RGP (ε = 8)": 83.9}
    for row, mean in means.items():
        values = [v for value in table4.paper[row].values() for v in (value if isinstance(value, list) else [value])]
        assert len(values) == 5 and sum(values) / 5 == pytest.approx(mean, abs=0.051)
    figure = read(items.files()["fig4"], "paper")
    for row, values in figure.paper.items():
        for column, value in values.items():
            expected = table4.paper[f"{row} (ε = 8)"][column]
            assert value == pytest.approx(sum(expected) / 2 if isinstance(expected, list) else expected)


def test_a_cell_is_known_by_its_training_and_not_by_where_it_is_computed(small):
    a, b = read(items.files()["table2"], "mini", seeds=2).cells[2:4]
    assert a.row == b.row == "RGP" and a.key != b.key
    elsewhere = {"data.folder": "/data", "run.threads": 1, "run.device": "cpu", "training.microbatch_size": 7}
    for changes, same in ((elsewhere, True), ({"method.rank": 3}, False), ({"data.seed": 1}, False)):
        other = read(items.files()["table2"], "mini", changes=changes).cells[1]
        assert (other.key == a.key) is same


def test_a_setting_that_a_later_version_adds_does_not_forget_what_was_run(small, monkeypatch):
    before = [cell.key for cell in read(items.files()["table2"], "mini").cells]
    old = config.Config.to_dict
    monkeypatch.setattr(config.Config, "to_dict", lambda self: {**old(self), "later": {"new": 1}})
    assert [cell.key for cell in read(items.files()["table2"], "mini").cells] == before


# ---------------------------------------------------------------------- running


def test_one_failure_does_not_stop_the_others_and_nothing_runs_twice(small, monkeypatch):
    shown = rgp("table2", "--out", small / "out", "--data", small, "--json")
    assert shown.exit_code == 1, shown.output
    result = json.loads(shown.stdout)
    assert list(result["problems"]) == result["failed"] == ["table2/digits/broken/seed 0"]
    assert "100000" in result["problems"]["table2/digits/broken/seed 0"]
    assert 0 < place(result, "RGP")["ours"] < 100 and place(result, "RGP")["paper"] == [12.5]
    assert (small / "out" / "mini.html").exists() and json.loads((small / "out" / "mini.json").read_text())["items"]
    kept = [json.loads(line) for line in (small / "out" / "results.jsonl").read_text().splitlines()]
    assert [row["preset"] for row in kept] == ["digits-rgp", "digits-dpsgd"]
    forbid(monkeypatch)
    again = run(small, only=["rgp", "dp-sgd"])
    assert again["problems"] == {} and place(again, "RGP")["ours"] == place(result, "RGP")["ours"]


class Impatient(Silent):
    def step(self, done, *, epsilon, examples):
        if done == 2:
            os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupted_run_goes_on_with_resume_and_ends_the_same(small):
    with pytest.raises(Interrupted):
        run(small, only=["/RGP/"], progress=Impatient())
    assert not (small / "out" / "results.jsonl").exists() and (small / "out" / "mini.html").exists()
    waiting = run(small, only=["/RGP/"])
    assert "--resume" in waiting["problems"]["table2/digits/RGP/seed 0"]
    done = run(small, only=["/RGP/"], resume=True)
    assert done["problems"] == {}
    straight = run(small, only=["/RGP/"], out=small / "other")
    assert place(done, "RGP")["ours"] == place(straight, "RGP")["ours"] is not None
    assert not list((small / "out" / "runs").glob("*/checkpoint-*"))


def test_the_attack_uses_the_run_that_the_other_table_made(small, monkeypatch):
    run(small, only=["/DP-SGD/"])
    forbid(monkeypatch)
    result = run(small, "table2", "table5", only=["/DP-SGD/"])
    assert result["problems"] == {} and 30 < place(result, "DP-SGD", "table5")["ours"] < 70
    assert result["items"][1]["covered_by_the_guarantee"] is False


def test_no_time_starts_nothing_and_missing_data_are_said_to_be_missing(small, monkeypatch):
    forbid(monkeypatch)
    result = run(small, minutes=0)
    assert set(result["problems"].values()) == {"not started: the time given was over"} and not result["failed"]
    absent = run(small, scale="paper")
    assert len(absent["problems"]) == 9 and not absent["failed"]
    assert all(why.startswith("not run here: data unavailable (svhn") for why in absent["problems"].values())
    page_of = reproduction(small, scale="paper")
    page_of.write(small / "page.md")
    assert "not run here: data unavailable" in (small / "page.md").read_text()


def test_runs_of_others_count_if_they_are_the_same_and_not_of_tuning(small, monkeypatch):
    rank = {**TINY, "method.rank": 2}
    lines = [
        {"name": "tables/rgp/0", "preset": "digits-rgp", "set": rank, "seed": 0, "accuracy": 0.25},
        {"name": "tuning/sgd/0", "preset": "digits-dpsgd", "set": TINY, "seed": 0, "accuracy": 0.75},
        {"name": "tables/old/0", "preset": "digits-no-more", "set": {}, "seed": 0, "accuracy": 0.5},
        # of a preset as it was before: what it says of its settings counts
        {
            "name": "tables/was/0",
            "preset": "digits-dpsgd",
            "set": TINY,
            "seed": 0,
            "accuracy": 0.9,
            "settings": "another",
        },
    ]
    shared = small / "vision.jsonl"
    shared.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"torn')
    result = run(small, minutes=0, shares=[shared])
    assert place(result, "RGP")["ours"] == 25 and place(result, "DP-SGD")["ours"] is None
    assert "digits-no-more" in reproduction(small, shares=[shared]).store.left_out[0]
    run(small, only=["/DP-SGD/"], out=small / "theirs")
    forbid(monkeypatch)
    result = run(small, "table5", only=["/DP-SGD/"], shares=[small / "theirs" / "runs"])
    assert result["problems"] == {} and place(result, "DP-SGD", "table5")["ours"] is not None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["table7"], "there is no table7"),
        (["table2", "--scale", "huge"], "--scale huge"),
        (["table2", "--seeds", "0"], "--seeds 0"),
        (["table2", "--only", "mnist"], "no cell has that in its name"),
        (["table2", "--set", "rank"], "write section.key=value"),
        (["table2", "--share", "nowhere"], "--share nowhere"),
    ],
)
def test_wrong_use_is_said_in_one_line(small, words, said):
    shown = rgp(*words, "--out", small / "out")
    assert shown.exit_code == 2 and said in shown.output and not (small / "out").exists()


def test_the_list_counts_different_runs(small):
    shown = rgp("LIST", "--out", small / "out", "--seeds", "2", "--json")
    rows = {row["name"]: row for row in json.loads(shown.stdout)["list"]}
    assert rows["table2"]["runs"] == 6 and rows["table2"]["finished"] == 0 and rows["table2"]["minutes_left"] is None


# ---------------------------------------------------------------------- checking


def test_a_run_whose_data_and_weights_cannot_be_had_is_seen_to_start(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setattr("rgp.reproduce.running._on_hub", lambda name: False)
    common = {"data.folder": str(tmp_path / "none"), "run.seed": 0, "training.epochs": 1, "budget.accountant": "rdp"}
    image = {"data.name": "svhn", "model.name": "wrn-10-1", "model.width": None, "training.batch_size": 1000}
    text = {"data.name": "mnli", "model.name": "owner/bert", "model.width": None, "training.batch_size": 1000}
    (tmp_path / "made").mkdir()
    stand_ins = StandIns(tmp_path / "made")
    for changes in (image, text):
        settings = config.load(
            preset="digits-rgp", changes=items.as_changes({**changes, **common, "budget.epsilon": 8})
        )
        found = stand_ins.check(settings)
        rows = {"svhn": 73257, "mnli": 392702}[changes["data.name"]]
        assert found["steps"] == 3 and len(found["stand_ins"]) == (1 if changes is image else 2)
        from rgp import accounting

        steps = accounting.planned_steps(1, rows, 1000)
        event = accounting.Event(1000 / rows, found["noise_multiplier"], steps)
        assert 7.9 < accounting.epsilon([event], delta=accounting.default_delta(rows), accountant="rdp") <= 8


def test_a_run_that_does_not_start_is_reported(small):
    shown = rgp(
        "table2",
        "--check",
        "--out",
        small / "out",
        "--data",
        small,
        "--json",
        "--set",
        "method.overrides={nothing: frozen}",
    )
    result = json.loads(shown.stdout)
    assert shown.exit_code == 1 and result["started"] == 0 and "nothing" in result["checked"][0]["error"]
    good = json.loads(
        rgp("table2", "--check", "--out", small / "out", "--data", small, "--only", "/RGP/", "--json").stdout
    )
    assert good["failed"] == [] and good["started"] == 1


# ---------------------------------------------------------------------- claims


def numbers_of(values, *, name="table2", measure="accuracy", rows=10000, x=None):
    """Numbers with these accuracies: (row, x) -> one per seed."""
    column = Column(name="CIFAR-10", data="")
    made = Item(
        name=name,
        title="",
        about="",
        measure=measure,
        note="",
        x=x,
        rows=tuple(dict.fromkeys(row for row, _ in values)),
        columns=(column,),
        paper={},
        cells=(),
        scale="mini",
    )
    numbers = Numbers(made, store=None)
    for (row, at), found in values.items():
        place = numbers.place(row, "CIFAR-10", at)
        place.wanted = len(found)
        numbers.places[row, "CIFAR-10", at] = place
        for seed, value in enumerate(found):
            if value is not None:
                key = "success_rate" if measure == "attack" else "accuracy"
                place.seeds[seed] = {key: value, "held_out_rows": rows, "standard_error": 0.01}
    return numbers


@pytest.mark.parametrize(
    ("ours", "theirs", "verdict"),
    [
        ([0.63, 0.64, 0.635], [0.57, 0.56, 0.565], claims.HELD),
        ([0.57, 0.56, 0.565], [0.63, 0.64, 0.635], claims.FAILED),
        ([0.60, 0.58, 0.62], [0.59, 0.60, 0.60], claims.LEVEL),
        ([0.600], [0.595], claims.LEVEL),  # one seed, 10,000 rows: an error of 0.7 points
        ([0.63], [0.57], claims.HELD),
        ([None], [0.5], claims.NOT_RUN),
    ],
)
def test_a_difference_counts_above_two_standard_errors(ours, theirs, verdict):
    numbers = numbers_of({("A", None): ours, ("B", None): theirs})
    assert [v.verdict for v in claims.above("A", "B")(numbers)] == [verdict]


def test_seeds_are_paired():
    numbers = numbers_of({("A", None): [0.50, 0.60, 0.70], ("B", None): [0.49, 0.59, 0.69]})
    assert [v.verdict for v in claims.above("A", "B")(numbers)] == [
        claims.HELD
    ]  # the seeds differ more than the methods


@pytest.mark.parametrize(("ours", "verdict"), [(0.92, claims.HELD), (0.90, claims.FAILED), (0.928, claims.HELD)])
def test_near_full_training(ours, verdict):
    found = claims.near_full(numbers_of({("Full (N.P.)", None): [0.933], ("RGP (N.P.)", None): [ours]}))
    assert [v.verdict for v in found] == [verdict]


@pytest.mark.parametrize(("off", "verdict"), [(0.1, claims.HELD), (0.3, claims.FAILED)])
def test_learning_nothing_is_measured_from_chance(off, verdict):
    found = claims.learns_nothing(numbers_of({("residual off (N.P.)", None): [off], ("RGP (N.P.)", None): [0.9]}))
    assert [v.verdict for v in found] == [verdict]


@pytest.mark.parametrize(("rate", "verdict"), [(0.503, claims.HELD), (0.56, claims.FAILED), (0.52, claims.LEVEL)])
def test_an_attack_near_a_coin(rate, verdict):
    found = claims.near_coin(numbers_of({("RGP (ε = 8)", None): [rate]}, name="table5", measure="attack"))
    assert [v.verdict for v in found] == [verdict]


def test_the_rank_trade_off_has_two_sides():
    rising = {("RGP (N.P.)", r): [0.5 + 0.03 * math.log2(r)] for r in (1, 2, 4, 8)}
    peaked = {("RGP (ε = 8)", r): [a] for r, a in ((1, 0.50), (2, 0.60), (4, 0.55), (8, 0.50))}
    x = {"label": "rank", "values": [1, 2, 4, 8]}
    found = list(claims.rank_trade_off(numbers_of(rising | peaked, name="fig5", x=x)))
    assert [v.verdict for v in found] == [claims.HELD, claims.HELD]
    swapped = {("RGP (ε = 8)", r): v for (_, r), v in rising.items()}
    assert [v.verdict for v in claims.rank_trade_off(numbers_of(swapped, name="fig5", x=x))] == [claims.FAILED]


def spectra(earlier, own, rank):
    residual = {"historical": [None, earlier, earlier], "self": [own] * 3, "update": [None, 0.5, 0.5], "random": 0.9}
    matrix = {"name": "head.weight", "shape": [10, 20], "stable_rank": [rank] * 3, "residual": residual}
    return {"epochs": [0, 1, 2], "matrices": [matrix]}


@pytest.mark.parametrize(("earlier", "rank", "verdict"), [(0.3, 2.0, claims.HELD), (0.8, 30.0, claims.FAILED)])
def test_claims_about_gradients(earlier, rank, verdict):
    numbers = numbers_of({("RGP", None): [None]}, name="fig3", measure="residual")
    numbers.item.columns[0].matrices.update({"head": "head*"})
    assert [v.verdict for v in claims.history_aligns(numbers)] == [claims.NOT_RUN]
    numbers.spectra["RGP", "CIFAR-10"] = spectra(earlier, 0.2, rank)
    assert [v.verdict for v in claims.history_aligns(numbers)] == [verdict]
    assert [v.verdict for v in claims.low_stable_rank(numbers)] == [verdict]
    lines = numbers.lines(numbers.item.columns[0])
    assert lines["RGP, head: one epoch earlier"] == [(1, earlier), (2, earlier)] and len(lines) == 4


# ---------------------------------------------------------------------- pages


def test_pages_hold_what_was_run_beside_the_papers_numbers_and_load_nothing(small):
    made = reproduction(small, "table2")
    cell = next(cell for cell in made.items[0].cells if cell.row == "RGP")
    made.store.add(cell, "accuracy", {"accuracy": 0.4321, "held_out_rows": 359})
    (small / "out").mkdir(exist_ok=True)
    files = made.write(small / "docs" / "page.md")
    text = (small / "docs" / "page.md").read_text()
    assert "| RGP | 43.2 | 12.5 |" in text and "| DP-SGD | not run |  |" in text
    html = (small / "out" / "mini.html").read_text()
    assert "43.2" in html and "http" not in html.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")
    assert str(small / "docs" / "page.md") in files
    assert Store(made.store.path).get(cell)["accuracy"] == 0.4321


def test_figures_are_drawn_and_marked(small):
    pytest.importorskip("matplotlib")
    from rgp.reproduce import content, figures

    numbers = numbers_of({("RGP", None): [None]}, name="fig3", measure="residual")
    numbers.item.columns[0].matrices.update({"head": "head*"})
    numbers.spectra["RGP", "CIFAR-10"] = spectra(0.3, 0.2, 2.0)
    section = content.section(numbers)
    assert section.private and len(section.panels[0].lines) == 4
    figures.draw(section, small / "fig.png")
    assert (small / "fig.png").stat().st_size > 5000
    assert content.NOT_COVERED in page.page([section], title="<b>", words=["`code`"])
    assert "&lt;b&gt;" in page.page([section], title="<b>", words=[])


def test_lines_of_a_figure_can_be_told_apart():
    from rgp.reproduce.figures import legend, looks

    names = [
        f"{who}, {part}: {kind}" for who in ("Full", "RGP") for part in "ab" for kind in ("own", "earlier", "random")
    ]
    found = looks(names + names[:3])  # of two panels
    assert len(set(found.values())) == len(names)
    assert found["Full, a: own"][0] == found["RGP, b: own"][0] != found["RGP, b: random"][0]
    assert legend(found)["own"][0] == found["RGP, b: own"][0]
    assert legend(found)["RGP, b"][1] == found["RGP, b: own"][1]
    assert set(legend(found)) == {"own", "earlier", "random", "Full, a", "Full, b", "RGP, a", "RGP, b"}
    found = looks([str(i) for i in range(20)])
    assert len(set(found.values())) == len(legend(found)) == 20
