"""`rgp train` and `rgp eval` as people meet them: what a run leaves behind, and what happens when things go wrong."""

import errno
import io
import json
import os
import signal
import sys

import numpy as np
import pytest
import torch

pytest.importorskip("yaml")
pytest.importorskip("typer")
pytest.importorskip("safetensors")
pytest.importorskip("sklearn")
from typer.testing import CliRunner

from rgp import checkpoint, cli
from rgp.errors import LedgerError
from rgp.ledger import Ledger
from rgp.train import config, folder, meters, progress, runner
from rgp.train.errors import Interrupted

SMALL = [
    "model.name=mlp",
    "model.width=16",
    "budget.noise_multiplier=2",
    "training.steps=4",
    "training.batch_size=40",
    "training.microbatch_size=32",
    "run.eval_every=2",
    "run.threads=1",
]
FIELDS = {
    *("method", "dataset", "model", "accuracy", "epsilon", "delta", "accountant", "noise_multiplier", "clip", "steps"),
    *("batch_size", "sampling_rate", "seed", "wall_seconds", "peak_memory_bytes", "parameters", "noise_dimensions"),
}


def rgp(*words):
    return CliRunner().invoke(cli.app, [str(word) for word in words])


def small(*changes, preset="digits-rgp"):
    sets = [word for change in (*SMALL, *changes) for word in ("--set", change)]
    return ["train", "--preset", preset, *sets]


def strict(text):
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def content(path):
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "a"
    result = rgp(*small(), "--out", out, "--json", "--diagnostics")
    assert result.exit_code == 0, result.output
    return out, strict(result.stdout)


def test_summary(finished):
    out, summary = finished
    assert summary == strict((out / "summary.json").read_text()) and set(summary) >= FIELDS
    assert "rgp" in summary["method"] and (summary["dataset"], summary["model"]) == ("digits", "mlp")
    assert 0 <= summary["accuracy"] <= 1 and 0 < summary["epsilon"] < 10 and summary["delta"] == 1e-5
    assert summary["sampling_rate"] == pytest.approx(40 / 1438) and summary["steps"] == 4
    assert summary["seed"] is None and summary["accountant"] == "pld" and summary["noise_multiplier"] == 2
    carried = 8 * (16 + 64 - 8)  # the first layer; the carriers of the second, 16 x 16, would be no smaller
    assert summary["noise_dimensions"] == carried + 16 + 16 * 16 + 16 + 160 + 10
    assert summary["parameters"] == 64 * 16 + 16 + 16 * 16 + 16 + 16 * 10 + 10


def test_what_may_be_published_is_apart_from_what_may_not(finished):
    out, summary = finished
    public, private = (folder.RunFolder(out).rows(out / name) for name in ("metrics.jsonl", "private.jsonl"))
    assert [row["step"] for row in public] == [row["step"] for row in private] == [2, 4]
    for row in public:  # digits come without a test split: the held-out rows are private
        assert set(row) == {"step", "epsilon", "seconds", "step_seconds"}
    assert public[0]["epsilon"] <= public[1]["epsilon"] == pytest.approx(summary["epsilon"], rel=1e-3)
    assert {"accuracy", "training_loss", "bad_examples"} <= set(private[-1])
    assert private[-1]["norm_median"] > 0 and 0 <= private[-1]["clip_fraction"] <= 1
    assert (out / "private.jsonl").stat().st_mode & 0o077 == 0
    names = {path.name for path in (out / "model").iterdir()}
    assert names == {"model.safetensors", "model.json", "privacy_card.md", "privacy_card.json"}
    assert "accuracy" not in strict((out / "model" / "privacy_card.json").read_text())
    assert not (out / "secret.json").exists(), "a finished run needs its secret no more"


