"""What rounding does to a thin state with bfloat16 weights: the top two layers of MiniLM on 1,024 rows of SST-2 (docs/thin.md).

    python experiments/bfloat16_minilm.py MINILM SST2        # folders; about ten minutes of one core

The four layers below are frozen and their outputs computed once. One line of JSON for each run: `way` is how far the
carried weights went of the way that the updates point (1 is all), `unchanged` how many of their entries a step leaves as
they were.
"""

from __future__ import annotations

import copy
import csv
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import rgp

KINDS = (
    (torch.float32, "nearest"),
    (torch.bfloat16, "nearest"),
    (torch.bfloat16, "stochastic"),
    (torch.bfloat16, "compensated"),
)


def features(encoder: Any, tokenizer: Any, path: Path, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs of the fourth layer, attention masks and labels of the first rows."""
    with path.open() as file:
        table = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))[1 : rows + 1]
    batch = tokenizer(
        [row[0] for row in table], padding="max_length", max_length=32, truncation=True, return_tensors="pt"
    )
    with torch.no_grad():
        h = through(encoder.encoder.layer[:4], encoder.embeddings(batch.input_ids), batch.attention_mask)
    return h, batch.attention_mask, torch.tensor([int(row[1]) for row in table])


def through(layers: Any, h: Tensor, mask: Tensor) -> Tensor:
    blocked = (1 - mask)[:, None, None, :].to(h.dtype) * -1e9
    for layer in layers:
        out = layer(h, blocked)
        h = out[0] if isinstance(out, tuple) else out
    return h


class Top(nn.Module):
    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers, self.head = copy.deepcopy(layers), nn.Linear(384, 2)
        nn.init.zeros_(self.head.weight)

    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        kind = self.head.weight.dtype
        h, weights = through(self.layers, h.to(kind), mask), mask.to(kind)[..., None]
        pooled = (h * weights).sum(1) / weights.sum(1)
        return self.head(F.layer_norm(pooled.float(), (384,)).to(kind)).float()


def train(
    layers: nn.ModuleList, rows: Any, held: Any, kind: torch.dtype, rounding: str, rate: float, seed: int
) -> dict:
    torch.manual_seed(seed)
    model = Top(layers).to(kind).train()
    body = [p for name, p in model.named_parameters() if not name.startswith("head")]
    run = rgp.privatize(
        model,
        torch.optim.Adam([{"params": body, "lr": rate}, {"params": list(model.head.parameters()), "lr": 5e-3}]),
        TensorDataset(*rows),
        method=rgp.RGP(rank=8, source="weight", keep=1000, state="thin", rounding=rounding),
        noise_multiplier=0.5,
        clip=1.0,
        batch_size=128,
        steps=40,
        microbatch_size=64,
        seed=seed,
        probe=False,
    )
    thin, names = run._step.update.thin, list(run._step.trained.carried)
    first = {name: model.get_parameter(name).detach().clone() for name in names}
    before, unchanged = first, []
    for h, mask, y in run:
        if run.step(F.cross_entropy(model(h, mask), y)):
            now = {name: model.get_parameter(name).detach().clone() for name in names}
            same = sum(int((now[name] == before[name]).sum()) for name in names)
            unchanged.append(same / sum(t.numel() for t in now.values()))
            before = now
    along = length = 0.0
    for name in names:
        history = thin.history(name)
        wanted = history.left.float() @ history.right.float()
        along += float(((before[name].float() - first[name].float()) * wanted).sum())
        length += float(wanted.square().sum())
    run.close()
    model.eval()
    with torch.no_grad():
        accuracy = 100 * (model(*held[:2]).argmax(1) == held[2]).float().mean().item()
        loss = F.cross_entropy(model(*rows[:2]), rows[2]).item()
    mean = sum(unchanged) / len(unchanged)
    return {"way": round(along / length, 3), "unchanged": round(mean, 3), "accuracy": round(accuracy, 1), "loss": loss}


def main() -> None:
    from transformers import AutoModel, AutoTokenizer

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    minilm, sst2 = map(Path, sys.argv[1:3])
    encoder = AutoModel.from_pretrained(minilm, attn_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(minilm)
    rows = features(encoder, tokenizer, sst2 / "train.tsv", 1024)
    held = features(encoder, tokenizer, sst2 / "valid.tsv", 872)
    for rate in (1e-4, 1e-3):
        for seed in (0, 1, 2):
            for kind, rounding in KINDS:
                found = train(encoder.encoder.layer[4:], rows, held, kind, rounding, rate, seed)
                setting = {"weights": str(kind)[6:], "rounding": rounding, "rate": rate, "seed": seed}
                print(json.dumps(setting | found), flush=True)


if __name__ == "__main__":
    main()
