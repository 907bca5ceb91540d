"""What the model and the loss have to show before anything is released: that they keep the examples of a batch apart.

The first micro-batch of two or more examples is watched: the arguments of the model's call, with which it is repeated
(probe.py), and the operations from its outputs to the loss (losses.py). A mean over everybody's labels is looked for in
every batch, since it depends on the labels. collate_fn and augment have their own watch: mixing.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

from torch import Tensor, nn

from rgp.capture import Capture
from rgp.checks.losses import check_apart, check_even, check_factors, leaves_of
from rgp.checks.probe import Recorder, check_examples_apart
from rgp.errors import WrongUseError
from rgp.streams import Streams


class Vetting:
    """Goes along with a run's micro-batches: `begin`, the loop's body, `check`, `end`.

    all_ranks: where a pass needs every rank (sharded weights), whether something holds on all of them; collective.
    """

    def __init__(
        self,
        model: nn.Module,
        capture: Capture,
        streams: Streams,
        *,
        wanted: bool,
        all_ranks: Callable[[bool], bool] | None = None,
    ) -> None:
        self._model, self._capture, self._streams, self._all_ranks = model, capture, streams, all_ranks
        self.model_open = wanted  # whether the model has yet to show it
        # whether the loss has; with sharded weights a look at its gradients would gather them, on this rank alone
        self.loss_open = wanted and all_ranks is None
        self._recorder: Recorder | None = None
        self._step = -1  # of the loss whose parameters were looked at last

    def begin(self, m: int) -> None:
        if self.model_open and m > 1:
            self._recorder = Recorder(self._model)
        self._capture.keeps_trail = self.loss_open and m > 1

    def end(self) -> None:
        if self._recorder is not None:
            self._recorder.remove()
            self._recorder = None

    def check(self, loss: Tensor, m: int, step: int) -> None:
        """Raise if examples are not kept apart, or if a parameter takes part that is not the run's."""
        if step != self._step:
            self._check_parameters(loss)
            self._step = step
        if self.model_open:
            self._check_model(m, step)
        self._check_loss(loss, m)

    def _check_model(self, m: int, step: int) -> None:
        calls = [] if self._recorder is None else self._recorder.calls
        if not self._every(bool(calls)):
            if self._capture.trail.outputs:
                self.model_open = False
                warnings.warn(
                    "the loop does not call the model as a whole, model(...), so it was not checked that the model keeps the "
                    "examples of a batch apart. Check it once with rgp.check(model, batch, loss_fn): see docs/pitfalls.md."
                )
            return
        self.end()
        names, seed = self._capture.names(), self._streams.torch_seed(step, part=2**33)
        with self._capture.paused():
            apart = [check_examples_apart(self._model, c, m, names, seed, self._every, self._some) for c in calls]
        self.model_open = not all(apart)

    def _every(self, flag: bool) -> bool:
        """Whether it holds on all ranks that pass together."""
        return flag if self._all_ranks is None else self._all_ranks(flag)

    def _some(self, flag: bool) -> bool:
        return not self._every(not flag)

    def _check_parameters(self, loss: Tensor) -> None:
        known, leaves = self._capture.names(), leaves_of(loss)
        foreign = [leaf for leaf in leaves if isinstance(leaf, nn.Parameter) and id(leaf) not in known]
        if foreign and any(id(leaf) in known for leaf in leaves):
            raise WrongUseError(
                f"a parameter of shape {tuple(foreign[0].shape)} that is not the model's takes part in the loss: it would get a "
                "gradient that is neither clipped nor noisy. Make it a part of the model (an attribute of the module) before "
                "privatize, or freeze it with requires_grad_(False). Nothing of this batch was released."
            )

    def _check_loss(self, loss: Tensor, m: int) -> None:
        trail = self._capture.trail
        check_even(loss, trail)
        if trail.outputs:
            self.loss_open = False
            check_factors(loss, trail)
            check_apart(loss, trail, m)
