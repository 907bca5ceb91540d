"""The trained weights: written into model/ with their card, and read back from a run's folder."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from torch import nn

from rgp.cards import card_text
from rgp.files import complete_folder
from rgp.train import config, language, setup
from rgp.train.config import Config
from rgp.train.errors import RunFolderError
from rgp.train.folder import RunFolder
from rgp.train.sections import IMAGE_MODELS
from rgp.train.setup import Parts


def publish(folder: RunFolder, settings: Config, parts: Parts, card: dict[str, Any]) -> None:
    """Write model/, weights and card, as a whole."""
    with complete_folder(folder.model) as draft:
        if settings.model.name in IMAGE_MODELS:
            save_weights(parts.model, draft / "model.safetensors")
            about = {
                "name": settings.model.name,
                "width": settings.model.width,
                "affine": settings.model.affine,
                "weight_standardization": settings.model.weight_standardization,
                "classes": parts.data.classes,
                "shape": list(parts.data.shape),
                "labels": list(parts.data.label_names),
            }
            folder.write_json(draft / "model.json", about)
        else:
            model: Any = language.without_adapters(copy.deepcopy(parts.model))
            model.save_pretrained(draft)
            parts.tokenizer.save_pretrained(draft)
        folder.write_json(draft / "privacy_card.json", card)
        folder.write_text(draft / "privacy_card.md", card_text(card))


def save_weights(model: nn.Module, path: Path) -> None:
    from safetensors.torch import save_model

    save_model(model, str(path))
    path.chmod(0o644)  # to be published; safetensors writes for the owner alone


def load_trained(out: Path, data: Any = None, *, search: bool = False) -> tuple[Config, Parts, str]:
    """(config, parts with the run's weights, where they came from: the finished model, or the last checkpoint).

    search: take the best run of a search too, whose promise is not the run's.
    """
    from safetensors.torch import load_model

    folder = RunFolder(out)
    if folder.search.exists():
        settings = config.load(_best_of_search(folder, search))
    elif folder.config.exists():
        settings = config.load(folder.config)
    else:
        raise RunFolderError(f"{out} is not a run's folder: it has no config.yaml")
    if (folder.model / "model.safetensors").exists():
        weights, source = folder.model / "model.safetensors", "model"
    elif folder.latest.exists():
        source = folder.latest.read_text().strip()
        weights = folder.path / source / "model.safetensors"
    else:
        raise RunFolderError(f"{out} has neither a trained model nor a checkpoint yet")
    parts = setup.make(settings, data)
    if source == "model":
        parts.model = language.without_adapters(parts.model)
    load_model(parts.model, str(weights))
    return settings, parts, source


def _best_of_search(folder: RunFolder, allowed: bool) -> Path:
    """The settings of the best run, where there is one that may be looked at."""
    found, out = folder.read_json(folder.search), folder.path
    if not allowed:
        raise RunFolderError(
            f"{out} holds a search (rgp tune), whose promise is not that of a run: rgp eval and rgp report can read it, this "
            f"command cannot. Train its best settings as a run: rgp train {out / 'best.yaml'} --out DIR"
        )
    if not found["finished"]:
        raise RunFolderError(
            f"the search in {out} is not finished, and nothing of it is released: rgp tune --resume --out {out}"
        )
    if found["best"] is None:
        raise RunFolderError(f"the search in {out} drew no trial, so there is no model in it")
    return out / "best.yaml"
