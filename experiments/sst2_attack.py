"""The loss-threshold attack on finished runs of SST-2, with others of the same kind: python sst2_attack.py RUN... --data FOLDER

The validation set is whole sentences, the training set mostly phrases: a threshold between the two tells lengths apart, not
members from others. Here the others are the 5,000 training rows that sst2.py held out, and the members 5,000 rows that
the run was trained on. Statistics of training rows without noise: no guarantee covers them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import sst2
import torch

from rgp.attacks import threshold
from rgp.train import setup, weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of finished runs of sst2.py tables")
    parser.add_argument("--data", type=Path, required=True, help="folder with sst2/ and minilm/")
    given = parser.parse_args()
    folders = sst2.split(given.data)
    for run in given.runs:
        settings, parts, _ = weights.load_trained(run)
        trained, others = (sst2.rows_in(folders[name], settings) for name in ("tables", "held_out"))
        chosen = np.random.default_rng(0).permutation(len(trained.train))[: sst2.HELD_OUT]
        members = torch.utils.data.Subset(trained.train, chosen.tolist())
        losses = [
            setup.example_losses(parts.model, data, collate_fn=trained.collate_fn, device=parts.device, batch_size=128)[
                0
            ].numpy()
            for data in (members, others.test)
        ]
        found = threshold.attack(*losses)
        print(
            f"{run}: {100 * found['success_rate']:.1f}% +- {100 * found['standard_error']:.1f}, AUC {found['auc']:.3f}"
        )


if __name__ == "__main__":
    main()
