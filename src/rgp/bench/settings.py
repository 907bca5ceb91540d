"""What is measured: the same settings go to every contender."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from rgp.validate import check_count, check_one_of

CONTENDERS = ("rgp", "plain", "bound", "opacus-ghost", "opacus-hooks", "dpsgd")
MODELS = ("bert-base", "minilm", "toy")
MODEL_PATTERN = re.compile(r"wrn\d+-\d+|(stack|transformer):\d+|[\w.]+:\w+")
LONG_WARM_UP = 8.0  # seconds after which one warm-up step is enough
WARM_UP_STEPS = 2  # the first steps of a process are slower: caches of kernels and of the allocator fill


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One benchmark's work. The defaults are the BERT-base row of the README's table.

    >>> Settings(model="minilm", batch=64, microbatch=32, seq=64)
    Settings(model='minilm', batch=64, microbatch=32, seq=64, ...)
    """

    model: str = "bert-base"
    """bert-base, minilm, wrn16-4 (any wrnD-K), transformer:512 (any width), toy, a folder with a Hugging Face model, or
    module:function."""
    batch: int = 32
    """Examples in a logical batch: one optimizer step."""
    microbatch: int = 8
    """Examples that go through the model at once; divides `batch`."""
    seq: int = 128
    """Tokens per example, for text models."""
    rank: int = 8
    """Columns of L and rows of R."""
    sides: str = "both"
    """Carriers that take gradients: both, left, right or alternate."""
    source: str = "weight"
    """Where carriers come from: weight, or history (W - W0, measured past the warm-up), or another of the engine's."""
    power_iterations: int = 1
    """K of the power method."""
    keep: int = 1
    """Steps for which carriers stay."""
    state: str = "full"
    """The optimizer's state for carried weights: full or thin."""
    bands: int = 1
    """Steps over which this library's noise is correlated, with all past noise in place from the second step on."""
    optimizer: str | None = None
    """adamw or sgd (momentum 0.9); by default sgd for wide ResNets and adamw for the rest."""
    repeats: int = 5
    """Measured steps of each contender."""
    threads: int = 0
    """Threads of each contender; 0 stands for all cores that this process may use."""
    device: str = "auto"
    """cpu, cuda, or auto: cuda where there is one."""
    compile: bool = False
    """Whether models are compiled (torch.compile), where a contender can train such: plain, rgp, dpsgd."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.model in MODELS or MODEL_PATTERN.fullmatch(self.model) or Path(self.model).is_dir()):
            raise ValueError(
                f"model={self.model!r} is not known: take {', '.join(MODELS)}, wrn16-4, wrn28-4, the path of a folder "
                "with a Hugging Face model, or module:function"
            )
        for name in ("batch", "microbatch", "seq", "rank", "repeats", "power_iterations", "keep", "bands"):
            check_count(name, getattr(self, name))
        if self.batch % self.microbatch:
            # Unequal micro-batches would not be cut in the same places by every contender.
            raise ValueError(f"batch={self.batch} must be a multiple of microbatch={self.microbatch}")
        check_count("threads", self.threads, least=0)
        check_one_of("state", self.state, ("full", "thin"))
        if self.optimizer not in (None, "adamw", "sgd"):
            raise ValueError(f"optimizer={self.optimizer!r} must be 'adamw' or 'sgd'")
        if self.optimizer is None:
            object.__setattr__(self, "optimizer", "sgd" if self.model.startswith("wrn") else "adamw")
        if self.threads == 0:
            object.__setattr__(self, "threads", available_cores())

    @property
    def steps(self) -> int:
        """Logical steps that a contender takes altogether."""
        return WARM_UP_STEPS + self.repeats


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_contenders(names: list[str]) -> list[str]:
    unknown = [name for name in names if name not in CONTENDERS]
    if unknown:
        raise ValueError(f"against={','.join(unknown)} is not known: choose from {', '.join(CONTENDERS)}")
    return names
