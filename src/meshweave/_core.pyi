"""The core, compiled from csrc/; CONTRIBUTING.md names its callers."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

class ProgramFault(Exception):
    """A program that cannot be expanded or run: (message, global rank, op on the rank), -1 for unknown."""

def prove(columns: Mapping[str, NDArray[np.int64]]) -> int:
    """The `ir.analysis.native_proof.Verdict` of a program. Raises ValueError for columns that describe none."""

def run_channel(columns: Mapping[str, NDArray[np.int64]]) -> NDArray[np.int64]:
    """Return (cycle, whether it is done, tag) of what happens to the requests of a memory channel, flat.

    The columns are `timing`, `controller` and `requests` (csrc/gpu.hpp). Raises ValueError.
    """

def run_gpus(
    columns: Mapping[str, NDArray[np.int64]], num_devices: int, max_steps: int = ...
) -> dict[str, NDArray[np.int64]]:
    """Simulate kernels on a ring of GPUs; csrc/gpu.hpp says what columns go in and come out.

    Raises ProgramFault, also for a run of more than `max_steps` accesses and events; ValueError for columns that
    describe nothing.
    """

class Rows:
    """Integers to which rows are appended."""

    def __len__(self) -> int: ...
    def extend(self, numbers: Iterable[int]) -> None: ...
    def column(self) -> NDArray[np.int64]: ...

def read_statements(writer: object, body: object) -> None:
    """Append the rows of statements to the columns of `ir.columns.proof.ProofColumns`."""

def skeleton_ps(code: NDArray[np.int64]) -> int:
    """The picoseconds of a skeleton as `estimate.chains` writes it. Raises ProgramFault, ValueError."""

class Core:
    """A program template, expanded. Raises ProgramFault, ValueError for columns that describe none."""

    def __init__(self, columns: Mapping[str, NDArray[np.int64]]) -> None: ...
    @property
    def num_ops(self) -> int: ...
    @property
    def num_classes(self) -> int:
        """How many ranks were expanded; each of the others runs as one of them."""
    def starts(self) -> NDArray[np.int64]:
        """The number of each rank's first op, and of all ops."""
    def rows(self) -> NDArray[np.int64]:
        """Each op's number in the template."""
    def edges(self, rank: int) -> NDArray[np.int64]:
        """(op, op that it waits for) of the rank at a position, flat."""
    def works(self) -> NDArray[np.int64]:
        """The different products and calls, flat, 12 numbers each.

        These are the number in the template, (m, n, k) or (FLOPs, bytes, 0), the products of a batch, the number
        of sizes of a call, and up to six sizes.
        """
    def collectives(self) -> NDArray[np.int64]:
        """The different all-gathers, reduce-scatters and all-reduces, flat, 4 numbers each.

        These are the number of the axis, the kind of communication, the members, and the bytes of the largest
        part (of an all-reduce, of all parts).
        """
    def routes(self, num_directions: NDArray[np.int64], rails: NDArray[np.int64]) -> NDArray[np.int64]:
        """(source, target, number) of each route that messages take, flat; positions of ranks."""
    def run(self, machine: Mapping[str, NDArray[np.int64]]) -> dict[str, Any]:
        """Simulates; see `simulate.result.Simulation.outputs`. Raises ProgramFault, ValueError."""
