"""`privatize`: check what a user gave, make the promise (mechanism.py) and the loading (loading.py), put the run together."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from rgp import rules
from rgp.accounting import Budget, planned_steps
from rgp.agreement import (
    check_same,
    describe_dataset,
    describe_optimizer,
    share_ledger,
    share_streams,
    share_weights,
)
from rgp.carriers import CarrierSearch
from rgp.checks.arguments import check_arguments, check_model, check_trainable, unwrapped
from rgp.checks.repeats import check_repeats
from rgp.clips import ClipRule
from rgp.distributed import Ranks, find_ranks
from rgp.earlier import check_all_named, earlier_runs, remember
from rgp.ema import WeightMean
from rgp.ledger import Ledger
from rgp.loading import Loading
from rgp.mechanism import FloatSchedule, Mechanism, plan_mechanism
from rgp.members import as_members
from rgp.methods import RGP, Method
from rgp.microbatch import choose_microbatch
from rgp.noise import NoiseSource, noise_source
from rgp.optimizers import AdamCorrected
from rgp.plan import Plan, make_plan
from rgp.release import Releases
from rgp.run import Run
from rgp.sampling import check_dataset, check_lengths
from rgp.slots import Slot, make_slot
from rgp.step import Step
from rgp.streams import Streams
from rgp.thin import ThinState
from rgp.torchstate import uncompiled
from rgp.trained import TrainedModel
from rgp.units import Rows, Unit
from rgp.update import Update
from rgp.workload import bands_by_default, check_carriers, default_note, workload_of


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
    bands: int | str | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    loss_reduction: str = "mean",
    scheduler: Any = None,
    seed: int | None = None,
    secure_noise: bool = False,
    folder: str | os.PathLike[str] | None = None,
    after: Any = None,
    workers: int = 0,
    pin_memory: bool = False,
    lengths: Any = None,
    units: Any = None,
    rows_per_unit: int | None = None,
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
    microbatch_size: rows per forward and backward pass; memory grows with it, the result does not depend on it. By default
        32 to 256, by the size of the model and of the first row.
    max_batch: cap on a drawn batch, with the accounting that belongs to it.
    bands: over how many steps noise is correlated: each step takes back part of what earlier ones added, so that less of it
        stays in the weights. 1 is independent noise; "auto" finds the best number for a budget, and run.mechanism says
        what it is worth. RGP needs carriers that stay for it, RGP(keep=K). By default it is "auto" for SGD with a budget,
        where it pays, and 1 elsewhere; a warning says so. docs/correlated-noise.md
    loss_reduction: how the loss of a micro-batch was reduced over its examples: "mean", "sum", or "none" for a vector
        of one loss per example, the right choice wherever the mean would mix examples (a mean over all tokens).
    scheduler: its step() is called once per logical step.
    seed: makes the run repeatable; the guarantee then does not hold against whoever knows the seed.
    secure_noise: noise from a cryptographic generator, hardened against floating-point attacks; needs rgp[secure].
    folder: where the ledger is kept on disk; without it, in memory.
    after: earlier runs over the same people, as ledgers, runs or folders: epsilon and the budget count their releases too.
        A model that a run of this process has trained needs it, or after=() where the data have nobody in common.
    units, rows_per_unit: whose each row is: one id per row, any hashable. A person with all their rows is then what is drawn,
        clipped and protected, and batch_size and N count persons. Of a drawn person at most rows_per_unit rows (8 by default),
        drawn afresh each time, are used, and the mean of their gradients is clipped once. docs/units.md
    lengths: one number per row (its tokens): examples of similar length then share a micro-batch, which saves padding.
        Which examples are in a batch, and what is released, do not depend on it.
    public_loss: for source="public": computes a loss of the model on public data, such as rgp.without_labels(...). It may
        use torch's random numbers; they are the same after a resume.
    probe: before its first batch, the loop is rehearsed with a few small ones: examples are replaced and left out, and if
        that changes another example's gradient, the run is refused. Nothing of them is trained on; `run.step` returns False,
        and `run.rehearsing` tells them from others. docs/pitfalls.md
    process_group: the torch.distributed processes that train together, by default all of them where torch.distributed is
        initialised. Every process makes this same call; the first one's weights are sent to the others. docs/distributed.md
    """
    method = RGP() if method is None else method
    optimizer = unwrapped(optimizer)
    called, model = model, uncompiled(model)
    check_arguments(model, optimizer, method, scheduler, budget, public_loss)
    if not method.private and (budget is not None or noise_multiplier != 0 or clip is not None):
        kind = type(method).__name__
        raise ValueError(f"rgp.{kind} protects nothing: give it noise_multiplier=0 and clip=None, and no budget")
    size = check_dataset(dataset)
    check_lengths(lengths, size)
    members = as_members(units, rows_per_unit)
    if members is not None:
        members.check(size)
    loading = Loading(
        microbatch_size=microbatch_size,
        views=views,
        loss_reduction=loss_reduction,
        collate_fn=collate_fn,
        augment=augment,
        workers=workers,
        pin_memory=pin_memory,
        lengths=lengths,
        members=members,
    )
    check_model(model)
    unit: Unit = Rows(size) if members is None else members.unit
    earlier = earlier_runs(after, unit)
    ranks = find_ranks(process_group)
    share_weights(ranks, model)
    plan = make_plan(model, method)
    check_trainable(model, plan, optimizer)
    for note in plan.notes if ranks.first else ():
        warnings.warn(note, stacklevel=2)
    by_default = bands is None
    if bands is None:
        bands = bands_by_default(method, optimizer, budget=budget, batch_size=batch_size, max_batch=max_batch)
    length = steps
    if bands != 1 and epochs is not None and isinstance(batch_size, int):
        length = planned_steps(epochs, size, batch_size)
    mechanism = plan_mechanism(
        unit=unit,
        method=method.name,
        batch_size=batch_size,
        budget=budget,
        noise_multiplier=noise_multiplier,
        delta=delta,
        epochs=epochs,
        steps=steps,
        clip=clip,
        max_batch=max_batch,
        spent=[event for one in earlier for event in one.events],
        bands=bands,
        workload=None if bands == 1 else workload_of(model, plan, optimizer, scheduler, length),
    )
    if by_default and mechanism.bands > 1 and ranks.first:
        warnings.warn(default_note(mechanism))
    check_carriers(method, mechanism.bands)
    mechanism.clip.groups([e.name for e in plan.trained])
    if (after is None or earlier) and min(mechanism.sigmas) > 0:
        check_all_named(model, dataset, unit.size, earlier)
    same = {**mechanism.to_json(), **loading.to_json(), "method": method, "secure_noise": secure_noise, "ema": ema}
    if members is not None:
        same["units"] = members.digest(b"")  # goes from rank to rank, and no further
    check_same(ranks, {**same, **describe_optimizer(optimizer), **describe_dataset(ranks, dataset)})
    streams = share_streams(ranks, Streams.from_system() if seed is None else Streams.from_seed(seed))
    header = {**mechanism.header(), "seed_known": streams.known, "secure_noise": secure_noise, "run": streams.run_id}
    if earlier:
        header["after"] = [one.to_json() for one in earlier]
    return assemble(
        model,
        optimizer,
        dataset,
        plan=plan,
        mechanism=mechanism,
        loading=loading,
        streams=streams,
        source=noise_source("secure" if secure_noise else "philox", streams),
        ledger=share_ledger(ranks, lambda: Ledger(header, folder)),
        scheduler=scheduler,
        public_loss=public_loss,
        ema=ema,
        probe=probe,
        ranks=ranks,
        called=called,
    )


