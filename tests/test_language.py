"""Language models end to end: pooling, heads, optimizers, LoRA, causal models, GLUE's tasks, presets."""

from __future__ import annotations

import copy
import json
import random
import tempfile
import warnings
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import helpers
import rgp
from helpers import seeded
from rgp.data import DataSpec, load
from rgp.loading import cut
from rgp.optimizers import AdamCorrected
from rgp.reconstruct import factors, noise_variance
from rgp.train import config, evaluation, progress, runner
from rgp.train.config import ConfigError

transformers = pytest.importorskip("transformers")

WORDS = ["good", "great", "fine", "warm", "bad", "dull", "the", "film", "was", "and", "story", "felt", "so", "a", "why"]


@pytest.fixture(scope="module")
def bert_folder(tmp_path_factory):
    """A tiny BERT with random weights, and its tokenizer."""
    folder = tmp_path_factory.mktemp("bert")
    return str(save_tiny(folder, "bert"))


@pytest.fixture(scope="module")
def gpt2_folder(tmp_path_factory):
    return str(save_tiny(tmp_path_factory.mktemp("gpt2"), "gpt2"))


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory):
    return str(save_tiny(tmp_path_factory.mktemp("llama"), "llama"))


def save_tiny(folder, kind):
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    tokenizer = transformers.BertTokenizer(str(folder / "vocab.txt"))
    tokenizer.save_pretrained(folder)
    size = 5 + len(WORDS)
    torch.manual_seed(0)
    if kind == "bert":
        made = transformers.BertModel(
            transformers.BertConfig(
                vocab_size=size,
                hidden_size=16,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=24,
                initializer_range=0.2,
                max_position_embeddings=64,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
            )
        )
    elif kind == "gpt2":
        made = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=size,
                n_embd=16,
                n_layer=2,
                n_head=2,
                n_positions=64,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
            )
        )
    else:
        made = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=size,
                hidden_size=16,
                intermediate_size=24,
                num_hidden_layers=2,
                num_attention_heads=2,
                max_position_embeddings=64,
            )
        )
    made.save_pretrained(folder)
    return folder


def sentence(rng, low=2, high=14):
    return " ".join(rng.choices(WORDS, k=rng.randint(low, high)))


def texts(count, seed=0):
    """Texts of very different lengths, and labels."""
    rng = random.Random(seed)
    return [(sentence(rng), rng.randrange(2)) for _ in range(count)]


# ---------------------------------------------------------------------- length-sorted micro-batches


def test_cut_by_length_keeps_every_index_and_groups_similar_lengths():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 100, 1000).astype(float)
    indices = np.sort(rng.choice(1000, 300, replace=False))
    parts = cut(indices, 32, lengths)
    assert sorted(i for part in parts for i in part) == indices.tolist()
    assert [len(p) for p in parts] == [len(p) for p in cut(indices, 32)]
    for before, after in pairwise(parts):
        assert lengths[before].min() >= lengths[after].max()  # the longest first


def test_sorting_changes_the_cost_and_not_the_result(bert_folder):
    """Same draws, same clipped sum; fewer padded tokens."""
    data = load_sst2_like(bert_folder, texts(60))
    torch.manual_seed(1)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(bert_folder, num_labels=2).double()
    found, padded = [], []
    for lengths in (None, data.train.lengths):
        twin = copy.deepcopy(model)
        optimizer = torch.optim.SGD(twin.parameters(), lr=1.0)
        run = rgp.privatize(
            twin,
            optimizer,
            data.train,
            method=rgp.RGP(rank=2, source="weight"),
            noise_multiplier=0.5,
            batch_size=30,
            steps=2,
            clip=0.05,
            microbatch_size=6,
            seed=3,
            collate_fn=data.collate_fn,
            lengths=lengths,
        )
        tokens = 0
        for batch in run:
            tokens += batch["input_ids"].numel()
            run.step(twin(**batch).loss)
        run.close()
        found.append(helpers.parameters_of(twin))
        padded.append(tokens)
    moved = max(float((found[0][n] - p).abs().max()) for n, p in helpers.parameters_of(model).items())
    apart = max(float((found[0][n] - found[1][n]).abs().max()) for n in found[0])
    assert moved > 1e-3 and apart < 1e-12
    assert padded[1] < 0.8 * padded[0]


@pytest.mark.parametrize("lengths", [[1, 2], np.ones((4, 1)), ["a", "b", "c", "d"]])
def test_lengths_must_be_one_number_per_example(lengths):
    model = nn.Linear(2, 2)
    data = [(torch.zeros(2), 0)] * 4
    with pytest.raises(ValueError, match="lengths must be one number per example"):
        helpers.privatize(model, data, lengths=lengths)


# ---------------------------------------------------------------------- optimizers


