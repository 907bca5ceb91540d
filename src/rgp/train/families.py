"""Presets that differ in a few settings only: one file, many names.

A file in presets/families is a list of families. A family has a `name` and an `about` with {axis} in them, a `base` of
settings, and `axes`: axis -> value -> settings of that value. Every combination of values is a preset; later axes win.
Without an axis it is one preset.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent / "presets" / "families"
Settings = dict[str, dict[str, Any]]


@cache
def members() -> dict[str, tuple[str, Settings]]:
    """Name -> (one line about it, its settings), of all families."""
    found: dict[str, tuple[str, Settings]] = {}
    for path in sorted(FOLDER.glob("*.yaml")):
        for family in yaml.safe_load(path.read_text(encoding="utf-8"))["families"]:
            for name, member in expand(family).items():
                assert name not in found, f"{path} makes {name} twice"
                found[name] = member
    return found


def expand(family: Mapping[str, Any]) -> dict[str, tuple[str, Settings]]:
    axes = family.get("axes", {})
    found = {}
    for values in product(*axes.values()):
        chosen = {axis: str(value) for axis, value in zip(axes, values, strict=True)}
        settings: Settings = {}
        for layer in (family.get("base", {}), *(axes[axis][value] for axis, value in zip(axes, values, strict=True))):
            for section, keys in (layer or {}).items():
                settings.setdefault(section, {}).update(keys)
        found[family["name"].format(**chosen)] = (family["about"].format(**chosen), settings)
    return found
