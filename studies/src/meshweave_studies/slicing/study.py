"""The experiments of Slicing Is All You Need, simulated: the universal product, DTensor and COSMA on two machines.

Data movement is that which is fastest at the largest batch, replication the best of each batch (section 5.2.1).
A process has as many steps as the paper's algorithm has local products (section 4.1), and fetches two ahead
(section 4.2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from meshweave.algorithms.universal import UniversalConfig, UniversalProblem, universal_program
from meshweave.base.errors import LayoutError, UnsupportedError
from meshweave.cost.machine import Machine
from meshweave.describe.layout import Layout, Shard
from meshweave.describe.layout.mesh import Mesh
from meshweave.describe.machine.cluster import Cluster
from meshweave.ir.program import Program
from meshweave.simulate import simulate
from meshweave_studies.slicing.cosma import Grid, choose_grid, cosma_program
from meshweave_studies.slicing.dtensor import Collectives, choose_strategy, resharded_program
from meshweave_studies.slicing.partitionings import (
    NAMED,
    Partitioning,
    divisors,
    local_products,
    partitioned_problem,
)
from meshweave_studies.slicing.readings import ALL_FACTORS, DTYPE, READINGS, SlicingReading

Stationary = Literal["a", "b", "c"]
STATIONARY: tuple[Stationary, ...] = get_args(Stationary)
KIBI = 1024
LAYERS: dict[str, tuple[int, int]] = {"mlp1": (48 * KIBI, 12 * KIBI), "mlp2": (12 * KIBI, 48 * KIBI)}
"""(n, k) of a layer; section 5.2.1."""
BATCHES = (1024, 2048, 4096, 8192, 16384)
"""Our reading: the paper's text does not list the batch sizes of its plots."""
CUT_BY = {"row": 0, "column": 1}


@dataclass(frozen=True)
class LayerOnMachine:
    """A layer ("mlp1" or "mlp2") on a machine ("pvc" or "h100")."""

    machine: str
    layer: str

    @property
    def name(self) -> str:
        """Machine and layer, as the rows of the paper name them: `pvc-mlp1`."""
        return f"{self.machine}-{self.layer}"


LAYERS_ON_MACHINES = {
    case.name: case
    for case in (LayerOnMachine(machine, layer) for machine in ("pvc", "h100") for layer in LAYERS)
}


@dataclass(frozen=True)
class BatchTime:
    """The time of a batch at its best replication.

    Attributes:
        copies: replication factor of A and B, and of C.
    """

    batch: int
    seconds: float
    copies: tuple[int, int]


@dataclass(frozen=True)
class Curve:
    """A partitioning with the data movement that is fastest at the largest batch."""

    partitioning: Partitioning
    stationary: Stationary
    points: tuple[BatchTime, ...]

    @property
    def label(self) -> str:
        """The name of the partitioning and its stationary matrix, as the figures have it: `column block (S-C)`."""
        return f"{self.partitioning.name} (S-{self.stationary.upper()})"


_Key = tuple[LayerOnMachine, Partitioning, int, Stationary, tuple[int, int]]