def rebuild(Lt, R, At, dR):
    """dL R + L dR - L L^T dL R, the paper's Corollary 1; with one side released, dL R or L dR."""
    if At is None:
        return Lt.T @ dR
    return At.T @ R if dR is None else At.T @ R + Lt.T @ dR - Lt.T @ Lt @ At.T @ R


def test_noise_variance_of_rebuilt_gradients_by_simulation():
    generator = seeded(0)
    Lt = torch.linalg.qr(torch.randn(7, 2, generator=generator, dtype=torch.float64)).Q.T.contiguous()
    R = torch.linalg.qr(torch.randn(5, 2, generator=generator, dtype=torch.float64)).Q.T.contiguous()
    draws = 20000
    for left, right in ((True, True), (True, False), (False, True)):
        At = torch.randn(draws, 2, 7, generator=generator, dtype=torch.float64)
        dR = torch.randn(draws, 2, 5, generator=generator, dtype=torch.float64)
        if left and right:
            made = torch.vmap(lambda a, d: rebuild(Lt, R, a, d))(At, dR)
        elif left:
            made = torch.vmap(lambda a: rebuild(Lt, R, a, None))(At)
        else:
            made = torch.vmap(lambda d: rebuild(Lt, R, None, d))(dR)
        given = (At[0] if left else None, dR[0] if right else None)
        one, other = factors(Lt, R, *given)
        torch.testing.assert_close(one @ other, rebuild(Lt, R, *given))
        known = noise_variance(Lt, R, left=left, right=right)
        measured = made.square().mean(0)
        # 5 standard errors of a variance; a formula without the product term, or with l and q swapped, is far outside
        assert (measured / known - 1).abs().max() < 5 * (2 / draws) ** 0.5


def test_adam_corrected_is_adamw_where_there_is_no_noise():
    torch.manual_seed(0)
    ours, theirs = nn.Linear(5, 3), nn.Linear(5, 3)
    theirs.load_state_dict(ours.state_dict())
    a = AdamCorrected(ours.parameters(), lr=0.01, weight_decay=0.1)
    b = torch.optim.AdamW(theirs.parameters(), lr=0.01, weight_decay=0.1)
    for _ in range(20):
        x = torch.randn(8, 5)
        for model, optimizer in ((ours, a), (theirs, b)):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
    assert torch.allclose(ours.weight, theirs.weight, atol=1e-6)


def test_adam_corrected_sees_the_signal_under_the_noise():
    """Two entries with gradients 1 and 0.1 under noise of variance 4: the second moments come out as 1 and 0.01."""
    weight = nn.Parameter(torch.zeros(2, 2000))
    optimizer = AdamCorrected([weight], lr=1e-4, betas=(0.9, 0.99))
    signal = torch.tensor([1.0, 0.1])[:, None].expand(2, 2000)
    optimizer.noise = lambda _: 4.0
    for _ in range(600):
        weight.grad = signal + 2.0 * torch.randn(2, 2000)
        optimizer.step()
    second = optimizer.state[weight]["exp_avg_sq"].mean(1)
    assert second[0] == pytest.approx(1.0, abs=0.1) and second[1] == pytest.approx(0.01, abs=0.1)
    uncorrected = torch.optim.Adam([weight], lr=1e-4, betas=(0.9, 0.99))
    for _ in range(600):
        weight.grad = signal + 2.0 * torch.randn(2, 2000)
        uncorrected.step()
    assert uncorrected.state[weight]["exp_avg_sq"].mean(1)[1] > 3


@pytest.mark.parametrize("sides", ["both", "left", "right"])
def test_adam_corrected_is_told_the_noise_of_a_run(sides):
    """With no examples' gradient (all zero), what is left of the squares after correction is near zero on average."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 40, bias=False), nn.Linear(40, 9))
    for p in model.parameters():
        p.data *= 0.1
    optimizer = AdamCorrected(model.parameters(), lr=0.0, betas=(0.0, 0.999))
    data = [(torch.zeros(40), 0)] * 50
    method = rgp.RGP(rank=3, sides=sides, source="random", head_scale=0.5)
    run = rgp.privatize(
        model, optimizer, data, method=method, noise_multiplier=2.0, clip=3.0, batch_size=20, steps=40, seed=0
    )
    squares = {}
    for x, y in run:
        if not run.step(nn.functional.cross_entropy(model(x), y) * 0):
            continue
        for name, p in model.named_parameters():
            squares[name] = squares.get(name, 0) + optimizer.state[p]["exp_avg"].square()
    run.close()
    for name, p in model.named_parameters():
        noise = (squares[name] / 40).mean()
        left = optimizer.state[p]["exp_avg_sq"].mean() / (1 - 0.999**40)  # a plain mean over the steps, nearly
        assert noise > 0 and abs(left) < 0.25 * noise, name


@pytest.mark.parametrize(("option", "value"), [("lr", -1.0), ("floor", 0.0), ("floor", 2.0), ("betas", (0.9, 1.0))])
def test_adam_corrected_refuses(option, value):
    with pytest.raises(ValueError, match=option):
        AdamCorrected([nn.Parameter(torch.zeros(2))], **{option: value})


# ---------------------------------------------------------------------- a parameter that does not move


class Lazy(torch.optim.SGD):
    """Leaves the first parameter alone."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"][1:]:
            p.add_(p.grad, alpha=-0.1)


