"""Checkpoints: `run.save(folder)` and `rgp.resume(folder, model, optimizer, dataset)`. safetensors and JSON, no pickle.

    folder/
      ledger.jsonl              every release so far; the run appends to it, checkpoints only refer to it
      latest                    the name of the checkpoint that counts
      checkpoint-120/           state.json, model.safetensors, optimizer.safetensors, carriers.safetensors
      initial.safetensors       W_0, where the method needs it; written once
      secret.json               what the random streams are made of; readable by the owner alone, never to be published,
                                deleted when the run is finished and saved or closed
      past-noise.checkpoint-120  what correlated noise has to take back; just as secret, and deleted with it

Formal guarantees (tests/test_checkpoint.py, tests/repository/test_torture.py):
- a crash at any moment leaves the old checkpoint or the new one
- resuming from it on CPU gives the weights of the uninterrupted run to the bit, and charges no release twice
- where it cannot (other micro-batches, threads, secure noise), steps on record are drawn afresh and charged again: no
  noise is ever used on two sums
- a ledger that is older than the checkpoint, or another run's, is refused; so is another dataset size, method or model
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rgp._version import __version__
from rgp.agreement import share_ledger, share_streams
from rgp.checks.arguments import check_model, check_trainable
from rgp.distributed import Ranks, find_ranks
from rgp.encoding import Tensors, decode, distinct, encode
from rgp.files import NEW, PAST_NOISE, make_folder, remove, sync_folder, write_atomically, write_file, write_json
from rgp.ledger import Ledger
from rgp.loading import Loading
from rgp.mechanism import Mechanism
from rgp.methods import Method
from rgp.noise import noise_source
from rgp.plan import Entry, Plan
from rgp.privatize import assemble
from rgp.run import Run
from rgp.same_run import (
    check_header,
    check_same_run,
    describe_model,
    find_members,
    find_method,
    group_names,
)
from rgp.sharding import Sharding, gather, load_whole, shard_state
from rgp.streams import Streams
from rgp.torchstate import is_sharded, uncompiled

FORMAT = 1
LATEST, STATE, SECRET, INITIAL = "latest", "state.json", "secret.json", "initial.safetensors"
DRAFT = ".draft"
Folder = str | os.PathLike[str]


# ---------------------------------------------------------------------- save


def save(run: Run, folder: Folder) -> None:
    """Write a checkpoint. May be called at any time; an unfinished logical batch is repeated after resuming.

    With several ranks the first one writes, and the others need not call it, unless weights are sharded: then all must.
    """
    sharded = any(is_sharded(p) for p in run.model.parameters())
    initial: Tensors = run.initial
    if sharded:
        Sharding(run.model, dict(run.model.named_parameters())).reshard()
        new = run.ranks.from_first(lambda: _latest(Path(folder)) is None)
        initial = gather(initial if new else {}, run.ranks)
    if not run.ranks.first:
        if sharded:
            _state(run)
        return
    _safetensors()
    if run.closed:
        raise ValueError("the run is closed; save it before closing")
    folder = Path(folder)
    if run.ledger.path is None:
        run.ledger.move_to(folder)
    elif run.ledger.path.parent.resolve() != folder.resolve():
        raise ValueError(
            f"this run's ledger is kept in {run.ledger.path.parent}; its checkpoints belong next to it, not in {folder}"
        )
    make_folder(folder)
    old = _latest(folder)
    if old is None:
        _write_tensors(folder / INITIAL, initial)
    elif run.secret_file is None:  # this run has not saved here before
        known = _read_state(folder / old)["ledger"]
        run.ledger.check_contains(known["count"], known["head"])

    name = _unused(folder, f"checkpoint-{run.step_index}")
    draft = folder / (name + DRAFT)
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    tensors, state = _state(run)
    for kind, group in tensors.items():
        _write_tensors(draft / f"{kind}.safetensors", group)
    write_json(draft / STATE, state)
    sync_folder(draft)
    os.rename(draft, folder / name)
    sync_folder(folder)

    finished = run.finished
    if not finished:
        _save_secret(run, folder / SECRET, keep=old, name=name)
        _save_past_noise(run, folder / (PAST_NOISE + name))
    write_file(folder / LATEST, (name + "\n").encode())
    if finished:
        remove(folder / SECRET)
    for past in folder.glob(PAST_NOISE + "*"):
        if finished or past.name != PAST_NOISE + name:
            remove(past)
    for other in folder.glob("checkpoint-*"):
        ours = (other / STATE).exists() or other.suffix == DRAFT  # other programs use such names too
        if ours and other.name != name:
            shutil.rmtree(other, ignore_errors=True)


def _state(run: Run) -> tuple[dict[str, Tensors], dict[str, Any]]:
    weights, aliases = distinct(gather(run.model.state_dict(), run.ranks))
    optimizer: Tensors = {}
    encoded = encode(run.optimizer.state_dict(), optimizer, "optimizer")
    optimizer = gather(optimizer, run.ranks)
    state = {
        "format": FORMAT,
        "version": __version__,
        **run.state(),
        # replay_from: releases after the checkpoint that are on record stay repeatable, also if it is saved again before they are
        "ledger": {"count": run.ledger.count, "head": run.ledger.head, "replay_from": run.releases.replay_from},
        "settings": {**run.mechanism.to_json(), **run.loading.to_json()},
        "method": run.plan.method.to_json(),
        "plan": [asdict(entry) for entry in run.plan],
        "model": describe_model(run.model),
        "aliases": aliases,
        "optimizer": {
            "class": type(run.optimizer).__name__,
            "groups": group_names(run.optimizer, run.model),
            "state": encoded,
        },
        "scheduler": None if run.scheduler is None else _scheduler_to_json(run.scheduler),
        "past_noise": len(run.past_noise()),
        "replay": _replay_conditions(run.loading, run.ranks),
        "augments": run.loading.augment is not None,
    }
    return {"model": weights, "optimizer": optimizer, **run.tensors()}, state


def _save_secret(run: Run, path: Path, *, keep: str | None, name: str) -> None:
    """The streams' secret, and two private counts, for the current checkpoint and for the one that is being written."""
    secret = run.secret_state()
    private = {name: {key: secret.pop(key) for key in ("bad_examples", "never_used")}}
    if run.loading.members is not None:
        private[name]["units"] = run.loading.members.digest(bytes.fromhex(secret["secret"]))
    if keep is not None and path.exists():
        private |= {k: v for k, v in json.loads(path.read_text())["private"].items() if k == keep}
    write_json(path, {**secret, "private": private}, mode=0o600)
    run.secret_file = path


