"""Does the loop write into the model? What it leaves in a parameter or a buffer is private data without noise.

A buffer that ends up the same whatever the examples are (a counter of steps, a falling temperature) reveals nothing about them.
The rehearsal finds out: before each of its trials the buffers are as they were, and afterwards their contents are compared.

What the loop does where `run.step` returns True is not rehearsed. If it changes the model there, one warning says so: a clamp or
a schedule follows from what was released, class centres do not, and the two look the same from here.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rgp.errors import UnsupportedError
from rgp.torchstate import bits_of, is_sharded

Place = tuple[str, dict[str, Any], str]  # name, the module's tensors, the name among them


class Writes:
    """Notices a forward pass that changes parameters or buffers."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._places = self._find()
        self._bits: Tensor | None = None
        self._kept: list[tuple[Place, Tensor, Tensor]] | None = None  # buffers as they were before a rehearsal
        self._ends: list[Tensor] | None = None  # as its first trial left them
        self.harmless: set[str] = set()  # buffers that changed, in the same way for all examples
        self._clamped: set[str] = set()  # parameters that the loop changed, in the same way for all examples
        self._left: dict[tuple[str, int], int] = {}  # in this rehearsal: a parameter before a trial -> after it
        self._settled: list[tuple[Tensor | None, int]] | None = None  # as the optimizer's last step left them

    def _find(self) -> list[Place]:
        return [
            (f"{prefix}.{leaf}".lstrip("."), tensors, leaf)
            for prefix, module in self._model.named_modules()
            for tensors in (module._parameters, module._buffers)
            for leaf, tensor in tensors.items()
            if tensor is not None and leaf != "num_batches_tracked" and leaf not in module._non_persistent_buffers_set
        ]

    def _now(self) -> list[tuple[Tensor | None, int]]:
        tensors = [place.get(leaf) for _, place, leaf in self._places]
        with torch._C.DisableTorchFunction():  # so that the capture does not see hundreds of reads of version counters
            return [(t, -1 if t is None or t.is_inference() else t._version) for t in tensors]

    def start(self, *, closely: bool = False) -> None:
        """closely: also compare contents, which `.data` changes past the version counters; a pass over the weights."""
        self._put_back()
        self._before = self._now()
        self._bits = self._sums() if closely else None

    def _sums(self) -> Tensor:
        tensors = [place.get(leaf) for _, place, leaf in self._places]
        with torch.no_grad(), torch._C.DisableTorchFunction():
            return torch.stack(
                [bits_of(t).cpu() if t is not None and _has_bits(t) else torch.tensor(0) for t in tensors]
            )

    def weights(self) -> Tensor | None:
        """A digest that shows whether parameters are unchanged, if they are examined closely."""
        if self._bits is None:
            return None
        return self._bits[[isinstance(place.get(leaf), nn.Parameter) for _, place, leaf in self._places]]

    def settle(self) -> None:
        """After the optimizer's step: until the next batch, nothing should change."""
        self._settled = self._now()

    def check_between(self) -> None:
        """When the loop has come back after a step: say once what it has changed, where it was not rehearsed."""
        if self._settled is None:
            return
        settled, self._settled = self._settled, None
        excused = self.harmless | self._clamped
        for (name, *_), (old, a), (new, b) in zip(self._places, settled, self._now(), strict=True):
            if (old is not new or a != b) and name not in excused:
                excused.add(name)
                self._clamped.update(place[0] for place in self._places)  # once is enough
                warnings.warn(
                    f"{name!r} was changed after run.step(loss) had returned True, which no check looks at: what is computed "
                    "from private examples would be in the model without noise. What follows from released weights and the "
                    "number of the step alone (a clamp, a schedule) is fine; if it does, ignore this. See docs/pitfalls.md."
                )

    def check(self) -> None:
        """UnsupportedError if something has changed; in a rehearsal, parameters only: `compare` looks at buffers."""
        now = self._now()
        changed = [old is not new or a != b for (old, a), (new, b) in zip(self._before, now, strict=True)]
        if self._bits is not None and not any(changed):
            changed = (self._sums() != self._bits).tolist()
            known = {name for name, *_ in self._places}
            added = next((name for name, *_ in self._find() if name not in known), None)
            if added is not None:
                _refuse_change(added)
        excused = self.harmless if self._kept is None else {name for (name, *_), *_ in self._kept}
        for (name, *_), has_changed in zip(self._places, changed, strict=True):
            if has_changed and name not in excused:
                _refuse_change(name)

    # ------------------------------------------------------------------ the rehearsal

    @contextmanager
    def rehearsed(self) -> Iterator[None]:
        """Keep a rehearsal from leaving anything in the buffers."""
        self._put_back()  # a loop that was left in the middle of a rehearsal
        with torch.no_grad(), torch._C.DisableTorchFunction():
            kept = self._kept = [
                (place, tensor, tensor.detach().clone())
                for place in self._places
                if isinstance(tensor := place[1].get(place[2]), Tensor)
                and not isinstance(tensor, nn.Parameter)
                and _has_bits(tensor)
            ]
        self._ends = None
        self._left.clear()
        try:
            yield
        finally:
            if self._kept is kept:  # no other loop has begun one
                self._put_back()
                self._kept = self._ends = None

    def _put_back(self) -> None:
        """Give the buffers what they held before the rehearsal, if there is one."""
        with torch.no_grad(), torch._C.DisableTorchFunction():
            for (_, place, leaf), tensor, content in self._kept or ():
                place[leaf] = tensor
                if not _same(tensor, content):
                    tensor.data.copy_(content)

    def compare(self) -> None:
        """After a trial, when the loop has come back: buffers must be as the first trial left them."""
        assert self._kept is not None
        with torch.no_grad(), torch._C.DisableTorchFunction():
            ends = [place[leaf].detach().clone() for (_, place, leaf), *_ in self._kept]
            if self._ends is None:
                self._ends = ends
            for ((name, *_), _, content), first, now in zip(self._kept, self._ends, ends, strict=True):
                if not _same(first, now):
                    _refuse_change(name)
                if not _same(content, now):
                    self.harmless.add(name)
        self._compare_parameters()

    def _compare_parameters(self) -> None:
        """A parameter that began two trials alike must have ended them alike: a clamp does, a mean of features does not."""
        if self._bits is None:
            return
        touched = [old is not new or a != b for (old, a), (new, b) in zip(self._before, self._now(), strict=True)]
        if not any(touched):
            return
        for (name, place, leaf), was, now, changed in zip(
            self._places, self._bits.tolist(), self._sums().tolist(), touched, strict=True
        ):
            if changed and isinstance(place.get(leaf), nn.Parameter):
                if (end := self._left.get((name, was))) is not None:
                    if end != now:
                        _refuse_change(name)
                    self._clamped.add(name)
                self._left[name, was] = now


def _same(one: Tensor, two: Tensor) -> bool:
    """Whether two tensors are equal, NaN included."""
    return (
        one.shape == two.shape and one.dtype == two.dtype and bool(((one == two) | ((one != one) & (two != two))).all())
    )


def _refuse_change(name: str) -> None:
    raise UnsupportedError(
        f"{name!r} was changed by the forward pass, or by the loop: it now holds something computed from private data "
        "without noise, and would be published with the model. Running statistics must be off (.eval(), or "
        "track_running_stats=False), and so must an embedding's max_norm."
    )


def _has_bits(tensor: Tensor) -> bool:
    return not (tensor.is_meta or is_sharded(tensor))
