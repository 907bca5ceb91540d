"""Sharded weights: models on which torch.distributed.fsdp.fully_shard was called (FSDP2), for the engine.

Outside of a forward pass a sharded parameter is a DTensor, of which each rank holds some rows; inside it is a plain tensor
with all of them. The plain ones are objects that live as long as the model, so the capture finds its slots by them. Their
ordinary gradients are never formed, so FSDP has none to reduce: what goes between ranks is each layer's weight, as in plain
FSDP, and the thin sums of distributed.py.

Passes over a sharded model are collective, so every rank makes the same number of them in a step: a rank with fewer micro-
batches repeats an example of the draw, and what comes of it is thrown away (`Filler`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rgp.distributed import Ranks
from rgp.errors import UnsupportedError
from rgp.reconstruct import Factors
from rgp.torchstate import is_sharded


class Filler(list[int]):
    """A micro-batch that keeps a rank in step, and contributes nothing."""


class Sharding:
    """How a model's parameters are sharded; `active` is False if none is."""

    def __init__(self, model: nn.Module, parameters: Mapping[str, Tensor]) -> None:
        self._model, self._parameters = model, parameters
        self.active = any(is_sharded(p) for p in parameters.values())

    def check(self, **unsupported: bool) -> None:
        """Refuse what does not work with sharded weights; the keywords say what it is, and whether it is asked for."""
        for name, wanted in unsupported.items():
            if self.active and wanted:
                raise UnsupportedError(
                    f"{name.replace('_', ' ')} cannot be used with weights that fully_shard has sharded; leave it out, or "
                    "let every rank hold the whole model (without fully_shard)"
                )

    def _modules(self) -> list[Any]:
        from torch.distributed.fsdp import FSDPModule

        return [module for module in self._model.modules() if isinstance(module, FSDPModule)]

    def reshard(self) -> None:
        """Parameters as DTensors: a forward pass without a backward one leaves some of them whole."""
        if self.active:
            for module in self._modules():
                module.reshard()

    def inside(self) -> dict[str, Tensor]:
        """Name -> the tensor that the forward pass will meet. Collective; unshards one module after the other."""
        found = dict(self._parameters)
        if not self.active:
            return found
        for module in self._modules():
            module.unshard()
            for name, parameter in self._model.named_parameters():
                if name in found and is_sharded(self._parameters[name]) and not is_sharded(parameter):
                    found[name] = parameter
            module.reshard()
        still = [name for name, parameter in found.items() if is_sharded(parameter)]
        if still:
            raise UnsupportedError(f"parameter {still[0]!r} is a DTensor that no fully_shard module unshards")
        return found


def shard(full: Tensor, like: Tensor) -> Tensor:
    """A tensor that every rank has in full, as `like` is sharded. Nothing is sent. Plain tensors stay as they are."""
    if not is_sharded(like) or is_sharded(full):
        return full
    return _replicated(full, like).redistribute(placements=like.placements)


def whole(tensor: Tensor) -> Tensor:
    """All rows of a sharded tensor, on every rank; collective. Plain tensors stay as they are."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def product(left: Tensor, right: Tensor, like: Tensor) -> Tensor:
    """left (p, k) times right (k, d), sharded as `like` is: each rank computes its own rows."""
    if not is_sharded(like):
        return left @ right
    from torch.distributed.tensor import Shard

    rows = [place if isinstance(place, Shard) and place.dim == 0 else _replicate() for place in like.placements]
    mine = _replicated(left, like).redistribute(placements=rows)
    return (mine @ _replicated(right, like)).redistribute(placements=like.placements)


def is_cut_by_rows(tensor: Any) -> bool:
    """Whether each rank holds some rows of this DTensor, or all of it."""
    from torch.distributed.tensor import Replicate, Shard

    return all(isinstance(place, Replicate) or place == Shard(0) for place in tensor.placements)


def local_rows(full: Tensor, like: Tensor) -> Tensor:
    """The rows of a tensor, which every rank has in full, that this rank holds of `like`; all of them if that is not sharded."""
    return shard(full, like=like).to_local() if is_sharded(like) else full  # type: ignore[attr-defined]


def thin_product(thin: Tensor, matrix: Tensor | Factors, *, transposed: bool) -> Tensor:
    """thin (r, d) times matrix^T, or thin (r, p) times matrix: on the shards, and only the thin result is gathered."""
    if isinstance(matrix, Factors):
        return (thin @ matrix.right.T) @ matrix.left.T if transposed else (thin @ matrix.left) @ matrix.right
    if is_sharded(matrix):
        thin = _replicated(thin, matrix)
    return whole(nn.functional.linear(thin, matrix) if transposed else thin @ matrix)


def _replicate() -> Any:
    from torch.distributed.tensor import Replicate

    return Replicate()


def _replicated(tensor: Tensor, like: Any) -> Any:
    from torch.distributed.tensor import DTensor

    mesh = like.device_mesh
    return DTensor.from_local(tensor, mesh, [_replicate()] * mesh.ndim, run_check=False)


def shard_state(state: dict[str, Any], parameters: list[Tensor]) -> dict[str, Any]:
    """An optimizer's state dict with whole tensors, as its parameters (in the order of its groups) are sharded."""
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        kept = state["state"].get(number, {})
        for key, value in kept.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and parameter.dim():
                kept[key] = shard(value.to(parameter.device), parameter)
    return state


def gather(tensors: Mapping[str, Any], ranks: Ranks) -> dict[str, Any]:
    """Sharded tensors in full, on the first rank alone; collective, one after the other. Plain ones stay as they are."""
    if not any(is_sharded(tensor) for tensor in tensors.values()):
        return dict(tensors)
    found = {}
    for name, tensor in tensors.items():
        full = whole(tensor).cpu() if is_sharded(tensor) else tensor
        if ranks.first:
            found[name] = full
    return found


@torch.no_grad()
def load_whole(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """load_state_dict, from whole tensors."""
    if not any(is_sharded(p) for p in model.parameters()):
        model.load_state_dict(dict(weights))
        return
    for name, place in model.state_dict().items():
        given = weights[name].to(place.device)
        place.copy_(shard(given.to(place.dtype), place))
