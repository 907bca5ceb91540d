"""Sums of bits: what tells tensors apart that should be equal, in writes that nobody announced and between ranks."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from rgp.torchstate import bits_of

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.uint8, torch.complex64, torch.bool, torch.int32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 2, 3, 8, 17])
@pytest.mark.parametrize("start", [0, 1])
def test_a_change_of_any_entry_is_seen(dtype, size, start):
    tensor = torch.ones(size + start).to(dtype)[start:]
    before = bits_of(tensor)
    assert before.dtype == torch.int64 and bits_of(tensor.clone()) == before
    for i in range(size):
        changed = tensor.clone()
        changed[i] = 0
        assert bits_of(changed) != before


def test_entries_count_and_not_how_they_lie_in_memory():
    tensor = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)).T
    assert bits_of(tensor) == bits_of(tensor.contiguous()) != bits_of(tensor.T.contiguous())
    assert bits_of(torch.tensor(2.0)) == bits_of(torch.tensor(2.0)) != 0
    assert bits_of(torch.empty(0)) == 0


def test_no_copy_is_made_of_a_weight():
    weight = torch.ones(1000, 1000)
    with torch.profiler.profile(profile_memory=True) as watched:
        bits_of(weight)
    assert max(event.self_cpu_memory_usage for event in watched.key_averages()) < 1000


def test_saved_tensor_hooks_are_seen_on_every_torch():
    """A torch without a function that asks for them (2.6) is stood in for by one from which it was taken away."""
    code = (
        "import torch\n"
        "if hasattr(torch._C._autograd, '_top_saved_tensors_default_hooks'):\n"
        "    del torch._C._autograd._top_saved_tensors_default_hooks\n"
        "from rgp.torchstate import saved_tensors_hooks\n"
        "hooks = saved_tensors_hooks()\n"
        "assert hooks(False) is None\n"
        "with torch.autograd.graph.save_on_cpu():\n"
        "    with torch.autograd.graph.save_on_cpu():\n"
        "        assert hooks(False) is not None\n"
        "    assert hooks(False) is not None\n"
        "assert hooks(False) is None\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
