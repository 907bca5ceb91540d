"""An image model with batch norm, made fit for private training, checked, trained, interrupted and resumed.

The images are made here: noisy bars, horizontal, vertical or diagonal. Replace `images` and `network` by yours.
"""

import tempfile

import torch
import torch.nn.functional as F
from torch import nn

import rgp


def images(count: int, seed: int) -> torch.utils.data.TensorDataset:
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (count,), generator=g)
    at = torch.arange(16)
    row, column = at[:, None].expand(16, 16), at[None, :].expand(16, 16)
    phase = torch.stack([row, column, row + column])[y] + torch.randint(8, (count, 1, 1), generator=g)
    x = (phase % 8 < 4).float() + 0.3 * torch.randn(count, 16, 16, generator=g)
    return torch.utils.data.TensorDataset(x.unsqueeze(1), y)


def network() -> nn.Module:
    def block(channels_in: int, channels_out: int) -> list[nn.Module]:
        conv = nn.Conv2d(channels_in, channels_out, 3, padding=1)
        return [conv, nn.BatchNorm2d(channels_out), nn.ReLU(inplace=True), nn.MaxPool2d(2)]

    model = nn.Sequential(*block(1, 16), *block(16, 32), *block(32, 64), nn.Flatten(), nn.Linear(256, 3))
    return rgp.fix(model)  # batch norm mixes the examples of a batch; group norm takes its place


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


@torch.no_grad()
def accuracy(model: nn.Module, data: torch.utils.data.TensorDataset) -> float:
    x, y = data.tensors
    return (model(x).argmax(1) == y).float().mean().item()


if __name__ == "__main__":
    torch.manual_seed(0)
    training, held_out = images(2000, seed=0), images(500, seed=1)
    model = network()
    method = rgp.RGP(rank=4, sides="left", source="weight")  # one-sided: fewer noise dimensions for wide kernels
    print(rgp.make_plan(model, method), "\n")

    # Once for a new model or loss: are the engine's gradients those of autograd, one example at a time?
    result = rgp.check(model, training[:6], loss_of, method=method)
    assert result.ok, str(result)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    with tempfile.TemporaryDirectory() as folder:
        run = rgp.privatize(
            model,
            optimizer,
            training,
            method=method,
            budget=rgp.Budget(epsilon=3.0),
            batch_size=250,
            epochs=6,
            microbatch_size=125,
            folder=folder + "/run",  # every release is on record here before it is used
        )
        for batch in run:
            run.step(loss_of(model, batch))
            if run.step_index == 20:
                break  # the machine went down, say
        run.save(folder + "/run")
        run.close()

        model = network()  # another day, another process
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        with rgp.resume(folder + "/run", model, optimizer, training) as run:
            for batch in run:
                run.step(loss_of(model, batch))
            spent = run.epsilon()

    print(f"held-out accuracy {accuracy(model, held_out):.3f} at epsilon {spent:.2f}")
