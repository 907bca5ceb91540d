"""How each contender takes one logical step: the batch in equal micro-batches, then one optimizer step.

What makes them comparable:
- Everyone trains the same parameters (`workloads.freeze_embeddings`) with the same optimizer, from the same weights.
- The dataset is one logical batch. Private contenders draw from it by Poisson sampling at rate 1, which is
  all of it each time; so everyone works on exactly `batch` examples, cut into micro-batches of exactly `microbatch`.
- Private contenders clip at 1 and add noise of multiplier 1.
- The time of a step runs from asking for its first micro-batch to the end of the optimizer step.
- After the warm-up step `Contender.trained_parameters` counts what the optimizer really holds state for, and the
  report says so if contenders differ.

`bound` is no training method: it is the cost of forward and backward without any weight gradient, below
which nothing that trains by backpropagation can get.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from rgp.bands import coefficients
from rgp.bench.settings import Settings
from rgp.bench.workloads import Workload
from rgp.correlated import Chain

CLIP = 1.0
NOISE_MULTIPLIER = 1.0


class Contender:
    """A workload under one way of training. `step` takes one logical step."""

    compiles = False  # whether it can train a model that torch.compile compiled

    def __init__(self, settings: Settings, workload: Workload):
        self.settings, self.workload, self.model = settings, workload, workload.model
        if settings.compile and self.compiles:
            self.model.compile()

    def step(self) -> None:
        raise NotImplementedError

    def trained_parameters(self) -> int:
        """Entries that the optimizer has seen a gradient for (both optimizers keep state for exactly those)."""
        return sum(p.numel() for p in self.optimizer.state)

    def per_example_bytes(self) -> int | None:
        """Largest size of the per-example gradients of a micro-batch, where the contender can tell."""
        return None

    def close(self) -> None:
        """Undo whatever another contender in this process would notice."""

    optimizer: torch.optim.Optimizer

    def make_optimizer(self) -> torch.optim.Optimizer:
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        if self.settings.optimizer == "sgd":
            return torch.optim.SGD(trainable, lr=0.01, momentum=0.9)
        return torch.optim.AdamW(trainable, lr=1e-4)


class Plain(Contender):
    """Ordinary training: gradients of the micro-batches add up in `.grad`."""

    compiles = True

    def __init__(self, settings: Settings, workload: Workload):
        super().__init__(settings, workload)
        self.optimizer = self.make_optimizer()
        self.loader = DataLoader(workload.dataset, batch_size=settings.microbatch, shuffle=True)

    def step(self) -> None:
        for batch in self.loader:
            loss = self.workload.loss(self.model, batch) / len(self.loader)
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Bound(Contender):
    """Forward and backward through all activations, no gradient of any weight, no optimizer."""

    def __init__(self, settings: Settings, workload: Workload):
        super().__init__(settings, workload)
        self.loader = DataLoader(workload.dataset, batch_size=settings.microbatch, shuffle=True)
        trainable = [m for m in self.model.modules() if any(p.requires_grad for p in m.parameters(recurse=False))]
        self.model.requires_grad_(False)
        for module in trainable:
            module.register_forward_hook(self.start_gradient_here)

    @staticmethod
    def start_gradient_here(module: nn.Module, inputs: Any, output: Any) -> None:
        # The first trained layer's output, and no tensor before it: as far back as the gradient goes in training.
        for tensor in output if isinstance(output, tuple) else (output,):
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and not tensor.requires_grad:
                tensor.requires_grad_()

    def step(self) -> None:
        for batch in self.loader:
            loss = self.workload.loss(self.model, batch) / len(self.loader)
            loss.backward()

    def trained_parameters(self) -> int:
        return 0


class Engine(Contender):
    """This library, by its public contract."""

    compiles = True

    def __init__(self, settings: Settings, workload: Workload, make_method: Callable[[Any, Settings], Any]):
        super().__init__(settings, workload)
        import rgp

        self.optimizer = self.make_optimizer()
        self.run = rgp.privatize(
            self.model,
            self.optimizer,
            workload.dataset,
            method=make_method(rgp, settings),
            noise_multiplier=NOISE_MULTIPLIER,
            clip=CLIP,
            batch_size=settings.batch,
            steps=settings.steps,
            microbatch_size=settings.microbatch,
            seed=settings.seed,
            probe=False,  # the rehearsal comes with a few steps only, and docs/pitfalls.md has what it costs
        )
        self.batches = iter(self.run)
        if settings.bands > 1:
            # Not by bands=, which would draw from groups: every contender sees the same batches. Nothing here is private.
            self.run.releases.chain = Chain(coefficients(settings.bands, settings.bands).tolist())

    def step(self) -> None:
        ended = False
        while not ended:
            batch = next(self.batches)
            ended = self.run.step(self.workload.loss(self.model, batch))
        chain = self.run.releases.chain
        if 0 < chain.length < chain.bands - 1:  # as full as it will be after b steps
            past = chain.secrets()[0].clone()
            chain.restore([past] * (chain.bands - 1))

    def per_example_bytes(self) -> int | None:
        return getattr(self.run, "per_example_bytes", None)

    def close(self) -> None:
        self.run.close()


def rgp_method(rgp: Any, settings: Settings) -> Any:
    options: dict[str, Any] = {}
    if settings.source == "history":
        options["warmup_steps"] = 1  # all measured steps are past it, and hold W0
    return rgp.RGP(
        rank=settings.rank,
        sides=settings.sides,
        source=settings.source,
        power_iterations=settings.power_iterations,
        keep=settings.keep,
        state=settings.state,
        **options,
    )


class Opacus(Contender):
    """Opacus as its manual says: `PrivacyEngine.make_private`, and `BatchMemoryManager` for the micro-batches.

    Ghost mode clips by a second backward pass inside `loss.backward()`; hooks mode keeps every example's gradient.
    Full fine-tuning of BERT fails in Opacus because position ids have batch size 1; with frozen embeddings, as for
    everyone here, no hook sits on them.
    """

    def __init__(self, settings: Settings, workload: Workload, mode: str):
        super().__init__(settings, workload)
        from opacus import PrivacyEngine
        from opacus.utils.batch_memory_manager import BatchMemoryManager

        # A sampling rate of 1 / len(loader) = 1: one "epoch" of this loader is one logical step.
        loader = DataLoader(workload.dataset, batch_size=settings.batch)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            private = PrivacyEngine().make_private(
                module=self.model,
                optimizer=self.make_optimizer(),
                criterion=workload.criterion,
                data_loader=loader,
                noise_multiplier=NOISE_MULTIPLIER,
                max_grad_norm=CLIP,
                grad_sample_mode=mode,
            )
        if mode == "ghost":
            self.model, self.optimizer, self.criterion, private_loader = private
        else:
            self.model, self.optimizer, private_loader = private
            self.criterion = workload.criterion
        self.keeps_gradients = mode == "hooks"
        self.largest = 0
        manager = BatchMemoryManager(
            data_loader=private_loader, max_physical_batch_size=settings.microbatch, optimizer=self.optimizer
        )
        self.loader = manager.__enter__()

    def step(self) -> None:
        for batch in self.loader:
            self.optimizer.zero_grad(set_to_none=True)
            loss = self.workload.loss(self.model, batch, self.criterion)
            loss.backward()
            if self.keeps_gradients:
                self.largest = max(self.largest, sum(p.grad_sample.nbytes for p in self.optimizer.params))
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def per_example_bytes(self) -> int | None:
        return self.largest if self.keeps_gradients else None


def build(name: str, settings: Settings, workload: Workload) -> Contender:
    """The contender by its name in the table."""
    if name == "plain":
        return Plain(settings, workload)
    if name == "bound":
        return Bound(settings, workload)
    if name == "rgp":
        return Engine(settings, workload, rgp_method)
    if name == "dpsgd":
        return Engine(settings, workload, lambda rgp, settings: rgp.DPSGD())
    if name.startswith("opacus-"):
        return Opacus(settings, workload, name.removeprefix("opacus-"))
    raise ValueError(f"contender={name!r} is not known")
