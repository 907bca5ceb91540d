"""PrivateTrainer: the Trainer's ways, the engine's numbers. LoRA adapters (peft) in the engine."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

import helpers
import rgp

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from rgp.integrations.losses import token_losses  # noqa: E402
from rgp.integrations.transformers import PrivacyArguments, PrivateTrainer  # noqa: E402
from tiny_trainer import N, arguments, collate, make_bert, make_gpt2, make_rows, privacy, trainer  # noqa: E402

# ---------------------------------------------------------------------- training


def test_it_is_the_engine_that_trains(tmp_path):
    """The same weights as a loop over rgp.privatize with the same seed; and epsilon from the same ledger."""
    model = make_bert()
    twin = copy.deepcopy(model)
    made = trainer(tmp_path, model, optim="sgd", lr_scheduler_type="linear")
    output = made.train()
    assert output.global_step == 3 and output.metrics["train_loss"] > 0

    optimizer = torch.optim.SGD(twin.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 - t / 3)
    twin.train()
    run = rgp.privatize(
        twin,
        optimizer,
        make_rows(),
        method=rgp.RGP(rank=2, source="weight"),
        noise_multiplier=8.0,
        clip=0.5,
        batch_size=12,
        steps=3,
        microbatch_size=4,
        seed=5,
        collate_fn=collate,
        scheduler=schedule,
    )
    for batch in run:
        run.step(twin(**batch).loss)
    run.close()
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    assert made.epsilon() == run.epsilon()
    logs = [row for row in made.state.log_history if "loss" in row]
    assert [row["step"] for row in logs] == [1, 2, 3] and logs[0]["learning_rate"] == pytest.approx(0.01)
    assert all(0 < row["epsilon"] <= made.epsilon() + 1e-9 for row in made.state.log_history)


class Recorder(transformers.TrainerCallback):
    def __init__(self):
        self.events = []

    def __getattribute__(self, name):
        if name.startswith("on_"):
            events = object.__getattribute__(self, "events")
            return lambda *args, **kwargs: events.append(name)
        return object.__getattribute__(self, name)


def test_callbacks_evaluation_and_logs_as_users_expect(tmp_path):
    seen = Recorder()
    made = trainer(
        tmp_path,
        callbacks=[seen],
        evaluate=make_rows(10, seed=1),
        max_steps=-1,
        num_train_epochs=2,
        eval_strategy="epoch",
        chosen=privacy(batch_size=10),
    )
    made.compute_metrics = lambda p: {"accuracy": float((p.predictions.argmax(1) == p.label_ids).mean())}
    made.train()
    count = seen.events.count
    assert made.state.global_step == made.state.max_steps == 8 == count("on_step_end") == count("on_step_begin")
    assert count("on_pre_optimizer_step") == count("on_optimizer_step") == 8
    assert count("on_epoch_begin") == count("on_epoch_end") == count("on_evaluate") == 2
    assert seen.events[0] == "on_init_end" and seen.events[-1] == "on_train_end"
    assert made.state.epoch == pytest.approx(2.0)
    metrics = made.evaluate()
    assert {"eval_loss", "eval_accuracy"} <= set(metrics)
    assert made.predict(make_rows(6)).predictions.shape == (6, 2)


@pytest.mark.parametrize("asked", [False, True])
def test_trackers_see_no_loss_on_training_data_unless_asked(tmp_path, asked):
    """W&B, MLflow and TensorBoard are callbacks that send what `on_log` gets and what the state holds."""
    sent = []

    class Tracker(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **_):
            sent.append(dict(logs))

    made = trainer(tmp_path, callbacks=[Tracker()], chosen=privacy(log_loss=asked))
    made.train()
    seen = {name for logs in [*sent, *made.state.log_history] for name in logs}
    assert sent and {"epsilon", "learning_rate"} <= seen
    assert ("loss" in seen) == ("train_loss" in seen) == asked
    assert not [name for name in seen if "norm" in name]


def test_a_callback_can_stop_training_and_less_is_spent(tmp_path):
    class Stop(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_training_stop = state.global_step >= 2

    full = trainer(tmp_path / "a", max_steps=6)
    full.train()
    short = trainer(tmp_path / "b", max_steps=6, callbacks=[Stop()])
    assert short.train().global_step == 2
    assert short.run.ledger.count == 2 and short.epsilon() < full.epsilon()


def test_save_model_writes_the_cards_and_no_private_number(tmp_path):
    made = trainer(tmp_path / "out", chosen=privacy(noise_multiplier=None, epsilon=0.5, batch_size=10))
    made.train()
    made.save_model(str(tmp_path / "model"))
    card = json.loads((tmp_path / "model" / "privacy_card.json").read_text())
    assert card["epsilon"] == made.epsilon() <= 0.5 and card["ledger"]["releases"] == 3
    readme = (tmp_path / "model" / "README.md").read_text()
    assert "differential privacy" in readme and card["ledger"]["head"] in readme and "differential-privacy" in readme
    loss = f"{made.state.log_history[0]['loss']:.4f}"
    assert loss not in readme and "Training Loss" not in readme
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    batch = collate(make_rows(4))
    assert torch.equal(again.eval()(**batch).logits, made.model.eval()(**batch).logits)
    made.create_model_card(model_name="mine", license="apache-2.0")
    assert "mine" in (tmp_path / "out" / "README.md").read_text()


def test_resume_gives_the_uninterrupted_run_and_charges_nothing_twice(tmp_path):
    class Crash(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step == 3:
                raise KeyboardInterrupt

    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch"}
    whole = trainer(tmp_path / "whole", **options)
    whole.train()
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path / "cut", callbacks=[Crash()], **options).train()
    assert (tmp_path / "cut" / "checkpoint-2" / "trainer_state.json").exists()
    with pytest.raises(ValueError, match="holds a private run"):
        trainer(tmp_path / "cut", **options).train()
    rest = trainer(tmp_path / "cut", **options)
    rest.train(resume_from_checkpoint=True)
    assert rest.state.global_step == 4
    assert [row["step"] for row in rest.state.log_history if "loss" in row] == [1, 2, 3, 4]
    for (name, ours), theirs in zip(rest.model.named_parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    assert rest.run.ledger.count == 4 and rest.epsilon() == whole.epsilon()
    older = trainer(tmp_path / "cut", **options)
    with pytest.raises(ValueError, match="only the last checkpoint"):
        older.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-2"))
    assert not list((tmp_path / "cut").glob("checkpoint-*/optimizer.pt"))  # nothing to unpickle


@pytest.mark.parametrize("changed", [{"noise_seed": None}, {"clip": 1.0}, {"overrides": {"*norm*": "frozen"}}])
def test_a_resumed_run_keeps_its_privacy_arguments(tmp_path, changed):
    """They are on its card."""
    trainer(tmp_path, save_strategy="steps", save_steps=1, max_steps=2).train()
    (name,) = changed
    with pytest.raises(ValueError, match=rf"PrivacyArguments\.{name} is .*, and the run in .* was made with"):
        trainer(tmp_path, chosen=privacy(**changed), max_steps=2).train(resume_from_checkpoint=True)


def test_a_warm_up_from_zero_with_a_fused_optimizer(tmp_path):
    private = trainer(tmp_path, warmup_steps=2, optim="adamw_torch_fused")
    private.train()
    assert private.run.step_index == 3


def test_memory_metrics(tmp_path):
    pytest.importorskip("psutil")
    assert trainer(tmp_path, skip_memory_metrics=False).train().global_step == 3


def test_a_dataset_that_is_given_later(tmp_path):
    private = trainer(tmp_path, num_train_epochs=1, max_steps=-1)
    private.train_dataset = make_rows(3 * N)
    private.train()
    assert private.run.mechanism.dataset_size == 3 * N and private.run.step_index == 10


def test_overrides_that_would_never_be_called_are_refused(tmp_path):
    class Mine(PrivateTrainer):
        def training_step(self, *args, **kwargs):
            return super().training_step(*args, **kwargs)

    with pytest.raises(TypeError, match=r"Mine\.training_step would never be called"):
        Mine(make_bert(), arguments(tmp_path), train_dataset=make_rows(), data_collator=collate, privacy=privacy())


def test_carriers_from_public_inputs(tmp_path):
    """As `privatize` would have them, and refused where only half of it is given."""
    with pytest.raises(ValueError, match="public_loss= go together"):
        trainer(tmp_path / "a", chosen=privacy(source="public")).train()
    models = [make_bert(), make_bert()]
    models[1].load_state_dict(models[0].state_dict())
    inputs = {k: v for k, v in collate(make_rows(6, seed=7)).items() if k != "labels"}
    for name, model in zip("cd", models, strict=True):
        loss = rgp.without_labels(lambda model=model: model(**inputs).logits)
        trainer(tmp_path / name, model, chosen=privacy(source="public"), public_loss=loss).train()
    first, second = (m.state_dict() for m in models)
    assert all(torch.equal(first[name], second[name]) for name in first)
    loss = rgp.without_labels(lambda: models[0](**inputs).logits)
    with pytest.raises(ValueError, match="public_loss= go together"):
        trainer(tmp_path / "b", models[0], public_loss=loss).train()


def test_a_second_run_on_the_same_data_is_refused(tmp_path):
    made = trainer(tmp_path, max_steps=1)
    made.train()
    with pytest.raises(ValueError, match="would add to epsilon"):
        made.train()


def test_without_noise_nothing_is_called_private(tmp_path):
    made = trainer(tmp_path, max_steps=1, chosen=privacy(noise_multiplier=0.0))
    with pytest.warns(UserWarning, match="NOTHING IS PRIVATE"):
        made.train()
    assert all("epsilon" not in row for row in made.state.log_history)
    made.save_model()
    assert "NOT private" in (tmp_path / "README.md").read_text()


# ---------------------------------------------------------------------- losses


def token_rows(count=N, seed=0):
    rows = make_rows(count, seed)
    return [{**row, "labels": row["input_ids"].clone()} for row in rows]


def test_token_losses_are_each_examples_own():
    generator = helpers.seeded(0)
    logits = torch.randn(3, 6, 7, generator=generator)
    labels = torch.randint(0, 7, (3, 6), generator=generator)
    labels[0, 3:] = -100
    labels[2] = -100
    found = token_losses(logits, labels, shift=True)
    for i, n in ((0, 3), (1, 6)):
        own = nn.functional.cross_entropy(logits[i, : n - 1], labels[i, 1:n])
        assert torch.allclose(found[i], own)
    assert found[2] == 0


def test_causal_language_model_with_examples_of_different_lengths(tmp_path):
    """The model's own loss, a mean over all tokens, would let a long text take from the others."""
    model = make_gpt2().double()
    twin, data = copy.deepcopy(model), token_rows(12)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = trainer(
            tmp_path,
            model,
            data,
            chosen=privacy(noise_multiplier=0.0, method="dpsgd", rank=None, source=None, batch_size=12),
            max_steps=1,
            optim="sgd",
            learning_rate=1.0,
            lr_scheduler_type="constant",
        )
        made.train()

    def loss(model, batch):
        return token_losses(model(input_ids=batch["input_ids"]).logits, batch["labels"], shift=True)

    gradients = helpers.per_example_gradients(twin, data, loss, collate)
    moved = dict(model.named_parameters())
    for entry in made.run.plan.trained:
        expected = sum(g[entry.name] for g in gradients) / 12
        change = dict(twin.named_parameters())[entry.name].detach() - moved[entry.name].detach()
        assert torch.allclose(change, expected, atol=1e-9), entry.name
    assert made.run.plan.trained


