"""Checksums of the bits of tensors, computed where they lie."""

from __future__ import annotations

import hashlib
from functools import lru_cache

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshweave.execute.torch import compat

_CHUNK = 1 << 18
_PER_CHUNK = 1_099_511_628_211  # odd, so that chunks that change places are seen
_SMALL_BYTES = 1 << 16
_HALVES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


def checksum(tensor: Tensor) -> Tensor:
    """Return the `bits_number` of a tensor, a checksum of its bits, as an int64 tensor () on its device."""
    number = bits_number(tensor)
    return torch.tensor(number, device="cpu") if isinstance(number, int) else number


def bits_number(tensor: Tensor) -> Tensor | int:
    """Return a signed 64-bit checksum of the bits of a tensor or a DTensor's local part, computed on its device.

    It is an int for a tensor on a CPU, else a tensor () on the device. It is the sum of words of at most 32 bits
    times odd numbers that depend on their positions, modulo 2**64, taken `_CHUNK` words at a time. A change of one
    word always changes the sum; two tensors that differ in more have equal sums with a probability of 2**-33 at
    most. For 64 KiB or less on a CPU it is `digest_of` a copy instead, which is faster (a copy, since memory that
    numpy has looked at can never be resized again, as FSDP2 resizes weights).
    """
    own = (compat.local_tensor(tensor) if isinstance(tensor, DTensor) else tensor).detach()
    if own.is_cpu and own.nbytes <= _SMALL_BYTES and own.dtype == torch.int64:  # tokens, in each call
        return digest_of(own.clone(memory_format=torch.contiguous_format))
    own = torch.view_as_real(own.resolve_conj()) if own.is_complex() else own
    words = own.contiguous().view(-1).view(_HALVES[own.element_size()])
    if own.is_cpu and own.nbytes <= _SMALL_BYTES:
        return digest_of(words.clone())
    total = torch.zeros((), dtype=torch.int64, device=own.device)
    for chunk in words.split(_CHUNK):
        factors = checksum_factors(own.device)[: chunk.numel()]
        total = total * _PER_CHUNK + torch.mul(chunk, factors).sum()
    return int(total) if own.is_cpu else total


def digest_of(own: Tensor) -> int:
    """Return a signed 64-bit hash of the bytes of a contiguous tensor on a CPU, of a dtype that numpy has."""
    return int.from_bytes(hashlib.blake2b(own.numpy(), digest_size=8).digest(), "little", signed=True)


@lru_cache(8)
def checksum_factors(device: torch.device) -> Tensor:
    """Return int64 factors (`_CHUNK`,) on `device`: a fixed odd, pseudo-random number for each position.

    They are made by splitmix64 (Steele et al., 2014).
    """
    mixed = torch.arange(1, _CHUNK + 1, dtype=torch.int64) * -7046029254386353131
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        mixed = (mixed ^ ((mixed >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return ((mixed ^ ((mixed >> 31) & ((1 << 33) - 1))) | 1).to(device)