@dataclass
class SlicingStudy:
    """The paper's experiments, each simulated once.

    Attributes:
        machines: the clusters "pvc" and "h100".
        reading: which replication factors are tried.
        advance: called after every simulation.
    """

    machines: dict[str, Cluster]
    batches: tuple[int, ...] = BATCHES
    partitionings: dict[str, tuple[Partitioning, ...]] = field(default_factory=lambda: NAMED)
    advance: Callable[[], None] = lambda: None
    reading: SlicingReading = READINGS[ALL_FACTORS]
    _seconds: dict[_Key, float | None] = field(default_factory=dict)
    _curves: dict[tuple[LayerOnMachine, str], Curve] = field(default_factory=dict)
    _rivals: dict[tuple[str, LayerOnMachine, int], tuple[float, str]] = field(default_factory=dict)

    def sizes(self, case: LayerOnMachine, batch: int) -> tuple[int, int, int]:
        """Return (m, n, k) of a layer at a batch size."""
        return batch, *LAYERS[case.layer]

    def percent_of_peak(self, case: LayerOnMachine, batch: int, seconds: float) -> float:
        """Return the percent of the peak of all devices that a layer of so many seconds reaches."""
        m, n, k = self.sizes(case, batch)
        cluster = self.machines[case.machine]
        return 100 * 2 * m * n * k / cluster.num_chips / cluster.chip.peak(DTYPE) / seconds

    # --- the universal product --------------------------------------------------------------------------------

    def copies(self, case: LayerOnMachine, partitioning: Partitioning) -> Iterator[tuple[int, int]]:
        """Yield all replication factors that the reading allows: (of A and B, of C).

        The factor of C differs from that of A and B only in MLP-2, as in the figures.
        """
        num_chips = self.machines[case.machine].num_chips
        of_ab, of_c = (
            [count for count in divisors(num_chips) if self.reading.allows(cuts, count, num_chips)]
            for cuts in ((partitioning.a, partitioning.b), (partitioning.c,))
        )
        for copies_ab in of_ab:
            for copies_c in of_c if case.layer == "mlp2" and not partitioning.aligned else (copies_ab,):
                if copies_c in of_c:
                    yield copies_ab, copies_c

    def seconds(
        self,
        case: LayerOnMachine,
        partitioning: Partitioning,
        batch: int,
        stationary: Stationary,
        copies: tuple[int, int],
    ) -> float | None:
        """Return the simulated seconds of the universal product.

        Return None for what cannot be computed, and for what communicates nothing, which the paper leaves out.
        """
        key = case, partitioning, batch, stationary, copies
        if key not in self._seconds:
            cluster, sizes = self.machines[case.machine], self.sizes(case, batch)
            problem = partitioned_problem(partitioning, sizes, cluster.num_chips, copies, DTYPE)
            self._seconds[key] = None if problem is None else _simulated(problem, cluster, stationary)
            self.advance()
        return self._seconds[key]

    def best(
        self,
        case: LayerOnMachine,
        partitioning: Partitioning,
        batch: int,
        stationary: Stationary,
        copies: Sequence[tuple[int, int]] | None = None,
    ) -> BatchTime | None:
        """Return the time at the best replication, of equals that with the fewest copies; None where none can be
        computed.

        Args:
            copies: the factors to try; None for those of `SlicingStudy.copies`.
        """
        points = []
        for pair in self.copies(case, partitioning) if copies is None else copies:
            seconds = self.seconds(case, partitioning, batch, stationary, pair)
            if seconds is not None:
                points.append(BatchTime(batch, seconds, pair))
        return min(points, key=lambda point: (point.seconds, point.copies), default=None)

    def curve(self, case: LayerOnMachine, name: str) -> Curve:
        """Return a named partitioning at its best, by batch."""
        if (case, name) not in self._curves:
            last = self.batches[-1]
            candidates = [
                (point.seconds, partitioning, stationary)
                for partitioning in self.partitionings[name]
                for stationary in STATIONARY
                if (point := self.best(case, partitioning, last, stationary)) is not None
            ]
            if not candidates:
                cluster = self.machines[case.machine]
                raise UnsupportedError(
                    f"no copies of a {name} of {case.layer} exchange anything on the {cluster.num_chips} chips of "
                    f"{cluster.name}; give a machine of more"
                )
            _, partitioning, stationary = min(candidates, key=lambda candidate: candidate[0])
            points = [self.best(case, partitioning, batch, stationary) for batch in self.batches]
            self._curves[case, name] = Curve(
                partitioning, stationary, tuple(point for point in points if point)
            )
        return self._curves[case, name]

    def curves(self, case: LayerOnMachine) -> dict[str, Curve]:
        """Return all partitionings of the study at their best, by name."""
        return {name: self.curve(case, name) for name in self.partitionings}

    # --- rivals -----------------------------------------------------------------------------------------------

    def dtensor(self, case: LayerOnMachine, cut: Literal["row", "column"], batch: int) -> tuple[float, str]:
        """Return the seconds of DTensor with A and B cut by row or column, and in words what it communicates.

        There are no copies. Collectives are rings, or direct messages where those are faster.
        """
        key = f"dtensor {cut}", case, batch
        if key not in self._rivals:
            mesh = Mesh.of("tp", (self.machines[case.machine].num_chips,), ("x",))
            sizes, layout = self.sizes(case, batch), Layout(mesh, (Shard(CUT_BY[cut]),))
            strategy = choose_strategy(UniversalProblem(*sizes, layout, layout, layout, DTYPE))
            shard = {"rows": Shard(0), "columns": Shard(1), "outer": Shard(CUT_BY[cut])}[strategy]
            problem = UniversalProblem(*sizes, layout, layout, Layout(mesh, (shard,)), DTYPE)
            times: list[tuple[float, Collectives]] = [
                (self._time(case, resharded_program(problem, strategy, collectives)), collectives)
                for collectives in get_args(Collectives)
            ]
            seconds, collectives = min(times)
            self._rivals[key] = seconds, f"{strategy}, {collectives} collectives"
        return self._rivals[key]

    def cosma(self, case: LayerOnMachine, batch: int) -> tuple[float, Grid]:
        """Return the seconds of COSMA, which ends in an all-reduce (section 5.2.1), and its grid."""
        sizes = self.sizes(case, batch)
        grid = choose_grid(*sizes, self.machines[case.machine].num_chips)
        key = "cosma", case, batch
        if key not in self._rivals:
            program = cosma_program(*sizes, grid, DTYPE, all_reduce=True)
            self._rivals[key] = self._time(case, program), "x".join(map(str, grid))
        return self._rivals[key][0], grid

    def _time(self, case: LayerOnMachine, program: Program) -> float:
        self.advance()
        return simulate(program, Machine.of(self.machines[case.machine], program)).duration_s

    def fastest_dtensor(self, case: LayerOnMachine, batch: int) -> float:
        """Return the seconds of the faster of DTensor cut by row and by column."""
        return min(self.dtensor(case, cut, batch)[0] for cut in ("row", "column"))


def _simulated(problem: UniversalProblem, cluster: Cluster, stationary: Stationary) -> float | None:
    try:
        config = UniversalConfig(stationary, num_slices=local_products(problem))
        program = universal_program(problem, config)
    except LayoutError:
        return None
    run = simulate(program, Machine.of(cluster, program))
    return run.duration_s if any(link.carried_bytes for link in run.links) else None