def small_run(optimizer, model, **options):
    data = [(torch.randn(6, generator=seeded(i)), i % 2) for i in range(20)]
    run = rgp.privatize(model, optimizer, data, noise_multiplier=1.0, batch_size=10, seed=0, **{"steps": 2, **options})
    with run:
        for x, y in run:
            run.step(nn.functional.cross_entropy(model(x), y))


def test_a_trained_parameter_that_does_not_move_is_an_error():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))
    with pytest.raises(rgp.WrongUseError, match=r"'0.weight'.*did not move"):
        small_run(Lazy(model.parameters(), lr=0.1), model)
    groups = [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[1].parameters()}]
    with pytest.raises(rgp.WrongUseError, match="learning rate is 0"):
        small_run(torch.optim.SGD(groups, lr=0.1), model)


def test_a_warm_up_from_zero_and_updates_lost_in_rounding_are_no_error():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: min(1.0, t / 3))  # 0 in the first step
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        small_run(optimizer, model, scheduler=warm_up, steps=3)
    groups = [{"params": model[0].parameters(), "lr": 1e-12}, {"params": model[1].parameters()}]
    with pytest.warns(UserWarning, match="2 trained parameters did not move in the whole run"):
        small_run(torch.optim.SGD(groups, lr=0.1), model)


# ---------------------------------------------------------------------- helpers for runs of `rgp train`


