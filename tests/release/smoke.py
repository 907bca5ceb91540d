"""A fresh installation at work: import, a private run, an epsilon that can be checked, and the commands.

python smoke.py      with the Python of that installation, in an empty folder; needs nothing but rgp[cli]
"""

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import torch
import torch.nn.functional as F

import rgp
from rgp import accounting
from rgp.ledger import Ledger


def command(*words: str) -> str:
    done = subprocess.run([sys.executable, "-m", "rgp", *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (words, done.stdout, done.stderr)
    return done.stdout


def main() -> None:
    here = Path(rgp.__file__).parent
    assert version("rgp") == rgp.__version__, "the metadata and the package disagree on the version"
    assert (here / "py.typed").exists() and (here / "report" / "style.css").exists()
    torch.manual_seed(0)
    x = torch.randn(400, 12)
    y = (x[:, 0] > 0).long()
    model = torch.nn.Sequential(torch.nn.Linear(12, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
    run = rgp.privatize(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        torch.utils.data.TensorDataset(x, y),
        method=rgp.RGP(rank=4),
        budget=rgp.Budget(epsilon=8.0, delta=1e-5),
        batch_size=80,
        steps=20,
        folder="smoke-run",
    )
    for inputs, labels in run:
        run.step(F.cross_entropy(model(inputs), labels))
    run.close()
    again = accounting.epsilon(Ledger.open("smoke-run").events(), delta=1e-5)
    assert abs(again - run.epsilon()) < 1e-9 and 7 < again <= 8, again
    result = rgp.check(model, (x[:6], y[:6]), lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]))
    assert result.ok, result
    found = json.loads(command("doctor", "--json"))
    assert found["ok"], found
    seconds = sum(test["seconds"] for test in found["self_test"])
    said = command("calibrate", "--epsilon", "8", "--dataset-size", "10000", "--batch-size", "500", "--epochs", "3")
    assert "noise" in said.lower(), said
    assert "digits-rgp" in command("train", "--presets")
    numbers = {name: number for name, number in found["packages"].items() if number}
    print(
        f"rgp {rgp.__version__} at {here}: Python {sys.version.split()[0]}, {numbers}; self-test {seconds:.1f} s. All is well."
    )


if __name__ == "__main__":
    main()