def _save_past_noise(run: Run, path: Path) -> None:
    """Write what correlated noise has to take back; if that is nothing, remove what an interrupted save may have left."""
    past = {str(i): vector.cpu() for i, vector in enumerate(run.past_noise())}
    if past:
        write_file(path, _safetensors().save(past), mode=0o600)
    else:
        remove(path)


def _read_past_noise(path: Path, length: int, ranks: Ranks) -> list[Tensor]:
    """As many vectors as the checkpoint had, newest first; none on ranks that add no noise, and none if any is missing."""
    if not ranks.first or not path.exists():
        return []
    found = {k: t.clone() for k, t in _safetensors().load_file(path).items()}
    return [found[str(i)] for i in range(length)] if len(found) == length else []


# ---------------------------------------------------------------------- resume


def resume(
    folder: Folder,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    dataset: Any,
    *,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    scheduler: Any = None,
    microbatch_size: int | None = None,
    workers: int = 0,
    pin_memory: bool = False,
    lengths: Any = None,
    units: Any = None,
    public_loss: Callable[[], Tensor] | None = None,
    augment: Callable[[Any], Any] | None = None,
    method: Method | None = None,
    batch_size: int | Callable[[int], int] | None = None,
    probe: bool = True,
    process_group: Any = None,
) -> Run:
    """Go on with a run that `run.save(folder)` saved: weights, optimizer, scheduler and all settings are as they were.

    model, optimizer, dataset, scheduler: made as for the first start; their state is overwritten.
    microbatch_size: as saved by default. With another one, or another number of threads, steps that are on record after
        the checkpoint cannot be computed again to the bit: they are drawn afresh and charged again.
    units: as for the first start, if that had any; rows_per_unit is as saved.
    lengths: as for the first start; micro-batches are cut by it, so another choice has the same effect.
    method, batch_size: need not be given; if they are, they must be the saved run's.
    process_group: as for privatize. The number of processes may change, with the same effect as microbatch_size. The
        folder need only exist for the first process: it reads for all.

    >>> import tempfile, torch, rgp
    >>> def parts():
    ...     model = torch.nn.Linear(8, 2)
    ...     return model, torch.optim.SGD(model.parameters(), lr=0.1), [(torch.ones(8), i % 2) for i in range(64)]
    >>> folder = tempfile.mkdtemp() + "/run"
    >>> run = rgp.privatize(*parts(), noise_multiplier=1.0, batch_size=16, steps=3, folder=folder)
    >>> run.save(folder)
    >>> resume(folder, *parts()).step_index
    0
    """
    _safetensors()
    folder, ranks = Path(folder), find_ranks(process_group)
    name = (ranks.read(folder / LATEST) or b"").decode().strip()
    if not name:
        raise FileNotFoundError(
            f"{folder} holds no checkpoint: run.save(folder) was never called, or this is not the folder. Releases "
            "that its ledger records were made nevertheless."
        )
    here = folder / name
    state = _read_state(here, ranks)
    method = find_method(state["method"], method)
    mechanism = Mechanism.from_json(state["settings"])
    kept = state["settings"]
    members = find_members(units, mechanism.unit, dataset)
    loading = Loading(
        microbatch_size=kept["microbatch_size"] if microbatch_size is None else microbatch_size,
        views=kept["views"],
        loss_reduction=kept["loss_reduction"],
        collate_fn=collate_fn,
        augment=augment,
        workers=workers,
        pin_memory=pin_memory,
        lengths=lengths,
        members=members,
    )
    plan = Plan(tuple(_entry(e) for e in state["plan"]), method)
    called, model = model, uncompiled(model)
    check_same_run(state, mechanism, model, optimizer, scheduler, dataset, batch_size)
    check_model(model)
    check_trainable(model, plan, optimizer)
    if (getattr(method, "source", None) == "public") != (public_loss is not None):
        raise ValueError("the run finds its carriers with a public loss (source='public'): give public_loss, as before")
    if state["augments"] != (augment is not None):
        raise ValueError(f"the run was made {'with' if state['augments'] else 'without'} augment=: give the same")

    ledger = share_ledger(ranks, lambda: Ledger.open(folder, append=True))
    try:
        ledger.check_contains(state["ledger"]["count"], state["ledger"]["head"])
        check_header(ledger, mechanism)
        if ledger.repaired:
            warnings.warn(ledger.repaired)
        if ranks.first:  # left by a process that was killed while writing it
            (folder / (SECRET + NEW)).unlink(missing_ok=True)
            for unfinished in folder.glob(PAST_NOISE + "*" + NEW):
                unfinished.unlink()
        secret, private = _read_secret(folder / SECRET, name, ranks)
        if members is not None and secret is not None and private["units"] != members.digest(secret.secret):
            raise ValueError("not the run that was saved: units assigns some rows to other units")
        streams = share_streams(ranks, secret or Streams.from_system())
        _load_weights(model, _read_tensors(here / "model.safetensors", ranks), state["aliases"])
        # checkpoints before 0.2 did not name their source
        source = state.get("noise", "secure" if state["secure_noise"] else "philox")
        run = assemble(
            model,
            optimizer,
            dataset,
            plan=plan,
            mechanism=mechanism,
            loading=loading,
            streams=streams,
            source=noise_source(source, streams),
            ledger=ledger,
            scheduler=scheduler,
            public_loss=public_loss,
            ema=state["ema"],
            probe=probe,
            ranks=ranks,
            called=called,
        )
        tensors = _read_tensors(here / "optimizer.safetensors", ranks)
        held = [p for group in optimizer.param_groups for p in group["params"]]
        run.load_optimizer(shard_state(decode(state["optimizer"]["state"], tensors), held))
        if scheduler is not None:
            scheduler.load_state_dict(decode(state["scheduler"]["state"], {}))
    except BaseException:
        ledger.close()
        raise
    kinds = {kind: _read_tensors(here / f"{kind}.safetensors", ranks) for kind in run.tensors()}
    initial = _read_tensors(folder / INITIAL, ranks) if run.initial else None
    same = ranks.from_first(lambda: secret is not None and state["replay"] == _replay_conditions(run.loading, ranks))
    past: list[Tensor] = []
    if (
        same or ledger.count == state["ledger"]["count"]
    ):  # a run that cannot be repeated starts a new chain: see release.py
        past = _read_past_noise(folder / (PAST_NOISE + name), state.get("past_noise", 0), ranks)
    replay_from = state["ledger"].get("replay_from", state["ledger"]["count"]) if same else ledger.count
    run.load(state, kinds, initial, private, replay_from=replay_from, past_noise=past)
    run.secret_file = folder / SECRET
    if secret is None and not run.finished and ranks.first:
        warnings.warn(
            f"{folder / SECRET} is missing, so the random streams start anew: nothing can be repeated, and the "
            f"{ledger.count - state['ledger']['count']} releases on record after the checkpoint are lost, but charged."
        )
    return run