def write_rows(folder, task, rows=48, seed=0):
    """Made-up rows in the layout of a GLUE task."""
    rng = random.Random(seed)
    columns, labels, tests = {
        "sst2": (("sentence",), 2, ("validation",)),
        "qnli": (("question", "sentence"), 2, ("dev",)),
        "qqp": (("question1", "question2"), 2, ("validation",)),
        "mnli": (("premise", "hypothesis"), 3, ("validation_matched", "validation_mismatched")),
    }[task]
    (folder / task).mkdir(parents=True, exist_ok=True)
    for split, count in (("train", rows), *((t, rows // 4 + i) for i, t in enumerate(tests))):
        lines = ["\t".join((*columns, "label"))]
        lines += ["\t".join((*(sentence(rng) for _ in columns), str(i % labels))) for i in range(count)]
        (folder / task / f"{split}.tsv").write_text("\n".join(lines))
    return folder


def load_sst2_like(bert_folder, rows, **options):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.csv"
        path.write_text("text,label\n" + "\n".join(f"{text},{label}" for text, label in rows))
        return load(DataSpec(name=str(path), tokenizer=bert_folder, max_length=32, **options))


def settings(changes, preset=None):
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as empty:
        return config.load(None if preset else Path(empty.name), preset=preset, changes=changes)


def train(settings, out):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="noise_multiplier is 0")
        warnings.filterwarnings("ignore", message=".*secret.json.*")
        return runner.train(settings, out, progress=progress.Silent())


def changes_for(bert_folder, folder, task="sst2", **more):
    made = {
        "data.name": task,
        "data.folder": folder,
        "data.max_length": 24,
        "model.name": bert_folder,
        "method.name": "rgp",
        "method.rank": 2,
        "method.source": "weight",
        "budget.noise_multiplier": 8,  # accounting is quick then
        "training.clip": 0.1,
        "training.batch_size": 16,
        "training.steps": 2,
        "training.microbatch_size": 8,
        "optimizer.name": "adam",
        "optimizer.lr": 0.001,
        "run.threads": 1,
        **more,
    }
    return [f"{k}={'null' if v is None else json.dumps(v) if isinstance(v, dict) else v}" for k, v in made.items()]


# ---------------------------------------------------------------------- pooling and heads


@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("head", ["linear", "layernorm"])
def test_pooled_classifier_ignores_padding_and_survives_saving(bert_folder, tmp_path, pooling, head):
    from rgp.models.pooled import PooledClassifier

    encoder = transformers.AutoModel.from_pretrained(bert_folder)
    model = PooledClassifier(encoder, 3, pooling=pooling, head=head).eval()
    model.centre += 0.3
    ids = torch.tensor([[2, 7, 9, 3]])
    alone = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    padded = nn.functional.pad(ids, (0, 5))
    together = model(input_ids=padded, attention_mask=(padded != 0).long()).logits
    assert torch.allclose(alone, together, atol=1e-5)
    states = encoder(input_ids=ids).last_hidden_state[0].detach()
    features = (states[0] if pooling == "cls" else states.mean(0)) - 0.3
    if head == "layernorm":
        features = (features - features.mean()) / features.var(correction=0).add(1e-5).sqrt()
    expected = features @ model.classifier.weight.T + model.classifier.bias
    assert torch.allclose(alone[0], expected, atol=1e-5)

    model.save_pretrained(tmp_path)
    again = PooledClassifier.from_pretrained(tmp_path).eval()
    assert torch.equal(again(input_ids=ids).logits, model(input_ids=ids).logits)
    assert torch.equal(  # the encoder alone can be had by anyone, with transformers only
        transformers.AutoModel.from_pretrained(tmp_path)(input_ids=ids).last_hidden_state[0],
        encoder(input_ids=ids)[0][0],
    )


def test_pooled_classifier_is_exact_per_example(bert_folder):
    from rgp.models.pooled import PooledClassifier

    encoder = transformers.AutoModel.from_pretrained(bert_folder)
    model = PooledClassifier(encoder, 2, head="layernorm").double()
    data = load_sst2_like(bert_folder, texts(8, seed=1)).train
    collate = load_sst2_like(bert_folder, texts(8, seed=1)).collate_fn
    weights = dict(zip((tuple(r["input_ids"].tolist()) for r in data), helpers.spread(len(data)), strict=True))

    def losses(model, batch):
        inputs = {k: v for k, v in batch.items() if k != "labels"}
        lost = nn.functional.cross_entropy(model(**inputs).logits, batch["labels"], reduction="none")
        return lost * torch.stack([weights[tuple(i for i in row.tolist() if i)] for row in batch["input_ids"]])

    helpers.check_exact(model, data, losses, method=rgp.RGP(rank=2, source="weight"), collate=collate)


def test_public_centre_is_the_mean_of_public_sentences_and_nothing_else(bert_folder, tmp_path):
    from rgp.train import setup

    write_rows(tmp_path, "sst2")
    options = {"model.pooling": "mean", "model.head": "layernorm", "model.centre": "public"}
    made = [setup.make(settings(changes_for(bert_folder, tmp_path, **options))) for _ in range(2)]
    write_rows(tmp_path, "sst2", seed=9)  # other private rows: the same centre
    made.append(setup.make(settings(changes_for(bert_folder, tmp_path, **options))))
    centres = [parts.model.centre for parts in made]
    assert centres[0].abs().sum() > 0 and all(torch.equal(c, centres[0]) for c in centres)
    assert not centres[0].requires_grad and "centre" in made[0].model.state_dict()
    (tmp_path / "mine.txt").write_text("the film was good\n\nthe story felt dull\n")
    options["model.centre"] = tmp_path / "mine.txt"
    model = setup.make(settings(changes_for(bert_folder, tmp_path, **options))).model.eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(bert_folder)
    lines = ["the film was good", "the story felt dull"]
    with torch.no_grad():
        own = [model.pooled(**tokenizer([line], return_tensors="pt"))[0] for line in lines]
    assert torch.allclose(model.centre, torch.stack(own).mean(0), atol=1e-6)


def test_a_head_may_start_from_public_texts(bert_folder, tmp_path):
    """Each row points to its text's feature, away from the mean of all; private rows have no part in it."""
    from rgp.train import setup

    texts = ["the film was dull", "the film was good"]
    options = {"model.pooling": "mean", "model.head": "layernorm", "model.centre": "public"}
    options["model.label_texts"] = json.dumps(texts)
    heads = []
    for seed in (0, 9):
        write_rows(tmp_path, "sst2", seed=seed)
        made = setup.make(settings(changes_for(bert_folder, tmp_path, **options)))
        heads.append(made.model.classifier)
    assert torch.equal(heads[0].weight, heads[1].weight) and not heads[0].bias.any()
    model, tokenizer = made.model.eval(), transformers.AutoTokenizer.from_pretrained(bert_folder)
    with torch.no_grad():
        alone = [model.features(**tokenizer([text], return_tensors="pt"))[0] for text in texts]
        logits = torch.stack([model(**tokenizer([text], return_tensors="pt")).logits[0] for text in texts])
    away = (alone[1] - alone[0]) / (alone[1] - alone[0]).norm()
    assert torch.allclose(heads[0].weight, 0.02 * 16**0.5 * torch.stack([-away, away]), atol=1e-5)
    assert logits.argmax(1).tolist() == [0, 1]
    train(settings(changes_for(bert_folder, tmp_path, **options)), tmp_path / "run")
    card = (tmp_path / "run" / "model" / "privacy_card.md").read_text()
    assert "texts that the head starts from: the film was dull; the film was good" in card
    options["model.label_texts"] = json.dumps([*texts, "neither"])
    with pytest.raises(ConfigError, match=r"3 texts for 2 classes; one for each of \w+, \w+, in this order"):
        setup.make(settings(changes_for(bert_folder, tmp_path, **options)))


# ---------------------------------------------------------------------- rgp train on texts


@pytest.mark.parametrize("optimizer", ["sgd", "adam-corrected"])
def test_train_with_pooling_head_lr_and_optimizer(bert_folder, tmp_path, optimizer):
    from rgp.models.pooled import PooledClassifier
    from rgp.train import setup

    write_rows(tmp_path / "data", "sst2")
    chosen = settings(
        changes_for(
            bert_folder,
            tmp_path / "data",
            **{
                "model.pooling": "mean",
                "model.head": "layernorm",
                "model.centre": "public",
                "optimizer.name": optimizer,
                "optimizer.head_lr": 0.05,
                "optimizer.schedule": "linear",
            },
        )
    )
    groups = setup.make(chosen).optimizer.param_groups
    assert [g["initial_lr"] for g in groups] == [0.001, 0.05]
    assert [tuple(p.shape) for p in groups[1]["params"]] == [(2, 16), (2,)]
    summary = train(chosen, tmp_path / "run")
    assert summary["finished"] and summary["epsilon"] <= 8
    measured = evaluation.evaluate_run(tmp_path / "run")
    assert measured["accuracy"] == pytest.approx(summary["accuracy"])
    assert isinstance(PooledClassifier.from_pretrained(tmp_path / "run" / "model"), nn.Module)


def test_biases_and_norms_may_have_a_rate_of_their_own(bert_folder, tmp_path):
    from rgp.train import setup

    write_rows(tmp_path / "data", "sst2")
    changes = {"optimizer.head_lr": 0.05, "optimizer.bias_lr": 0.02}
    made = setup.make(settings(changes_for(bert_folder, tmp_path / "data", **changes)))
    matrices, vectors, head = made.optimizer.param_groups
    assert [g["lr"] for g in (matrices, vectors, head)] == [0.001, 0.02, 0.05]
    assert {p.ndim for p in matrices["params"]} == {2} and {p.ndim for p in vectors["params"]} == {1}
    assert [tuple(p.shape) for p in head["params"]] == [(2, 16), (2,)]
    assert sum(len(g["params"]) for g in made.optimizer.param_groups) == len(list(made.model.parameters()))


def test_head_first_keeps_the_body_still_and_then_trains_it(bert_folder, tmp_path):
    from rgp.train import setup

    write_rows(tmp_path / "data", "sst2")
    changes = {"optimizer.head_lr": 0.05, "optimizer.head_first": 0.4, "optimizer.schedule": "linear"}
    chosen = settings(changes_for(bert_folder, tmp_path / "data", **changes))
    optimizer = setup.make(chosen).optimizer
    schedule = setup.make_schedule(chosen, optimizer, 10)
    body, head = zip(*(_rates(optimizer, schedule) for _ in range(10)), strict=True)
    assert body[:4] == (0, 0, 0, 0)
    assert body[4:] == pytest.approx([0.001 * (6 - i) / 6 for i in range(6)])  # a run of its own
    assert head == pytest.approx([0.05 * (10 - i) / 10 for i in range(10)])
    assert train(chosen, tmp_path / "run")["finished"]


def _rates(optimizer, schedule):
    found = [group["lr"] for group in optimizer.param_groups]
    optimizer.step()
    schedule.step()
    return found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.head": "layernorm"}, "model.head = layernorm: needs model.pooling"),
        ({"model.centre": "public"}, "model.centre = public: needs model.pooling"),
        ({"model.label_texts": '["bad", "good"]'}, "model.label_texts = .*: needs model.pooling"),
        ({"model.pooling": "mean", "model.label_texts": '["same", "same"]'}, "model.label_texts = .*no two the same"),
        (
            {"model.pooling": "mean", "model.centre": "nowhere.txt"},
            "model.centre = nowhere.txt: must be none, public, films",
        ),
        ({"optimizer.head_first": 0.2}, "optimizer.head_first = 0.2: needs optimizer.head_lr"),
        ({"data.unit": "block"}, "data.unit = block: is for language models"),
        ({"model.task": "causal-lm"}, "data.unit = null: task causal-lm needs"),
        ({"method.name": "dp-lora", "method.rank": "auto", "method.source": None}, "method.rank = auto"),
        (
            {"model.name": "mlp", "data.name": "digits", "method.name": "dp-lora", "method.source": None},
            "dp-lora: needs",
        ),
        ({"method.source": "public"}, "method.source = public, method.public = null: source public and the inputs"),
        ({"method.public": "films"}, "method.source = weight, method.public = films: source public and"),
        (
            {"method.source": "public", "method.public": "nowhere.txt"},
            "method.public = nowhere.txt: must be noise, public, films",
        ),
        (
            {"method.name": "rgp-random", "method.source": "public", "method.public": "films"},
            "method.public = films: is for method rgp",
        ),
        (
            {"model.name": "mlp", "data.name": "digits", "method.source": "public", "method.public": "films"},
            "method.public = films: is text, and the model takes images",
        ),
        ({"model.name": "mlp", "data.name": "digits", "model.dropout": 0}, "model.dropout = 0: is for Hugging Face"),
    ],
)
def test_settings_that_do_not_go_together(bert_folder, tmp_path, change, message):
    write_rows(tmp_path, "sst2")
    with pytest.raises(ConfigError, match=message):
        settings(changes_for(bert_folder, tmp_path, **change))


