"""Opacus's image tutorial with rgp: a ResNet-18 with batch norm, RMSprop, a budget for all epochs, accuracy as it goes.

The images are made here, in the size of CIFAR-10: ten random patterns in colour, each moved about and covered with noise. The
network is a quarter as wide as the tutorial's, for the sake of seconds: give `--width 64` for its 11 million parameters.
`--rgp` trains it with carriers.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import rgp

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--width", type=int, default=16)
parser.add_argument("--rgp", action="store_true")
args = parser.parse_args()


def images(count: int, seed: int) -> TensorDataset:
    patterns = torch.randn(10, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    patterns = F.interpolate(patterns, scale_factor=4)
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=draw)
    x = 0.5 * torch.randn(count, 3, 32, 32, generator=draw)
    for i, (top, left) in enumerate(torch.randint(8, (count, 2), generator=draw).tolist()):
        x[i, :, top : top + 24, left : left + 24] += patterns[labels[i]]
    return TensorDataset(x, labels)


class Block(nn.Module):
    def __init__(self, inside: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inside, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.around = nn.Sequential()
        if stride > 1 or inside != out:
            self.around = nn.Sequential(nn.Conv2d(inside, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.around(x))


def resnet18(w: int) -> nn.Module:
    stem = [nn.Conv2d(3, w, 7, 2, 3, bias=False), nn.BatchNorm2d(w), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    blocks, inside = [], w
    for out, stride in ((w, 1), (2 * w, 2), (4 * w, 2), (8 * w, 2)):
        blocks += [Block(inside, out, stride), Block(out, out, 1)]
        inside = out
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, 10))


torch.manual_seed(0)
model = rgp.fix(resnet18(args.width))  # ModuleValidator.fix
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
run = rgp.privatize(
    model,
    optimizer,
    images(1500, seed=1),
    method=rgp.RGP() if args.rgp else rgp.DPSGD(),
    bands=1,  # independent noise, as in Opacus
    budget=rgp.Budget(epsilon=50.0, delta=1e-5),  # the tutorial's, in make_private_with_epsilon
    clip=1.2,  # max_grad_norm
    batch_size=150,
    microbatch_size=75,  # BatchMemoryManager
    epochs=4,
)
test, labels = images(500, seed=2).tensors


def accuracy() -> float:
    model.eval()
    with torch.no_grad():
        right = (model(test).argmax(1) == labels).float().mean().item()
    model.train()
    return right


print(f"sigma {run.noise_multiplier:.3f}, C {run.clip_norm}")
with run:
    for epoch in run.epochs():
        for x, y in epoch:
            run.step(F.cross_entropy(model(x), y))
        print(f"epoch {epoch.number}: accuracy {accuracy():.3f} at epsilon {run.epsilon():.2f}")
print(f"held-out accuracy {accuracy():.3f}")
