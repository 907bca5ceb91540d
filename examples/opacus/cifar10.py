"""Opacus's CIFAR-10 example with rgp: a residual network with batch norm, micro-batches, random flips and a schedule.

The images are made here: coloured gratings, whose direction and colour are the class. `rgp.fix` is ModuleValidator.fix.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import rgp

SIZE = 16  # of CIFAR's 32, for the sake of seconds


def images(count: int, seed: int) -> TensorDataset:
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(6, (count,), generator=draw)
    steps = torch.arange(SIZE) / SIZE * 6 * math.pi
    phase = 2 * math.pi * torch.rand(count, 1, 1, generator=draw)
    waves = torch.where((labels % 2 == 0).view(-1, 1, 1), steps.view(1, 1, -1), steps.view(1, -1, 1)) + phase
    colours = torch.eye(3)[labels // 2].view(-1, 3, 1, 1)
    return TensorDataset(
        colours * waves.sin().unsqueeze(1) + 0.2 * torch.randn(count, 3, SIZE, SIZE, generator=draw), labels
    )


class Block(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, inside: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, out, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(out)
        self.around = nn.Conv2d(inside, out, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.around(x))


def flipped(batch: list[torch.Tensor]) -> list[torch.Tensor]:
    """Every image on its own, left and right exchanged or not: what examples get must not depend on others."""
    x, y = batch
    heads = torch.rand(len(x), 1, 1, 1) < 0.5
    return [torch.where(heads, x.flip(3), x), y]


torch.manual_seed(0)
model = nn.Sequential(
    Block(3, 16, 1), Block(16, 32, 2), Block(32, 32, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 6)
)
rgp.fix(model)  # batch norm becomes group norm; before the optimizer is made
epochs, size, batch_size = 6, 1500, 250
optimizer = torch.optim.SGD(model.parameters(), lr=0.8, momentum=0.9)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs * size // batch_size)

run = rgp.privatize(
    model,
    optimizer,
    images(size, seed=1),
    method=rgp.DPSGD(),
    bands=1,  # independent noise, as in Opacus
    budget=rgp.Budget(epsilon=8.0, delta=1e-4),  # make_private_with_epsilon
    clip=1.0,
    batch_size=batch_size,
    microbatch_size=125,  # BatchMemoryManager
    epochs=epochs,
    augment=flipped,
    scheduler=scheduler,  # its step() is called once per logical batch
)
print(f"sigma {run.noise_multiplier:.3f}")
with run:
    for x, y in run:
        run.step(F.cross_entropy(model(x), y))

test = images(500, seed=2)
with torch.no_grad():
    accuracy = (model(test.tensors[0]).argmax(1) == test.tensors[1]).float().mean().item()
print(f"held-out accuracy {accuracy:.3f} at epsilon {run.epsilon():.2f}")