def test_the_privacy_card(finished):
    out, summary = finished
    card = strict((out / "model" / "privacy_card.json").read_text())
    assert card["private"] and card["epsilon"] == summary["epsilon"] and card["neighbours"] == "add-or-remove-one"
    ledger = Ledger.open(out)
    assert card["ledger"] == {"releases": 4, "head": ledger.head}
    assert card["sampling"]["kind"] == "Poisson" and not card["seed_known"] and card["unit"].startswith("one row")
    assert 0.01 < card["attack_bound"]["true_positive_rate"] < 1
    text = (out / "model" / "privacy_card.md").read_text()
    for words in ("differential privacy", "Not covered", "one row is added or removed", ledger.head, "Poisson"):
        assert words in text


def test_plan_and_config_are_kept(finished):
    out, _ = finished
    plan = strict((out / "plan.json").read_text())
    assert plan[0] | {"why": ""} == {
        "name": "1.weight", "shape": [16, 64], "treatment": "carried", "rank": 8, "noise_dimensions": 576, "why": ""
    }  # fmt: skip
    assert config.load(out / "config.yaml") == config.load(preset="digits-rgp", changes=SMALL)


def test_eval_measures_the_same(finished):
    out, summary = finished
    got = strict(rgp("eval", out, "--json").stdout)
    assert (got["accuracy"], got["epsilon"], got["releases"]) == (summary["accuracy"], summary["epsilon"], 4)
    assert "private data" in rgp("eval", out).stdout
    missing = rgp("eval", out / "nothing")
    assert missing.exit_code == 2 and "is not a run's folder" in missing.stderr


def test_an_existing_folder_is_refused_and_not_touched(finished):
    out, _ = finished
    before = content(out)
    again = rgp(*small(), "--out", out)
    assert again.exit_code == 2 and f"--out {out}-2" in again.stderr and "finished run" in again.stderr
    resumed = rgp("train", "--resume", "--out", out, "--json")
    assert resumed.exit_code == 0 and "nothing was done" in resumed.stderr and strict(resumed.stdout)["finished"]
    assert content(out) == before
    other = out.parent / "holiday"
    other.mkdir()
    (other / "photo").write_text("dear")
    assert rgp(*small(), "--out", other).exit_code == 2 and content(other) == {"photo": b"dear"}


def test_without_privacy_nothing_is_claimed(tmp_path):
    changes = [c for c in SMALL if not c.startswith("budget")]
    sets = [word for change in changes for word in ("--set", change)]
    result = rgp("train", "--preset", "digits-nonprivate", *sets, "--out", tmp_path / "run", "--json")
    assert result.exit_code == 0, result.output
    summary = strict(result.stdout)
    assert summary["epsilon"] is None and summary["delta"] is None and summary["noise_multiplier"] is None
    assert summary["noise_dimensions"] == 0
    assert "NOT private" in (tmp_path / "run" / "model" / "privacy_card.md").read_text()
    assert "NOT PRIVATE" in rgp("eval", tmp_path / "run").stdout


# ---------------------------------------------------------------------- interruptions


class InterruptAt(progress.Silent):
    """Presses Ctrl-C after a step."""

    def __init__(self, step):
        self.at = step

    def step(self, done, **_):
        if done == self.at:
            os.kill(os.getpid(), signal.SIGINT)


def weights(out):
    from safetensors.torch import load_file

    return load_file(out / "model" / "model.safetensors")


