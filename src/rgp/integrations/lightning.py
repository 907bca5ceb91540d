"""`PrivateStrategy`: a Lightning Trainer whose `fit` is a private run. The LightningModule stays as it is.

    trainer = Trainer(max_epochs=3, strategy=PrivateStrategy(budget=rgp.Budget(epsilon=8.0), batch_size=1024, microbatch_size=32))
    trainer.fit(module, DataLoader(dataset, batch_size=32))      # its dataset and collate_fn are used, its sampler is not
    trainer.strategy.run.epsilon()

For Lightning a batch is one logical step: hooks, validation, schedulers and `global_step` count those. The strategy calls
`training_step` for each micro-batch of it, and gives the losses to the run, which clips, adds noise and steps the optimizer.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import rgp
from rgp.cards import EpsilonSoFar
from rgp.run import Run

try:
    from lightning.pytorch.strategies import SingleDeviceStrategy
except ImportError:  # the same library under its other name
    from pytorch_lightning.strategies import SingleDeviceStrategy

__all__ = ["PrivateStrategy"]


class LogicalSteps:
    """What Lightning iterates over: as many places as an epoch has logical steps. The rows come from the run."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.steps))


class PrivateStrategy(SingleDeviceStrategy):
    """Private training on one device. Keyword arguments are those of `rgp.privatize`; the epochs are the Trainer's.

    log_training: whether what `training_step` logs is logged. It comes from private rows without noise, and epsilon does not
        cover it, so by default it is left out; epsilon is logged in its place. `validation_step` logs as always: see
        that its rows are public, or keep what it logs to yourself.
    """

    def __init__(self, *, device: str | torch.device | None = None, log_training: bool = False, **privacy: Any) -> None:
        super().__init__(device=device or ("cuda:0" if torch.cuda.is_available() else "cpu"))
        for name in ("epochs", "steps", "scheduler", "collate_fn"):
            if name in privacy:
                raise ValueError(
                    f"{name}={privacy[name]!r}: Lightning has it already (max_epochs, configure_optimizers, DataLoader)"
                )
        self.privacy, self.log_training = privacy, log_training
        self.run: Run | None = None
        self._batches: Iterator[Any] | None = None
        self._curve: EpsilonSoFar | None = None

    # ------------------------------------------------------------------ the run in place of the loader

    def process_dataloader(self, dataloader: Any) -> Any:
        trainer = self.lightning_module.trainer
        if not trainer.training:
            return super().process_dataloader(dataloader)
        if self.run is None:
            self._refuse(trainer)
            self.run = rgp.privatize(
                self.lightning_module,
                self.optimizers[0],
                getattr(dataloader, "dataset", dataloader),
                collate_fn=getattr(dataloader, "collate_fn", None),
                epochs=trainer.max_epochs,
                **self.privacy,
            )
            self._batches = iter(self.run)
            self._curve = EpsilonSoFar(self.run) if min(self.run.mechanism.sigmas) > 0 else None
        steps = len(self.run)
        if steps % trainer.max_epochs:
            warnings.warn(
                f"{steps} steps do not fill {trainer.max_epochs} epochs evenly; Lightning's last epoch is shorter"
            )
        return LogicalSteps(-(-steps // trainer.max_epochs))

    def _refuse(self, trainer: Any) -> None:
        """Raise ValueError for what private training cannot allow, with what to do."""
        module = self.lightning_module
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
        refused = [
            (
                not module.automatic_optimization,
                "manual optimization",
                "use rgp.privatize and run.step(loss) in a loop of your own",
            ),
            (
                len(self.optimizers) != 1,
                f"{len(self.optimizers)} optimizers",
                "one run has one; use rgp.privatize for each",
            ),
            (
                trainer.accumulate_grad_batches != 1,
                "accumulate_grad_batches",
                "batch_size= is the logical batch already",
            ),
            (trainer.gradient_clip_val, "gradient_clip_val", "clip= bounds the gradient of each example"),
            (
                trainer.precision != "32-true",
                f"precision={trainer.precision}",
                "load the model in the precision you want",
            ),
            (
                not trainer.max_epochs or trainer.max_epochs < 0,
                "max_epochs",
                "give it: noise is calibrated to the length",
            ),
            (
                trainer.max_steps not in (None, -1),
                "max_steps",
                "give max_epochs alone: it is what the noise is calibrated to",
            ),
            (trainer.ckpt_path, "ckpt_path", "Lightning's checkpoints have no ledger; use run.save and rgp.resume"),
            (
                any(isinstance(config.scheduler, plateau) for config in self.lr_scheduler_configs),
                "ReduceLROnPlateau",
                "it follows a metric, which is a use of the data without noise; take a schedule that is fixed in advance",
            ),
        ]
        for wrong, name, what_to_do in refused:
            if wrong:
                raise ValueError(f"{name} cannot be used in private training: {what_to_do}")

    # ------------------------------------------------------------------ one logical step

    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """All micro-batches of one logical step. The optimizer has taken its step when this returns."""
        assert self.run is not None and self._batches is not None
        total, count, ended = 0.0, 0, False
        while not ended:
            microbatch = next(self._batches, None)
            if microbatch is None:  # draws that were empty: the run is over a little earlier
                return None
            with self._without_logging():
                output = super().training_step(self.batch_to_device(microbatch, self.root_device), *args, **kwargs)
            loss = output["loss"] if isinstance(output, dict) else output
            ended = self.run.step(loss)
            total, count = total + float(loss.detach().mean()), count + 1
        if self._curve is not None:
            self.lightning_module.log("epsilon", self._curve.after(self.run), prog_bar=True)
        return torch.tensor(total / count)

    def backward(self, closure_loss: Any, *args: Any, **kwargs: Any) -> Any:
        return closure_loss  # done by the run, example by example

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        return closure()  # the run steps the optimizer, once the noise is in

    def teardown(self) -> None:
        if self.run is not None:
            self.run.close()
        super().teardown()

    @contextmanager
    def _without_logging(self) -> Iterator[None]:
        """Leave out what training_step logs, unless it was asked for."""
        module: Any = self.lightning_module
        if self.log_training:
            yield
            return
        hidden = {name: (lambda *_, **__: None) for name in ("log", "log_dict")}
        module.__dict__.update(hidden)
        try:
            yield
        finally:
            for name in hidden:
                module.__dict__.pop(name, None)
