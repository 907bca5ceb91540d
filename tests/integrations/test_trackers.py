"""What W&B and MLflow really keep of a private run, through the Trainer's own callbacks. Skipped without these packages."""

import sqlite3

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from tiny_trainer import make_rows, privacy, trainer

PRIVATE = (b"train/loss", b"train_loss", b"train/grad_norm", b"clip_fraction", b"gradients/")


@pytest.mark.parametrize("asked", [False, True])
def test_wandb_keeps_no_private_number_unless_asked(tmp_path, asked):
    wandb = pytest.importorskip("wandb")
    wandb.init(
        dir=tmp_path, mode="offline", project="test", settings=wandb.Settings(silent=True)
    )  # the callback takes it
    options = {"report_to": ["wandb"], "evaluate": make_rows(8, 1), "eval_strategy": "steps", "eval_steps": 1}
    trainer(tmp_path / "out", chosen=privacy(log_loss=asked), **options).train()
    wandb.finish()
    wandb.teardown()  # ends W&B's own process, which on a busy machine is still writing the file
    [kept] = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    kept = kept.read_bytes()
    assert b"train/epsilon" in kept and b"eval/loss" in kept
    assert (b"train/loss" in kept) == asked
    assert asked or [name for name in PRIVATE if name in kept] == []


@pytest.mark.parametrize("asked", [False, True])
def test_mlflow_keeps_no_private_number_unless_asked(tmp_path, monkeypatch, asked):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "mlflow.db"
    mlflow.set_tracking_uri(f"sqlite:///{file}")
    trainer(tmp_path / "out", chosen=privacy(log_loss=asked), report_to=["mlflow"]).train()
    kept = {name for (name,) in sqlite3.connect(file).execute("select distinct key from metrics")}
    assert {"epsilon", "learning_rate"} <= kept
    assert ("loss" in kept) == ("train_loss" in kept) == asked
    assert not [name for name in kept if "norm" in name or "clip" in name]


@pytest.mark.parametrize(("watch", "refused"), [("gradients", True), ("all", True), ("parameters", False)])
def test_gradients_are_not_watched(tmp_path, monkeypatch, watch, refused):
    """The hooks of W&B would see gradients without noise."""
    from rgp.integrations.arguments import refuse
    from tiny_trainer import arguments

    monkeypatch.setenv("WANDB_WATCH", watch)
    args = arguments(tmp_path)
    refuse(args)  # report_to="none": nobody watches
    args.report_to = ["wandb"]
    if refused:
        with pytest.raises(ValueError, match=r"WANDB_WATCH cannot be used in private training: .* before noise"):
            refuse(args)
    else:
        refuse(args)
