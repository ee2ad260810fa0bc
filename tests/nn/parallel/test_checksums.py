"""Checksums tell other bits apart and leave a tensor as it is."""

from __future__ import annotations

import pytest
import torch

from meshweave.nn.parallel.checksums import checksum


@pytest.mark.parametrize("numel", [3, 1 << 15])  # of a digest, and of words times factors
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64, torch.bool])
def test_other_bits_have_another_checksum(numel: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    given = (torch.randn(numel) > 0 if dtype == torch.bool else 9 * torch.randn(numel)).to(dtype)
    other = given.clone()
    other[numel // 2] = ~other[numel // 2] if dtype == torch.bool else other[numel // 2] + 1
    assert int(checksum(given)) == int(checksum(given.clone())) != int(checksum(other))


@pytest.mark.parametrize("numel", [3, 1 << 15])
def test_memory_can_be_freed_as_before(numel: int) -> None:
    """FSDP2 frees weights by their storage, which numpy would forbid."""
    given = torch.ones(numel)
    checksum(given)
    given.untyped_storage().resize_(0)
    assert given.untyped_storage().nbytes() == 0
