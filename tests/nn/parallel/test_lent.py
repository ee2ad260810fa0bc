"""Memory that is lent is free once no tensor on it is alive."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")

import torch

from meshweave.nn.parallel.lent import LentMemory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_lent_memory_is_free_once_no_view_of_it_is_alive(dtype):
    own = torch.arange(6).to(dtype)
    memory = LentMemory(own)
    assert memory.is_free
    lent = memory.lend()
    assert lent.dtype == dtype
    assert torch.equal(lent, own)
    assert lent.data_ptr() == own.data_ptr()
    part = lent[2:4].view(1, 2)
    del lent
    assert not memory.is_free
    own += 1
    assert part.tolist() == [[3, 4]]
    weight = torch.nn.Parameter(torch.zeros(1, 2, dtype=dtype))
    weight.grad = part
    del part
    assert not memory.is_free
    weight.grad = None
    assert memory.is_free
