"""Passes that rewrite a program into the ops that a transport has, one per file."""

from meshweave.lower.chains import lower_chains
from meshweave.lower.in_place import read_in_place
from meshweave.lower.linearise import linearise
from meshweave.lower.one_sided import lower_one_sided, write_out_per_rank
from meshweave.lower.rings import lower_rings
from meshweave.lower.shared_memory import lower_to_shared_memory
from meshweave.lower.small_sums import lower_small_sums
from meshweave.lower.tiles import write_out_tiles

__all__ = [
    "linearise",
    "lower_chains",
    "lower_one_sided",
    "lower_rings",
    "lower_small_sums",
    "lower_to_shared_memory",
    "read_in_place",
    "write_out_per_rank",
    "write_out_tiles",
]
