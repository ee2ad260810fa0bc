"""The experiments of ATP's evaluation: layers of four GPT models on its interconnects, simulated.

A case is a model on some GPUs of a machine of the catalog. Two layers are one program, with batch 4 and 2048
tokens in half precision; its time is halved. ATP scatters before attention by an all-reduce, as the paper's f1 and
f2 do. "ATP-i" is DeviceMesh(N / i, i); ATP-1 is Megatron's program. Rates are in 2^40 FLOPs per second, in which
alone table 2 comes out. The FLOPs of a layer follow the formula of Megatron-LM without recomputation, which counts
masked pairs of queries and keys; attention is priced over these as well.

Readings that the paper leaves open, each scored beside the others:

- IC4 is figure 7(a), four nodes of four GPUs ("ic4"), or one port of 200 Gb/s a GPU ("ic4-flat", section 5.3);
- attention is one fused call, or keeps its scores in memory ("unfused"): section 5.1 uses no optimized kernels;
- sums are of 2 bytes an element, as activations are, or of 4 ("four bytes"): the paper's own calibrated bandwidths
  allow twice its IC1 throughput if half-precision sums are all that is moved;
- a GPU communicates along rows and columns at once, or one collective after another ("one stream"), as NCCL does
  on one stream behind CUDA_DEVICE_MAX_CONNECTIONS=1 (section 4.2);
- Megatron-LM 2.6 hides the sums of gradients of inputs as ATP does, or runs one op after another ("serial");
- 2D products broadcast panels (SUMMA, as Colossal-AI does), or gather their operands ("collective"). They run on
  a mesh with two sides, or as 2.5D on several square ones ("25d"), as Colossal-AI does on 8 GPUs: 2 x 2 x 2;
- rates are those of the sources, or two kinds of them are fitted on M3 without chunks ("fitted").

These are rows of their own. What a framework adds is a reading of whole tables (`readings`, `framework`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from meshweave.algorithms.block import BlockConfig, BlockProblem
from meshweave.algorithms.table import algorithm
from meshweave.cost.calls import with_counts
from meshweave.describe.machine.cluster import Cluster, load_cluster
from meshweave.describe.machine.links import NetworkAxis
from meshweave.describe.machine.network import with_axes
from meshweave.describe.model.transformer import Transformer
from meshweave.describe.model.workload import Workload
from meshweave.ir.work import Compute
from meshweave.simulate import simulate
from meshweave_studies.atp.framework import (
    ATP,
    DEPTH,
    SUMMA,
    config_of,
    framework_s,
    on_one_stream,
    step_problem,
)
from meshweave_studies.atp.readings import RATES, AtpReading
from meshweave_studies.atp.readings import READINGS as NAMED
from meshweave_studies.blocks.ranking import MeshShape, block_machine
from meshweave_studies.layer_operations import ops_besides_fc_layers
from meshweave_studies.matrix.device_meshes import device_meshes

TABLE_2 = "ATP, table 2"
MODELS = {
    f"m{number}": Transformer(f"M{number}", 1, hidden, heads, heads, 128, 4 * hidden, None, False, TABLE_2)
    for number, (hidden, heads) in enumerate(((2048, 16), (4096, 32), (8192, 64), (12288, 96)), start=1)
}
LOAD = Workload(4, 2048, "float16")
LAYERS = 2
MACHINES = {
    "ic1": "atp-ic1",
    "ic2": "atp-ic2",
    "ic3": "atp-ic3",
    "ic4": "atp-ic4",
    "ic4-flat": "atp-ic4-flat",
    "ic5": "atp-ic5",
    "ic6": "atp-ic6",
}
NUM_GPUS = {"ic4": 16, "ic4-flat": 16}
"""GPUs in figures 10 and 11, 8 where nothing is said."""
PAPER_COLUMNS = {("ic1", 8): 4, ("ic4", 16): 2, ("ic4-flat", 16): 2}
"""i of the ATP-i that the paper chooses, 1 where nothing is said (sections 5.1 and 5.3)."""
CHUNKS = (1, 2, 4)
READINGS = ("", "unfused", "four_bytes", "one_stream")
FITTED = "fitted"
FITTED_FLOPS = 0.721
FITTED_LINKS = {"ic1": 0.443, "ic2": 0.928, "ic3": 1.0, "ic4": 0.209}
"""Shares of the catalog's rates of products and links with which M3 without chunks comes out as in table 3.

