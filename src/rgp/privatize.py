"""`privatize`: check everything a user gave, settle the privacy-relevant numbers once, and make the run."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rgp import accounting
from rgp.accounting import Budget
from rgp.clips import LARGEST, SMALLEST, ClipRule, GroupClip, first_norm, group_of
from rgp.distributed import (
    check_same,
    describe_optimizer,
    find_ranks,
    refuse_wrappers,
    share_ledger,
    share_streams,
    share_weights,
)
from rgp.engine import Run
from rgp.errors import UnsupportedError
from rgp.guards import check_optimizer
from rgp.ledger import Ledger
from rgp.methods import RGP, Method
from rgp.noise import NoiseSource, PhiloxNoise
from rgp.plan import Plan, make_plan
from rgp.sampling import check_dataset, check_lengths
from rgp.settings import FloatSchedule, Settings, per_step
from rgp.streams import Streams

REDUCTIONS = ("mean", "sum", "none")


def privatize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    dataset: Any,
    *,
    batch_size: int | Callable[[int], int],
    method: Method | None = None,
    budget: Budget | None = None,
    noise_multiplier: FloatSchedule | None = None,
    delta: float | None = None,
    epochs: float | None = None,
    steps: int | None = None,
    clip: FloatSchedule | ClipRule | None = 1.0,
    views: int = 1,
    augment: Callable[[Any], Any] | None = None,
    ema: float | None = None,
    microbatch_size: int | None = None,
    max_batch: int | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    loss_reduction: str = "mean",
    scheduler: Any = None,
    seed: int | None = None,
    secure_noise: bool = False,
    folder: str | os.PathLike[str] | None = None,
    workers: int = 0,
    pin_memory: bool = False,
    lengths: Any = None,
    public_loss: Callable[[], Tensor] | None = None,
    probe: bool = True,
    process_group: Any = None,
) -> Run:
    """Make a private training run out of a model, its optimizer and a dataset. Nothing is wrapped or renamed.

    >>> import torch, rgp
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> data = [(torch.randn(8), i % 2) for i in range(64)]
    >>> run = rgp.privatize(model, optimizer, data, method=rgp.RGP(rank=2), noise_multiplier=1.0, batch_size=16, steps=2)
    >>> for x, y in run:
    ...     ended = run.step(torch.nn.functional.cross_entropy(model(x), y))
    >>> run.epsilon() > 0
    True
    >>> run.close()

    model, optimizer: the user's own; the optimizer must hold every parameter that the plan trains.
    dataset: anything with len() and [index]. Its size N counts as public.
    batch_size: expected size of a logical batch. Each example is in it independently with probability batch_size / N, and
        the summed gradient is divided by it. A function of the step makes a schedule.
    method: rgp.RGP() by default.
    budget: rgp.Budget(epsilon, delta): the noise is calibrated to it for the planned steps, and it is a hard stop. Or
    noise_multiplier: sigma itself, a number or a function of the step; 0 means no privacy at all. delta goes with it
        and is min(1e-5, 1 / (10 N)) by default.
    epochs or steps: the length of the run, in passes over the data (round(epochs N / batch_size) steps) or logical steps.
    clip: C, the largest gradient norm of one example; a number or a function of the step; or rgp.AutoClip, rgp.GroupClip,
        rgp.AdaptiveClip. None only without noise.
    views, augment: the loop gets every micro-batch `views` times, each time through augment(batch), and an example's
        gradient is the mean over its views, before clipping. Memory does not grow with them.
    ema: decay of a running mean of the weights, kept beside them; `with run.averaged():` puts it in their place.
    microbatch_size: examples per forward and backward pass; memory grows with it, the result does not depend on it.
    max_batch: cap on a drawn batch, with the accounting that belongs to it.
    loss_reduction: how the loss of a micro-batch was reduced over its examples: "mean", "sum", or "none" for a vector
        of one loss per example, the right choice wherever the mean would mix examples (a mean over all tokens).
    scheduler: its step() is called once per logical step.
    seed: makes the run repeatable; the guarantee then does not hold against whoever knows the seed.
    secure_noise: noise from a cryptographic generator, hardened against floating-point attacks; needs rgp[secure].
    folder: where the ledger is kept on disk; without it, in memory.
    lengths: one number per example (its tokens): examples of similar length then share a micro-batch, which saves padding.
        Which examples are in a batch, and what is released, do not depend on it.
    public_loss: for source="public": computes a loss of the model on public data, such as rgp.without_labels(...). It may
        use torch's random numbers; they are the same after a resume.
    probe: once, before the first release, repeat the model's call with one example replaced, and refuse a model in which
        that changes another example's activations; likewise collate_fn and augment in their first calls, and a loss that
        couples examples. docs/pitfalls.md
    process_group: the torch.distributed processes that train together, by default all of them where torch.distributed is
        initialised. Every process makes this same call; the first one's weights are sent to the others. docs/distributed.md
    """
    method = RGP() if method is None else method
    if not isinstance(method, Method):
        raise TypeError(f"method must be one of rgp's methods, such as rgp.RGP(rank=8); got {method!r}")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module; got {model!r}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be an instance of a torch.optim class; got {optimizer!r}")
    if scheduler is not None and not hasattr(scheduler, "step"):
        raise TypeError(f"scheduler must have a step() method; got {scheduler!r}")
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ValueError(
            "scheduler is a ReduceLROnPlateau: a rate that follows a metric. On private rows that is a use of them without "
            "noise. Take a schedule that is known beforehand; or, with a metric on public rows, call its step(metric) "
            "yourself and leave scheduler out."
        )
    if budget is not None and not isinstance(budget, Budget):
        raise TypeError(f"budget must be an rgp.Budget, such as rgp.Budget(epsilon=8.0, delta=1e-5); got {budget!r}")
    if (getattr(method, "source", None) == "public") != (public_loss is not None):
        raise ValueError("source='public' and public_loss= go together: give both, or neither")
    if not method.private and (budget is not None or noise_multiplier != 0 or clip is not None):
        kind = type(method).__name__
        raise ValueError(f"rgp.{kind} protects nothing: give it noise_multiplier=0 and clip=None, and no budget")
    size = check_dataset(dataset)
    check_lengths(lengths, size)
    check_model(model)
    ranks = find_ranks(process_group)
    share_weights(ranks, model)
    plan = make_plan(model, method)
    check_plan(model, plan)
    check_optimizer(optimizer, dict(model.named_parameters()), {e.name for e in plan.trained})
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS calls the loss again by itself, which private training cannot allow; use another optimizer"
        )
    settings = settle(
        size=size,
        method=method,
        batch_size=batch_size,
        budget=budget,
        noise_multiplier=noise_multiplier,
        delta=delta,
        epochs=epochs,
        steps=steps,
        clip=clip,
        views=views,
        microbatch_size=microbatch_size,
        max_batch=max_batch,
        loss_reduction=loss_reduction,
    )
    if views > 1 and augment is None:
        raise ValueError(f"views={views} without augment= would train on {views} copies of each example; give augment")
    if isinstance(clip, GroupClip):
        group_of(clip, [e.name for e in plan.trained])
    check_same(
        ranks,
        {**vars(settings), "method": method, "secure_noise": secure_noise, "ema": ema, **describe_optimizer(optimizer)},
    )
    streams = share_streams(ranks, Streams.from_system() if seed is None else Streams.from_seed(seed))
    header = {**settings.header(), "seed_known": streams.known, "secure_noise": secure_noise}
    return Run(
        model,
        optimizer,
        dataset,
        plan=plan,
        settings=settings,
        streams=streams,
        noise=noise_source(streams, secure=secure_noise),
        ledger=share_ledger(ranks, lambda: Ledger(header, folder)),
        scheduler=scheduler,
        collate_fn=collate_fn,
        workers=workers,
        pin_memory=pin_memory,
        lengths=lengths,
        public_loss=public_loss,
        augment=augment,
        ema=ema,
        probe=probe,
        ranks=ranks,
    )


def noise_source(streams: Streams, *, secure: bool) -> NoiseSource:
    if secure:
        from rgp.secure import SecureNoise

        return SecureNoise()
    return PhiloxNoise(streams)


def settle(
    *,
    size: int,
    method: Method,
    batch_size: Any,
    budget: Budget | None,
    noise_multiplier: Any,
    delta: float | None,
    epochs: float | None,
    steps: int | None,
    clip: Any,
    views: int,
    microbatch_size: int | None,
    max_batch: int | None,
    loss_reduction: str,
) -> Settings:
    """The privacy-relevant numbers of a run, checked; calibrates the noise where a budget is given."""
    if loss_reduction not in REDUCTIONS:
        raise ValueError(f"loss_reduction must be one of {', '.join(map(repr, REDUCTIONS))}; got {loss_reduction!r}")
    if (epochs is None) == (steps is None):
        raise ValueError(f"give either epochs or steps; got epochs={epochs!r}, steps={steps!r}")
    if (budget is None) == (noise_multiplier is None):
        raise ValueError("give either budget=rgp.Budget(epsilon, delta) or noise_multiplier=, and not both")
    if budget is not None and delta is not None:
        raise ValueError("delta goes with noise_multiplier; with a budget it is part of it: rgp.Budget(epsilon, delta)")
    if steps is None:
        if callable(batch_size):
            raise ValueError("a batch_size schedule needs steps=, because epochs have no fixed length with it")
        _positive("batch_size", batch_size)
        if not isinstance(epochs, (int, float)) or not 0 < epochs < math.inf:
            raise ValueError(f"epochs must be positive and finite; got {epochs!r}")
        steps = accounting.planned_steps(epochs, size, batch_size)
    _positive("steps", steps)
    if max_batch is not None:
        _positive("max_batch", max_batch)

    def fits(b: Any) -> bool:
        return isinstance(b, int) and 0 < b <= size

    batch_sizes = per_step("batch_size", batch_size, steps, fits, f"an integer from 1 to the dataset's size {size}")
    if microbatch_size is None:
        microbatch_size = min(max(batch_sizes), 32)
    _positive("microbatch_size", microbatch_size)
    _positive("views", views)
    clips = None
    rule = clip if isinstance(clip, ClipRule) else None
    if rule is not None:
        clips = (first_norm(rule),) * steps
    elif clip is not None:
        inside = f"from {SMALLEST:g} to {LARGEST:g}, a rule such as rgp.AutoClip(), or None without noise"
        clips = per_step("clip", clip, steps, lambda c: SMALLEST <= c <= LARGEST, inside)

    accountant = "pld" if budget is None else budget.accountant
    chosen = budget.delta if budget is not None else delta
    chosen = accounting.default_delta(size) if chosen is None else chosen
    accounting.check_delta(chosen, size)
    if budget is not None:
        if clips is None:
            raise ValueError("clip=None bounds nothing, so no noise can protect anyone; give clip= a number")
        sigma = _calibrated(budget, chosen, batch_sizes, size, max_batch)
        sigmas = (sigma,) * steps
    else:
        sigmas = per_step(
            "noise_multiplier", noise_multiplier, steps, lambda s: 0 <= s < math.inf, "at least 0 and finite"
        )
        if clips is None and any(s > 0 for s in sigmas):
            raise ValueError("clip=None is allowed with noise_multiplier=0 only: noise is a multiple of the clip norm")
        if not all(s > 0 for s in sigmas):
            warnings.warn("noise_multiplier is 0: NOTHING IS PRIVATE in this run, and its epsilon is infinite.")
    settings = Settings(
        dataset_size=size,
        steps=steps,
        batch_sizes=batch_sizes,
        sigmas=sigmas,
        clips=clips,
        delta=chosen,
        budget=budget,
        accountant=accountant,
        microbatch_size=microbatch_size,
        loss_reduction=loss_reduction,
        max_batch=max_batch,
        method=method.name,
        clip_rule=rule,
        views=views,
    )
    for step in range(steps) if settings.adapts else ():
        settings.bound(step)  # an adaptive rule's noise on the count must fit in every step
    return settings


def _calibrated(budget: Budget, delta: float, batch_sizes: tuple[int, ...], size: int, max_batch: int | None) -> float:
    from collections import Counter

    counts = Counter(batch_sizes)
    cap_size = None if max_batch is None else size

    def events(sigma: float) -> list[accounting.Event]:
        return [
            accounting.Event(b / size, sigma, n, max_batch=max_batch, dataset_size=cap_size) for b, n in counts.items()
        ]

    return accounting.calibrate_scale(events, epsilon=budget.epsilon, delta=delta, accountant=budget.accountant)


def _positive(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1; got {value!r}")


def check_model(model: nn.Module) -> None:
    """Refuse models that mix the examples of a batch, or that are not ready."""
    refuse_wrappers(model)
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            raise UnsupportedError(
                f"module {name!r} is {type(module).__name__} in training mode: it mixes the examples of a batch, so no clipping "
                "bounds one example's influence. rgp.fix(model) replaces it by GroupNorm; or keep its statistics: .eval()."
            )
        if isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.training and module.track_running_stats:
            raise UnsupportedError(
                f"module {name!r} is {type(module).__name__} with running statistics, which would be computed from "
                "private data without noise. Make it with track_running_stats=False, or call .eval() on it."
            )
        if type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None:
            raise UnsupportedError(
                f"module {name or '(the model)'!r} is compiled, which hides its operations from the engine. Give privatize the "
                "model as it was before torch.compile."
            )
    if any(p.is_meta for p in model.parameters()):
        raise ValueError("the model has parameters on the meta device; load its weights first")


def check_plan(model: nn.Module, plan: Plan) -> None:
    if not plan.trained:
        raise ValueError("the plan trains nothing: every parameter is frozen (requires_grad is False, or overrides)")
    trained = {e.name for e in plan.trained}
    for name, parameter in model.named_parameters():
        if name in trained and parameter.is_complex():
            raise UnsupportedError(
                f"parameter {name!r} is complex, and its imaginary part would be lost. Freeze it (overrides={{{name!r}: "
                "'frozen'}), or keep the two parts in real parameters and combine them with torch.complex."
            )
    devices = {p.device for n, p in model.named_parameters() if n in trained}
    if len(devices) > 1:
        raise ValueError(
            f"trained parameters are on several devices ({', '.join(map(str, devices))}); move them to one"
        )
    for prefix, module in model.named_modules():
        if isinstance(module, nn.RNNBase):
            names = [f"{prefix}.{leaf}".lstrip(".") for leaf, _ in module.named_parameters()]
            if any(name in trained for name in names):
                raise UnsupportedError(
                    f"module {prefix or '(the model)'!r} is {type(module).__name__}, whose fused kernel gives no per-example "
                    f"gradients: {names[0]!r} cannot be trained. Freeze it (overrides={{'{prefix}*': 'frozen'}}), or write the "
                    "recurrence with nn.Linear layers."
                )
