"""What the processes of a run settle before its first step: the same settings, data and weights, one secret, one ledger.

`distributed.py` is how they talk; here is what they say once, at the start.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from rgp.distributed import Ranks
from rgp.errors import UnsupportedError
from rgp.ledger import Ledger
from rgp.streams import Streams
from rgp.torchstate import as_tree, forked_rng, is_sharded, kept_rng, seed_others


def check_same(ranks: Ranks, what: Mapping[str, Any]) -> None:
    """ValueError on all ranks that names the first thing that is not the same on all of them."""
    if ranks.size == 1:
        return
    mine = {name: repr(value) for name, value in what.items()}
    theirs = ranks.from_first(lambda: mine)
    names = [*theirs, *(name for name in mine if name not in theirs)]
    different = next((name for name in names if mine.get(name) != theirs.get(name)), None)
    problem = None
    if different is not None:
        here, there = _where_they_part(mine.get(different, "missing"), theirs.get(different, "missing"))
        problem = f"{different} is {here} on rank {ranks.rank}, and {there} on rank 0; all ranks need the same"
    ranks.agree(problem)


def _where_they_part(here: str, there: str, width: int = 60) -> tuple[str, str]:
    if max(len(here), len(there)) <= 3 * width:
        return here, there
    start = next((i for i, (a, b) in enumerate(zip(here, there, strict=False)) if a != b), min(len(here), len(there)))
    start = max(0, start - width // 2)
    return f"...{here[start : start + width]}...", f"...{there[start : start + width]}..."


@torch.no_grad()
def share_weights(ranks: Ranks, model: nn.Module) -> None:
    """The first rank's parameters and buffers to all, as DistributedDataParallel does; their names and shapes must agree."""
    if ranks.size == 1:
        return
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    check_same(ranks, {f"the model's {name!r}": (list(t.shape), str(t.dtype)) for name, t in tensors.items()})
    for tensor in tensors.values():
        if not is_sharded(tensor):
            ranks.send(tensor)


def share_streams(ranks: Ranks, streams: Streams) -> Streams:
    """One secret for all: the first rank's. Dropout and augmentation still differ from rank to rank."""
    if ranks.size == 1:
        return streams
    secret, known = ranks.from_first(lambda: [streams.secret.hex(), streams.known])
    return Streams(bytes.fromhex(secret), known=known, rank=ranks.rank)


def share_ledger(ranks: Ranks, make: Callable[[], Ledger]) -> Ledger:
    """The first rank's ledger; the others hold the same lines in memory, for what depends on them."""
    if ranks.size == 1:
        return make()
    kept: list[Ledger] = []

    def lines() -> str:
        kept.append(make())
        return kept[0].text().decode()

    text = ranks.from_first(lines)
    return kept[0] if ranks.first else Ledger.from_text(text.encode())


def describe_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All that decides its steps, except for the values of the parameters."""
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return {
        "the optimizer": type(optimizer).__name__,
        "the optimizer's settings": groups,
        "the optimizer's parameters": [[tuple(p.shape) for p in g["params"]] for g in optimizer.param_groups],
    }


def describe_dataset(ranks: Ranks, dataset: Any) -> dict[str, Any]:
    """A digest of a few rows, for ranks to compare: they draw indices together, so their rows must be the same.

    Left out where reading a row twice gives two answers (augmentation with a generator of its own).
    """
    if ranks.size == 1:
        return {}
    rows = sorted({0, len(dataset) // 2, len(dataset) - 1})
    pairs = {i: (_digest(dataset, i), _digest(dataset, i)) for i in rows}
    return {f"row {i} of the dataset": one if one == two else "varies" for i, (one, two) in pairs.items()}


def _digest(dataset: Any, index: int) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with kept_rng(), forked_rng(0):
        seed_others(0)
        item = dataset[index]
    for leaf in tree_leaves(as_tree(item)):
        if isinstance(leaf, Tensor):
            leaf = torch.view_as_real(leaf) if leaf.is_complex() else leaf
            digest.update(leaf.detach().cpu().double().numpy().tobytes())
        elif isinstance(leaf, np.ndarray):
            digest.update(leaf.tobytes())
        elif isinstance(leaf, (str, bytes, int, float)):
            digest.update(repr(leaf).encode())
    return digest.hexdigest()


def refuse_wrappers(model: nn.Module) -> None:
    """Wrappers average gradients over ranks by themselves, before any clipping."""
    for name, module in model.named_modules():
        if type(module).__name__ in ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel"):
            where = "the model" if name == "" else f"module {name!r}"
            raise UnsupportedError(
                f"{where} is wrapped in {type(module).__name__}, which averages gradients before they are clipped. It is not "
                "needed: give privatize the model itself on every process (model.module), and it trains together with the "
                "others. For sharded weights use torch.distributed.fsdp.fully_shard."
            )


def first_then_others(ranks: Ranks, make: Callable[[], Any]) -> Any:
    """Call `make` on every rank, on the first one before the others: it may fill a cache that they then use."""
    kept: list[Any] = []
    ranks.from_first(lambda: kept.append(make()))
    return kept[0] if ranks.first else make()