def question_rows(count=N):
    rows = make_rows(count)
    return [{**row, "start_positions": torch.tensor(1), "end_positions": torch.tensor(2)} for row in rows]


def make_question_model():
    return transformers.BertForQuestionAnswering(make_bert().config)


def whole_labels(rows):  # padding is labelled too
    batch = collate([{"input_ids": row["input_ids"]} for row in rows])
    return {**batch, "labels": batch["input_ids"].clone()}


@pytest.mark.parametrize("kind", ["a softmax over padding", "labels for padding", "no mask"])
def test_padding_that_counts_is_refused(tmp_path, kind):
    """An example's gradient would depend on the longest of its batch."""
    if kind == "a softmax over padding":
        rows = [{k: v for k, v in row.items() if k != "labels"} for row in question_rows()]
        private = trainer(tmp_path, make_question_model(), rows)
    elif kind == "labels for padding":
        private = trainer(tmp_path, make_gpt2(), token_rows(), privacy(overrides={"*": "exact"}))
        private.data_collator = whole_labels
    else:
        private = trainer(
            tmp_path, data=[{k: v for k, v in row.items() if k != "attention_mask"} for row in make_rows()]
        )
    with pytest.raises(rgp.UnsupportedError, match=r"depends? on the padding that a longer example brings"):
        private.train()
    assert private.run.ledger.count == 0


