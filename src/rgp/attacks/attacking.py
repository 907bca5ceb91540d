"""All attacks on one run -> attack.json and attack.png in its folder. Both are private: statistics of its training rows."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from rgp import accounting
from rgp.attacks.lira import lira
from rgp.attacks.metrics import CONFIDENCE, INTERVALS, judge
from rgp.attacks.pool import Pool
from rgp.attacks.rmia import rmia
from rgp.attacks.shadows import confidences, train_shadows
from rgp.attacks.threshold import attack
from rgp.ledger import Ledger
from rgp.report.words import coin
from rgp.train import runner, setup
from rgp.train.card import record_attack
from rgp.train.config import Config
from rgp.train.errors import Interrupted, RunFolderError
from rgp.train.folder import RunFolder
from rgp.train.progress import Progress
from rgp.train.weights import load_trained

NOTE = "Statistics of private rows. The guarantee does not cover them: do not publish."


def attack_run(out: Path, *, shadows: int = 0, seed: int = 0, keep: bool = False, progress: Progress) -> dict[str, Any]:
    """Attack the run in `out`; returns what its attack.json holds.

    What is guessed about is what the run protects: rows, or persons with all their rows.
    """
    if shadows and (shadows < 4 or shadows % 2):
        raise ValueError(
            f"--shadows {shadows} must be 0, or an even number of at least 4: each row (or person) is in half of them."
        )
    folder = RunFolder(out)
    config, parts, source = load_trained(out)
    if source != "model":
        raise RunFolderError(f"{out} is not finished; finish it first: rgp train --resume --out {out}")
    pool, summary = Pool.of(parts.data), folder.read_json(folder.summary)
    members = pool.trained
    of_rows = confidences(parts.model, pool.rows(), parts, batch_size=config.training.microbatch_size or 32)
    target = pool.mean(of_rows)
    scores = {"loss threshold": pool.mean(-np.logaddexp(0.0, -of_rows))}
    if shadows:
        try:
            found, inside = train_shadows(
                config,
                pool,
                noise_multiplier=summary["noise_multiplier"],
                steps=summary["steps"],
                shadows=shadows,
                seed=seed,
                folder=_cache(folder, config, summary),
                keep=keep,
                progress=progress,
            )
        except Interrupted as error:
            error.args = (
                f"stopped; the shadow models so far are kept. Resume with: rgp attack {out} --shadows {shadows}",
            )
            raise
        scores["LiRA"] = lira(target, found, inside)
        scores["RMIA"] = rmia(target, found, np.arange(members, len(target)))
    judged = {name: judge(-score[:members], -score[members:], seed=seed) for name, score in scores.items()}
    first = judged["loss threshold"]
    result: dict[str, Any] = {
        "covered_by_the_guarantee": False,
        "note": NOTE,
        **{name: value for name, value in first.items() if name not in ("intervals", "roc", "judged")},
        "attacks": judged,
        "unit": pool.noun,
        "shadows": shadows,
        "seed": seed,
        "confidence": CONFIDENCE,
        "interval": INTERVALS,
        "promised": _promised(out),
        "files": [],
    }
    picture = out / "attack.png"
    if _draw(judged, result["promised"], picture, progress):
        result["files"] = [str(picture)]
    result["files"].insert(0, str(out / "attack.json"))
    folder.write_json(out / "attack.json", result, mode=0o600)
    record_attack(folder)
    if runner.write_report([out], folder.report, progress.say) is not None:
        result["files"].append(str(folder.report))
    return result


def threshold_attack(out: Path, *, seed: int = 0) -> dict[str, Any]:
    """The loss-threshold test alone, training rows against held-out rows, writing nothing. Its result is private."""
    config, parts, _ = load_trained(out)
    train, test = (
        setup.example_losses(
            parts.model,
            rows,
            collate_fn=parts.data.collate_fn,
            device=parts.device,
            batch_size=config.training.microbatch_size or 32,
        )[0]
        for rows in (parts.data.train, parts.data.test)
    )
    return attack(train, test, seed=seed)


def _promised(out: Path) -> dict[str, float] | None:
    """What the guarantee allows any attack; None without one."""
    ledger = Ledger.open(out)
    events = ledger.events()
    meaning = accounting.meaning(events, delta=ledger.header["delta"])
    if not math.isfinite(meaning.mu):
        return None
    return {
        "success_rate": coin(meaning.mu),
        "tpr_at_0.001": meaning.tpr_at_0_1_percent,
        "tpr_at_0.01": meaning.tpr_at_1_percent,
        "mu": meaning.mu,
    }


def _cache(folder: RunFolder, config: Config, summary: dict[str, Any]) -> Path:
    """Where the shadow models of exactly this training are kept; another config has another folder."""
    about = json.dumps([config.to_dict(), summary["noise_multiplier"], summary["steps"]], sort_keys=True, default=str)
    cache = folder.path / "attack" / hashlib.sha256(about.encode()).hexdigest()[:12]
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    cache.parent.chmod(0o700)
    return cache


def _draw(judged: dict[str, Any], promised: dict[str, float] | None, path: Path, progress: Progress) -> bool:
    try:
        from rgp.attacks.figure import draw_roc
    except ImportError:
        progress.say("no figure was drawn; it needs: pip install 'rgp[plots]'")
        return False
    draw_roc({name: found["roc"] for name, found in judged.items()}, promised, path)
    path.chmod(0o600)
    return True
