"""Wide residual networks (Zagoruyko and Komodakis 2016) with group norm, as the paper uses them for images.

Shapes: images `(m, in_channels, H, W)` in, logits `(m, num_classes)` out. Any H and W that two strides of 2 can halve.

Batch norm mixes the examples of a batch, so that one example's gradient would not be defined; group norm does not.
"""

from __future__ import annotations

import re

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rgp.rules.derived import derived


class StandardizedConv2d(nn.Conv2d):
    """A convolution with weight standardisation: each output channel's kernel gets mean 0 and variance 1 / fan-in.

    With that variance the output keeps the scale of the input, whatever the scale of `weight`.
    """

    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, derived(self.weight, standardized), self.bias)


def standardized(weight: Tensor) -> Tensor:
    """Each row of weight.flatten(1) with mean 0 and variance 1 / d."""
    variance, mean = torch.var_mean(weight, dim=tuple(range(1, weight.dim())), keepdim=True, correction=0)
    return (weight - mean) * torch.rsqrt(variance * weight[0].numel() + 1e-8)


class Block(nn.Module):
    """Twice (norm, relu, conv), and a shortcut: the identity, or a 1x1 convolution where the shape changes."""

    def __init__(
        self, norm1: nn.Module, conv1: nn.Module, norm2: nn.Module, conv2: nn.Module, shortcut: nn.Module | None
    ):
        super().__init__()
        self.norm1, self.conv1 = norm1, conv1
        self.norm2, self.conv2 = norm2, conv2
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(x))
        # A shortcut that changes the shape starts after the first activation, as in the original network.
        residual = x if self.shortcut is None else self.shortcut(h)
        h = F.relu(self.norm2(self.conv1(h)))
        return residual + self.conv2(h)


class WideResNet(nn.Module):
    """WRN-depth-widen, pre-activation, group norm instead of batch norm.

    >>> model = WideResNet(depth=28, widen=4)
    >>> sum(p.numel() for p in model.parameters())
    5849050
    >>> model(torch.randn(2, 3, 32, 32)).shape
    torch.Size([2, 10])

    depth: 6 n + 4, for n blocks in each of three stages of 16 widen, 32 widen and 64 widen channels.
    groups: groups of every group norm, never more than the layer has channels.
    affine: whether the norms have a trained scale and shift.
    weight_standardization: 3x3 and 1x1 convolutions with `StandardizedConv2d`.
    """

    def __init__(
        self,
        depth: int,
        widen: int,
        num_classes: int = 10,
        in_channels: int = 3,
        groups: int = 16,
        affine: bool = True,
        weight_standardization: bool = False,
    ):
        super().__init__()
        if depth < 10 or (depth - 4) % 6:
            raise ValueError(f"depth={depth} is not 6 n + 4 with n >= 1: take 10, 16, 22, 28, 40, ...")
        if widen < 1:
            raise ValueError(f"widen={widen} must be at least 1")
        conv_type = StandardizedConv2d if weight_standardization else nn.Conv2d

        def conv(channels_in: int, channels_out: int, kernel: int, stride: int = 1) -> nn.Module:
            return conv_type(channels_in, channels_out, kernel, stride, padding=kernel // 2, bias=False)

        def norm(channels: int) -> nn.Module:
            return nn.GroupNorm(min(groups, channels), channels, affine=affine)

        channels = 16
        self.conv = conv(in_channels, channels, 3)
        stages = []
        for width, stride in ((16 * widen, 1), (32 * widen, 2), (64 * widen, 2)):
            blocks = []
            for i in range((depth - 4) // 6):
                step = stride if i == 0 else 1
                shortcut = conv(channels, width, 1, step) if step != 1 or channels != width else None
                first, second = conv(channels, width, 3, step), conv(width, width, 3)
                blocks.append(Block(norm(channels), first, norm(width), second, shortcut))
                channels = width
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.norm = norm(channels)
        self.head = nn.Linear(channels, num_classes)

        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stages(self.conv(x))
        x = F.relu(self.norm(x))
        return self.head(x.mean(dim=(2, 3)))


def wrn(name: str, **options) -> WideResNet:
    """A wide ResNet by the name papers give it, such as "28-4", "16-1" or "wrn40-4".

    >>> model = wrn("16-4", num_classes=100)
    """
    match = re.fullmatch(r"(?:wrn-?)?(\d+)-(\d+)", name.lower())
    if match is None:
        raise ValueError(f"name={name!r} is not a wide ResNet: write depth and width, such as '28-4'")
    depth, widen = map(int, match.groups())
    return WideResNet(depth, widen, **options)
