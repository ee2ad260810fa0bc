"""Compile programs for TPUs that need not be there, and say what their compiler made of them.

An `Emission` says in which form a program is given to XLA, and with which options of its compiler. The compiled
module is read by `scheduled_module`; `ScheduleTime` follows its schedule on one device:

- a product, or another fusion, takes the cycles that the compiler expects of it, at the chip's clock;
- a synchronous collective takes what our own model prices it at (`cost.price`), once its links are free;
- an asynchronous one begins at its start, once its links are free, and its done waits until it has ended.
  Collectives over the same mesh axis follow each other; permutes in opposite directions of a ring do not;
- in a fused one nothing else is different: that its steps slow the products beside it stands in their cycles.

Left out are launches, copies within the chip's memory that the compiler runs beside other ops (copy-start,
slice-start) and instructions without a number of cycles.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from meshweave.base.errors import UnsupportedError, require_known
from meshweave.base.units import to_s
from meshweave.cost.machine import Machine
from meshweave.cost.price import price
from meshweave.describe.machine.cluster import Cluster, load_cluster
from meshweave.describe.machine.kernels_file import load_kernels
from meshweave.estimate.uncontended import estimate
from meshweave.execute.jax.devices import DeviceMesh
from meshweave.execute.jax.source import jax_source
from meshweave.ir.program import Program
from meshweave.ir.work import Transfer
from meshweave.lower import lower_rings
from meshweave_studies.tpu.interleave import interleave
from meshweave_studies.tpu.scheduled_module import ModuleCollective, ScheduledModule
from meshweave_studies.tpu.split_products import split_products
from meshweave_studies.tpu.targets import TpuTarget, require_tpu_compiler, tpu_devices

Axes = tuple[tuple[str, int], ...]

ASYNC_FUSION = dict.fromkeys(
    (
        "xla_tpu_enable_async_collective_fusion",
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather",
        "xla_tpu_enable_async_collective_fusion_fuse_reduce_scatter",
        "xla_tpu_enable_async_collective_fusion_multiple_steps",
        "xla_tpu_overlap_compute_collective_tc",
        "xla_enable_async_all_gather",
    ),
    "true",
)
"""Options of the TPU compiler with which steps of collectives run inside the fusions of products."""


@dataclass(frozen=True)
class Emission:
    """A form in which a program is given to XLA.

    Attributes:
        ring_directions: 0 for collectives as they are, 1 or 2 for rings of permutes.
        num_parts: the parts into which each product is cut.
        along_sum: whether the parts are terms of a sum, rather than parts of the result.
        in_order: whether each transfer waits for the product before it, in the order of `tpu.interleave`.
        most_beside: the most transfers beside one product, where it is in order; None for one of each lane.
        options: of the compiler.
    """

    name: str
    ring_directions: int = 0
    num_parts: int = 1
    along_sum: bool = False
    in_order: bool = False
    most_beside: int | None = None
    options: Mapping[str, str] = field(default_factory=dict)

    def program(self, program: Program) -> Program:
        """Return the program that is given to XLA.

        Raises:
            UnsupportedError: it is to be in order, and ranks run different ops.
        """
        if self.ring_directions:
            program = lower_rings(program, 2 if self.ring_directions == 2 else 1)
        program = split_products(program, self.num_parts, along_sum=self.along_sum)
        return interleave(program, self.most_beside) if self.in_order else program


EMISSIONS = {
    emission.name: emission
    for emission in (
        Emission("collectives"),
        Emission("fused-gathers", options=ASYNC_FUSION),
        Emission("fused", num_parts=2, along_sum=True, in_order=True, most_beside=1, options=ASYNC_FUSION),
        Emission("rings", 1, num_parts=2),
        Emission("ordered-rings", 1, num_parts=3, in_order=True),
    )
}
"""`collectives`: as they are, with the compiler's defaults. `fused-gathers`: the same with asynchronous collective
fusion, for programs that have a product for each gather. `fused`: with that, too; a product takes one collective
into its fusion, so each is cut in two, and the order says which. `rings`: permutes,
beside products in two parts, in the order that the compiler's own model of latencies gives. `ordered-rings`:
products in three parts, each with the next step of the ring along either axis beside it.
"""


def emission_named(name: str) -> Emission:
    """Return an emission by its name. Raises UnsupportedError for an unknown one."""
    require_known(name, EMISSIONS, "there is no emission", UnsupportedError, "give one of")
    return EMISSIONS[name]


@dataclass(frozen=True)
class ScheduleTime:
    """Seconds of a scheduled module on one device, as the module docstring counts them.

    Attributes:
        total_s: from the first instruction to the last.
        product_s: products.
        other_s: other fusions.
    """

    total_s: float
    product_s: float
    other_s: float

    @property
    def exposed_s(self) -> float:
        """Return the seconds in which the device waits for a collective."""
        return self.total_s - self.product_s - self.other_s


def schedule_time(module: ScheduledModule, machine: Machine, cycles_per_s: float) -> ScheduleTime:
    """Return the time of a module whose partitions are the ranks of the machine's first mesh, row by row."""
    mesh = machine.meshes[0]
    axes = tuple(zip(mesh.axes, mesh.shape, strict=True))
    now = products = others = 0.0
    free: dict[tuple[str, int], float] = {}
    ends: dict[int, float] = {}
    for event in module.events:
        if event.what in ("product", "other"):
            seconds = event.cycles / cycles_per_s
            now += seconds
            products += seconds * (event.what == "product")
            others += seconds * (event.what == "other")
        elif event.what == "done":
            now = max(now, ends[event.collective])
        else:
            collective = module.collectives[event.collective]
            links = _links(collective, axes)
            begin = max(now, *(free.get(link, 0.0) for link in links))
            ends[event.collective] = begin + _collective_s(collective, machine, axes)
            free.update(dict.fromkeys(links, ends[event.collective]))
            if event.what == "collective":
                now = ends[event.collective]
    return ScheduleTime(now, products, others)


