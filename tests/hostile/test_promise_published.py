"""What `rgp train` publishes, for two data sets that differ in one row, under one seed: nothing differs but through the noisy
weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("yaml")
pytest.importorskip("safetensors")

from rgp.train import config, runner
from rgp.train.progress import Silent

THROUGH_THE_WEIGHTS = {"head", "hash", "previous", "digest", "ledger_head", "accuracy"}
TIMES = {"made", "wall_seconds", "step_seconds", "peak_memory_bytes", "seconds", "cpu_seconds", "memory_bytes"}


def written(path: Path, strange: bool, rows: int = 120) -> Path:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(rows, 4, 4)).astype(np.float32), rng.integers(0, 3, rows)
    if strange:
        x[7], y[7] = 1e30, (y[7] + 1) % 3
    path.mkdir()
    test = {"x_test": x[:30] * 0 + 0.5, "y_test": np.arange(30) % 3}
    np.savez(path / "pixels.npz", x_train=x, y_train=y, **test)
    return path / "pixels.npz"


@pytest.fixture(scope="module")
def neighbours(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    base = tmp_path_factory.mktemp("neighbours")
    found = []
    for strange in (False, True):
        data = written(base / str(strange), strange)
        changes = ["model.name=mlp", "model.width=8", "budget.noise_multiplier=1", "training.steps=4", "method.rank=2"]
        changes += [
            "training.batch_size=100",
            "training.microbatch_size=8",
            "run.eval_every=2",
            "run.threads=1",
            "run.seed=3",
        ]
        made = config.load(preset="digits-rgp", changes=[f"data.name={data}", *changes])
        runner.train(made, data.parent / "run", progress=Silent(), diagnostics=True)
        found.append(data.parent / "run")
    return found


def without(content: Any, names: set[str]) -> Any:
    if isinstance(content, dict):
        return {k: without(v, names) for k, v in content.items() if k not in names}
    if isinstance(content, list):
        return [without(v, names) for v in content]
    return content


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_the_same_files_of_the_same_sizes(neighbours):
    one, two = neighbours
    assert files(one) == files(two)
    assert not any("secret" in name or "past-noise" in name for name in files(one))
    for name in files(one / "model"):
        sizes = [(run / "model" / name).stat().st_size for run in neighbours]
        assert sizes[0] == sizes[1] or name.startswith("privacy_card"), name


def test_the_model_folder_differs_by_its_weights(neighbours):
    for name in files(neighbours[0] / "model"):
        a, b = ((run / "model" / name).read_bytes() for run in neighbours)
        if name.endswith(".json"):
            assert without(json.loads(a), THROUGH_THE_WEIGHTS | TIMES) == without(
                json.loads(b), THROUGH_THE_WEIGHTS | TIMES
            )
        elif name.endswith(".md"):
            lines = zip(a.decode().splitlines(), b.decode().splitlines(), strict=True)
            known = (
                "ccuracy",
                "edger",
                "made",
                "20",
            )  # accuracy on the published test split, the ledger's head, the date
            assert all(any(word in one for word in known) for one, two in lines if one != two)
        else:
            assert name == "model.safetensors"
            header = [int.from_bytes(content[:8], "little") for content in (a, b)]
            assert a[: 8 + header[0]] == b[: 8 + header[1]], "names, shapes and offsets"


def test_the_ledger_differs_by_the_digests_of_releases(neighbours):
    lines = [[json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()] for run in neighbours]
    assert without(lines[0], THROUGH_THE_WEIGHTS) == without(lines[1], THROUGH_THE_WEIGHTS)
    assert lines[0][1]["digest"] != lines[1][1]["digest"] or lines[0][-1]["digest"] != lines[1][-1]["digest"]


def test_summary_plan_and_metrics_differ_by_weights_and_times(neighbours):
    for name in ("summary.json", "plan.json"):
        a, b = (json.loads((run / name).read_text()) for run in neighbours)
        a, b = (without(content, THROUGH_THE_WEIGHTS | TIMES) for content in (a, b))
        assert a | {"dataset": ""} == b | {"dataset": ""} if isinstance(a, dict) else a == b
    rows = [[json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in neighbours]
    cut = [without(one, THROUGH_THE_WEIGHTS | TIMES) for one in rows]
    assert cut[0] == cut[1]


def test_what_is_private_is_marked_so(neighbours):
    """Losses, norms and counts of bad examples are in private.jsonl, for the owner alone."""
    path = neighbours[0] / "private.jsonl"
    assert path.stat().st_mode & 0o077 == 0
    private = set().union(*(json.loads(line) for line in path.read_text().splitlines()))
    public = set().union(*(json.loads(line) for line in (neighbours[0] / "metrics.jsonl").read_text().splitlines()))
    assert any("loss" in name for name in private) and not any("loss" in name or "norm" in name for name in public)
