"""The global batch of a training step."""

from __future__ import annotations

from dataclasses import dataclass

from meshweave.base.errors import DescriptionError, require_count, require_known
from meshweave.base.units import DTYPES
from meshweave.describe.files import format_value

MAX_SIZE = 2**31
"""The most sequences in a batch, and tokens in a sequence: more is a typing mistake."""


@dataclass(frozen=True)
class Workload:
    """A global batch of `batch` sequences of `sequence` tokens each, in a dtype.

    Raises:
        DescriptionError: a size is no whole number, below 1 or above `MAX_SIZE`, or the dtype is unknown.
    """

    batch: int
    sequence: int
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for key, size in (("batch", self.batch), ("sequence", self.sequence)):
            count = require_count(size, f"workload: {key}", DescriptionError)
            if count > MAX_SIZE:
                raise DescriptionError(f"workload: {key} is {format_value(count)}; give at most {MAX_SIZE}")
            object.__setattr__(self, key, count)
        require_known(self.dtype, DTYPES, "workload: unknown dtype", DescriptionError, "known:")

    @property
    def tokens(self) -> int:
        """Return the number of tokens of the global batch."""
        return self.batch * self.sequence
