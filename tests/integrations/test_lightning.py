"""`PrivateStrategy` under Lightning's own Trainer: the engine trains, and Lightning sees logical steps."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import rgp

try:
    import lightning.pytorch as pl
except ImportError:
    pl = pytest.importorskip("pytorch_lightning")

from rgp.integrations.lightning import PrivateStrategy

N = 60


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(6, 2)
        self.calls = 0

    def training_step(self, batch, batch_idx):
        self.calls += 1
        loss = F.cross_entropy(self.layer(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self.layer(batch[0]), batch[1]))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def rows():
    x = torch.randn(N, 6, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x[:, 0] > 0).long())


def strategy(**options):
    given = {"noise_multiplier": 1.0, "batch_size": 20, "microbatch_size": 8, "method": rgp.DPSGD(), "seed": 3}
    return PrivateStrategy(device="cpu", **{**given, **options})


def trainer(tmp_path, chosen, **options):
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return pl.Trainer(
        **{"default_root_dir": tmp_path, "max_epochs": 2, "accelerator": "cpu", "strategy": chosen, **quiet, **options}
    )


def test_it_is_the_engine_that_trains(tmp_path):
    """The weights are those of a plain loop over the same run; steps, schedule and validation follow logical steps."""
    module, chosen = Module(), strategy()
    fitted = trainer(tmp_path, chosen)
    fitted.fit(module, DataLoader(rows(), batch_size=5, shuffle=True), DataLoader(rows(), batch_size=30))
    assert fitted.global_step == len(chosen.run) == 6 == chosen.run.step_index and module.calls > 6
    assert "val_loss" in fitted.callback_metrics

    plain = Module()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    run = rgp.privatize(
        plain.layer,
        optimizer,
        rows(),
        noise_multiplier=1.0,
        batch_size=20,
        microbatch_size=8,
        method=rgp.DPSGD(),
        seed=3,
        epochs=2,
    )
    for x, y in run:
        if run.step(F.cross_entropy(plain.layer(x), y)) and run.step_index == 3:
            optimizer.param_groups[0]["lr"] = 0.25  # the epoch's end
    run.close()
    assert chosen.run.epsilon() == pytest.approx(run.epsilon())
    torch.testing.assert_close(module.layer.weight, plain.layer.weight)


@pytest.mark.parametrize("asked", [False, True])
def test_training_loss_is_logged_only_if_asked_for(tmp_path, asked):
    fitted = trainer(tmp_path, strategy(log_training=asked))
    fitted.fit(Module(), DataLoader(rows(), batch_size=5))
    assert ("train_loss" in fitted.callback_metrics) == asked
    assert float(fitted.callback_metrics["epsilon"]) > 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gradient_clip_val": 1.0}, "gradient_clip_val"),
        ({"accumulate_grad_batches": 2}, "accumulate_grad_batches"),
        ({"precision": "bf16-mixed"}, "precision"),
        ({"max_steps": 3}, "max_steps"),
    ],
)
def test_what_cannot_be_private_is_refused(tmp_path, options, words):
    with pytest.raises(ValueError, match=words):
        trainer(tmp_path, strategy(), **options).fit(Module(), DataLoader(rows(), batch_size=5))


def test_what_lightning_decides_is_not_given_twice():
    with pytest.raises(ValueError, match="epochs=3"):
        strategy(epochs=3)