def _read_secret(path: Path, name: str, ranks: Ranks) -> tuple[Streams | None, dict[str, Any]]:
    private: dict[str, Any] = {"bad_examples": 0, "never_used": []}
    data = ranks.read(path)
    if data is None:
        return None, private
    if ranks.first and os.name == "posix" and path.stat().st_mode & 0o077:
        warnings.warn(f"{path} can be read by others, who could then remove the noise. Protect it: chmod 600 {path}")
    content = json.loads(data)
    return Streams(bytes.fromhex(content["secret"]), known=content["known"]), content["private"].get(name, private)


def _load_weights(model: nn.Module, weights: Tensors, aliases: Mapping[str, str]) -> None:
    load_whole(model, {**weights, **{alias: weights[name] for alias, name in aliases.items()}})


def _replay_conditions(loading: Loading, ranks: Ranks) -> dict[str, Any]:
    """What a release must have in common with the one on record to have a chance of being equal to the bit."""
    return {"microbatch_size": loading.microbatch_size, "threads": torch.get_num_threads(), "processes": ranks.size}


def _entry(saved: Mapping[str, Any]) -> Entry:
    found: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in saved.items()}
    return Entry(**found)


def _scheduler_to_json(scheduler: Any) -> dict[str, Any]:
    if not hasattr(scheduler, "state_dict"):
        raise ValueError(f"the scheduler, a {type(scheduler).__name__}, has no state_dict() and cannot be saved")
    return {"class": type(scheduler).__name__, "state": encode(scheduler.state_dict(), None, "scheduler")}


