"""The built-in data sets and weights: where they come from, and the public constants they are normalised with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Pixels:
    """`(value / scale - mean) / std`, per channel. Written down here, never computed from the rows of a run."""

    scale: float = 255.0
    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.5,)


@dataclass(frozen=True, kw_only=True)
class Images:
    """A built-in set of images; on disk NAME.npz with x_train, y_train, x_test, y_test."""

    about: str
    pixels: Pixels
    labels: tuple[str, ...]
    hub: str = ""
    hub_config: str | None = None


@dataclass(frozen=True, kw_only=True)
class Texts:
    """A built-in set of texts; on disk a folder NAME with one table per split.

    text, label: columns, the first alternative that a file has is taken
    labels: names of the classes in the order of their numbers
    test: splits that serve as test set, the first that is there; GLUE's own test split has no labels
    more: further test sets: name -> splits, the first that is there, if any
    """

    about: str
    text: Sequence[tuple[str, ...]]
    label: tuple[str, ...]
    labels: tuple[str, ...]
    test: tuple[str, ...] = ("validation", "valid", "dev")
    more: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    hub: str = "nyu-mll/glue"
    hub_config: str


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Pretrained weights with their tokenizer; on disk a Hugging Face model folder NAME."""

    about: str
    hub: str
    sha256: str  # of model.safetensors


GENERIC = Pixels()
_DIGITS = tuple("0123456789")

IMAGES = {
    "digits": Images(
        about="1,797 handwritten digits, 8 x 8, from scikit-learn; nothing to fetch",
        pixels=Pixels(scale=16.0),
        labels=_DIGITS,
    ),
    "cifar10": Images(
        about="60,000 photographs in 10 classes, 3 x 32 x 32",
        pixels=Pixels(mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616)),
        labels=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
        hub="uoft-cs/cifar10",
    ),
    "svhn": Images(
        about="99,289 house numbers, 3 x 32 x 32, cropped to one digit",
        pixels=Pixels(mean=(0.4377, 0.4438, 0.4728), std=(0.1980, 0.2010, 0.1970)),
        labels=_DIGITS,
        hub="ufldl-stanford/svhn",
        hub_config="cropped_digits",
    ),
    "mnist": Images(
        about="70,000 handwritten digits, 28 x 28",
        pixels=Pixels(mean=(0.1307,), std=(0.3081,)),
        labels=_DIGITS,
        hub="ylecun/mnist",
    ),
    "fashion_mnist": Images(
        about="70,000 articles of clothing in 10 classes, 28 x 28",
        pixels=Pixels(mean=(0.2860,), std=(0.3530,)),
        labels=(
            *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
            *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
        ),
        hub="zalando-datasets/fashion_mnist",
    ),
}

TEXTS = {
    "sst2": Texts(
        about="68,221 phrases of film reviews, negative or positive (GLUE)",
        text=[("sentence",)],
        label=("label",),
        labels=("negative", "positive"),
        hub_config="sst2",
    ),
    "qnli": Texts(
        about="110,206 questions with a sentence that answers them or not (GLUE)",
        text=[("question", "sentence")],
        label=("label",),
        labels=("entailment", "not_entailment"),
        hub_config="qnli",
    ),
    "qqp": Texts(
        about="404,276 pairs of questions that mean the same or not (GLUE)",
        text=[("question1", "question2")],
        label=("label", "is_duplicate"),
        labels=("not_duplicate", "duplicate"),
        hub_config="qqp",
    ),
    "mnli": Texts(
        about="402,517 pairs of sentences that follow, contradict or neither (GLUE)",
        text=[("premise", "hypothesis"), ("sentence1", "sentence2")],
        label=("label", "gold_label"),
        labels=("entailment", "neutral", "contradiction"),
        test=("validation_matched", "dev_matched", "validation", "valid", "dev"),
        more={"mismatched": ("validation_mismatched", "dev_mismatched")},
        hub_config="mnli",
    ),
}

WEIGHTS = {
    "minilm": Weights(
        about="all-MiniLM-L6-v2: 6 layers, 384 wide, 22.7M parameters, Apache-2.0",
        hub="sentence-transformers/all-MiniLM-L6-v2",
        sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    ),
    "mpnet": Weights(
        about="all-mpnet-base-v2: 12 layers, 768 wide, 109M parameters, Apache-2.0",
        hub="sentence-transformers/all-mpnet-base-v2",
        sha256="78c0197b6159d92658e319bc1d72e4c73a9a03dd03815e70e555c5ef05615658",
    ),
}