def assemble(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    dataset: Any,
    *,
    plan: Plan,
    mechanism: Mechanism,
    loading: Loading,
    streams: Streams,
    source: NoiseSource,
    ledger: Ledger,
    scheduler: Any = None,
    public_loss: Callable[[], Tensor] | None = None,
    ema: float | None = None,
    probe: bool = True,
    ranks: Ranks | None = None,
    slot: Callable[..., Slot] = make_slot,
    called: nn.Module | None = None,
) -> Run:
    """Put the parts of a run together. `privatize` and `resume` both end here, where nothing is left to decide.

    called: what the loop calls, if torch.compile wrapped the model (compiled/).
    """
    rules.load()
    if plan.method.private and loading.members is None:
        check_repeats(dataset)
    ranks = Ranks() if ranks is None else ranks
    if loading.microbatch_size is None:
        most = max(map(mechanism.batch_size, range(mechanism.steps))) * mechanism.unit.rows_per_unit
        loading = replace(loading, microbatch_size=choose_microbatch(dataset, plan, most))
    trained = TrainedModel(model, plan, views=loading.views, slot=slot)
    trained.sharding.check(
        public_loss=public_loss is not None,
        ema=ema is not None,
        rgp_ResidualOff=not plan.method.residual,
        rgp_AdamCorrected=isinstance(optimizer, AdamCorrected),
    )
    method = plan.method
    thin = ThinState(trained, optimizer, streams) if getattr(method, "state", "full") == "thin" else None
    mean = None if ema is None else WeightMean(trained.trained, ema)
    step = Step(
        trained,
        mechanism,
        CarrierSearch(trained, optimizer, streams, steps=mechanism.steps, public_loss=public_loss, thin=thin),
        Releases(mechanism, source, ledger, ranks, run_id=streams.run_id),
        Update(trained, optimizer, scheduler, streams, ema=mean, power=method.power_iteration(), thin=thin),
        views=loading.views,
        loss_reduction=loading.loss_reduction,
        called=called,
    )
    remember(model, trained.trained.values(), ledger, dataset)
    return Run(step, dataset, loading, streams, rehearse=probe)