@pytest.mark.parametrize("more", [(), ("method.source=public", "method.public=noise")], ids=["history", "public"])
def test_ctrl_c_saves_and_resuming_gives_the_same_model(tmp_path, monkeypatch, more):
    changes = (*SMALL, *more, "run.seed=5", "optimizer.schedule=cosine", "run.checkpoint_seconds=0")
    settings = config.load(preset="digits-rgp", changes=changes)
    whole = runner.train(settings, tmp_path / "whole", progress=progress.Silent())
    sets = [word for change in changes for word in ("--set", change)]
    with monkeypatch.context() as patch:
        patch.setattr(progress, "for_stream", lambda: InterruptAt(3))
        stopped = rgp("train", "--preset", "digits-rgp", *sets, "--out", tmp_path / "cut")
    assert stopped.exit_code == 130 and not stopped.stdout
    assert f"rgp train --resume --out {tmp_path / 'cut'}" in stopped.stderr and "step 3 of 4" in stopped.stderr
    assert strict((tmp_path / "cut" / "summary.json").read_text())["finished"] is False
    assert not (tmp_path / "cut" / "model").exists()
    assert strict(rgp("eval", tmp_path / "cut", "--json").stdout)["weights"].startswith("checkpoint-3")

    refused = rgp("train", "--preset", "digits-rgp", *sets, "--out", tmp_path / "cut")
    assert refused.exit_code == 2 and "--resume" in refused.stderr
    changed = rgp(
        "train", "--preset", "digits-rgp", *sets, "--set", "method.rank=2", "--resume", "--out", tmp_path / "cut"
    )
    assert changed.exit_code == 2 and "method.rank = 2" in changed.stderr and "cannot change" in changed.stderr

    resumed = rgp("train", "--resume", "--out", tmp_path / "cut", "--json")
    assert resumed.exit_code == 0, resumed.output
    summary = strict(resumed.stdout)
    assert (summary["epsilon"], summary["accuracy"]) == (whole["epsilon"], whole["accuracy"])
    assert summary["releases"] == 4 and summary["seed"] == 5
    a, b = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert [r["step"] for r in folder.RunFolder(tmp_path / "cut").rows(tmp_path / "cut" / "metrics.jsonl")] == [2, 4]


def test_products_in_bfloat16(tmp_path, monkeypatch):
    """training.precision: passes of training run in bfloat16; weights, gradients and evaluations stay in float32."""
    seen, runs, make, train = set(), [], runner.setup.make, runner.Session.train

    def look(layer, _, out):
        if not (layer.training and runs[-1].rehearsing):  # rehearsals are in full precision
            seen.add((layer.training, out.dtype))

    def watched(settings):
        parts = make(settings)
        for layer in parts.model.modules():
            if isinstance(layer, torch.nn.Linear):
                layer.register_forward_hook(look)
        return parts

    def noted(self, run, board=None):
        runs.append(run)
        return train(self, run, board)

    monkeypatch.setattr(runner.setup, "make", watched)
    monkeypatch.setattr(runner.Session, "train", noted)
    outs = [tmp_path / "half", tmp_path / "full"]
    for out, precision in zip(outs, ("bfloat16", "float32"), strict=True):
        seen.clear()
        result = rgp(*small(f"training.precision={precision}", "run.seed=1"), "--out", out)
        assert result.exit_code == 0, result.output
        assert seen == {(True, getattr(torch, precision)), (False, torch.float32)}
    half, full = map(weights, outs)
    assert all(value.dtype == torch.float32 for value in half.values())
    assert any(not torch.equal(half[name], full[name]) for name in full)
    for name in full:  # the same noise: what is left is rounding
        torch.testing.assert_close(half[name], full[name], atol=5e-3, rtol=5e-2)


def test_a_second_ctrl_c_does_not_wait():
    with meters.Signals() as signals:
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.number == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_run_that_never_reached_its_first_checkpoint_starts_again(tmp_path, monkeypatch):
    out = tmp_path / "run"

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", fail)
        assert rgp(*small(), "--out", out).exit_code == 3
    assert (out / "ledger.jsonl").exists() and not (out / "latest").exists()
    assert rgp("train", "--resume", "--out", out).exit_code == 0


# ---------------------------------------------------------------------- disks


def full_after(calls, real):
    def write(*args, **keywords):
        nonlocal calls
        calls -= 1
        if calls < 0:
            raise OSError(errno.ENOSPC, "No space left on device", "the disk")
        return real(*args, **keywords)

    return write