def test_train_with_carriers_from_public_sentences(bert_folder, tmp_path):
    """They are really used: other sentences, and random ones, give other weights."""
    from safetensors.torch import load_file

    write_rows(tmp_path / "data", "sst2")
    found = {}
    (tmp_path / "a").write_text("good film\ndull story")
    (tmp_path / "b").write_text("the film\na good dull story")
    for name in ("a", "b", "noise"):
        where = name if name == "noise" else str(tmp_path / name)
        change = {"method.source": "public", "method.public": where, "run.seed": 0}
        chosen = settings(changes_for(bert_folder, tmp_path / "data", **change))
        summary = train(chosen, tmp_path / f"run-{name}")
        assert summary["finished"]
        found[name] = load_file(tmp_path / f"run-{name}" / "model" / "model.safetensors")
        card = (tmp_path / f"run-{name}" / "model" / "privacy_card.md").read_text()
        assert ("carriers follow: random inputs" if name == "noise" else "which the user says is public") in card
    name = "bert.encoder.layer.0.attention.self.query.weight"
    assert not torch.equal(found["a"][name], found["b"][name])
    assert not torch.equal(found["a"][name], found["noise"][name])


@pytest.mark.parametrize("rate", [0.0, 0.25])
@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_dropout_of_every_part_is_what_was_asked_for(kind, rate):
    from transformers import AutoModelForSequenceClassification, BertConfig, GPT2Config

    from rgp.train.language import set_dropout

    small = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 8, "vocab_size": 9}
    shape = BertConfig(**small) if kind == "bert" else GPT2Config(**small, bos_token_id=1, eos_token_id=1)

    def rates():
        model = AutoModelForSequenceClassification.from_config(shape)
        return [m.p for m in model.modules() if isinstance(m, nn.Dropout)]

    before = rates()
    assert len(before) >= 3 and set(before) == {0.1}
    set_dropout(shape, rate)
    assert rates() == [rate] * len(before)


