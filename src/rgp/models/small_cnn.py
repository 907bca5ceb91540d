"""A small convolutional network for quick looks at MNIST and CIFAR-10."""

from __future__ import annotations

from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn


class SmallCNN(nn.Module):
    """Three times (3x3 convolution, group norm, relu, 2x2 pooling), then the mean over positions and a linear head.

    >>> import torch
    >>> SmallCNN(in_channels=1)(torch.randn(2, 1, 28, 28)).shape
    torch.Size([2, 10])

    width: channels of the first convolution; the second has twice, the third four times as many.
    groups: groups of every group norm.
    stride: of the first convolution; 2 (with a 5x5 kernel) makes everything after it four times cheaper.
    """

    def __init__(self, num_classes: int = 10, in_channels: int = 3, width: int = 32, groups: int = 8, stride: int = 1):
        super().__init__()
        if width % groups:
            raise ValueError(f"width={width} must be a multiple of groups={groups}")
        channels = [in_channels, width, 2 * width, 4 * width]
        self.convs = nn.ModuleList(nn.Conv2d(c, d, 3, padding=1) for c, d in pairwise(channels))
        if stride != 1:
            self.convs[0] = nn.Conv2d(in_channels, width, 5, stride=stride, padding=2)
        self.norms = nn.ModuleList(nn.GroupNorm(groups, d) for d in channels[1:])
        self.head = nn.Linear(channels[-1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.max_pool2d(F.relu(norm(conv(x))), 2)
        return self.head(x.mean(dim=(2, 3)))
