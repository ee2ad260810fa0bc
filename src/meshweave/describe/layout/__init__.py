"""Layouts: which elements of a tensor each rank of a mesh holds."""

from meshweave.describe.layout.intervals import Intervals as Intervals
from meshweave.describe.layout.intervals import chunk_bounds as chunk_bounds
from meshweave.describe.layout.layouts import Layout as Layout
from meshweave.describe.layout.layouts import Partial as Partial
from meshweave.describe.layout.layouts import Placement as Placement
from meshweave.describe.layout.layouts import Replicate as Replicate
from meshweave.describe.layout.layouts import Shard as Shard
from meshweave.describe.layout.layouts import StridedShard as StridedShard
from meshweave.describe.layout.layouts import Tile as Tile