# ---------------------------------------------------------------------- files


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError("checkpoints need safetensors: pip install 'rgp[checkpoint]'") from error
    return safetensors.torch


def _write_tensors(path: Path, tensors: Tensors) -> None:
    def alone(tensor: Tensor) -> Tensor:
        tensor = tensor.detach().cpu().contiguous()
        return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()

    def write(new: Path) -> None:
        _safetensors().save_file({k: alone(t) for k, t in tensors.items()}, new)

    write_atomically(path, write)


def _read_tensors(path: Path, ranks: Ranks) -> Tensors:
    """Copies, because what safetensors returns may be a view of the file."""
    if ranks.size == 1:
        return {k: t.clone() for k, t in _safetensors().load_file(path).items()}
    return {k: t.clone() for k, t in _safetensors().load(_read(path, ranks)).items()}


def _read(path: Path, ranks: Ranks) -> bytes:
    if (data := ranks.read(path)) is None:
        raise FileNotFoundError(f"{path} is missing, and the checkpoint cannot be read without it")
    return data


def _read_state(checkpoint: Path, ranks: Ranks = Ranks()) -> dict[str, Any]:  # noqa: B008
    state = json.loads(_read(checkpoint / STATE, ranks))
    if state["format"] != FORMAT:
        raise ValueError(f"{checkpoint} has format {state['format']!r}; this version of rgp reads {FORMAT}")
    return state


def _latest(folder: Path) -> str | None:
    try:
        return (folder / LATEST).read_text().strip()
    except FileNotFoundError:
        return None


def _unused(folder: Path, name: str) -> str:
    names = (name if k == 0 else f"{name}.{k}" for k in range(1000))
    return next(n for n in names if not (folder / n).exists())