`validation/fit_atp.py` finds them: that of products on IC3, then that of links on each other machine. No other row
was used.
"""


@dataclass(frozen=True)
class Case:
    """A model on some GPUs of a machine.

    Attributes:
        reading: one of `READINGS`, or `FITTED`; others, such as those of figure 10's rows, change nothing here.
    """

    machine: str
    model: str
    num_gpus: int
    reading: str = ""

    @classmethod
    def of(cls, subject: str, num_gpus: int | None = None, reading: str = "") -> Case:
        """Return the case of a row's subject, such as `ic4-flat-m3`."""
        machine, _, model = subject.rpartition("-")
        return cls(machine, model, num_gpus or NUM_GPUS.get(machine, 8), reading)


@cache
def cluster_of(machine: str, num_gpus: int) -> Cluster:
    """Return a machine of the paper with so many GPUs."""
    return load_cluster(f"{MACHINES[machine]}:{num_gpus}")


def with_links(cluster: Cluster, share: float) -> Cluster:
    """Return a machine all of whose links have a share of their rates."""

    def changed(axis: NetworkAxis) -> NetworkAxis:
        constants = tuple(
            (kind, replace(known, bytes_per_s=known.bytes_per_s * share)) for kind, known in axis.constants
        )
        return replace(axis, link_bytes_per_s=axis.link_bytes_per_s * share, constants=constants)

    return replace(cluster, network=with_axes(cluster.network, changed))


def with_products(cluster: Cluster, share: float) -> Cluster:
    """Return a machine whose products and calls run at a share of their rates."""
    chip = cluster.chip
    return replace(cluster, chip=chip.with_flops_per_s(chip.flops_per_s(LOAD.dtype) * share))


def with_unfused_attention(cluster: Cluster, model: Transformer) -> Cluster:
    """Return a machine whose calls of attention take as long as its operations one by one.

    Each is a roofline of its FLOPs and bytes as `layer_operations` counts them, with scores and dropout.
    """
    chip, seconds = cluster.chip, 0.0
    for op in ops_besides_fc_layers(model, LOAD):
        if op.name in _OF_ATTENTION:
            seconds += max(op.flops / chip.flops_per_s(LOAD.dtype), op.bytes / chip.memory_bytes_per_s)
    attention = model.layer.attentions[0]
    shape = (LOAD.batch, attention.heads, LOAD.sequence, LOAD.sequence, attention.width)
    work = Compute("call", 0, call="attention", shape=shape)
    flops = sum(with_counts(replace(work, part=part)).flops for part in ("", "input_grad"))
    return replace(cluster, chip=replace(chip, call_flops_per_s=(("attention", flops / seconds),)))


_OF_ATTENTION = ("softmax", "dropout of scores", "Q K^T", "P V", "dQ", "dK", "dP", "dV")


def flops_per_layer(model: Transformer) -> int:
    """Return 72 b s h^2 (1 + s / 6h): three quarters of the formula of Narayanan et al. (SC '21)."""
    b, s, h = LOAD.batch, LOAD.sequence, model.hidden
    return 72 * b * s * h * h + 12 * b * s * s * h