def test_a_run_has_the_dropout_that_was_asked_for(bert_folder, tmp_path):
    from rgp.train import setup

    write_rows(tmp_path, "sst2")
    batch = {"input_ids": torch.arange(5, 13)[None], "attention_mask": torch.ones(1, 8, dtype=torch.long)}
    for rate, same in ((0.5, False), (0, True)):
        change = {"model.dropout": rate, "model.pooling": "mean"}
        model = setup.make(settings(changes_for(bert_folder, tmp_path, **change))).model.train()
        first, second = (model(**batch).logits for _ in range(2))
        assert torch.equal(first, second) is same


def test_a_model_without_dropout_says_so():
    from transformers import T5Config

    from rgp.train.language import set_dropout

    shape = T5Config()
    shape.__dict__ = {k: v for k, v in shape.__dict__.items() if "dropout" not in k}
    with pytest.raises(ConfigError, match=r"model.dropout = 0: a t5 has no dropout"):
        set_dropout(shape, 0.0)


@pytest.mark.parametrize("task", ["qnli", "qqp", "mnli"])
def test_glue_tasks_of_two_texts(bert_folder, tmp_path, task):
    """Pairs go in with their token types; MNLI is measured on both of its test sets."""
    write_rows(tmp_path / "data", task)
    chosen = settings(changes_for(bert_folder, tmp_path / "data", task, **{"training.steps": 1}))
    data = load(DataSpec(name=task, folder=tmp_path / "data", tokenizer=bert_folder, max_length=24))
    assert data.train[0]["token_type_ids"].max() == 1 and data.published_test
    summary = train(chosen, tmp_path / "run")
    measured = evaluation.evaluate_run(tmp_path / "run")
    extra = [k for k in measured if k.startswith("accuracy_") and k != "accuracy_is_publishable"]
    assert extra == (["accuracy_mismatched"] if task == "mnli" else [])
    card = json.loads((tmp_path / "run" / "model" / "privacy_card.json").read_text())
    for key in ("accuracy", *extra):
        assert measured[key] == pytest.approx(summary[key]) == pytest.approx(card[key])
    if task == "mnli":
        assert len(data.more_tests["mismatched"]) == len(data.test) + 1  # another file


