"""The limits of what is read from files and options, and of the work that it may ask for: all in one place.

A file that is over a limit is refused with one line that names the limit, before the work is done. The page
docs/reference/limits.md is generated from `LIMITS`. Limits are far above what real descriptions and programs need;
what Python code builds by itself meets only those of `Program`, the simulator and the describing classes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limit:
    """A largest number of something.

    Attributes:
        most: the largest number that is accepted.
        unit: what is counted, a plural noun phrase.
        subject: what must not have more of it.
    """

    most: int
    unit: str
    subject: str

    def refusal(self, count: int | None = None) -> str:
        """Return what an error says of something over the limit: "has 5 dims, over the limit of 4".

        `count` is how many it has; None where they were not all counted.
        """
        if count is None or count >= 10**30:
            return f"has more than {self.most:,} {self.unit}, which is the limit"
        return f"has {count:,} {self.unit}, over the limit of {self.most:,}"


# --- text -----------------------------------------------------------------------------------------------

FILE_BYTES = Limit(1 << 22, "bytes", "a JSON file")
TOML_BYTES = Limit(1 << 20, "bytes", "a TOML file")
PROGRAM_BYTES = Limit(32_000_000, "bytes", "the text of a program")
SCHEDULE_BYTES = Limit(32_000_000, "bytes", "a CSV of a pipeline's actions")
NESTING = Limit(64, "levels of nested tables and lists", "a TOML or JSON file")
VALUES = Limit(200_000, "values", "a TOML or JSON file")
KEY_PARTS = Limit(16, "parts of a dotted key", "a TOML file")
MANIFEST_BYTES = Limit(1 << 27, "bytes", "the manifest of a checkpoint")
MANIFEST_BRACKETS = Limit(1_000_000, "lists and tables", "the manifest of a checkpoint")
MANIFEST_COMMAS = Limit(8_000_000, "commas", "the manifest of a checkpoint")

# --- descriptions ---------------------------------------------------------------------------------------

CHIPS = Limit(1 << 16, "chips", "a cluster")
STEP_LAYERS = Limit(1 << 14, "layers", "a model whose training step is priced")
MODEL_TENSORS = Limit(1 << 12, "tensors", "the state dict of a model that is resharded")
RESHARD_MESSAGES = Limit(200_000, "messages", "a reshard whose program `reshard --out` writes")

RUNS = Limit(1_000, "rows", "a file of published runs")
MEASUREMENTS = Limit(20_000, "rows", "a file of measured kernels")

# --- programs -------------------------------------------------------------------------------------------

EXPRESSION_DEPTH = Limit(50, "nested operations", "an expression of a program")
DIMS = Limit(32, "dims", "a tensor, scratch buffer or mesh of a program")
MESH_RANKS = Limit(1 << 18, "ranks in its meshes", "a mesh, and the text of a program, all meshes added")
PIECES = Limit(
    1 << 15, "separate ranges of indices", "a dim of a tensor on one rank, in tiles or strided shards"
)
SLOTS = Limit(1 << 12, "slots", "a buffer of a program")
RANK_STEPS = Limit(
    1 << 20, "ops, blocks and turns of loops on one rank", "a program, wherever it is unrolled"
)
CHECKED_STEPS = Limit(
    15_000,
    "ops, blocks and turns of loops on all ranks",
    "a program that `show` checks without --check, or `simulate --against estimate` takes",
)
LISTED_STEPS = Limit(
    50_000,
    "ops, blocks and turns of loops on the ranks shown",
    "a program that `show` checks, writes out by rank or writes for jax",
)
GPU_STEPS = Limit(
    200_000, "ops, blocks and turns of loops on all ranks", "a program that runs on a GPU in detail"
)
PROOF_ELEMENTS = Limit(
    16_000_000, "elements in its buffers", "a program whose results are proved on index labels"
)
PROOF_WORK = Limit(
    60_000_000, "elements that its ops read and write", "a program whose results are proved on index labels"
)
RING_NUMBERS = Limit(
    1 << 22, "numbers in the steps of its rings", "a program whose collectives are lowered to rings"
)
_SIMULATED = "a program that `simulate` runs without --no-limits"
SIMULATED_DIMS = Limit(8, "dims", "a buffer of a program that is simulated")
SIMULATED_RANKS = Limit(1 << 14, "ranks", _SIMULATED)
SIMULATED_OPS = Limit(200_000, "ops on all ranks", _SIMULATED)
SIMULATED_RANK_OPS = Limit(20_000, "ops on one rank", _SIMULATED)
SIMULATED_MESSAGES = Limit(30_000_000, "messages", _SIMULATED)
SIMULATED_ROUTES = Limit(200_000, "pairs of ranks that send to each other", _SIMULATED)

SCHEDULE_STAGES = Limit(1 << 12, "stages", "a pipeline schedule")
SCHEDULE_FORWARDS = Limit(
    1 << 16, "forwards, stages times micro-batches", "a pipeline schedule by name that is written out"
)
SEARCHED_FORWARDS = Limit(
    1 << 14, "forwards, stages times micro-batches", "a pipeline schedule that is searched, zb-1p or zb-2p"
)
SCHEDULE_CELLS = Limit(1 << 19, "cells", "a CSV of a pipeline's actions")
SCHEDULED_PRODUCTS = Limit(
    2048, "local products on all ranks", "a product whose issue order `tune schedule` searches"
)

LIMITS = tuple(value for value in vars().values() if isinstance(value, Limit))
"""All limits, in the order in which the reference lists them."""
