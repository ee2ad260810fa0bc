"""Bytes of a text as batches for a language model, in an order that a seed decides, from any position.

The text that comes along is the book of Genesis in the King James Version of 1611, which is in the public domain.
It was written by `bible -l72 gen1:1-gen50:26` of Debian's packages bible-kjv and bible-kjv-text 4.38.
"""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import torch
from torch import Tensor

from meshweave.errors import DescriptionError

TEXT = Path(__file__).parent / "genesis.txt.gz"


class ByteBatches:
    """Windows of a text, all of them once an epoch. A batch depends on the seed and the position alone.

    So the batches that follow a position are the same on any number of ranks.

    Args:
        path: a text file, or one that gzip made.
        sequence: tokens of a window; the targets are the same bytes one later.
        batch: windows of a step.
        seed: of the order of windows.

    Raises:
        DescriptionError: the file cannot be read, or has no window.

    Attributes:
        position: how many windows have been given out.
    """

    def __init__(self, path: Path = TEXT, *, sequence: int, batch: int, seed: int = 0) -> None:
        try:
            raw = path.read_bytes()
            raw = gzip.decompress(raw) if path.suffix == ".gz" else raw
        except (OSError, EOFError, zlib.error) as error:
            raise DescriptionError(f"{path} cannot be read as a text: {error}") from None
        self._bytes = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        self._sequence, self._batch, self._seed, self.position = sequence, batch, seed, 0
        self._windows = (len(self._bytes) - 1) // sequence
        if self._windows < 1:
            raise DescriptionError(f"{path} has {len(self._bytes)} bytes, and a window takes {sequence + 1}")
        self._order: tuple[int, Tensor] = (-1, torch.empty(0))

    def __next__(self) -> tuple[Tensor, Tensor]:
        """Return tokens and targets of the next batch, each (batch, sequence) of int64, and go past it."""
        starts = [self._start(self.position + each) for each in range(self._batch)]
        rows = torch.stack([self._bytes[start : start + self._sequence + 1] for start in starts]).long()
        self.position += self._batch
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def __iter__(self) -> ByteBatches:
        return self

    def _start(self, number: int) -> int:
        epoch, at = divmod(number, self._windows)
        if self._order[0] != epoch:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            self._order = epoch, torch.randperm(self._windows, generator=generator)
        return int(self._order[1][at]) * self._sequence

    def state_dict(self) -> dict[str, int]:
        """Return the position and what it belongs to."""
        return {
            "position": self.position, "seed": self._seed, "sequence": self._sequence, "windows": self._windows
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from the position of `state`. Raises DescriptionError where text or order are others."""
        own = self.state_dict()
        for name in ("seed", "sequence", "windows"):
            if state[name] != own[name]:
                raise DescriptionError(f"the checkpoint's data have {name} {state[name]}, these {own[name]}")
        self.position = state["position"]
