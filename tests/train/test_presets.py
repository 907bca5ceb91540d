"""Presets of language models: each starts, and has the paper's numbers."""

from __future__ import annotations

import pytest

from rgp.train import config
from tiny_language import (
    settings,
    train,
    write_rows,
)

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
