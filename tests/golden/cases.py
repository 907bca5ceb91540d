"""Runs whose every bit is known: methods, clip rules, sides, views, caps, deferred parameters, one and two processes.

    python tests/golden/cases.py OUT.json            all of them
    python tests/golden/cases.py --compare A B       what differs between two such files

A redesign keeps them equal. Numbers hold for one machine and one version of torch: compare files made side by side.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

import rgp

SIZE = 48


def model(width: int = 24, *, deferred: bool = False) -> nn.Module:
    torch.manual_seed(7)
    inner = 160 if deferred else width  # 160 x 160 entries are kept as operands, not as per-example gradients
    return nn.Sequential(
        nn.Linear(10, inner),
        nn.LayerNorm(inner),
        nn.GELU(),
        nn.Dropout(0.1),
        nn.Linear(inner, inner),
        nn.GELU(),
        nn.Linear(inner, 3),
    )


def dataset() -> list[tuple[torch.Tensor, int]]:
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(10, generator=generator), i % 3) for i in range(SIZE)]


def flip(batch: Any) -> Any:
    x, y = batch
    return x * (torch.rand(len(x), 1) < 0.5).to(x).mul(2).sub(1), y


METHODS: dict[str, Any] = {
    "rgp": lambda: rgp.RGP(rank=2),
    "rgp-left": lambda: rgp.RGP(rank=2, sides="left"),
    "rgp-right": lambda: rgp.RGP(rank=2, sides="right"),
    "rgp-alternate": lambda: rgp.RGP(rank=2, sides="alternate", source="momentum"),
    "rgp-paper": lambda: rgp.RGP(rank=3, norm="paper", source="weight", power_iterations=2),
    "rgp-random": lambda: rgp.RGPRandom(rank=2),
    "dpsgd": lambda: rgp.DPSGD(),
    "powersgd": lambda: rgp.DPPowerSGD(rank=2, error_feedback=True),
    "bitfit": lambda: rgp.BiTFiT(),
    "linear": lambda: rgp.LinearProbe(head_scale=0.1),
}
CLIPS: dict[str, Any] = {
    "flat": 0.7,
    "schedule": lambda step: 0.5 + 0.1 * step,
    "auto": rgp.AutoClip(),
    "group": rgp.GroupClip({"0.*": 0.4, "*": 0.6}),
    "adaptive": rgp.AdaptiveClip(initial=0.5, rate=0.5),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "views": {"views": 2, "augment": flip},
    "cap": {"max_batch": 14},
    "ema": {"ema": 0.9, "lengths": list(range(SIZE))},
    "batches": {"batch_size": lambda step: 12 + step, "noise_multiplier": lambda step: 1.0 + 0.1 * step},
}


def cases() -> dict[str, tuple[str, str, str, bool]]:
    found = {}
    for method in METHODS:
        for clip in CLIPS if method in ("rgp", "dpsgd") else ("flat",):
            for option in OPTIONS if clip in ("flat", "adaptive") else ("plain",):
                if clip == "group" and method not in ("rgp", "dpsgd"):
                    continue
                found[f"{method}/{clip}/{option}"] = (method, clip, option, False)
    for method in ("rgp", "dpsgd"):
        for option in ("plain", "views", "cap"):
            found[f"{method}/flat/{option}/deferred"] = (method, "flat", option, True)
    return found


def optimizer(method: str, net: nn.Module) -> torch.optim.Optimizer:
    if "alternate" in method:
        return torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
    return torch.optim.Adam(net.parameters(), lr=0.01)


def train(
    method: str, clip: str, option: str, deferred: bool, folder: Path, *, stop_after: int | None = None
) -> dict[str, Any]:
    net = model(deferred=deferred)
    opt = optimizer(method, net)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 2)
    options = {"batch_size": 12, "noise_multiplier": 1.1, **OPTIONS[option]}
    run = rgp.privatize(
        net,
        opt,
        dataset(),
        method=METHODS[method](),
        clip=CLIPS[clip],
        steps=5,
        microbatch_size=5,
        seed=11,
        scheduler=scheduler,
        folder=folder,
        **options,
    )
    return finish(run, net, folder, stop_after=stop_after)


def finish(run: rgp.Run, net: nn.Module, folder: Path, *, stop_after: int | None = None) -> dict[str, Any]:
    with run:
        for x, y in run:
            if run.step(nn.functional.cross_entropy(net(x), y)) and run.step_index == stop_after:
                run.save(folder)
                return {}
        state = {**net.state_dict(), **{f"ema.{k}": v for k, v in (run.ema.state if run.ema else {}).items()}}
        digest = hashlib.sha256()
        for name, tensor in sorted(state.items()):
            digest.update(name.encode() + tensor.detach().contiguous().numpy().tobytes())
        lines = [{k: v for k, v in r.items() if k not in ("hash", "previous", "version")} for r in run.ledger.records]
        text = json.dumps(lines, sort_keys=True)
        return {
            "weights": digest.hexdigest(),
            "ledger": hashlib.sha256(text.encode()).hexdigest(),
            "epsilon": run.epsilon(),
        }


def on_two_ranks(names: list[str], folder: str) -> dict[str, Any]:
    found = {}
    for i, name in enumerate(names):
        found[name] = train(*cases()[name], Path(folder) / str(i))
    return found


def main() -> None:
    if sys.argv[1] == "--compare":
        one, two = (json.loads(Path(p).read_text()) for p in sys.argv[2:4])
        different = sorted(name for name in {*one, *two} if one.get(name) != two.get(name))
        print(f"{len(one)} and {len(two)} runs, {len(different)} differ: {different}")
        raise SystemExit(bool(different))
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for i, (name, case) in enumerate(cases().items()):
            found[name] = train(*case, Path(folder) / str(i))
        sys.path.insert(0, str(Path(__file__).parents[1]))
        from ranks import Ranks

        names = [
            "rgp/flat/plain",
            "dpsgd/adaptive/plain",
            "rgp/group/plain",
            "dpsgd/flat/plain/deferred",
            "rgp/flat/views",
        ]
        for rank, result in enumerate(Ranks(on_two_ranks, 2, (names, str(Path(folder) / "ranks")), 20.0).results()):
            if isinstance(result, BaseException):
                raise result
            found |= {f"{name}/rank{rank}of2": value for name, value in result.items()}
    Path(sys.argv[1]).write_text(json.dumps(found, indent=1) + "\n")
    print(f"{len(found)} runs")


if __name__ == "__main__":
    main()