@pytest.mark.parametrize("ending", ["csv", "tsv", "jsonl", "parquet"])
@pytest.mark.parametrize("pairs", [False, True])
def test_any_table_with_one_or_two_text_columns(bert_folder, tmp_path, ending, pairs):
    names = ("review", "reply") if pairs else ("review",)
    rng = random.Random(0)
    rows = [{**{n: sentence(rng) for n in names}, "stars": ("low", "high")[i % 2]} for i in range(20)]
    path = tmp_path / f"rows.{ending}"
    if ending == "jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    elif ending == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        mark = "," if ending == "csv" else "\t"
        path.write_text("\n".join([mark.join(rows[0]), *(mark.join(row.values()) for row in rows)]))
    text = names if pairs else names[0]
    data = load(DataSpec(name=str(path), text=text, label="stars", tokenizer=bert_folder))
    tokenizer = transformers.AutoTokenizer.from_pretrained(bert_folder)
    kept = [row for i, row in enumerate(rows) if i in hold_in(20)]
    assert len(data.train) == len(kept) == 16 and data.label_names == ("high", "low")
    assert data.train[3]["input_ids"].tolist() == tokenizer(*(kept[3][n] for n in names))["input_ids"]


def hold_in(rows):
    from rgp.data.splits import hold_out

    return set(hold_out(rows, 0.2, 0, "")[0].tolist())


# ---------------------------------------------------------------------- LoRA through rgp train


@pytest.mark.parametrize("pooling", [None, "mean"])
def test_train_dp_lora(bert_folder, tmp_path, pooling):
    """Adapters and head are trained, everything else stays; what is published is an ordinary model with them added in."""
    pytest.importorskip("peft")
    from rgp.train import setup

    write_rows(tmp_path / "data", "sst2")
    options = {"method.name": "dp-lora", "method.rank": 3, "method.source": None, "model.pooling": pooling}
    chosen = settings(changes_for(bert_folder, tmp_path / "data", **options))
    parts = setup.make(chosen)
    plan = rgp.make_plan(parts.model, parts.method)
    trained = {e.name: e for e in plan.trained}
    assert all("lora_" in n or "modules_to_save" in n for n in trained)
    assert {e.treatment for e in trained.values()} == {"exact"}
    assert {min(e.shape) for n, e in trained.items() if "lora_" in n} == {3}
    linear = [m for m in parts.model.modules() if isinstance(m, nn.Linear)]
    assert sum("lora_A" in n for n in trained) >= 12 and len(linear) > 24  # query, key, value and three dense, twice
    summary = train(chosen, tmp_path / "run")
    assert summary["method"] == "dp-lora" and summary["epsilon"] <= 8
    measured = evaluation.evaluate_run(tmp_path / "run")
    assert measured["accuracy"] == pytest.approx(summary["accuracy"])
    from safetensors.torch import load_file

    names = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert not [n for n in names if "lora" in n or "base_layer" in n or "modules_to_save" in n]
    if pooling is None:
        transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "model")


# ---------------------------------------------------------------------- causal language models


def write_text(path, documents=40, seed=0):
    rng = random.Random(seed)
    path.write_text(
        "\n\n".join("\n".join(sentence(rng, 3, 9) for _ in range(rng.randint(1, 3))) for _ in range(documents))
    )
    return path


