"""A rule for an operation that rgp does not know: swish with a trained slope per feature."""

import torch
import torch.nn.functional as F
from torch import nn

import rgp
from rgp.rules import register


@torch.overrides.wrap_torch_function(lambda x, beta: (x, beta))
def swish(x, beta):
    return x * torch.sigmoid(beta * x)


@register(swish)
def gradients(m, grad, x, beta):
    """Per-example gradients of `beta`, argument 1 of swish."""
    s = torch.sigmoid(beta * x)
    each = grad * x * x * s * (1 - s)
    return {1: each.reshape(m, -1, beta.numel()).sum(1)}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 3)
        self.beta = nn.Parameter(torch.ones(32))

    def forward(self, x):
        return self.last(swish(self.first(x), self.beta))


if __name__ == "__main__":
    torch.manual_seed(0)
    batch = torch.randn(6, 16), torch.randint(3, (6,))
    result = rgp.check(
        Net(), batch, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), method=rgp.RGP(rank=2)
    )
    print(result)
    assert result.ok
