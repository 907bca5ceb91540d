"""The Trainer's loss, one per example: what private training needs where models take a mean over all tokens of a batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Trainer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rgp.errors import UnsupportedError
from rgp.torchstate import evaluating, forked_rng

IGNORED = -100


class ExampleLosses(Trainer):
    """`transformers.Trainer` whose training loss is the mean over examples of each example's own loss."""

    _checking = False  # whether losses are tried before a run

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """In training, the mean over examples of each example's own loss; in evaluation, the Trainer's own."""
        labels: Any = inputs.get("labels")
        if (
            not (model.training or self._checking)
            or self.compute_loss_func is not None
            or not isinstance(labels, Tensor)
        ):
            return super().compute_loss(model, inputs, return_outputs=return_outputs)
        if not self._takes_over(inputs):
            if not labels.is_floating_point() and bool((labels == IGNORED).any()):
                raise ValueError(
                    "a label is -100, to be ignored: drop such examples, for a mean without them mixes examples"
                )
            if self.label_smoother is not None and not labels.is_floating_point():
                return self._smoothed_loss(model, inputs, labels, return_outputs)
            return super().compute_loss(model, inputs, return_outputs=return_outputs)
        causal = self._is_causal(model)
        # the model's own loss is a mean over all tokens of the batch; encoder-decoders need labels to make their inputs
        outputs = model(**({k: v for k, v in inputs.items() if k != "labels"} if causal else inputs))
        logits = outputs["logits"] if isinstance(outputs, dict) else outputs[0 if causal else 1]
        loss = token_losses(logits, labels, shift=causal, smoothing=self.args.label_smoothing_factor).mean()
        return (loss, outputs) if return_outputs else loss

    def _smoothed_loss(self, model: nn.Module, inputs: dict[str, Any], labels: Tensor, return_outputs: bool) -> Any:
        """What the Trainer computes for one label per example, without its count of labels over the batch."""
        outputs = model(**{k: v for k, v in inputs.items() if k != "labels"})
        logits = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
        loss = F.cross_entropy(logits, labels, label_smoothing=self.args.label_smoothing_factor)
        return (loss, outputs) if return_outputs else loss

    def _takes_over(self, inputs: dict[str, Any]) -> bool:
        """Whether examples have several labels each, over all of which the model would take one mean."""
        labels = inputs.get("labels")
        return isinstance(labels, Tensor) and not labels.is_floating_point() and labels.dim() > 1

    def _is_causal(self, model: nn.Module) -> bool:
        base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
        names = {kind.__name__ for kind in type(base).__mro__}  # a user's class counts as what it inherits from
        if names.intersection(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()):
            return True
        shifts = getattr(base, "loss_type", None) in ("ForCausalLM", "ForConditionalGeneration")
        return shifts and not getattr(base.config, "is_encoder_decoder", False)

    # ------------------------------------------------------------------ checks before a run

    def check_losses(self, dataset: Any, collate: Any) -> None:
        """Check, before anything is released, that what is trained is the model's own loss."""
        self._checking = True
        try:
            self._check_own_loss(collate([dataset[0]]))
        finally:
            self._checking = False

    def _check_own_loss(self, batch: Any) -> None:
        """Check that, for one example, our loss and the model's own mean over all tokens agree."""
        inputs = self._prepare_inputs(batch)
        if type(self).compute_loss is not ExampleLosses.compute_loss or not self._takes_over(inputs):
            return
        if self.args.label_smoothing_factor:
            return
        with torch.no_grad(), forked_rng(0), evaluating(self.model):
            ours, outputs = self.compute_loss(self.model, dict(inputs)), self.model(**inputs)
        theirs = outputs.get("loss") if isinstance(outputs, dict) else outputs[0]
        if not isinstance(theirs, Tensor) or theirs.numel() != 1 or not bool(theirs.isfinite()):
            return
        if not bool((ours - theirs).abs() <= 1e-2 * (1 + theirs.abs())):
            raise UnsupportedError(
                f"the loss of {type(self.model).__name__} is not the mean cross-entropy of an example's labels, which would be "
                f"trained: for one example it is {float(theirs):.4g}, not {float(ours):.4g} (a shift of the labels, an auxiliary "
                "loss, CTC). Override compute_loss: return a loss for each example, or their mean."
            )


def token_losses(logits: Tensor, labels: Tensor, *, shift: bool, smoothing: float = 0.0) -> Tensor:
    """(m,): the mean loss of every example over its own labelled tokens."""
    if shift:
        logits, labels = logits[:, :-1], labels[:, 1:]
    losses = F.cross_entropy(
        logits.transpose(1, 2), labels, ignore_index=IGNORED, reduction="none", label_smoothing=smoothing
    )
    return losses.flatten(1).sum(1) / (labels != IGNORED).flatten(1).sum(1).clamp_min(1)