def test_a_class_made_from_a_language_model_is_one(tmp_path):
    class Mine(transformers.GPT2LMHeadModel):
        pass

    model = Mine(make_gpt2().config)
    private = trainer(tmp_path, model, token_rows())
    assert private._is_causal(model)
    private.train()


def test_a_loss_that_is_not_the_models_is_refused(tmp_path):
    class Doubled(transformers.GPT2LMHeadModel):
        def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
            found = super().forward(input_ids, attention_mask=attention_mask, labels=labels, **kwargs)
            if labels is not None:
                found.loss = 2 * found.loss  # as an auxiliary loss would
            return found

    with pytest.raises(rgp.UnsupportedError, match="the loss of Doubled is not the mean cross-entropy"):
        trainer(tmp_path, Doubled(make_gpt2().config), token_rows()).train()


def test_a_model_without_a_loss_of_its_own_is_trained_all_the_same(tmp_path):
    class Bare(transformers.GPT2LMHeadModel):
        def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
            found = super().forward(input_ids, attention_mask=attention_mask, **kwargs)
            assert found.loss is None
            return found

    assert trainer(tmp_path, Bare(make_gpt2().config), token_rows()).train().global_step > 0


def test_smoothed_labels_of_classifiers_are_the_trainers(tmp_path):
    private = trainer(tmp_path, label_smoothing_factor=0.2)
    batch = collate(make_rows(4))
    private.model.train()
    with torch.no_grad():
        ours = private.compute_loss(private.model, dict(batch))
        outputs = private.model(**{k: v for k, v in batch.items() if k != "labels"})
    assert torch.allclose(ours, private.label_smoother(outputs, batch["labels"]))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the loss was multiplied or divided")
        private.train()