@pytest.mark.parametrize(
    ("unit", "options", "words"),
    [
        ("document", {"data.max_length": 20}, "one document"),
        ("line", {"data.max_length": 20}, "one line"),
        ("block", {"data.block": 8}, "one block of 8 tokens"),
    ],
)
def test_the_unit_of_a_language_model_is_what_was_asked_for(gpt2_folder, tmp_path, unit, options, words):
    path = write_text(tmp_path / "text.txt")
    spec = {k.removeprefix("data."): v for k, v in options.items()}
    data = load(DataSpec(name=str(path), unit=unit, tokenizer=gpt2_folder, **spec))
    text = path.read_text()
    tokenizer = transformers.AutoTokenizer.from_pretrained(gpt2_folder)
    if unit == "block":
        tokens = sum(len(i) + 1 for i in tokenizer(text.split("\n\n"))["input_ids"])
        expected, longest = tokens // 8, 8
        assert {len(r["input_ids"]) for r in data.train} == {8}
    else:
        expected, longest = len(text.split("\n\n") if unit == "document" else [x for x in text.split("\n") if x]), 20
    assert len(data.train) + len(data.test) == expected and max(data.train.lengths) <= longest
    assert data.row.startswith(words) and words in data.description
    batch = data.collate_fn([data.train[i] for i in range(6)])
    assert ((batch["labels"] == -100) == (batch["attention_mask"] == 0)).all()


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_train_a_causal_language_model(request, tmp_path, kind, capsys):
    folder = request.getfixturevalue(f"{kind}_folder")
    path = write_text(tmp_path / "text.txt")
    options = {"data.name": path, "data.folder": None, "data.unit": "document", "model.task": "causal-lm"}
    chosen = settings(changes_for(folder, tmp_path, **{**options, "optimizer.lr": 0.05, "training.steps": 6}))
    said = []
    shown = progress.Silent()
    shown.say = said.append
    summary = runner.train(chosen, tmp_path / "run", progress=shown)
    assert any("privacy unit: one row of the dataset (one document of the training text)" in line for line in said)
    assert (
        summary["unit"] == "one row of the dataset (one document of the training text)"
        and 0 <= summary["accuracy"] <= 1
    )
    measured = evaluation.evaluate_run(tmp_path / "run")
    assert measured["perplexity"] == pytest.approx(summary["perplexity"], rel=1e-5)
    card = (tmp_path / "run" / "model" / "privacy_card.md").read_text()
    assert (
        "for one row of the dataset (one document of the training text)" in card
        and "one row is added or removed" in card
    )
    assert "perplexity" not in card  # the held-out documents are private
    published = [f for f in (tmp_path / "run" / "model").rglob("*") if f.suffix in (".md", ".json")]
    assert published and not any(str(tmp_path.parent) in f.read_text() for f in published), "no path of this machine"
    # the model's own loss, one text at a time: what perplexity is
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").eval()
    data = load(DataSpec(name=str(path), unit="document", tokenizer=folder, max_length=24))
    with torch.no_grad():
        rows = [(model(**{k: v[None] for k, v in r.items()}).loss.double(), len(r["labels"]) - 1) for r in data.test]
    mean = sum(loss * n for loss, n in rows) / sum(n for _, n in rows)
    assert summary["perplexity"] == pytest.approx(float(mean.exp()), rel=1e-4)


# ---------------------------------------------------------------------- presets


def preset_names(pattern):
    return [n for n in config.presets() if pattern(n)]


BERT = preset_names(lambda n: "-bert-" in n)
MINILM = preset_names(lambda n: n.startswith("sst2-minilm"))
QUICK = ["sst2-minilm-rgp", "qnli-bert-dpsgd-eps1", "mnli-bert-rgp-np", "qqp-bert-linear-np"]


def start(preset, bert_folder, folder):
    """One step on a tiny random BERT and made-up rows; all else as the preset has it."""
    task = preset.split("-")[0]
    write_rows(folder / "data", task, rows=40)
    changes = [
        f"data.folder={folder / 'data'}",
        f"model.name={bert_folder}",
        "data.max_length=24",
        "training.steps=2",
        "training.batch_size=10",
        "training.microbatch_size=5",
        "run.threads=1",
    ]
    return train(settings(changes, preset), folder / "run")


@pytest.mark.parametrize("preset", QUICK)
def test_presets_start(preset, bert_folder, tmp_path):
    if "lora" in preset:
        pytest.importorskip("peft")
    summary = start(preset, bert_folder, tmp_path)
    assert summary["finished"] and (summary["epsilon"] is None) == ("np" in preset)


@pytest.mark.slow
@pytest.mark.parametrize("preset", [n for n in (*BERT, *MINILM) if n not in QUICK])
def test_all_presets_start(preset, bert_folder, tmp_path):
    if "lora" in preset:
        pytest.importorskip("peft")
    assert start(preset, bert_folder, tmp_path)["finished"]


def test_the_presets_of_the_papers_table_have_its_numbers():
    private, free = ("dpsgd", "rgp-random", "rgp"), ("full-np", "linear-np", "rgp-np")
    tasks = {"sst2": (500, 1e-5), "qnli": (500, 1e-5), "qqp": (1000, 1e-6), "mnli": (1000, 1e-6)}
    wanted = {f"{t}-bert-{m}-eps{e}" for t in tasks for m in private for e in (1, 2, 4, 6, 8)}
    wanted |= {f"{t}-bert-{m}" for t in tasks for m in free}
    assert wanted == set(BERT)
    for name in wanted:
        made, (batch, delta) = config.load(preset=name), tasks[name.split("-")[0]]
        assert made.training.batch_size == batch and made.budget.delta == delta, name
        epsilon = float(name.rpartition("eps")[2]) if "eps" in name else None
        assert made.budget.epsilon == epsilon
        assert made.training.epochs == (20 if epsilon in (1, 2) else 50)
        if "eps8" in name:
            assert config.load(preset=name.replace("-bert", "").replace("-eps8", "")) == made
