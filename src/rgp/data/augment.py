"""Augmentation of image batches, one choice per image, from torch's own generator (which the engine seeds)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

PADDING = 4


def crop_and_flip(batch: Any) -> Any:
    """(images (m, c, H, W), labels) with every image padded by reflection, cropped at random and mirrored half the time."""
    x, y = batch
    return flip(crop(x)), y


def crop(x: Tensor) -> Tensor:
    m, _, height, width = x.shape
    padding = min(PADDING, height - 1, width - 1)
    padded = F.pad(x, [padding] * 4, mode="reflect")
    top, left = (torch.randint(0, 2 * padding + 1, (m, 1)) for _ in range(2))
    rows, columns = (top + torch.arange(height)).to(x.device), (left + torch.arange(width)).to(x.device)
    each = torch.arange(m, device=x.device)
    return padded[each[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def flip(x: Tensor) -> Tensor:
    mirrored = (torch.rand(len(x)) < 0.5).to(x.device)
    return torch.where(mirrored[:, None, None, None], x.flip(3), x)