def test_ignored_labels_that_would_mix_examples_are_refused(tmp_path):
    data = make_rows()
    for row in data:
        row["labels"] = torch.tensor(-100)
    with pytest.raises(ValueError, match="-100"):
        trainer(tmp_path, data=data).train()


# ---------------------------------------------------------------------- arguments


def test_arguments_with_hf_argument_parser(tmp_path):
    parser = transformers.HfArgumentParser((transformers.TrainingArguments, PrivacyArguments))
    line = f"--output_dir {tmp_path} --epsilon 3 --batch_size 64 --method rgp --rank 4 --sides left --head_scale 0.1"
    args, chosen = parser.parse_args_into_dataclasses([*line.split(), "--overrides", '{"*norm*": "frozen"}'])
    method = chosen.make_method()
    assert (method.rank, method.sides, method.head_scale) == (4, "left", 0.1) and method.overrides == {
        "*norm*": "frozen"
    }
    assert args.output_dir == str(tmp_path) and chosen.epsilon == 3
    for f in PrivacyArguments.__dataclass_fields__.values():
        assert f.metadata["help"], f.name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epsilon": 1.0}, "either epsilon or noise_multiplier"),
        ({"noise_multiplier": None}, "either epsilon or noise_multiplier"),
        ({"method": "adam"}, "method must be one of"),
        ({"method": "dpsgd"}, "rank, source: method 'dpsgd' has no carriers"),
        ({"sides": "top"}, "sides must be one of"),
        ({"overrides": "[1]"}, "overrides must be a mapping"),
    ],
)
def test_privacy_arguments_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        privacy(**options)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"bf16": True}, "bf16"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"torch_compile": True}, "torch_compile"),
        ({"push_to_hub": True}, "push_to_hub"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "lr_scheduler_type"),
        ({"train_sampling_strategy": "sequential"}, "train_sampling_strategy"),
        ({"include_num_input_tokens_seen": "all"}, "include_num_input_tokens_seen"),
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps=2 and PrivacyArguments.batch_size=12"),
    ],
)
def test_what_conflicts_is_refused_by_name(tmp_path, options, name):
    with pytest.raises(ValueError, match=name):
        trainer(tmp_path, **options)