class AtpStudy:
    """Simulated times of cases; each is computed once."""

    def __init__(self, layers: int = LAYERS, reading: AtpReading = NAMED[RATES]) -> None:
        self.layers, self.reading = layers, reading
        self._seconds: dict[tuple[Case, str, MeshShape, int], float] = {}

    def seconds(self, case: Case, mesh: MeshShape, chunks: int = 1, strategy: str = ATP) -> float:
        """Return the simulated seconds of a layer of a case on a mesh."""
        key = (case, strategy, mesh, chunks)
        if key not in self._seconds and self.reading.framework:
            links = with_links(self.cluster(case), 2 / self.reading.sum_bytes)
            step = step_problem(links, MODELS[case.model], LOAD, self.reading.host)
            self._seconds[key] = framework_s(step, strategy, mesh, chunks, self.reading.overlaps)
        elif key not in self._seconds:
            problem, config = self.problem(case, mesh), config_of(strategy, mesh, chunks)
            machine = block_machine(self.cluster(case), mesh)
            program = algorithm(strategy).program(problem, config)
            if case.reading == "one_stream":
                program = on_one_stream(program)
            self._seconds[key] = simulate(program, machine).duration_s / self.layers
        return self._seconds[key]

    def serial_seconds(self, case: Case) -> float:
        """Return the seconds of Megatron's layer with one op after another."""
        mesh = (case.num_gpus, 1)
        machine = block_machine(self.cluster(case), mesh)
        parts = algorithm("megatron").estimate(self.problem(case, mesh), BlockConfig(), machine)
        return (parts.compute_s + parts.copy_s + parts.communication_s) / self.layers

    def cluster(self, case: Case) -> Cluster:
        """Return the machine of a case in its reading."""
        cluster = cluster_of(case.machine, case.num_gpus)
        if case.reading == "four_bytes":
            return with_links(cluster, 0.5)
        if case.reading == FITTED:
            return with_links(with_products(cluster, FITTED_FLOPS), FITTED_LINKS[case.machine])
        if case.reading == "unfused":
            return with_unfused_attention(cluster, MODELS[case.model])
        return cluster

    def problem(self, case: Case, mesh: MeshShape) -> BlockProblem:
        """Return the layers of a case on a mesh."""
        return BlockProblem.of(MODELS[case.model], LOAD, mesh, layers=self.layers, counts_masked=True)

    def tflops(self, case: Case, seconds: float) -> float:
        """Return what a GPU reaches in a layer of so many seconds, in 2^40 FLOPs per second."""
        return flops_per_layer(MODELS[case.model]) / case.num_gpus / seconds / 2**40

    def meshes(self, case: Case) -> tuple[MeshShape, ...]:
        """Return the meshes of figure 11: all but the one with a single row."""
        return tuple(mesh for mesh in device_meshes(case.num_gpus) if mesh[0] > 1 or case.num_gpus == 1)

    def best_mesh(self, case: Case) -> MeshShape:
        """Return ATP's fastest mesh, without chunks; of equals the one with the fewest columns."""
        return min(self.meshes(case), key=lambda mesh: self.seconds(case, mesh))

    def chunked_seconds(self, case: Case, mesh: MeshShape) -> float:
        """Return the seconds of a layer in ATP's best number of chunks on a mesh."""
        return min(self.seconds(case, mesh, chunks) for chunks in CHUNKS)

    def rival_2d_seconds(self, case: Case, strategy: str = SUMMA) -> float:
        """Return the seconds of 2D products on their best mesh of two sides, of 2.5D products of three."""
        meshes: Sequence[MeshShape] = [mesh for mesh in device_meshes(case.num_gpus) if min(mesh) > 1]
        if strategy == DEPTH:
            meshes = depth_meshes(case.num_gpus)
        return min(self.seconds(case, mesh, 1, strategy) for mesh in meshes)


def depth_meshes(num_gpus: int) -> list[MeshShape]:
    """Return the meshes (d, q, q) with 1 < d <= q of so many GPUs (Wang et al., Tesseract, section 3.1)."""
    sides = range(2, math.isqrt(num_gpus) + 1)
    return [
        (num_gpus // side**2, side, side)
        for side in sides
        if num_gpus % side**2 == 0 and 1 < num_gpus // side**2 <= side
    ]


def paper_mesh(case: Case) -> MeshShape:
    """Return the mesh that the paper's ATP chooses for a case."""
    columns = PAPER_COLUMNS.get((case.machine, case.num_gpus), 1)
    return case.num_gpus // columns, columns


SIMULATED_SIZES = (2, 4, 8, 16, 32)
"""Numbers of devices at which figure 12 is simulated as well."""


def simulated_communication_s(machine: str, size: int) -> dict[int, float]:
    """Return the seconds that rank 0 communicates in one layer of M4, one chunk, by i of ATP-i (figure 12)."""
    out = {}
    for mesh in device_meshes(size):
        placed = block_machine(cluster_of(machine, size), mesh)
        program = algorithm(ATP).program(BlockProblem.of(MODELS["m4"], LOAD, mesh), config_of(ATP, mesh, 1))
        parts = simulate(program, placed).parts(0)
        out[mesh[1]] = sum(parts[name] for name in ("launch_s", "sync_s", "transfer_s"))
    return out
