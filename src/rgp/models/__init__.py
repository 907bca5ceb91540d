"""Image models for private training: plain `nn.Module`s without batch norm, no torchvision."""

from rgp.models.small_cnn import SmallCNN
from rgp.models.wrn import StandardizedConv2d, WideResNet, wrn

__all__ = ["SmallCNN", "StandardizedConv2d", "WideResNet", "wrn"]
