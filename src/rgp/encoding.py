"""Nested state, such as an optimizer's, as JSON and named tensors: no pickle, which can run code when it is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import Tensor

Tensors = dict[str, Tensor]


def encode(value: Any, tensors: Tensors | None, path: str) -> Any:
    """Nested dicts, lists, tuples and scalars as JSON; tensors go to `tensors`, under the path where they were met."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor) and tensors is not None:
        tensors[path] = value
        return {"tensor": path}
    if isinstance(value, Mapping):
        kind = "counter" if isinstance(value, Counter) else "dict"
        if all(isinstance(k, (str, int)) for k in value):
            return {kind: [[k, encode(v, tensors, f"{path}.{k}")] for k, v in value.items()]}
    if isinstance(value, (list, tuple)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [encode(v, tensors, f"{path}.{i}") for i, v in enumerate(value)]}
    if hasattr(value, "item") and not isinstance(value, Tensor):  # a numpy number
        return encode(value.item(), tensors, path)
    raise ValueError(
        f"{path} is a {type(value).__name__} and cannot be saved: checkpoints hold numbers, text and tensors, no pickle"
    )


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind in ("dict", "counter"):
        found = {k: decode(v, tensors) for k, v in content}
        return Counter(found) if kind == "counter" else found
    return (tuple if kind == "tuple" else list)(decode(v, tensors) for v in content)


def distinct(state: Mapping[str, Any]) -> tuple[Tensors, dict[str, str]]:
    """Tied tensors once, and which name stands for which."""
    seen: dict[tuple[Any, ...], str] = {}
    tensors: Tensors = {}
    aliases = {}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"the model's state {name!r} is a {type(value).__name__}; a checkpoint holds tensors only")
        key = (value.data_ptr(), value.shape, value.stride(), value.dtype) if value.numel() else (name,)
        if (first := seen.setdefault(key, name)) == name:
            tensors[name] = value
        else:
            aliases[name] = first
    return tensors, aliases