def test_streams_of_examples_and_too_large_batches_are_refused(tmp_path):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(make_rows())

    with pytest.raises(ValueError, match="IterableDataset"):
        trainer(tmp_path, data=Stream())
    with pytest.raises(ValueError, match="must be at most 40"):
        trainer(tmp_path, chosen=privacy(batch_size=41))
    with pytest.raises(ValueError, match="hyperparameter_search"):
        trainer(tmp_path).hyperparameter_search()


def test_what_is_taken_over_is_said(tmp_path, caplog):
    transformers.utils.logging.enable_propagation()
    made = trainer(
        tmp_path,
        chosen=privacy(batch_size=None),
        gradient_accumulation_steps=3,
        max_steps=1,
        max_grad_norm=1.0,
        train_sampling_strategy="group_by_length",
        dataloader_drop_last=True,
    )
    made.train()
    assert made.run.mechanism.batch_size(0) == 12 and made.run.loading.microbatch_size == 4
    for word in (
        "gradient_accumulation_steps=3",
        "max_grad_norm=1",
        "group_by_length",
        "dataloader_drop_last",
        "Poisson",
    ):
        assert word in caplog.text
    lengths = [len(row["input_ids"]) for row in make_rows()]
    parts = made.run._loop._microbatches(0)
    flat = [lengths[i] for part in parts for i in part]
    assert flat == sorted(flat, reverse=True)  # similar lengths together


# ---------------------------------------------------------------------- peft


def lora(model, **options):
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    settings = peft.LoraConfig(r=3, lora_alpha=6, lora_dropout=0.0, **options)
    made = peft.get_peft_model(model, settings)
    for name, parameter in made.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)  # with B = 0 the gradient of A is zero, and would test nothing
    return made


