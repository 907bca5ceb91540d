"""Opacus's MNIST example with rgp: a small convolutional network, trained with DP-SGD.

The images are made here: ten random patterns, each moved about and covered with noise, in the size of MNIST. A network this small
has no use for carriers, so the method is `rgp.DPSGD()`; docs/opacus.md has the numbers.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import rgp


def images(count: int, seed: int) -> TensorDataset:
    patterns = torch.rand(10, 7, 7, generator=torch.Generator().manual_seed(0)).round()
    patterns = patterns.repeat_interleave(3, 1).repeat_interleave(3, 2)  # 21 x 21
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=draw)
    x = 0.2 * torch.randn(count, 1, 28, 28, generator=draw)
    for i, (top, left) in enumerate(torch.randint(4, (count, 2), generator=draw).tolist()):
        x[i, 0, 2 + top : 23 + top, 2 + left : 23 + left] += patterns[labels[i]]
    return TensorDataset(x, labels)


torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 16, 8, stride=2, padding=3),
    nn.ReLU(),
    nn.MaxPool2d(2, stride=1),
    nn.Conv2d(16, 32, 4, stride=2),
    nn.ReLU(),
    nn.MaxPool2d(2, stride=1),
    nn.Flatten(),
    nn.Linear(512, 32),
    nn.ReLU(),
    nn.Linear(32, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.8)

run = rgp.privatize(
    model,
    optimizer,
    images(3000, seed=1),
    method=rgp.DPSGD(),
    noise_multiplier=1.0,  # the names that Opacus has for the next ones: max_grad_norm,
    clip=1.0,
    delta=1e-5,
    batch_size=300,  # the DataLoader's batch_size,
    microbatch_size=150,  # and BatchMemoryManager's max_physical_batch_size
    epochs=5,
)
with run:
    for epoch in run.epochs():
        for x, y in epoch:
            run.step(F.cross_entropy(model(x), y))
        print(f"epoch {epoch.number}: epsilon {run.epsilon():.2f}")

test = images(500, seed=2)
with torch.no_grad():
    accuracy = (model(test.tensors[0]).argmax(1) == test.tensors[1]).float().mean().item()
print(f"held-out accuracy {accuracy:.3f} at epsilon {run.epsilon():.2f}")
