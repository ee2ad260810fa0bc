"""The resharding problems of AlpaComm's microbenchmarks (MLSys '23, section 5.1): one device to several, table 2.

Hosts are numbered from 0, those of the source mesh first; a mesh of n x m has its first m chips of n hosts. In
spec strings axis 0 is the one over hosts, axis 1 the one within a host.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshweave.algorithms.reshard import ReshardProblem, TensorMove
from meshweave.base.errors import LayoutError
from meshweave.describe.layout.mesh import Mesh
from meshweave.describe.layout.spec import layout_of_spec

Shape = tuple[int, int, int]
SHAPE: Shape = (1024, 1024, 512)
"""Elements, of 4 bytes (section 5.1.2)."""
GIGABYTE: Shape = (1024, 1024, 256)
"""1 GB of fp32 (section 5.1.1); by our reading 2^30 bytes, a tensor like those of table 2."""
DTYPE = "float32"


@dataclass(frozen=True)
class ReshardingCase:
    """A tensor moves from spec `src` on a mesh of `src_mesh` to spec `dst` on a mesh of `dst_mesh`.

    Attributes:
        src, dst: for each tensor dim "R" if it is replicated, or "S" and the mesh axes that shard it: "RS01R".
        src_mesh, dst_mesh: number of hosts, and chips of each host.
        shape: the paper's, in elements.
    """

    src: str
    dst: str
    src_mesh: tuple[int, int]
    dst_mesh: tuple[int, int]
    shape: Shape = SHAPE

    @property
    def num_hosts(self) -> int:
        """The number of hosts of both meshes together."""
        return self.src_mesh[0] + self.dst_mesh[0]

    def problem(
        self, shape: Shape | None = None, chips_per_host: int = 4, dtype: str = DTYPE
    ) -> ReshardProblem:
        """Return the problem on hosts of `chips_per_host` chips; `shape` replaces the tensor's own.

        Raises LayoutError where a mesh needs more chips of a host than there are.
        """
        src = _mesh("src", self.src_mesh, 0, chips_per_host)
        dst = _mesh("dst", self.dst_mesh, self.src_mesh[0], chips_per_host)
        layouts = layout_of_spec(self.src, src), layout_of_spec(self.dst, dst)
        return ReshardProblem((TensorMove("tensor", shape or self.shape, dtype, *layouts),))


def _mesh(name: str, shape: tuple[int, int], first_host: int, chips_per_host: int) -> Mesh:
    if shape[1] > chips_per_host:
        raise LayoutError(
            f"a mesh of {shape[0]} x {shape[1]} needs {shape[1]} chips of a host; it has {chips_per_host}"
        )
    hosts = range(first_host, first_host + shape[0])
    ranks = tuple(host * chips_per_host + chip for host in hosts for chip in range(shape[1]))
    return Mesh(name, shape, ("hosts", "chips"), ranks)


def one_to_many(hosts: int, chips: int, shape: Shape = GIGABYTE) -> ReshardingCase:
    """Return the case of one device that sends to `chips` chips of each of `hosts` other hosts."""
    return ReshardingCase("RRR", "RRR", (1, 1), (hosts, chips), shape)


CASES: dict[int, ReshardingCase] = {
    1: ReshardingCase("S0RR", "S0RR", (2, 4), (2, 4)),
    2: ReshardingCase("RRR", "S0RR", (2, 4), (2, 4)),
    3: ReshardingCase("RS0R", "S0RR", (2, 4), (2, 4)),
    4: ReshardingCase("RS01R", "S01RR", (2, 4), (2, 4)),
    5: ReshardingCase("S1RR", "S0RR", (2, 4), (2, 4)),
    6: ReshardingCase("S0RR", "S0RR", (2, 4), (3, 4), (3072, 1024, 170)),
    7: ReshardingCase("S1RR", "RRR", (1, 4), (2, 4)),
    8: ReshardingCase("RRR", "RRR", (2, 3), (3, 2)),
    9: ReshardingCase("RS0R", "RRS0", (2, 4), (2, 4)),
}
"""Table 2, by its numbers. Case 4 is our reading: section 5.1.2 has it schedule 64 unit tasks, which is what it
takes to cut along both mesh axes on either side. The shape of case 6 is ours too: the paper pads there."""
