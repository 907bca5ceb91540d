"""Opacus's DCGAN example with rgp: the discriminator is trained privately, the generator learns from the discriminator alone.

Only the discriminator sees private images, so only it needs a run. The generator's own step comes after `run.step`: it looks
at the discriminator's released weights, and costs no privacy. Inside the loop of a run `backward()` is refused, because it could
put a gradient past the engine; `torch.autograd.grad` with the generator's parameters says what it is for.

The images are made here: one bright square each, always in the upper left quarter. A generator that has learnt draws there.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import rgp

SIZE, CODE = 8, 8


def squares(count: int, seed: int) -> TensorDataset:
    draw = torch.Generator().manual_seed(seed)
    x = -torch.ones(count, 1, SIZE, SIZE)
    for i, (top, left) in enumerate(torch.randint(2, (count, 2), generator=draw).tolist()):
        x[i, 0, top : top + 3, left : left + 3] = 1
    return TensorDataset(x)


torch.manual_seed(0)
generator = nn.Sequential(
    nn.ConvTranspose2d(CODE, 32, 2),
    nn.ReLU(),
    nn.ConvTranspose2d(32, 16, 4, stride=2, padding=1),
    nn.ReLU(),
    nn.ConvTranspose2d(16, 1, 4, stride=2, padding=1),
    nn.Tanh(),
)
discriminator = nn.Sequential(
    nn.Conv2d(1, 16, 4, stride=2, padding=1),
    nn.LeakyReLU(0.2),
    nn.Conv2d(16, 32, 4, stride=2, padding=1),
    nn.LeakyReLU(0.2),
    nn.Flatten(),
    nn.Linear(128, 1),
)
generator_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
discriminator_optimizer = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))


def codes(count: int) -> torch.Tensor:
    return torch.randn(count, CODE, 1, 1)


def real_or_not(images: torch.Tensor, real: float) -> torch.Tensor:
    logits = discriminator(images).squeeze(1)
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, real))


@torch.no_grad()
def brightness() -> tuple[float, float]:
    """Mean of generated images in the upper left quarter, and in the rest."""
    torch.manual_seed(1)
    made = generator(codes(256))
    inside = made[..., : SIZE // 2, : SIZE // 2]
    return inside.mean().item(), ((made.sum() - inside.sum()) / (made.numel() - inside.numel())).item()


before = brightness()
run = rgp.privatize(
    discriminator,
    discriminator_optimizer,
    squares(2000, seed=1),
    method=rgp.DPSGD(),
    noise_multiplier=0.6,
    clip=1.0,
    batch_size=100,
    microbatch_size=200,
    steps=200,
)
with run:
    for (real,) in run:
        with torch.no_grad():
            fake = generator(codes(len(real)))  # one for each private image, and part of that example's loss
        stepped = run.step(real_or_not(real, 1.0) + real_or_not(fake, 0.0))
        if stepped:  # not in the rehearsal, and once for several micro-batches
            loss = real_or_not(generator(codes(100)), 1.0)
            parameters = list(generator.parameters())
            for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                parameter.grad = gradient
            generator_optimizer.step()

inside, outside = brightness()
print(
    f"generated images: {inside:.2f} in the upper left, {outside:.2f} elsewhere ({before[0]:.2f}, {before[1]:.2f} before)"
)
print(f"real ones: 0.12, -1.00; epsilon {run.epsilon():.2f}")
