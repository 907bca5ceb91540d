"""The settings of a run: typed, checked in full before any work starts, read from and written to YAML.

    >>> config = load(preset="digits-rgp", changes=["method.rank=4", "budget.epsilon=3"])
    >>> config.method.rank, config.budget.epsilon
    (4, 3.0)
    >>> load(preset="digits-rgp", changes=["method.ranks=4", "budget.epsilon=-1"])
    Traceback (most recent call last):
    rgp.train.config.ConfigError: 2 mistakes in the configuration:
      method.ranks = 4: there is no such key; did you mean method.rank?
      budget.epsilon = -1: must be a number above 0, or null

Settings come from a preset, then a file, then `--set`; later ones win. A section is a dataclass, a key one of its fields;
the field says what is allowed and what it means, and everything else (checks, suggestions, the printed file) follows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

PRESETS = Path(__file__).parent / "presets"
METHODS = ("rgp", "rgp-random", "dpsgd", "linear", "bitfit", "nonprivate")
IMAGE_MODELS = ("small-cnn", "mlp", "wrn-10-1", "wrn-16-1", "wrn-16-4", "wrn-28-4")
IMAGES = ("digits", "cifar10", "svhn", "mnist", "fashion_mnist")
TEXTS = ("sst2", "qnli", "qqp", "mnli")
EXCLUSIVE = (("training.epochs", "training.steps"), ("budget.epsilon", "budget.noise_multiplier"))
CARRIED = ("rank", "sides", "source", "warmup_steps", "power_iterations", "norm")  # keys of methods with carriers


class Mistakes(list[str]):
    """Mistakes found so far, and the keys they are about: what else is wrong with those is not worth saying."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: set[str] = set()
        self.no_base = False  # preset or file could not be read: most keys are missing for that reason

    def add(self, message: str, *keys: str) -> None:
        if not self.keys.intersection(keys):
            self.append(message.rstrip("; "))


class ConfigError(ValueError):
    """Everything that is wrong with a configuration, one line each in `mistakes`."""

    def __init__(self, mistakes: list[str]) -> None:
        self.mistakes = mistakes
        count = "a mistake" if len(mistakes) == 1 else f"{len(mistakes)} mistakes"
        super().__init__("\n  ".join([f"{count} in the configuration:", *mistakes]))


# ---------------------------------------------------------------------- what a value may be


@dataclass(frozen=True)
class Allowed:
    """What a key may hold: `read` turns what YAML gave into the value, or raises ValueError."""

    words: str
    read: Callable[[Any], Any]


def whole(low: int) -> Allowed:
    def read(value: Any) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise ValueError
        return value

    return Allowed(f"a whole number of at least {low}", read)


