"""Does a forward pass write into the model? What it leaves in a parameter or a buffer is private data without noise."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rgp.errors import UnsupportedError
from rgp.torchstate import bits_of, is_sharded


class Writes:
    """Notices a forward pass that changes parameters or buffers: what it wrote there is private data without noise."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._places = self._find()
        self._bits: Tensor | None = None

    def _find(self) -> list[tuple[str, dict[str, Any], str]]:
        return [
            (f"{prefix}.{leaf}".lstrip("."), tensors, leaf)
            for prefix, module in self._model.named_modules()
            for tensors in (module._parameters, module._buffers)
            for leaf, tensor in tensors.items()
            if tensor is not None and leaf != "num_batches_tracked" and leaf not in module._non_persistent_buffers_set
        ]

    def _now(self) -> list[tuple[Tensor | None, int]]:
        tensors = [place.get(leaf) for _, place, leaf in self._places]
        with torch._C.DisableTorchFunction():  # the capture need not see hundreds of looks at version counters
            return [(t, -1 if t is None or t.is_inference() else t._version) for t in tensors]

    def start(self, *, closely: bool = False) -> None:
        """closely: also compare contents, which `.data` changes past the version counters; a pass over the weights."""
        self._before = self._now()
        self._bits = self._sums() if closely else None

    def _sums(self) -> Tensor:
        tensors = [place.get(leaf) for _, place, leaf in self._places]
        with torch.no_grad(), torch._C.DisableTorchFunction():
            return torch.stack(
                [bits_of(t).cpu() if t is not None and _has_bits(t) else torch.tensor(0) for t in tensors]
            )

    def check(self) -> None:
        now = self._now()
        changed = [old is not new or a != b for (old, a), (new, b) in zip(self._before, now, strict=True)]
        if self._bits is not None and not any(changed):
            changed = (self._sums() != self._bits).tolist()
            known = {name for name, *_ in self._places}
            added = next((name for name, *_ in self._find() if name not in known), None)
            if added is not None:
                _refuse_change(added)
        if any(changed):
            _refuse_change(self._places[changed.index(True)][0])


def _refuse_change(name: str) -> None:
    raise UnsupportedError(
        f"{name!r} was changed by the forward pass: it now holds something computed from private data "
        "without noise, and would be published with the model. Running statistics must be off (.eval(), or "
        "track_running_stats=False), and so must an embedding's max_norm."
    )


def _has_bits(tensor: Tensor) -> bool:
    return not (tensor.is_meta or is_sharded(tensor))