def _links(collective: ModuleCollective, axes: Axes) -> tuple[tuple[str, int], ...]:
    """Return the (axis, direction) that a collective uses: both directions unless it is a permute."""
    axis = collective.axis(axes)
    if collective.kind != "permute" or len(collective.group) != 2:
        return (axis, 1), (axis, -1)
    size = dict(axes).get(axis, 2)
    stride = 1
    for name, extent in reversed(axes):
        if name == axis:
            break
        stride *= extent
    sender, receiver = collective.group
    distance = (receiver // stride - sender // stride) % size
    return ((axis, 1 if distance <= size // 2 else -1),)


def _collective_s(collective: ModuleCollective, machine: Machine, axes: Axes) -> float:
    axis, mesh = collective.axis(axes), machine.meshes[0].name
    count = dict(axes).get(axis, 0) if collective.kind == "permute" else len(collective.group)
    over = f"{mesh}.{axis}" if axis else mesh
    if not axis and count != machine.meshes[0].num_ranks and collective.kind != "permute":
        raise UnsupportedError(f"collective {collective.name} of the module runs over no axis of mesh {mesh}")
    work = Transfer(collective.kind, over, count or machine.meshes[0].num_ranks, collective.part_bytes)
    return to_s(price(work, machine).total_ps)


@dataclass(frozen=True)
class CompiledProgram:
    """A program that was compiled for a TPU.

    Attributes:
        program: as it was given to XLA.
        text: the scheduled module.
        compile_s: processor seconds of the compiler.
        memory: bytes of arguments, results and temporaries on one device, by name.
    """

    program: Program
    emission: Emission
    target: TpuTarget
    cluster: Cluster
    text: str
    compile_s: float
    memory: Mapping[str, int]

    @cached_property
    def module(self) -> ScheduledModule:
        """Return the scheduled module, parsed from `text`."""
        return ScheduledModule(self.text)

    @cached_property
    def machine(self) -> Machine:
        """Return the machine by which transfers are priced."""
        return Machine.of(self.cluster, self.program)

    @property
    def axes(self) -> Axes:
        """Return (name, size) of each mesh axis; partitions are numbered along them, row by row."""
        mesh = self.machine.meshes[0]
        return tuple(zip(mesh.axes, mesh.shape, strict=True))

    @property
    def peak_bytes(self) -> int:
        """Return the bytes of arguments, results and temporaries together."""
        return sum(self.memory.values())

    def time(self) -> ScheduleTime:
        """Return the time that the module is expected to take."""
        return schedule_time(self.module, self.machine, self.target.cycles_per_s)

    def predicted_s(self) -> float:
        """Return the seconds that our own model predicts of the same program."""
        return estimate(self.program, self.machine).total_s


def target_cluster(target: TpuTarget, num_chips: int) -> Cluster:
    """Return the cluster of a target: its links, and the kernels that were fitted to the same compiler's cycles.

    Where a target is one core of a chip that has two, the chip of the cluster is that core.
    """
    cluster = load_cluster(f"{target.cluster}:{num_chips}")
    if not target.kernels:
        return cluster
    peak = target.peak_flops_per_s
    chip = replace(
        cluster.chip,
        name=target.name,
        peak_flops_per_s=(("bfloat16", peak),),
        effective_flops_per_s=peak,
        memory_bytes_per_s=target.memory_bytes_per_s,
        kernels=load_kernels(target.kernels),
    )
    return replace(cluster, chip=chip)


def compile_program(
    program: Program, target: TpuTarget, emission: Emission, cluster: Cluster | None = None
) -> CompiledProgram:
    """Compile a program for a target ahead of time.

    Args:
        cluster: prices the transfers of the module and the program itself; by default `target_cluster`.

    Raises:
        UnsupportedError: jax or libtpu is missing, jax has no form for something in the program, or the target has
            not as many chips as the program has ranks.
    """
    require_tpu_compiler()
    given = emission.program(program.expanded)
    devices, shape = tpu_devices(target), DeviceMesh(given).mesh
    if len(devices) != shape.num_ranks:
        raise UnsupportedError(
            f"{target.topology} has {len(devices)} chips, and program {program.name} {shape.num_ranks} ranks; "
            f"plan for {len(devices)} chips"
        )
    import numpy as np
    from jax.sharding import Mesh

    mesh = Mesh(np.asarray(devices).reshape(shape.shape), shape.axes)
    source = jax_source(given, shape.axes, in_order=emission.in_order)
    begin = time.process_time()
    compiled = _lowered(source, given, mesh).compile(compiler_options=dict(emission.options))
    seconds = time.process_time() - begin
    stats = compiled.memory_analysis()
    memory = {
        "arguments": int(stats.argument_size_in_bytes),
        "results": int(stats.output_size_in_bytes - stats.alias_size_in_bytes),
        "temporaries": int(stats.temp_size_in_bytes),
    }
    priced = cluster or target_cluster(target, len(devices))
    return CompiledProgram(given, emission, target, priced, compiled.as_text(), seconds, memory)


def _lowered(source: str, program: Program, mesh: Any) -> Any:
    """Return the function of a source, lowered for whole tensors that lie as the program's inputs do."""
    import jax.numpy as jnp
    from jax import ShapeDtypeStruct
    from jax.sharding import NamedSharding, PartitionSpec

    from meshweave.execute.jax.run import load_source

    inputs = {buffer.tensor: buffer for buffer in program.buffers if buffer.kind == "input"}
    arguments = []
    for name, buffer in inputs.items():
        tensor = program.tensor_of[str(name)]
        spec = PartitionSpec(*_spec(buffer.layout, tensor.shape))
        dtype = jnp.dtype(tensor.dtype)
        arguments.append(ShapeDtypeStruct(tensor.shape, dtype, sharding=NamedSharding(mesh, spec)))
    function: Any = load_source(source, mesh)
    return function.lower(*arguments)


def _spec(layout: Any, shape: tuple[int, ...]) -> list[tuple[str, ...] | None]:
    """Return the mesh axes of each dim; of a tensor whose shards are uneven, none."""
    from meshweave.describe.layout import Shard

    axes: list[tuple[str, ...]] = [() for _ in shape]
    for axis, placement in zip(layout.mesh.axes, layout.placements, strict=True):
        if isinstance(placement, Shard) and layout.has_equal_shards(shape):
            axes[placement.dim] += (axis,)
    return [names or None for names in axes]
