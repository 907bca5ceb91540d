"""DP-SGD, RGP and (where it is installed) Opacus on small convolutional networks: the numbers of docs/opacus.md.

    python experiments/small_cnn.py --method dpsgd --width 16 --lr 0.25 --sigma 2
    python experiments/small_cnn.py --method opacus --width 16 --lr 0.25 --sigma 2      # pip install opacus

scikit-learn's 8 x 8 digits, 1437 to train on and 360 held out; 112 steps of 256 on average (20 epochs), clip 1, SGD with momentum
0.9. Three seeds: of the initial weights, the draws and the noise.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import rgp

BATCH, EPOCHS, CLIP, SEEDS = 256, 20, 1.0, 3


def network(width: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * width, 2 * width),
        nn.ReLU(),
        nn.Linear(2 * width, 10),
    )


def train(
    model: nn.Module, data: TensorDataset, optimizer: torch.optim.Optimizer, method: str, sigma: float, seed: int
) -> None:
    chosen = {"rgp": rgp.RGP(), "dpsgd": rgp.DPSGD()}[method]
    with rgp.privatize(
        model,
        optimizer,
        data,
        method=chosen,
        noise_multiplier=sigma,
        clip=CLIP,
        batch_size=BATCH,
        microbatch_size=2 * BATCH,
        epochs=EPOCHS,
        seed=seed,
    ) as run:
        for x, y in run:
            run.step(F.cross_entropy(model(x), y))


def train_with_opacus(
    model: nn.Module, data: TensorDataset, optimizer: torch.optim.Optimizer, sigma: float, seed: int
) -> None:
    from opacus import PrivacyEngine

    private, stepper, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(data, batch_size=BATCH),
        noise_multiplier=sigma,
        max_grad_norm=CLIP,
        noise_generator=torch.Generator().manual_seed(seed),
    )
    left = round(EPOCHS * len(data) / BATCH)
    while left:
        for x, y in loader:
            if left:
                stepper.zero_grad()
                F.cross_entropy(private(x), y).backward()
                stepper.step()
                left -= 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=["rgp", "dpsgd", "opacus"], default="dpsgd")
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.25)
    parser.add_argument("--sigma", type=float, default=2.0)
    args = parser.parse_args()

    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(digits.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    held_out, data = order[:360], TensorDataset(x[order[360:]], y[order[360:]])
    found = []
    for seed in range(SEEDS):
        model = network(args.width, seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
        if args.method == "opacus":
            train_with_opacus(model, data, optimizer, args.sigma, seed)
        else:
            train(model, data, optimizer, args.method, args.sigma, seed)
        with torch.no_grad():
            found.append((model(x[held_out]).argmax(1) == y[held_out]).float().mean().item())
    parameters = sum(p.numel() for p in network(args.width, 0).parameters())
    print(f"{args.method}, {parameters:,} parameters, sigma {args.sigma:g}, rate {args.lr:g}:", end=" ")
    print(", ".join(f"{100 * a:.1f}" for a in found), f"mean {100 * sum(found) / SEEDS:.1f}")


if __name__ == "__main__":
    main()
