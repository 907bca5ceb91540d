"""What the owner of a GPU runs: `make gpu-check`. Writes a dated note into benchmarks/.

Exactness, noise, bfloat16, compiled models, two devices and the benchmark, on the device itself. With `--device cpu --toy` the
same script runs in the tests, so that it cannot rot.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import rgp
from rgp.noise import PhiloxNoise
from rgp.streams import Streams


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.GroupNorm(4, 32),
        nn.ReLU(inplace=True),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.GroupNorm(4, 64),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(64 * 16, 64),
        nn.LayerNorm(64),
        nn.Linear(64, 10),
    )


def batch(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(6, 3, 8, 8, device=device), torch.randint(10, (6,), device=device)


def loss_fn(model: nn.Module, data: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(data[0]), data[1])


def exactness(device: str) -> str:
    """Per-example gradients against autograd; float64 where the device has it."""
    double = device != "mps"
    results = [
        rgp.check(network().to(device), batch(device), loss_fn, method=method, double=double)
        for method in (rgp.RGP(rank=4), rgp.RGP(rank=4, sides="left"), rgp.DPSGD())
    ]
    assert all(r.ok for r in results), "\n".join(map(str, results))
    return f"worst relative error {max(r.worst for r in results):.1e}"


def noise(device: str) -> str:
    """The noise on the device has the standard deviation that was asked for, and not 2/3 or 3/2 of it."""
    from scipy import stats

    total = torch.zeros(300_000, device=device)
    PhiloxNoise(Streams.from_system()).add(total, std=1.7, step=0, attempt=0)
    values = total.double().cpu().numpy()
    p_values = {scale: stats.kstest(values, "norm", args=(0, 1.7 * scale)).pvalue for scale in (1, 2 / 3, 3 / 2)}
    assert p_values[1] > 1e-4 and p_values[2 / 3] < 1e-9 and p_values[3 / 2] < 1e-9, p_values
    return f"Kolmogorov-Smirnov p = {p_values[1]:.2f}; 2/3 and 3/2 of it rejected"


def bfloat16(device: str) -> str:
    """A private step under autocast: finite, weights stay float32 and move."""
    model = network().to(device)
    before = [p.detach().clone() for p in model.parameters()]
    images, labels = (t.cpu() for t in batch(device))
    data = torch.utils.data.TensorDataset(images, labels)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"noise_multiplier": 1.0, "batch_size": 6, "steps": 3, "delta": 1e-2}
    with rgp.privatize(model, optimizer, data, method=rgp.RGP(rank=4), **options) as run:
        for x, y in run:
            with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
                loss = loss_fn(model, (x.to(device), y.to(device)))
            run.step(loss)
    after = list(model.parameters())
    assert all(p.dtype == torch.float32 and p.isfinite().all() for p in after)
    assert all(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return "three steps under autocast, weights float32 and finite"


def private_weights(device: str, *, compile_first: bool = False) -> list[torch.Tensor]:
    """The weights after three private steps from a fixed seed, on the CPU."""
    torch.manual_seed(0)
    model = network().to(device)
    called = torch.compile(model) if compile_first else model
    images, labels = (t.cpu() for t in batch(device))
    run = rgp.privatize(
        called,
        torch.optim.SGD(model.parameters(), lr=0.1),
        torch.utils.data.TensorDataset(images, labels),
        method=rgp.RGP(rank=4),
        noise_multiplier=1.0,
        batch_size=6,
        steps=3,
        delta=1e-2,
        seed=0,
    )
    for x, y in run:
        run.step(loss_fn(called, (x.to(device), y.to(device))))
    return [p.detach().cpu() for p in model.parameters()]


def difference(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    error = max(((a - b).norm() / b.norm()).item() for a, b in zip(found, wanted, strict=True))
    assert error < 1e-4, error
    return error


def compiled(device: str) -> str:
    """A compiled model is trained to the weights of the same model as it is written."""
    error = difference(private_weights(device, compile_first=True), private_weights(device))
    return f"three private steps, weights within {error:.0e} of the model's as it is written"


def several_devices(device: str) -> str:
    """Two processes, with a device each, arrive at the weights of one."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        return "not run: only one device is visible"
    if device == "mps":
        return "not run: there is only one"
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(one_of_two, (device, folder), nprocs=2)
        ranks = [torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*ranks, strict=True)), "the two ranks have different weights"
    error = difference(ranks[0], private_weights(device))
    return f"two processes, three private steps, weights within {error:.0e} of one process's"


def one_of_two(rank: int, device: str, folder: str) -> None:
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    torch.save(private_weights(device), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def benchmark(device: str, toy: bool) -> str:
    small = [
        "--model",
        "toy",
        "--batch",
        "6",
        "--microbatch",
        "2",
        "--seq",
        "8",
        "--rank",
        "2",
        "--repeats",
        "2",
        "--threads",
        "1",
    ]
    size = small if toy else ["--model", "bert-base"]
    against = "plain" if toy else "plain,bound,dpsgd,opacus-ghost,opacus-hooks"
    command = [sys.executable, "-m", "rgp", "bench", *size, "--against", against, "--device", device, "--json"]
    rows = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["rows"]
    lines = [
        f"{r['name']} {r['seconds_per_step']:.3f} s, {r['ratio_to_plain']:.2f} of plain, memory {r['memory_ratio_to_plain']:.2f}"
        for r in rows
        if "error" not in r
    ]
    return "; ".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    default = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    parser.add_argument("--device", default=default)
    parser.add_argument("--toy", action="store_true", help="toy sizes, for tests")
    parser.add_argument("--only", help="names of checks, with commas between them; by default all")
    parser.add_argument("--out", type=Path, help="the note; by default benchmarks/DATE-DEVICE.md")
    options = parser.parse_args()
    device = options.device
    checks = {
        "exactness": lambda: exactness(device),
        "noise": lambda: noise(device),
        "bfloat16 autocast": lambda: bfloat16(device),
        "torch.compile": lambda: compiled(device),
        "several devices": lambda: several_devices(device),
        "benchmark": lambda: benchmark(device, options.toy),
    }
    if options.only is not None:
        checks = {name: checks[name] for name in options.only.split(",")}
    name = torch.cuda.get_device_name() if device == "cuda" else device
    lines = [f"# Check on {name}, {datetime.date.today()}", "", f"rgp {rgp.__version__}, torch {torch.__version__}", ""]
    failed = False
    for title, check in checks.items():
        try:
            result = check()
        except Exception as error:
            failed, result = True, f"FAILED: {error}"
        lines.append(f"- {title}: {result}")
        print(lines[-1], flush=True)
    out = options.out or Path(__file__).parent / f"{datetime.date.today()}-{device}.md"
    out.write_text("\n".join(lines) + "\n")
    print(f"written to {out}")
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
