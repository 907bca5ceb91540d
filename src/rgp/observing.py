"""Watching a run while it trains: audits, analyses and plans use the real engine, and observe it from here.

What an observer sees before the release is private; the guarantee does not cover
what it changes there, such as an audit's canaries.
"""

from __future__ import annotations

from torch import Tensor

from rgp.clipping import Gradients


class Observer:
    """Does nothing. Override what is wanted, and give it to `run.observe`."""

    def begin_pass(self, gradients: Gradients) -> None:
        """A micro-batch is about to be handed to the loop."""

    def before_clipping(self, gradients: Gradients, indices: list[int]) -> None:
        """The per-example gradients of these examples (rows, or units by their number) are complete; private."""

    def released(self, step: int, noisy: Tensor) -> None:
        """The noisy sum of a step, on record, before it is used."""