def check_lora(model, data, losses, **options):
    """Exact per-example gradients of A and B, by autograd one example at a time; the rest does not move."""
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    before = helpers.parameters_of(model)
    twin = copy.deepcopy(model)
    truth = helpers.per_example_gradients(twin, data, losses, collate)
    norms = [sum(g[n].square().sum() for n in trained).sqrt() for g in truth]
    clip = float(sorted(norms)[len(norms) // 2]) * 0.99
    with helpers.privatize(model, data, method=rgp.DPSGD(), clip=clip, collate_fn=collate, **options) as run:
        assert {e.name for e in run.plan.trained} == trained
        helpers.train(run, model, losses)
    after = helpers.parameters_of(model)
    factors = [min(1.0, clip / float(norm)) for norm in norms]
    assert any(f < 1 for f in factors) and any(f == 1 for f in factors)
    for name in before:
        moved = after[name] - before[name]
        if name not in trained:
            assert not moved.any(), name
            continue
        expected = -sum(f * g[name] for f, g in zip(factors, truth, strict=True)) / len(data)
        assert (moved - expected).norm() <= 1e-9 * max(float(expected.norm()), 1e-4), name
    return run.plan


def test_lora_of_a_classifier_is_exact():
    model = lora(make_bert(torch.float64), task_type="SEQ_CLS", target_modules=["query", "value", "dense"])
    data = make_rows(9)
    weights = {tuple(r["input_ids"].tolist()): w for r, w in zip(data, helpers.spread(9), strict=True)}

    def losses(model, batch):
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        lost = nn.functional.cross_entropy(logits, batch["labels"], reduction="none")
        return lost * torch.stack([weights[tuple(i for i in r.tolist() if i)] for r in batch["input_ids"]])

    plan = check_lora(model, data, losses, microbatch_size=4)
    kinds = {e.name.split(".")[-3] for e in plan.trained}
    assert {"lora_A", "lora_B", "modules_to_save"} <= {part for e in plan.trained for part in e.name.split(".")}, kinds
    assert all(e.treatment == "exact" for e in plan.trained)
    heads = [e.name for e in plan if e.kind == "head"]
    assert len(heads) == 1 and "modules_to_save" in heads[0]


def test_lora_of_gpt2_is_exact():
    model = lora(make_gpt2().double(), task_type="CAUSAL_LM", target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    data = token_rows(7)

    def losses(model, batch):
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return token_losses(logits, batch["labels"], shift=True) * batch["attention_mask"].sum(1) ** 2

    check_lora(model, data, losses, microbatch_size=3)


def test_trainer_with_adapters(tmp_path):
    peft = pytest.importorskip("peft")
    model = lora(make_bert(), task_type="SEQ_CLS", target_modules=["query", "value"])
    before = helpers.parameters_of(model)
    made = trainer(
        tmp_path / "out",
        model,
        chosen=privacy(method="dpsgd", rank=None, source=None),
        save_strategy="steps",
        save_steps=2,
    )
    made.train()
    for name, p in helpers.parameters_of(model).items():
        assert torch.equal(p, before[name]) != ("lora_" in name or "modules_to_save" in name), name
    made.save_model(str(tmp_path / "adapter"))
    again = peft.PeftModel.from_pretrained(make_bert(), tmp_path / "adapter").eval()
    batch = collate(make_rows(4))
    assert torch.allclose(again(**batch).logits, model.eval()(**batch).logits, atol=1e-6)
    assert "differential privacy" in (tmp_path / "adapter" / "README.md").read_text()


def test_the_trainer_needs_none_of_the_command_line_s_packages():
    """rgp[trainer] does not install typer, rich and yaml; transformers itself may use them if they are there."""
    code = """
import sys
import transformers.trainer  # with all that it imports by itself
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("typer", "rich", "yaml"):
            raise ImportError(f"{name} is blocked")
for name in [n for n in sys.modules if n.split(".")[0] in ("typer", "rich", "yaml")]:
    del sys.modules[name]
sys.meta_path.insert(0, Blocked())
import rgp.integrations.transformers
assert not [n for n in sys.modules if n == "rgp.cli" or n.startswith("rgp.train.")]
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_card_names_the_unit_that_was_drawn_and_no_other(tmp_path):
    private = trainer(tmp_path, max_steps=1)
    private.train()
    assert private.privacy_card()["unit"] == private.run.mechanism.unit.describe() == privacy().unit
    with pytest.raises(ValueError, match="unit='one patient': the guarantee is for one row of the dataset"):
        privacy(unit="one patient")
    assert "unit" not in privacy(unit="one row of the training data").record()  # the default of earlier versions