@pytest.mark.parametrize("where", ["checkpoint", "ledger", "metrics"])
def test_a_full_disk_loses_nothing(tmp_path, monkeypatch, where):
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        if where == "checkpoint":
            patch.setattr(checkpoint, "_write_tensors", full_after(9, checkpoint._write_tensors))
        elif where == "ledger":
            real = full_after(2, Ledger._put)

            def put(self, line):
                try:
                    real(self, line)
                except OSError as error:
                    raise LedgerError("a release could not be recorded") from error

            patch.setattr(Ledger, "_put", put)
        else:
            patch.setattr(folder.RunFolder, "append", full_after(1, folder.RunFolder.append))
        result = rgp(*small("run.checkpoint_seconds=0"), "--out", out)
    assert result.exit_code == 3 and "disk is full" in result.stderr and "--resume" in result.stderr, result.output
    resumed = rgp("train", "--resume", "--out", out, "--json")
    assert resumed.exit_code == 0, resumed.output
    assert strict(resumed.stdout)["releases"] == 4, "nothing was charged twice"


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    wrong = rgp(*small(), "--out", tmp_path / "file" / "run")
    assert wrong.exit_code == 2 and "is a file" in wrong.stderr
    monkeypatch.setattr(folder.os, "access", lambda *_: False)
    refused = rgp(*small(), "--out", tmp_path / "run")
    assert refused.exit_code == 3 and "cannot be written" in refused.stderr and not (tmp_path / "run").exists()
    assert "--resume" not in refused.stderr, "there is nothing to go on with"


# ---------------------------------------------------------------------- wrong use


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["data.name=mnist", "data.folder={tmp}"], "rgp data get mnist"),
        (["training.batch_size=5000"], "training.batch_size = 5000: must be at most 1438"),
        (["budget.delta=0.01"], "budget.delta = 0.01: must be below 1/1438"),
        (["data.name={tmp}"], "{tmp}"),
        (["run.device=cuda:99"], "run.device = cuda:99: this machine has none"),
    ],
)
def test_what_only_the_data_can_tell(changes, words, tmp_path):
    changes = [c.format(tmp=tmp_path) for c in changes]
    result = rgp(*small(*changes), "--out", tmp_path / "run")
    assert result.exit_code == 2 and words.format(tmp=tmp_path) in result.stderr
    assert not (tmp_path / "run").exists() and "Traceback" not in result.output


def test_nothing_to_resume(tmp_path):
    assert rgp("train", "--resume", "--out", tmp_path / "no").exit_code == 2
    assert "no config.yaml" in rgp("train", "--resume", "--out", tmp_path).stderr
    assert "--resume needs --out" in rgp("train", "--resume").stderr


# ---------------------------------------------------------------------- other data


def test_a_published_test_split_may_be_published(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {
        f"x_{part}": rng.integers(0, 255, (n, 8, 8), dtype=np.uint8) for part, n in (("train", 200), ("test", 50))
    }
    arrays |= {f"y_{part}": rng.integers(0, 3, n) for part, n in (("train", 200), ("test", 50))}
    np.savez(tmp_path / "images.npz", **arrays)
    changes = [f"data.name={tmp_path / 'images.npz'}", "model.name=small-cnn", "model.width=8"]
    result = rgp(*small(*changes), "--out", tmp_path / "run", "--json")
    assert result.exit_code == 0, result.output
    rows = folder.RunFolder(tmp_path / "run").rows(tmp_path / "run" / "metrics.jsonl")
    assert rows[-1]["accuracy"] == strict(result.stdout)["accuracy"]
    assert strict((tmp_path / "run" / "model" / "privacy_card.json").read_text())["accuracy"] == rows[-1]["accuracy"]


def test_texts(tmp_path):
    transformers = pytest.importorskip("transformers")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film", "very"]
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "vocab.txt").write_text("\n".join(words))
    tokenizer = transformers.BertTokenizer(str(tmp_path / "bert" / "vocab.txt"))
    tokenizer.save_pretrained(tmp_path / "bert")
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    transformers.BertConfig(vocab_size=len(words), max_position_embeddings=32, **shape).save_pretrained(
        tmp_path / "bert"
    )
    # of different lengths: rows that are equal are on one side of the split
    rows = [{"text": f"{'very ' * (i % 20)}{('bad', 'good')[i % 2]} film", "label": i % 2} for i in range(120)]
    (tmp_path / "reviews.jsonl").write_text("\n".join(map(json.dumps, rows)))
    sets = [f"data.name={tmp_path / 'reviews.jsonl'}", f"model.name={tmp_path / 'bert'}", "model.width=null"]
    result = rgp(*small(*sets, "model.pretrained=false", "optimizer.name=adamw"), "--out", tmp_path / "run", "--json")
    assert result.exit_code == 0, result.output
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "model")
    assert model.config.num_labels == 2 and (tmp_path / "run" / "model" / "privacy_card.md").exists()
    assert strict(rgp("eval", tmp_path / "run", "--json").stdout)["accuracy"] == strict(result.stdout)["accuracy"]


