"""`fix`: replace modules that private training cannot use."""

from __future__ import annotations

from torch import nn

from rgp.errors import UnsupportedError

_KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def fix(model: nn.Module, *, groups: int = 32) -> nn.Module:
    """Replace every BatchNorm in `model` by GroupNorm, in place, before the optimizer is made. Returns the model.

    Scale and shift are copied; running statistics have no place in GroupNorm and are dropped, so a pretrained model
    needs training afterwards. The number of groups is the largest divisor of the channels that is at most `groups`.

    >>> fix(nn.Sequential(nn.Conv2d(3, 48, 3), nn.BatchNorm2d(48)))[1].num_groups
    24
    """
    if isinstance(model, _KINDS):
        raise UnsupportedError("the model is itself a BatchNorm; give fix the module that contains it")
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, _KINDS):
                setattr(parent, name, _group_norm(child, groups))
    return model


def _group_norm(old: nn.modules.batchnorm._BatchNorm, most: int) -> nn.GroupNorm:
    channels = old.num_features
    count = max(n for n in range(1, min(most, channels) + 1) if channels % n == 0)
    new = nn.GroupNorm(count, channels, eps=old.eps, affine=old.affine)
    if old.affine:
        new.weight, new.bias = old.weight, old.bias
        new.to(old.weight.device)
    return new.train(old.training)
