"""`PrivateTrainer`: the Hugging Face Trainer, trained by `rgp.privatize`.

train       our loop: Poisson batches, per-example clipping, noise, any optimizer; callbacks, logging, evaluation and
            checkpoints happen where the Trainer's own loop has them
output_dir  checkpoint-N/ as always, and _privacy/: the ledger, and the state that resume_from_checkpoint resumes from
save_model  the model, with README.md and the privacy card

    >>> from transformers import TrainingArguments
    >>> privacy = PrivacyArguments(epsilon=8.0, batch_size=512)
    >>> trainer = PrivateTrainer(model, args, train_dataset=data, privacy=privacy)  # doctest: +SKIP
    >>> trainer.train()  # doctest: +SKIP
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainerState
from transformers.modelcard import TrainingSummary
from transformers.trainer_callback import ExportableState
from transformers.trainer_pt_utils import find_batch_size
from transformers.trainer_utils import TrainOutput, get_last_checkpoint, speed_metrics
from transformers.utils import logging

import rgp
from rgp import accounting
from rgp.cards import EpsilonSoFar, card_text, make_card
from rgp.files import write_text
from rgp.integrations.arguments import PrivacyArguments, logical_batch, refuse, strategy, taken_over
from rgp.integrations.losses import ExampleLosses
from rgp.members import Members
from rgp.run import Run
from rgp.sampling import check_dataset
from rgp.units import ROWS_PER_UNIT

__all__ = ["PrivacyArguments", "PrivateTrainer"]

RECORD = "arguments.json"  # the PrivacyArguments of the run
FOLDER = "_privacy"  # in output_dir; files whose names begin so are not uploaded by the Trainer
logger = logging.get_logger(__name__)


class PrivateTrainer(ExampleLosses):
    """`transformers.Trainer` with one more argument, `privacy`; and `public_loss`, for PrivacyArguments(source="public").

    The loss of an example is its own: with token labels, the mean over the example's tokens. A compute_loss of yours must
    be the mean of one loss per example, or the vector of these.
    """

    state: Any
    control: Any
    _created_lr_scheduler: bool

    def __init__(
        self, *args: Any, privacy: PrivacyArguments, public_loss: Callable[[], Tensor] | None = None, **kwargs: Any
    ) -> None:
        if not isinstance(privacy, PrivacyArguments):
            raise TypeError(f"privacy must be a PrivacyArguments; got {privacy!r}")
        given = kwargs.get("args", args[1] if len(args) > 1 else None)
        if given is not None:
            refuse(given)  # before anything is compiled, sharded or uploaded
        super().__init__(*args, **kwargs)
        self.privacy, self.public_loss = privacy, public_loss
        self.run: Run | None = None  # of the last train()
        self._curve: Any = None
        for name in ("training_step", "get_train_dataloader", "_get_train_sampler"):
            if getattr(type(self), name) is not getattr(Trainer, name):
                raise TypeError(
                    f"{type(self).__name__}.{name} would never be called: sampling and steps are the engine's. Override "
                    "compute_loss, or use rgp.privatize with a loop of your own."
                )
        if self.train_dataset is not None:
            self._measure()

    def _measure(self) -> None:
        self._size = check_dataset(self.train_dataset)
        self._members = None
        if self.privacy.units is not None:
            self._members = find_members(self.train_dataset, self.privacy.units, self.privacy.rows_per_unit)
            self._size = self._members.unit.size
        self._batch_size = logical_batch(self.args, self.privacy)
        if self._batch_size > self._size:
            what = "size of train_dataset" if self._members is None else f"number of persons ({self.privacy.units})"
            raise ValueError(f"the logical batch size {self._batch_size} must be at most {self._size}, the {what}")

    # ------------------------------------------------------------------ training

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: Any = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        args = self.args
        if self.train_dataset is None:
            raise ValueError("train() needs train_dataset")
        if self.run is not None:
            raise ValueError(
                "this trainer has trained already: a second run on the same data would add to epsilon, and the model's card "
                "would not say so. Use resume_from_checkpoint, or make a new trainer and account for both runs."
            )
        self._measure()  # train_dataset may have been set since
        steps = self._steps()
        # made anew for every run, as in the Trainer's own loop; before privatize, which turns requires_grad off
        self.create_optimizer()
        if self._created_lr_scheduler:
            self.lr_scheduler, self._created_lr_scheduler = None, False
        self.create_scheduler(num_training_steps=steps)
        self.model_wrapped = self.model
        self.model.train()
        run = self._make_run(steps, resume_from_checkpoint)
        run.same_passes = True  # with several processes: callbacks and evaluation talk to the other ranks
        self.run = run
        self._curve = EpsilonSoFar(run) if self.privacy.private else None
        self._begin_state(run, resume_from_checkpoint, trial)
        for line in taken_over(args, self.privacy, self._batch_size, run.mechanism.rate(0)):
            logger.warning(f"private training: {line}")
        if self.privacy.number_of_bands not in (None, 1):  # of the default, privatize has told
            logger.warning(f"private training: {run.mechanism.noise_words()}")
        for attribute in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, attribute, getattr(self, attribute))
        self.callback_handler.train_dataloader = run
        hooks = [
            self.optimizer.register_step_pre_hook(self._before_optimizer),
            self.optimizer.register_step_post_hook(self._after_optimizer),
        ]
        self._loss_sum, self._examples, self._loss_total, self._seen_total = 0.0, 0, 0.0, 0
        self._logged_at = first = self.state.global_step
        began = time.time()
        try:
            self.control = self.callback_handler.on_train_begin(args, self.state, self.control)
            if args.eval_on_start:
                self._evaluate(trial, ignore_keys_for_eval, skip_scheduler=True)
            self._loop(run, trial, ignore_keys_for_eval)
            if run.step_index > 0 and not args.save_only_model and (Path(args.output_dir) / FOLDER / "latest").exists():
                run.save(Path(args.output_dir) / FOLDER)
        finally:
            for hook in hooks:
                hook.remove()
            run.close()
        memory: dict[str, Any] = {}
        self._memory_tracker.stop_and_update_metrics(memory)  # which knows its caller by name
        return self._end(run, began, run.step_index - first, memory)

    def _loop(self, run: Run, trial: Any, ignore_keys: list[str] | None) -> None:
        fresh, epoch = True, int(self._epochs(run.step_index))
        self.control = self.callback_handler.on_epoch_begin(self.args, self.state, self.control)
        for batch in run:
            self._catch_up(run, trial, ignore_keys)  # draws that were empty
            if fresh:
                self.control = self.callback_handler.on_step_begin(self.args, self.state, self.control)
            if not self.model.training:
                self.model.train()  # an evaluation left it otherwise
            inputs = self._prepare_inputs(batch)
            examples = find_batch_size(inputs) or 1
            loss = self.compute_loss(self.model, inputs)
            loss = loss.mean() if loss.dim() else loss
            ended = run.step(loss)
            if run.rehearsing:
                fresh = False
                continue
            fresh = ended
            self._loss_sum += loss.item() * examples
            self._examples += examples
            if not fresh:
                self.control = self.callback_handler.on_substep_end(self.args, self.state, self.control)
                continue
            self._catch_up(run, trial, ignore_keys)
            if int(self._epochs(run.step_index)) > epoch or run.finished:
                epoch = int(self._epochs(run.step_index))
                self.control = self.callback_handler.on_epoch_end(self.args, self.state, self.control)
                self._log_evaluate_save(run, trial, ignore_keys)
                if not run.finished:
                    self.control = self.callback_handler.on_epoch_begin(self.args, self.state, self.control)
            if self.control.should_training_stop:
                break
        self._catch_up(run, trial, ignore_keys)

    def _catch_up(self, run: Run, trial: Any, ignore_keys: list[str] | None) -> None:
        """Bring the Trainer's count of steps up to the run's."""
        while self.state.global_step < run.step_index:
            self.state.global_step += 1
            self.state.epoch = self._epochs(self.state.global_step)
            self.control = self.callback_handler.on_step_end(self.args, self.state, self.control)
            self._log_evaluate_save(run, trial, ignore_keys)

    def _log_evaluate_save(self, run: Run, trial: Any, ignore_keys: list[str] | None) -> None:
        if self.control.should_log and self.state.global_step > self._logged_at:
            logs: dict[str, float] = {"learning_rate": self._rate_used}
            if self.privacy.log_loss and self._examples:
                logs = {"loss": self._loss_sum / self._examples, **logs}
            self._loss_total, self._seen_total = self._loss_total + self._loss_sum, self._seen_total + self._examples
            self._loss_sum, self._examples, self._logged_at = 0.0, 0, self.state.global_step
            self.log(logs)
        if self.control.should_evaluate:
            with run.averaged():
                metrics = self._evaluate(trial, ignore_keys)
            best = self._determine_best_metric(metrics=metrics, trial=trial)
            if str(getattr(self.args.save_strategy, "value", self.args.save_strategy)) == "best":
                self.control.should_save = best
        if self.control.should_save:
            if not self.args.save_only_model:
                run.save(Path(self.args.output_dir) / FOLDER)  # first: it must never be behind the other
            with run.averaged():
                self._save_checkpoint(self.model, trial)
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)

    def _end(self, run: Run, began: float, steps: int, memory: dict[str, Any]) -> TrainOutput:
        metrics = speed_metrics("train", began, num_samples=steps * self._batch_size, num_steps=steps)
        seen = self._seen_total + self._examples
        loss = (self._loss_total + self._loss_sum) / seen if seen and self.privacy.log_loss else math.nan
        if self.privacy.log_loss:
            metrics["train_loss"] = loss
        metrics.update(memory)
        self.log(metrics)
        if run.ema is not None:  # for good: the mean is what is evaluated and saved from now on
            parameters = dict(self.model.named_parameters())
            with torch.no_grad():
                for name, mean in run.ema.state.items():
                    parameters[name].copy_(mean)
        if self.args.load_best_model_at_end and self.state.best_model_checkpoint is not None:
            self._load_best_model()
        self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
        self.is_in_train = False
        return TrainOutput(self.state.global_step, loss, metrics)

    # ------------------------------------------------------------------ what the run is made of

    def _steps(self) -> int:
        if self.args.max_steps > 0:
            return self.args.max_steps
        return accounting.planned_steps(self.args.num_train_epochs, self._size, self._batch_size)

    def _epochs(self, step: int) -> float:
        return step * self._batch_size / self._size

    def _make_run(self, steps: int, resume: str | None) -> Run:
        args, privacy = self.args, self.privacy
        dataset, collate = self._data()
        loading: dict[str, Any] = {
            "collate_fn": collate,
            "scheduler": self.lr_scheduler,
            "microbatch_size": args.per_device_train_batch_size,
            "workers": args.dataloader_num_workers,
            "pin_memory": args.dataloader_pin_memory and args.device.type == "cuda",
            "lengths": self._lengths(),
            "units": self._members,
            "public_loss": self.public_loss,
        }
        method, folder = privacy.make_method(), Path(args.output_dir) / FOLDER
        if privacy.private:
            self.check_losses(dataset, collate)
        if resume is not None:
            self._check_record(folder)
            last = get_last_checkpoint(args.output_dir)
            if last is None or Path(last).resolve() != Path(resume).resolve():
                raise ValueError(
                    f"resume_from_checkpoint={resume!r}: only the last checkpoint of output_dir, "
                    f"{last!r}, can be resumed. Steps after an earlier one were released, and would be charged again."
                )
            run = rgp.resume(
                folder, self.model, self.optimizer, dataset, method=method, batch_size=self._batch_size, **loading
            )
            if run.mechanism.steps != steps:
                raise ValueError(
                    f"the run was planned for {run.mechanism.steps} steps, and cannot become one of {steps}"
                )
            return run
        if (folder / "ledger.jsonl").exists():
            raise ValueError(
                f"output_dir={args.output_dir!r} holds a private run. Resume it: train(resume_from_checkpoint=True); or "
                "choose another output_dir. What was released there counts against the same data."
            )
        budget = None
        if privacy.epsilon is not None:
            budget = rgp.Budget(privacy.epsilon, privacy.delta, accountant=privacy.accountant)
        clip: Any = privacy.clip if privacy.private else None
        run = rgp.privatize(
            self.model,
            self.optimizer,
            dataset,
            batch_size=self._batch_size,
            method=method,
            budget=budget,
            noise_multiplier=privacy.noise_multiplier,
            delta=None if budget is not None else privacy.delta,
            steps=steps,
            clip=rgp.AutoClip(privacy.clip) if privacy.auto_clip and privacy.private else clip,
            seed=privacy.noise_seed,
            secure_noise=privacy.secure_noise,
            ema=privacy.ema,
            bands=privacy.number_of_bands,
            folder=folder,
            **loading,
        )
        if run.ranks.first:
            write_text(folder / RECORD, json.dumps(privacy.record(), indent=2) + "\n")
        return run

    def _check_record(self, folder: Path) -> None:
        """Refuse other privacy arguments for a run that is resumed: they are on its card."""
        if not (folder / RECORD).exists():  # another machine's
            return
        recorded = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        for name, value in json.loads(json.dumps(self.privacy.record())).items():
            if name == "bands" and value is None:  # the default goes on with what was chosen, by whichever version
                continue
            if name in recorded and recorded[name] != value:
                raise ValueError(
                    f"PrivacyArguments.{name} is {value!r}, and the run in {str(folder.parent)!r} was made with "
                    f"{recorded[name]!r}: resume it with what it was made with, or start another run"
                )

    def _data(self) -> tuple[Any, Any]:
        """The dataset and the collator, as the Trainer's own data loader has them."""
        dataset, collate = self.train_dataset, self.data_collator
        if hasattr(dataset, "column_names") and hasattr(dataset, "remove_columns"):
            return self._remove_unused_columns(dataset, description="training"), collate
        return dataset, self._get_collator_with_removed_columns(collate, description="training")

    def _lengths(self) -> Sequence[float] | None:
        """Tokens of every example, where group_by_length asks for them or the dataset has them."""
        dataset: Any = self.train_dataset
        if getattr(dataset, "lengths", None) is not None:
            return dataset.lengths
        if strategy(self.args) != "group_by_length":
            return None
        column = self.args.length_column_name
        if column in (getattr(dataset, "column_names", None) or ()):
            return list(dataset[column])
        if not isinstance(dataset[0], dict) or "input_ids" not in dataset[0]:
            raise ValueError(f"group_by_length needs input_ids in every example, or a column {column!r}")
        return [len(dataset[i]["input_ids"]) for i in range(len(dataset))]

    def _begin_state(self, run: Run, resume: str | None, trial: Any) -> None:
        callbacks = [c for c in [*self.callback_handler.callbacks, self.control] if isinstance(c, ExportableState)]
        self.state = TrainerState(stateful_callbacks=callbacks)
        if resume is not None:
            self.state = TrainerState.load_from_json(os.path.join(resume, "trainer_state.json"))
            self._load_callback_state()
        self.state.is_hyper_param_search = False
        self.state.train_batch_size = self.args.per_device_train_batch_size
        self.state.compute_steps(self.args, run.mechanism.steps)
        epochs = math.ceil(self._epochs(run.mechanism.steps))
        self.state.init_training_references(self, run.mechanism.steps, epochs, trial)
        self.state.global_step = run.step_index
        self.state.epoch = self._epochs(run.step_index)
        self._rate_used = self._get_learning_rate()

    def _before_optimizer(self, *_: Any) -> None:
        self._rate_used = self._get_learning_rate()
        self.control = self.callback_handler.on_pre_optimizer_step(self.args, self.state, self.control)

    def _after_optimizer(self, *_: Any) -> None:
        self.control = self.callback_handler.on_optimizer_step(self.args, self.state, self.control)

    # ------------------------------------------------------------------ epsilon, logs, files

    def epsilon(self, delta: float | None = None) -> float:
        """Spent so far, from the ledger; inf where nothing is protected."""
        if self.run is None:
            raise ValueError("nothing was trained yet")
        return self.run.epsilon(delta)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log these values, and with them epsilon, an upper bound on what was spent."""
        if self.run is not None and self._curve is not None:
            logs = {**logs, "epsilon": self._curve.after(self.run)}
        super().log(logs, *args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The model as always; with README.md, privacy_card.json and privacy_card.md once there is something to say."""
        super().save_model(output_dir, _internal_call=_internal_call)
        if self.run is not None and not _internal_call and self.args.should_save:
            self._write_cards(Path(output_dir or self.args.output_dir), {})

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """README.md in output_dir: the Trainer's, without its table of losses on private data, and the privacy card."""
        names = ("language", "license", "tags", "model_name", "finetuned_from", "tasks", "dataset_tags", "dataset")
        self._write_cards(Path(self.args.output_dir), {**dict(zip(names, args, strict=False)), **kwargs})

    def _write_cards(self, folder: Path, about: dict[str, Any]) -> None:
        tags = about.get("tags") or []
        about["tags"] = [*([tags] if isinstance(tags, str) else tags), "differential-privacy", "rgp"]
        summary = TrainingSummary.from_trainer(self, **about)
        summary.eval_lines, summary.eval_results = None, None  # losses and scores on what may be private data
        text = summary.to_model_card()
        folder.mkdir(parents=True, exist_ok=True)
        if self.run is not None:
            card = self.privacy_card()
            text += "\n\n" + card_text(card).replace("# Privacy card", "## Privacy", 1)
            write_text(folder / "privacy_card.json", json.dumps(card, indent=2) + "\n")
            write_text(folder / "privacy_card.md", card_text(card))
        write_text(folder / "README.md", text)

    def privacy_card(self) -> dict[str, Any]:
        """What was proven about the trained model. Nothing in it comes from private data without noise."""
        if self.run is None:
            raise ValueError("nothing was trained yet")
        name = getattr(getattr(self.model, "config", None), "_name_or_path", "") or type(self.model).__name__
        return make_card(
            self.run,
            method=self.privacy.method,
            dataset=type(self.train_dataset).__name__,
            model=name,
            secure_noise=self.privacy.secure_noise,
            seed_known=self.run.seed_known,
        )

    def hyperparameter_search(self, *_: Any, **__: Any) -> Any:
        raise ValueError(
            "hyperparameter_search: every trial would be a release of its own, and no card would count them"
        )

    # the run's own checkpoint holds these, without pickle
    def _save_optimizer_and_scheduler(self, output_dir: str) -> None: ...
    def _save_scaler(self, output_dir: str) -> None: ...
    def _save_rng_state(self, output_dir: str) -> None: ...
    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None: ...


def find_members(dataset: Any, column: str, rows_per_unit: int | None) -> Members:
    """The units in a column of the dataset; or in a key of its items, where it has no columns."""
    names = getattr(dataset, "column_names", None)
    if names is None and isinstance(dataset[0], dict):
        names = list(dataset[0])
    if column not in (names or ()):
        raise ValueError(
            f"units={column!r}: train_dataset has no such column; it has {', '.join(names or []) or 'none'}"
        )
    columns = hasattr(dataset, "column_names")
    ids = list(dataset[column]) if columns else [dataset[i][column] for i in range(len(dataset))]
    return Members(ids, rows_per_unit=ROWS_PER_UNIT if rows_per_unit is None else rows_per_unit, column=column)
