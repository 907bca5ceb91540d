"""What `rgp plan` is asked: a model, a method and the settings of a run."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import torch

from rgp.planning.devices import DEVICES
from rgp.planning.step import OPTIMIZERS
from rgp.validate import check_count, check_one_of

METHODS = ("rgp", "dpsgd", "dpsgd-ghost", "dp-lora", "plain")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_UNITS = {"": 1, "B": 1, **{f"{u}B": 1000**i for i, u in enumerate("KMGT", 1)}}
_UNITS |= {f"{u}IB": 1024**i for i, u in enumerate("KMGT", 1)}


def bytes_from(text: str) -> int:
    """Bytes of "24GB" (10^9), "24GiB" (2^30) or a plain number."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or match[1].count(".") > 1 or not float(match[1]) > 0:
        raise ValueError(f"memory={text!r} is not a size: write 24GB or 24GiB")
    return int(float(match[1]) * unit)


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked. The defaults fine-tune BERT-base on SST-2's size.

    >>> from rgp.planning import plan
    >>> plan(Question(model="bert-base", rank=8, against=()))["noise_dimensions"]
    1458370
    """

    model: str = "bert-base"
    """bert-base, minilm, wrn28-4, llama-1b, llama-8b, llama-70b, a folder, a hub id, or module:function."""
    method: str = "rgp"
    """Whose layers, noise and trained parameters stand at the top: one of METHODS."""
    against: tuple[str, ...] = METHODS
    """Methods beside it."""
    rank: int = 8
    """Rank of the carriers, and of DP-LoRA's factors."""
    sides: str = "both"
    source: str = "history"
    """Where carriers come from; history keeps a second copy of the carried weights, unless the state is thin."""
    state: str = "full"
    """The optimizer's state for carried weights: full, or thin (in the released coordinates)."""
    rounding: str = "nearest"
    """With a thin state: how updates to bfloat16 weights are rounded; compensated keeps what was lost."""
    batch: int = 1024
    """Expected examples of a logical batch, over all ranks."""
    microbatch: int = 32
    """Examples that go through the model at once, on each rank."""
    seq: int = 128
    dataset_size: int = 67349
    """Units to draw from: rows, or persons with rows_per_unit rows each."""
    rows_per_unit: int = 1
    """Rows of a drawn person that a step uses, at most; of rows, 1."""
    epochs: float = 3
    epsilon: float = 8.0
    delta: float | None = None
    bands: str = "1"
    """Steps over which noise is correlated, in memory b - 1 times what is released; carriers are taken to stay. Or auto."""
    world_size: int = 1
    """Ranks that share a batch."""
    sharded: bool = False
    """Weights, optimizer state and full-size gradients spread over the ranks, and gathered a layer at a time."""
    memory: int | None = None
    """Bytes of one device."""
    dtype: str = "float32"
    """Type of the weights; the sum that is released is float32 in any case."""
    optimizer: str = "adamw"
    device: str = "gpu"
    """gpu or cpu: which form attention, dropout and the optimizer take."""
    task: str = "classification"
    labels: int = 2
    checkpointing: bool = False
    """Layers keep their input only and run again in the backward pass."""

    def __post_init__(self) -> None:
        for name, allowed in (
            ("method", METHODS),
            ("dtype", tuple(DTYPES)),
            ("optimizer", tuple(OPTIMIZERS)),
            ("device", DEVICES),
        ):
            check_one_of(name, getattr(self, name), allowed)
        for name in self.against:
            check_one_of("against", name, METHODS)
        for name in ("rank", "batch", "microbatch", "seq", "dataset_size", "rows_per_unit", "world_size", "labels"):
            check_count(name, getattr(self, name))
        if self.bands != "auto" and not (self.bands.isdecimal() and int(self.bands) >= 1):
            raise ValueError(f"bands={self.bands!r} must be a whole number of at least 1, or auto")
        if self.batch > self.dataset_size:
            raise ValueError(f"batch={self.batch} must be at most dataset_size={self.dataset_size}")
        if self.batch < self.world_size:
            raise ValueError(f"batch={self.batch} must be at least world_size={self.world_size}")
        if self.sharded and self.world_size == 1:
            raise ValueError("sharded needs world_size of at least 2: there is nothing to share with one rank")
        if self.source == "public":
            raise ValueError("source='public' needs public data, and a plan has none; take history, weight or random")

    @property
    def share(self) -> int:
        """Expected rows of a logical batch on one rank, if every unit has as many as are used."""
        return math.ceil(self.batch * self.rows_per_unit / self.world_size)
