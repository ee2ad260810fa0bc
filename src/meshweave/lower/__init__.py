"""Passes that rewrite a program into the ops that a transport has, one per file."""

from meshweave.base import lazy
from meshweave.lower.chains import lower_chains as lower_chains
from meshweave.lower.in_place import read_in_place as read_in_place
from meshweave.lower.linearise import linearise as linearise
from meshweave.lower.one_sided import lower_one_sided as lower_one_sided
from meshweave.lower.one_sided import write_out_per_rank as write_out_per_rank
from meshweave.lower.rings import lower_rings as lower_rings
from meshweave.lower.shared_memory import lower_to_shared_memory as lower_to_shared_memory
from meshweave.lower.small_sums import lower_small_sums as lower_small_sums
from meshweave.lower.tiles import write_out_tiles as write_out_tiles

__all__ = lazy.imported_names(__name__)
