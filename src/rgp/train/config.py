"""The settings of a run: typed, checked in full before any work starts, read from and written to YAML.

    >>> config = load(preset="digits-rgp", changes=["method.rank=4", "budget.epsilon=3"])
    >>> config.method.rank, config.budget.epsilon
    (4, 3.0)
    >>> load(preset="digits-rgp", changes=["method.ranks=4", "budget.epsilon=-1"])
    Traceback (most recent call last):
    rgp.train.config.ConfigError: 2 mistakes in the configuration:
      method.ranks = 4: there is no such key; did you mean method.rank?
      budget.epsilon = -1: must be a number above 0, or null

Settings come from a preset, then a file, then `--set`; later ones win. A section is a dataclass, a key one of its
fields; the field says what is allowed and what it means, and all else (checks, suggestions, the printed file) follows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from rgp.train import families
from rgp.train.checks import ConfigError, Mistakes, cross_check, perhaps
from rgp.train.sections import KEYS, SECTIONS, Config, short

__all__ = ["KEYS", "SECTIONS", "Config", "ConfigError", "load", "presets"]

PRESETS = Path(__file__).parent / "presets"
EXCLUSIVE = (("training.epochs", "training.steps"), ("budget.epsilon", "budget.noise_multiplier"))


def load(file: Path | None = None, *, preset: str | None = None, changes: Iterable[str] = ()) -> Config:
    """A checked config from a preset, a YAML file and `section.key=value` changes. ConfigError lists all mistakes."""
    mistakes = Mistakes()
    given: dict[str, Any] = {}  # dotted key -> what the user wrote
    if preset is None and file is None:
        mistakes.no_base = True
        mistakes.append(
            "nothing to train: give a config file, or --preset NAME, such as digits-rgp; rgp train --presets lists them"
        )
    if preset is not None:
        if preset in presets():
            _collect(_preset(preset, mistakes), given, mistakes)
        else:
            mistakes.no_base = True
            mistakes.append(
                f"preset {preset!r} does not exist; {perhaps(preset, presets())}rgp train --presets lists all of them"
            )
    if file is not None:
        try:
            content = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            mistakes.no_base = True
            missing = isinstance(error, FileNotFoundError)
            why = "does not exist" if missing else f"cannot be read: {error}"
            mistakes.append(f"config file {str(file)!r} {why}")
        else:
            layer: dict[str, Any] = {}
            _collect(_parse(content, str(file), mistakes), layer, mistakes)
            _overlay(given, layer)
    layer = {}
    for change in changes:
        name, equals, value = change.partition("=")
        if not equals:
            mistakes.append(f"--set {change}: write section.key=value, such as --set method.rank=4")
            continue
        parsed = _parse(value, f"--set {change}", mistakes)
        _take(name.strip(), parsed, layer, mistakes)
    _overlay(given, layer)
    values = _read(given, mistakes)
    config = Config(**{section: kind(**values[section]) for section, kind in SECTIONS.items()})
    if not mistakes.no_base:
        cross_check(config, mistakes)
    if mistakes:
        raise ConfigError(mistakes)
    return config


def presets() -> list[str]:
    return sorted([*(path.stem for path in PRESETS.glob("*.yaml")), *families.members()])


def about_preset(name: str) -> str:
    """One line that says what a preset is."""
    if name in families.members():
        return families.members()[name][0]
    return (PRESETS / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[0].lstrip("# ")


def _preset(name: str, mistakes: Mistakes) -> Any:
    if name in families.members():
        return families.members()[name][1]
    return _parse((PRESETS / f"{name}.yaml").read_text(encoding="utf-8"), f"preset {name}", mistakes)


def _overlay(given: dict[str, Any], layer: Mapping[str, Any]) -> None:
    """Later settings win; of two keys that exclude each other, the later one replaces the earlier."""
    given.update(layer)
    for pair in EXCLUSIVE:
        for a, b in (pair, pair[::-1]):
            if layer.get(a) is not None and b not in layer:
                given.pop(b, None)


def _collect(content: Any, given: dict[str, Any], mistakes: Mistakes) -> None:
    if content is None:
        return
    if not isinstance(content, Mapping):
        mistakes.no_base = True
        mistakes.append(f"the config must be sections with keys below them; got {content!r}")
        return
    for section, keys in content.items():
        if section in SECTIONS and isinstance(keys, Mapping):
            for name, value in keys.items():
                _take(f"{section}.{name}", value, given, mistakes)
        elif section in SECTIONS:
            if keys is not None:
                mistakes.append(f"{section} = {short(keys)}: must be a section, with keys below it")
        else:
            _take(str(section), keys, given, mistakes)


def _take(name: str, value: Any, given: dict[str, Any], mistakes: Mistakes) -> None:
    if name in KEYS:
        given[name] = value
    elif name in SECTIONS:
        mistakes.add(f"{name} = {short(value)}: {name} is a section; set one of its keys, such as {_first_key(name)}")
    else:
        section, dot, leaf = name.partition(".")
        among = [*SECTIONS, *KEYS]
        known = f"the sections are {', '.join(SECTIONS)}"
        if dot and section in SECTIONS:
            among = KEYS
            known = f"{section} has {', '.join(f.name for f in fields(SECTIONS[section]))}"
        # the section may have been forgotten, or be another one
        exact = [k for k in KEYS if k.partition(".")[2] == (leaf or name)]
        near = exact[:1] or get_close_matches(name, among, n=1, cutoff=0.6)
        mistakes.add(f"{name} = {short(value)}: there is no such key; {f'did you mean {near[0]}?' if near else known}")
        mistakes.keys.update(near)


def _read(given: Mapping[str, Any], mistakes: Mistakes) -> dict[str, dict[str, Any]]:
    values: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for section, kind in SECTIONS.items():
        for f in fields(kind):
            name = f"{section}.{f.name}"
            if name not in given:
                continue
            value, allowed, nullable = given[name], f.metadata["allowed"], f.metadata["nullable"]
            if value is None and nullable:
                values[section][f.name] = None
                continue
            try:
                values[section][f.name] = allowed.read(value)
            except (ValueError, TypeError):
                near = (
                    perhaps(str(value), allowed.words.removeprefix("one of ").split(", "))
                    if isinstance(value, str)
                    else ""
                )
                words = allowed.words + (", or null" if nullable else "")
                mistakes.add(f"{name} = {short(value)}: must be {words}; {near}".rstrip())
                mistakes.keys.add(name)
    return values


class _Loader(yaml.SafeLoader):
    """Refuses a key that is written twice, where YAML would silently take the second one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            name = self.construct_object(key_node, deep=True)  # type: ignore[no-untyped-call]
            if name in seen:
                line = key_node.start_mark.line + 1
                raise yaml.constructor.ConstructorError(None, None, f"key {name!r} is written twice (line {line})")
            seen.add(name)
        return super().construct_mapping(node, deep)


def _parse(content: str, where: str, mistakes: Mistakes) -> Any:
    try:
        return yaml.load(content, _Loader)
    except (yaml.YAMLError, TypeError) as error:  # TypeError: a list as a key
        mistakes.no_base = True
        mistakes.append(f"{where} is not YAML: {' '.join(str(error).split())}")
        return None


def _first_key(section: str) -> str:
    return f"{section}.{fields(SECTIONS[section])[0].name}"