def number(low: float, *, above: bool = False, high: float = math.inf, below: bool = False) -> Allowed:
    def read(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise ValueError
        found = float(value)  # YAML takes 1e-5, without a point, for text
        if not (math.isfinite(found) and (found > low if above else found >= low)):
            raise ValueError
        if not (found < high if below else found <= high):
            raise ValueError
        return found

    words = f"a number {'above' if above else 'of at least'} {low:g}"
    return Allowed(words + (f" and {'below' if below else 'at most'} {high:g}" if high < math.inf else ""), read)


def choice(*names: str) -> Allowed:
    def read(value: Any) -> str:
        if value not in names:
            raise ValueError
        return value

    return Allowed(f"one of {', '.join(names)}", read)


def string() -> Allowed:
    def read(value: Any) -> str:
        if not isinstance(value, (str, int)) or isinstance(value, bool) or not str(value):
            raise ValueError
        return str(value)

    return Allowed("text", read)


def flag() -> Allowed:
    def read(value: Any) -> bool:
        if not isinstance(value, bool):
            raise ValueError
        return value

    return Allowed("true or false", read)


def ranks() -> Allowed:
    one = whole(1)

    def read(value: Any) -> Any:
        if isinstance(value, Mapping) and value:
            return {str(pattern): one.read(r) for pattern, r in value.items()}
        return value if value == "auto" else one.read(value)

    return Allowed("a whole number of at least 1, auto, or a mapping from parameter-name patterns to ranks", read)


def treatments() -> Allowed:
    one = whole(1)

    def read(value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise ValueError
        return {str(k): v if v in ("carried", "exact", "frozen") else one.read(v) for k, v in value.items()}

    return Allowed("a mapping from parameter-name patterns to carried, exact, frozen or a rank", read)


def key(default: Any, allowed: Allowed, meaning: str) -> Any:
    made = {"default_factory": dict} if default == {} else {"default": default}
    return field(**made, metadata={"allowed": allowed, "nullable": default is None, "meaning": meaning})


# ---------------------------------------------------------------------- the sections


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    name: str = key("digits", string(), "a built-in name, a file or a folder")
    text: str | None = key(None, string(), "column of the text, for tables (two columns: a,b)")
    label: str | None = key(None, string(), "column of the label, for tables")
    held_out: float = key(
        0.2, number(0, above=True, high=1, below=True), "share held out, where the data come without a test split"
    )
    seed: int = key(0, whole(0), "which rows are held out; public")
    folder: str | None = key(None, string(), "where `rgp data get` put the data, if not in its usual place")
    max_length: int = key(128, whole(1), "tokens of a text, the rest is cut off")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    name: str = key("small-cnn", string(), f"{', '.join(IMAGE_MODELS)}; a folder or hub name of a Hugging Face model")
    width: int | None = key(None, whole(8), "small-cnn: channels of the first layer (32); mlp: hidden units (128)")
    pretrained: bool = key(True, flag(), "Hugging Face: start from its weights, not from random ones")


@dataclass(frozen=True, kw_only=True)
class MethodConfig:
    name: str = key("rgp", choice(*METHODS), ", ".join(METHODS))
    rank: Any = key(None, ranks(), "columns of L and rows of R; auto, or a number per parameter-name pattern (8)")
    sides: str | None = key(None, choice("both", "left", "right", "alternate"), "which carrier gradients are used (both)")
    source: str | None = key(
        None, choice("history", "weight", "momentum", "random"), "what the carriers are found in (history)"
    )
    warmup_steps: int | None = key(None, whole(0), "steps before history or momentum is used (a tenth of the run)")
    power_iterations: int | None = key(None, whole(1), "of the power method that finds the carriers (1)")
    norm: str | None = key(None, choice("intrinsic", "paper"), "which norm is clipped (intrinsic)")
    head_scale: float = key(1.0, number(0, above=True), "multiplies the head's gradient before clipping")
    overrides: dict[str, Any] = key({}, treatments(), "parameter-name pattern: carried, exact, frozen or a rank")


@dataclass(frozen=True, kw_only=True)
class BudgetConfig:
    epsilon: float | None = key(None, number(0, above=True), "the privacy that may be spent; the noise follows from it")
    delta: float | None = key(
        None, number(0, above=True, high=1, below=True), "probability that epsilon does not hold (1/(10 N), 1e-5 at most)"
    )
    noise_multiplier: float | None = key(None, number(0, above=True), "the noise itself, in place of epsilon")
    accountant: str = key("pld", choice("pld", "rdp"), "pld is tight; rdp is what older papers used")


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    batch_size: int = key(256, whole(1), "expected examples of a step; each is drawn on its own")
    epochs: float | None = key(None, number(0, above=True), "length of the run in passes over the data")
    steps: int | None = key(None, whole(1), "length of the run in steps, in place of epochs")
    clip: float | None = key(None, number(0, above=True), "largest gradient norm of one example")
    microbatch_size: int | None = key(None, whole(1), "examples that go through the model at once (32)")
    max_batch: int | None = key(None, whole(1), "cap on the examples of a step, with the accounting for it")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    name: str = key("sgd", choice("sgd", "adam", "adamw"), "sgd, adam, adamw")
    lr: float = key(0.1, number(0, above=True), "learning rate")
    momentum: float = key(0.9, number(0, high=1, below=True), "of sgd; beta1 of adam")
    weight_decay: float = key(0.0, number(0), "weight decay")
    schedule: str = key("constant", choice("constant", "cosine", "linear"), "of the learning rate, down to 0")
    warmup: float = key(0.0, number(0, high=1, below=True), "share of the steps in which the learning rate rises")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    seed: int | None = key(
        None, whole(0), "repeats a run exactly; who knows it can undo the protection, so leave it out for real data"
    )
    secure_noise: bool = key(False, flag(), "noise from a cryptographic generator; needs rgp[secure]")
    device: str = key("auto", string(), "auto, cpu, cuda, cuda:1, ...")
    threads: int | None = key(None, whole(1), "CPU threads (all)")
    workers: int = key(0, whole(0), "processes that load data")
    eval_every: int | None = key(None, whole(1), "steps between evaluations (a twentieth of the run)")
    checkpoint_seconds: float = key(300.0, number(0), "seconds between checkpoints")


@dataclass(frozen=True, kw_only=True)
class Config:
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    method: MethodConfig = field(default_factory=MethodConfig)
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    run: RunConfig = field(default_factory=RunConfig)

    @property
    def private(self) -> bool:
        return self.method.name != "nonprivate"

    def to_dict(self) -> dict[str, dict[str, Any]]:
        return {s.name: {f.name: getattr(getattr(self, s.name), f.name) for f in fields(SECTIONS[s.name])} for s in fields(self)}

    def to_yaml(self) -> str:
        """As a file that `rgp train` reads, every key with its meaning."""
        lines = []
        for section, kind in SECTIONS.items():
            lines.append(f"{section}:")
            for f in fields(kind):
                value = _scalar(getattr(getattr(self, section), f.name))
                lines.append(f"  {f.name + ': ' + value:<26}  # {f.metadata['meaning']}")
            lines.append("")
        return "\n".join(lines)


SECTIONS: dict[str, type] = {
    "data": DataConfig,
    "model": ModelConfig,
    "method": MethodConfig,
    "budget": BudgetConfig,
    "training": TrainingConfig,
    "optimizer": OptimizerConfig,
    "run": RunConfig,
}
KEYS = [f"{section}.{f.name}" for section, kind in SECTIONS.items() for f in fields(kind)]


# ---------------------------------------------------------------------- reading


def load(
    file: Path | None = None, *, preset: str | None = None, changes: Iterable[str] = (), defaults: bool = False
) -> Config:
    """A checked config out of a preset, a YAML file and `section.key=value` changes; ConfigError lists every mistake.

    Without preset and file there is nothing to start from, and an error says so, unless `defaults` is set.
    """
    mistakes = Mistakes()
    given: dict[str, Any] = {}  # dotted key -> what the user wrote
    if preset is None and file is None and not defaults:
        mistakes.no_base = True
        mistakes.append(f"nothing to train: give a config file, or --preset with one of {', '.join(presets())}")
    if preset is not None:
        if preset in presets():
            content = _parse((PRESETS / f"{preset}.yaml").read_text(encoding="utf-8"), f"preset {preset}", mistakes)
            _collect(content, given, mistakes)
        else:
            mistakes.no_base = True
            mistakes.append(f"preset {preset!r} does not exist; {_perhaps(preset, presets())}there are {', '.join(presets())}")
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
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def _overlay(given: dict[str, Any], layer: Mapping[str, Any]) -> None:
    """Later settings win; one of two that exclude each other takes the place of an earlier other one."""
    given.update(layer)
    for pair in EXCLUSIVE:
        for a, b in (pair, pair[::-1]):
            if layer.get(a) is not None and b not in layer:
                given.pop(b, None)


def _collect(content: Any, given: dict[str, Any], mistakes: Mistakes) -> None:
    if content is None:
        return
    if not isinstance(content, Mapping):
        mistakes.append(f"the config must be sections with keys below them; got {content!r}")
        return
    for section, keys in content.items():
        if section in SECTIONS and isinstance(keys, Mapping):
            for name, value in keys.items():
                _take(f"{section}.{name}", value, given, mistakes)
        elif section in SECTIONS:
            if keys is not None:
                mistakes.append(f"{section} = {_short(keys)}: must be a section, with keys below it")
        else:
            _take(str(section), keys, given, mistakes)


def _take(name: str, value: Any, given: dict[str, Any], mistakes: Mistakes) -> None:
    if name in KEYS:
        given[name] = value
    elif name in SECTIONS:
        mistakes.add(f"{name} = {_short(value)}: {name} is a section; set one of its keys, such as {_first_key(name)}")
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
        mistakes.add(
            f"{name} = {_short(value)}: there is no such key; {f'did you mean {near[0]}?' if near else known}"
        )
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
                near = _perhaps(str(value), allowed.words.removeprefix("one of ").split(", ")) if isinstance(value, str) else ""
                words = allowed.words + (", or null" if nullable else "")
                mistakes.add(f"{name} = {_short(value)}: must be {words}; {near}".rstrip())
                mistakes.keys.add(name)
    return values


class _Loader(yaml.SafeLoader):
    """Refuses a key that is written twice: YAML would silently take the second one."""

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
    except yaml.YAMLError as error:
        mistakes.append(f"{where} is not YAML: {' '.join(str(error).split())}")
        return None


# ---------------------------------------------------------------------- checks of keys against each other


def cross_check(config: Config, mistakes: Mistakes) -> None:
    """Mistakes that no key makes alone."""
    method, budget, training = config.method, config.budget, config.training

    def one_of(a: str, b: str, first: Any, second: Any) -> None:
        if (first is None) == (second is None):
            state = "neither is set" if first is None else "both are set"
            mistakes.add(f"{a} and {b}: set one of them, and the other to null; {state}", a, b)

    one_of("training.epochs", "training.steps", training.epochs, training.steps)
    protecting = {
        "budget.epsilon": budget.epsilon,
        "budget.noise_multiplier": budget.noise_multiplier,
        "training.clip": training.clip,
    }
    if config.private:
        one_of("budget.epsilon", "budget.noise_multiplier", budget.epsilon, budget.noise_multiplier)
        if training.clip is None:
            mistakes.add(f"training.clip = null: method {method.name} needs a number above 0, such as 1", "training.clip")
    else:
        for name, value in protecting.items():
            if value is not None:
                words = f"{name} = {value:g}: method nonprivate protects nothing, so this must be null"
                mistakes.add(words, name, "method.name")
    carries = method.name in ("rgp", "rgp-random")
    for leaf in CARRIED:
        value = getattr(method, leaf)
        if value is not None and not carries:
            words = f"method.{leaf} = {_short(value)}: method {method.name} has no carriers, so this must be null"
            mistakes.add(words, f"method.{leaf}", "method.name")
    if method.name == "rgp-random" and method.source not in (None, "random"):
        words = f"method.source = {method.source}: the carriers of rgp-random are random; use method.name = rgp"
        mistakes.add(words, "method.source")
    if training.max_batch is not None and budget.accountant == "rdp":
        words = f"training.max_batch = {training.max_batch}: needs budget.accountant = pld"
        mistakes.add(words, "training.max_batch", "budget.accountant")
    if config.run.device != "auto" and not _is_device(config.run.device):
        words = f"run.device = {config.run.device}: must be auto, cpu, cuda or cuda with a number, such as cuda:1"
        mistakes.add(words, "run.device")
    _check_names(config.data, config.model, mistakes)


def _check_names(data: DataConfig, model: ModelConfig, mistakes: Mistakes) -> None:
    images = model.name in IMAGE_MODELS
    hub = "/" in model.name and not model.name.startswith((".", "/", "~"))
    if not images and not hub and not Path(model.name).expanduser().is_dir():
        near = _perhaps(model.name, IMAGE_MODELS)
        mistakes.add(
            f"model.name = {model.name}: {near}must be one of {', '.join(IMAGE_MODELS)}, a folder with a Hugging Face "
            "model, or its name on the hub (owner/name)",
            "model.name",
        )
        mistakes.keys.add("model.name")
    known = data.name in IMAGES + TEXTS
    hub = "/" in data.name and not data.name.startswith((".", "/", "~"))
    if not known and not hub and not Path(data.name).expanduser().exists():
        near = _perhaps(data.name, IMAGES + TEXTS)
        mistakes.add(
            f"data.name = {data.name}: {near}must be one of {', '.join(IMAGES + TEXTS)}, a file or folder that exists, or "
            "the name of a data set on the Hugging Face hub (owner/name)",
            "data.name",
        )
    elif known and images != (data.name in IMAGES):
        holds, wanted = ("texts", "a Hugging Face model") if images else ("images", f"one of {', '.join(IMAGE_MODELS)}")
        mistakes.add(f"model.name = {model.name}: {data.name} holds {holds}; the model must be {wanted}", "model.name")
    if model.width is not None and model.name not in ("small-cnn", "mlp"):
        words = f"model.width = {model.width}: is for small-cnn and mlp; {model.name} has its own, so this must be null"
        mistakes.add(words, "model.width", "model.name")
    if model.width is not None and model.name == "small-cnn" and model.width % 8:
        words = f"model.width = {model.width}: must be a multiple of 8 for small-cnn, whose norms have 8 groups"
        mistakes.add(words, "model.width")


def _is_device(name: str) -> bool:
    kind, colon, index = name.partition(":")
    return kind in ("cpu", "cuda", "mps") and (not colon or index.isdigit())


# ---------------------------------------------------------------------- words


def _perhaps(name: str, among: Iterable[str]) -> str:
    near = get_close_matches(name, list(among), n=1, cutoff=0.6)
    return f"did you mean {near[0]}? " if near else ""


def _first_key(section: str) -> str:
    return f"{section}.{fields(SECTIONS[section])[0].name}"


def _short(value: Any) -> str:
    words = _scalar(value)
    return words if len(words) <= 60 else words[:57] + "..."


def _scalar(value: Any) -> str:
    """As YAML on one line."""
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    dumped = yaml.safe_dump(value, default_flow_style=True, width=10**6, sort_keys=False).strip()
    return dumped.removesuffix("...").strip()
