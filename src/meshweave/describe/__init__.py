"""What there is: clusters, chips, models, meshes and layouts, and the catalog of clusters and models.

`meshweave` itself has the classes that most need: clusters, models, meshes, layouts. Here are rates of hosts,
strided and tiled placements, and the process grids of ScaLAPACK.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshweave.base.lazy import lazy_names

if TYPE_CHECKING:
    from meshweave.describe.layout import Placement as Placement
    from meshweave.describe.layout import StridedShard as StridedShard
    from meshweave.describe.layout import Tile as Tile
    from meshweave.describe.layout.grid import ProcessGrid as ProcessGrid
    from meshweave.describe.layout.grid import block_2d as block_2d
    from meshweave.describe.layout.grid import block_cyclic as block_cyclic
    from meshweave.describe.layout.grid import column_block as column_block
    from meshweave.describe.layout.grid import cyclic as cyclic
    from meshweave.describe.layout.grid import row_block as row_block
    from meshweave.describe.machine.host import HostRates as HostRates
    from meshweave.describe.model import FcLayer as FcLayer

__all__ = lazy_names(__name__, moved={"meshweave": "cluster_names=clusters model_names=models"})
