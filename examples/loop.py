"""A plain training loop made private: the four changed lines are marked.

Trains a small network on scikit-learn's digits without privacy and with RGP at epsilon 8, and shows both.
"""

import time

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import rgp

digits = load_digits()
x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16  # a public constant, not a statistic
y = torch.tensor(digits.target)
order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
held_out, training = order[:360], order[360:]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.GroupNorm(8, 32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.GroupNorm(8, 64),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    return (model(x[held_out]).argmax(1) == y[held_out]).float().mean().item()


def plain(epochs: int = 20) -> nn.Module:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = torch.utils.data.TensorDataset(x[training], y[training])
    loader = torch.utils.data.DataLoader(data, batch_size=128, shuffle=True)
    for _ in range(epochs):
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


def private(epochs: int = 20) -> tuple[nn.Module, float]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    data = torch.utils.data.TensorDataset(x[training], y[training])
    run = rgp.privatize(  # 1: in place of the data loader
        model,
        optimizer,
        data,
        method=rgp.RGP(rank=8, source="weight"),
        budget=rgp.Budget(epsilon=8.0, delta=1e-5),
        batch_size=256,
        epochs=epochs,
        microbatch_size=128,
    )
    for images, labels in run:  # 2: in place of the loops over epochs and batches
        loss = F.cross_entropy(model(images), labels)
        run.step(loss)  # 3: in place of backward, step and zero_grad
    run.close()  # 4
    return model, run.epsilon()


if __name__ == "__main__":
    print(rgp.make_plan(network(), rgp.RGP(rank=8)), "\n")
    print(f"{'':<12}{'accuracy':>10}{'epsilon':>10}{'seconds':>10}")
    start = time.perf_counter()
    model = plain()
    print(f"{'plain':<12}{accuracy(model):>10.3f}{'none':>10}{time.perf_counter() - start:>10.1f}")
    start = time.perf_counter()
    model, epsilon = private()
    print(f"{'RGP':<12}{accuracy(model):>10.3f}{epsilon:>10.2f}{time.perf_counter() - start:>10.1f}")