# ---------------------------------------------------------------------- what is shown


def test_progress_is_plain_lines_where_there_is_no_terminal(monkeypatch):
    stream = io.StringIO()
    shown = progress.for_stream(stream)
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0)
    shown.start("rgp", 0, 10)
    shown.accuracy(0.5)
    shown.step(5, epsilon=1.234, examples=100)
    last = stream.getvalue().splitlines()[-1]
    assert (
        last.startswith("rgp: step 5/10, ") and "epsilon <= 1.24" in last and last.endswith("held-out accuracy 50.0%")
    )
    assert "examples/s" in last and "left" in last and "\x1b" not in stream.getvalue()


def test_progress_is_a_bar_on_a_terminal():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    shown = progress.for_stream(stream)
    shown.start("rgp", 0, 10)
    shown.accuracy(0.5)
    shown.step(5, epsilon=1.234, examples=100)
    shown.stop()
    for words in ("5/10", "ε ≤ 1.24", "accuracy 50.0%", "/s"):
        assert words in stream.getvalue()


def test_interrupted_says_how_to_go_on(tmp_path):
    assert "rgp train --resume --out runs/x" in str(Interrupted("runs/x", 1, 2, signal.SIGTERM))


# ---------------------------------------------------------------------- TensorBoard


def events(path):
    """{name: {step: value}} of all event files in a folder; what a later writer purged is left out, as on the board."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(path))
    board.Reload()
    return {name: {e.step: e.value for e in board.Scalars(name)} for name in board.Tags()["scalars"]}


def test_tensorboard_keeps_private_values_apart(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed: pip install 'rgp[tensorboard]'")
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(progress, "for_stream", lambda: InterruptAt(3))
        assert rgp(*small(), "--out", out, "--tensorboard", "--diagnostics").exit_code == 130
    resumed = rgp("train", "--resume", "--out", out, "--tensorboard", "--diagnostics", "--json")
    assert resumed.exit_code == 0, resumed.output
    public, private = events(out / "tensorboard"), events(out / "tensorboard-private")
    assert set(public) == {"epsilon", "seconds", "step_seconds"}
    assert {"accuracy", "training_loss", "bad_examples"} <= set(private) and not set(private) & set(public)
    assert public["epsilon"][4] == pytest.approx(strict(resumed.stdout)["epsilon"], rel=1e-3)
    assert private["accuracy"][4] == pytest.approx(strict(resumed.stdout)["accuracy"])
    assert all(set(steps) == {2, 4} for steps in (public | private).values())
    assert (out / "tensorboard-private").stat().st_mode & 0o077 == 0


def test_tensorboard_forgets_steps_that_are_taken_again(tmp_path):
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed: pip install 'rgp[tensorboard]'")
    for begin, rows in ((0, {2: 0.2, 4: 0.4, 6: 0.6}), (3, {4: 0.5})):  # the first process died after step 6
        board = progress.Board(tmp_path, begin)
        for step, epsilon in rows.items():
            board.add({"step": step, "epsilon": epsilon, "seconds": None}, public=True)
        board.close()
    assert events(tmp_path / "tensorboard") == {"epsilon": pytest.approx({2: 0.2, 4: 0.5})}


def test_tensorboard_that_is_missing_is_said_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    missing = rgp(*small(), "--out", tmp_path / "run", "--tensorboard")
    assert missing.exit_code == 2 and "rgp[tensorboard]" in missing.stderr and not (tmp_path / "run").exists()
