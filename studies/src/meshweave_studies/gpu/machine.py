"""Programs on clusters whose description has a GPU in detail (`chip.gpu`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshweave.base.errors import ProgramError, UnsupportedError
from meshweave.base.limits import GPU_STEPS
from meshweave.base.units import to_ps
from meshweave.cost.machine import Machine
from meshweave.describe.machine.gpu import load_gpu
from meshweave.describe.machine.network import FullMeshNetwork, RingNetwork
from meshweave.ir.program import Program
from meshweave_studies.gpu.lower import lower
from meshweave_studies.gpu.run import Arbiter, GpuRun, ProgramFault, run

_FAST = "`meshweave simulate --fast` runs it by the rates of the cluster"


def simulate_in_detail(program: Program, machine: Machine, arbiter: Arbiter | None = None) -> GpuRun:
    """Return the run of a program on one GPU, which stands for all GPUs of a ring or a full mesh.

    Raises:
        UnsupportedError: the program or the cluster is not what GPUs in detail run; the error says what does.
        ProgramError: the program waits for what never happens.
    """
    cluster = machine.cluster
    _require_alike(program, machine)
    gpu = load_gpu(cluster.chip.gpu)
    axis = cluster.network.axis(0, 1, (cluster.num_chips,))
    try:
        kernels = lower(program, gpu)
    except UnsupportedError as error:
        raise UnsupportedError(f"{error}; {_FAST}") from None
    if isinstance(cluster.network, RingNetwork) and len(kernels.peers) > 1:
        raise UnsupportedError(
            f"{gpu.name} in a ring has a link to one neighbour, and program {program.name} sends to "
            f"{len(kernels.peers)} ranks; give a cluster with a link between any two, or {_FAST}"
        )
    if not kernels.kernels:
        raise UnsupportedError(f"program {program.name} has nothing that a GPU in detail runs; {_FAST}")
    try:
        return run(
            kernels,
            gpu,
            link_bytes_per_s=int(axis.link_bytes_per_s),
            link_ps=max(to_ps(axis.link_latency_s), 1),
            arbiter=arbiter,
        )
    except ProgramFault as fault:
        raise ProgramError(f"on {gpu.name}: {fault.args[0]}") from None
    except ValueError as error:
        raise UnsupportedError(f"on {gpu.name}: {str(error).removeprefix('gpu: ')}; {_FAST}") from None


def _require_alike(program: Program, machine: Machine) -> None:
    """Raise UnsupportedError unless the program's ranks are alike and are the whole cluster, in its order."""
    cluster = machine.cluster
    name, network = cluster.chip.gpu, cluster.network
    if not name:
        raise UnsupportedError(
            f"the chip of {cluster.name} has no GPU in detail (chip.gpu), as that of t3-8 has; `meshweave "
            "simulate` takes it by its rates"
        )
    has_links = isinstance(network, FullMeshNetwork) and 1 in (
        network.num_packages,
        network.chips_per_package,
    )
    if not isinstance(network, RingNetwork) and not has_links:
        raise UnsupportedError(
            f"{name} in detail stands in a ring or has a link to every other, and {cluster.name} is neither; "
            f"{_FAST}"
        )
    size = cluster.num_chips
    if any([extent for extent in mesh.shape if extent > 1] != [size] for mesh in program.meshes if size > 1):
        raise UnsupportedError(
            f"{name} in detail runs programs whose meshes are all {size} chips, in one axis; {_FAST}"
        )
    if not program.has_steps_within(GPU_STEPS):
        raise UnsupportedError(f"the program {GPU_STEPS.refusal()} for {name} in detail; {_FAST}")
    first = program.ranks[0]
    expected = list(_outline(program, first))
    for rank in program.ranks[1:]:
        if list(_outline(program, rank)) != expected:
            raise UnsupportedError(
                f"{name} in detail runs programs whose ranks all do the same; rank {rank} has other ops or sizes "
                f"than rank {first}; {_FAST}"
            )


def _outline(program: Program, rank: int) -> Iterator[tuple[Any, ...]]:
    """Yield kind, lane and shapes of each op of a rank."""
    for bound in program.expanded.ops_on_rank(rank):
        op = bound.op
        yield op.kind, op.lane, tuple((mode, view.buffer, view.shape) for mode, view in op.accesses())
