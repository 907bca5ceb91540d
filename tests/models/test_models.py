"""The image models: sizes as published, examples kept apart, the parts that their names promise."""

import pytest
import torch
from torch import nn

from rgp.models import SmallCNN, StandardizedConv2d, WideResNet, wrn
from rgp.models.wrn import standardized


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def wrn_size(depth: int, k: int, classes: int = 10) -> int:
    """From the table of Zagoruyko and Komodakis: kernels, two numbers per normalised channel, the linear head."""
    n, size, before = (depth - 4) // 6, 9 * 3 * 16, 16
    for width in (16 * k, 32 * k, 64 * k):
        size += 9 * before * width + 9 * width * width + 2 * before + 2 * width  # first block
        size += before * width if before != width else 0  # its shortcut
        size += (n - 1) * (2 * 9 * width * width + 4 * width)
        before = width
    return size + 2 * before + before * classes + classes


@pytest.mark.parametrize(
    ("name", "millions"),
    [("10-1", 0.08), ("16-1", 0.18), ("16-4", 2.75), ("28-2", 1.47), ("28-4", 5.85), ("40-4", 8.95)],
)
def test_wide_resnets_have_their_published_size(name, millions):
    depth, widen = map(int, name.split("-"))
    assert count(wrn(name)) == wrn_size(depth, widen)
    assert count(wrn(name)) / 1e6 == pytest.approx(millions, abs=0.005)


@pytest.mark.parametrize(
    "model",
    [
        wrn("10-1"),
        wrn("wrn10-1", affine=False),
        wrn("10-1", weight_standardization=True),
        SmallCNN(),
        SmallCNN(stride=2),
    ],
    ids=["wrn", "no affine", "standardised", "small cnn", "tiny cnn"],
)
def test_an_example_does_not_see_its_neighbours(model):
    images = torch.randn(3, 3, 32, 32)
    together = model.train()(images)
    assert together.shape == (3, 10)
    torch.testing.assert_close(together[1:2], model(images[1:2]), rtol=1e-4, atol=1e-5)


def test_other_channels_classes_and_groups():
    model = WideResNet(10, 2, num_classes=100, in_channels=1, groups=32)
    assert model(torch.randn(2, 1, 28, 28)).shape == (2, 100)
    assert [m.num_groups for m in model.modules() if isinstance(m, nn.GroupNorm)][:2] == [16, 32]
    assert SmallCNN(num_classes=3, in_channels=1)(torch.randn(2, 1, 28, 28)).shape == (2, 3)
    tiny = SmallCNN(in_channels=1, width=16, stride=2)
    assert tiny(torch.randn(2, 1, 28, 28)).shape == (2, 10)
    assert tiny.convs[0](torch.randn(2, 1, 28, 28)).shape == (2, 16, 14, 14)


def test_norms_without_affine_have_no_parameters():
    names = [name for name, _ in wrn("10-1", affine=False).named_parameters()]
    assert not any("norm" in name for name in names)


def test_a_block_without_its_branch_is_the_identity():
    block = wrn("16-1").stages[0][1]  # the second of its stage: no change of shape
    nn.init.zeros_(block.conv2.weight)
    x = torch.randn(2, 16, 8, 8)
    torch.testing.assert_close(block(x), x, rtol=0, atol=0)


def test_standardised_weights_forget_scale_and_shift():
    conv = StandardizedConv2d(4, 6, 3, bias=False).double()
    nn.init.normal_(conv.weight)
    x = torch.randn(2, 4, 8, 8, dtype=torch.float64)
    before = conv(x)
    with torch.no_grad():
        conv.weight.mul_(7).add_(3)
    torch.testing.assert_close(conv(x), before, rtol=1e-7, atol=1e-7)
    kernels = standardized(conv.weight).flatten(1)
    torch.testing.assert_close(kernels.mean(1), torch.zeros(6, dtype=torch.float64))
    torch.testing.assert_close(kernels.var(1, correction=0), torch.full((6,), 1 / 36, dtype=torch.float64))


def test_state_dict_goes_over_to_another_instance():
    first, second = wrn("10-1"), wrn("10-1")
    second.load_state_dict(first.state_dict())
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(first(x), second(x), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: WideResNet(28 + 1, 4), "depth=29"),
        (lambda: WideResNet(4, 4), "depth=4"),
        (lambda: WideResNet(28, 0), "widen=0"),
        (lambda: wrn("resnet18"), "'resnet18'"),
        (lambda: SmallCNN(width=30), "width=30"),
    ],
)
def test_wrong_sizes_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
