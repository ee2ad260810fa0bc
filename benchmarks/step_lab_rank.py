"""What one rank of `step_lab.py` does: constants of the lab, then steps of every configuration."""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from block_lab_functions import FusedFunctions
from block_lab_rank import PRODUCT

from meshweave.algorithms.step import Parallelism, StepProblem, step_of
from meshweave.describe.layout import Layout, Replicate, Shard
from meshweave.describe.layout.mesh import Mesh
from meshweave.describe.machine.cluster import Cluster
from meshweave.describe.machine.links import CommConstants, NetworkAxis
from meshweave.describe.machine.network import HostsNetwork
from meshweave.describe.model import Transformer
from meshweave.execute.ranks.job import RankContext
from meshweave.execute.torch.bind import bind
from meshweave.execute.torch.context import TorchContext
from meshweave.execute.torch.measure import start_together, without_garbage_collection
from meshweave.ir.program import FULL, Buffer, Lane, On, Program, Repeat, Statement, Tensor, View
from meshweave.ir.program.ops import AllGather, AllReduce, Matmul, Op, Permute, Zero
from meshweave.lower import lower_rings
from meshweave_lab.description import LabDescription
from meshweave_lab.description_file import load_lab
from meshweave_lab.pace import paced
from meshweave_lab.step_run import Adam, StepRun

ADAM = Adam(lr=0.01, eps=0.1)
"""Gradients that are nearly zero do not decide by their rounding which way a weight moves."""


AXES = {"intra": "col", "nic": "row"}
"""Along which axis of a mesh (hosts, ranks of a host) messages take links inside hosts, and those between them."""
SMALL_BYTES, LARGE_BYTES = 4096, {"intra": 1 << 20, "nic": 1 << 18}
CASES = tuple(
    (kind, link, num_bytes, loops)
    for link in AXES
    for kind, num_bytes, loops in (
        ("all_gather", SMALL_BYTES, 20),
        ("all_gather", LARGE_BYTES[link], 10 if link == "intra" else 2),
        ("all_reduce", SMALL_BYTES, 20),
        ("permute", SMALL_BYTES, 20),
    )
)
"""(kind of op, link, bytes of a part, how many in a row) of a calibration."""
SMALL_PRODUCT, NUM_SMALL = (64, 64, 128), 50
"""Rows, terms and columns of small products, and how many of them show what passes between two."""
PRODUCTS = 2
"""How many products run beside each of them: for about as long as it takes."""


# --- constants ----------------------------------------------------------------------------------------------


def products_program(shape: tuple[int, int]) -> Program:
    """Return `NUM_SMALL` small products on every rank, one after another."""
    mesh = Mesh.of("tp", shape, ("row", "col"))
    m, k, n = SMALL_PRODUCT
    sizes = {"a": (m, k), "b": (k, n), "c": (m, n)}
    layout = Layout(mesh, (Replicate(), Replicate()))
    buffers = [
        Buffer(name, "input" if name != "c" else "output", "tp", "float32", name.upper(), layout)
        for name in sizes
    ]
    tensors = tuple(Tensor(name.upper(), shape, "float32") for name, shape in sizes.items())
    views = {name: View(name, (FULL, FULL)) for name in sizes}
    product = Matmul(out=views["c"], a=views["a"], b=views["b"], lane="compute")
    body = (On("tp", (Repeat("j", NUM_SMALL, (product,)),)),)
    return Program("products", (mesh,), tensors, tuple(buffers), (Lane("compute"),), body)


def axis_program(
    kind: str, shape: tuple[int, int], axis: str, num_bytes: int, loops: int, products: int
) -> Program:
    """Return ops along one axis of a mesh (hosts, ranks of a host), one after another, with products beside them.

    Args:
        kind: "all_gather" (as rings), "all_reduce" (the transport's) or "permute".
        axis: "row", between hosts, or "col", inside them; all groups of the axis at once.
        num_bytes: of a part of an all-gather, of what is summed, or of a message.
        loops: how many ops there are in lane "net".
        products: how many products there are in lane "compute".
    """
    mesh, count = Mesh.of("tp", shape, ("row", "col")), num_bytes // 4
    size = mesh.size(axis)
    everywhere = Layout(mesh, (Replicate(), Replicate()))
    whole = count * size if kind == "all_gather" else count
    tensors = [Tensor("X", (whole,), "float32"), Tensor("Y", (whole,), "float32")]
    over, x, y = f"tp.{axis}", View("x", (FULL,)), View("y", (FULL,))
    split = Layout(mesh, tuple(Shard(0) if name == axis else Replicate() for name in mesh.axes))
    read = split if kind == "all_gather" else everywhere
    op: Op
    if kind == "all_gather":
        op = AllGather(out=y, src=x, dim=0, over=over, lane="net")
    elif kind == "all_reduce":
        op = AllReduce(out=y, src=x, over=over, lane="net")
    else:
        op = Permute(out=y, src=x, over=over, shift=1, lane="net")
    buffers = [
        Buffer("x", "input", "tp", "float32", "X", read),
        Buffer("y", "output", "tp", "float32", "Y", everywhere),
    ]
    m, k, n = PRODUCT
    views = {name: View(name, (FULL, FULL)) for name in "abc"}
    buffers += [
        Buffer(name, "scratch", "tp", "float32", shape=sizes)
        for name, sizes in (("a", (m, k)), ("b", (k, n)), ("c", (m, n)))
    ]
    statements: list[Statement] = [Repeat("i", loops, (op,))]
    statements += [Zero(out=views[name], lane="compute") for name in "ab"]
    product = Matmul(out=views["c"], a=views["a"], b=views["b"], lane="compute")
    statements.append(Repeat("j", products, (product,)))
    body = (On("tp", tuple(statements)),)
    program = Program(kind, (mesh,), tuple(tensors), tuple(buffers), (Lane("net"), Lane("compute")), body)
    return lower_rings(program)


def measure_axes(
    context: RankContext, lab: LabDescription, repeat: int, deadline_s: float
) -> dict[str, float]:
    """Return for each "kind link bytes" the median seconds of one op in a row, equal on all ranks."""
    shared = TorchContext(liveness=context.liveness, deadline_s=deadline_s)
    network = lab.cluster().network
    assert isinstance(network, HostsNetwork) and lab.flops_per_s is not None
    shape = network.num_hosts, network.chips_per_host
    medians = {"between products": _between_products(context, lab, shape, repeat, shared)}
    for kind, link, num_bytes, loops in CASES:
        program = axis_program(kind, shape, AXES[link], num_bytes, loops, PRODUCTS)
        bound = bind(program, context.rank, {"x": torch.ones(num_bytes // 4)}, context=shared, trace=True)
        times = []
        with without_garbage_collection(), paced(lab.flops_per_s, lab.call_flops_per_s):
            for repetition in range(repeat + 1):
                start_together(shared)
                trace = bound.run()
                assert trace is not None
                spans = [span for span in trace.spans if span.lane != "compute"]
                took_ps = max(span.end_ps for span in spans) - min(span.start_ps for span in spans)
                if repetition:
                    times.append(took_ps / 1e12 / loops)
        slowest = torch.tensor(times, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        medians[f"{kind} {link} {num_bytes}"] = statistics.median(slowest.tolist())
    shared.close()
    return medians


def _between_products(
    context: RankContext, lab: LabDescription, shape: tuple[int, int], repeat: int, shared: TorchContext
) -> float:
    """Return the seconds that pass between two products, while all ranks multiply; equal on all ranks."""
    m, k, n = SMALL_PRODUCT
    given = {"a": torch.ones(m, k), "b": torch.ones(k, n)}
    bound = bind(products_program(shape), context.rank, given, context=shared)
    assert lab.flops_per_s is not None
    times = []
    with without_garbage_collection(), paced(lab.flops_per_s, lab.call_flops_per_s):
        for repetition in range(repeat + 1):
            start_ns, _ = start_together(shared)
            bound.run()
            if repetition:
                times.append(
                    (time.monotonic() - start_ns / 1e9) / NUM_SMALL - 2 * m * k * n / lab.flops_per_s
                )
    mean = torch.tensor([statistics.median(times)], dtype=torch.float64)
    dist.all_reduce(mean)
    return max(float(mean) / context.num_ranks, 0.0)


def constants_of(medians: Mapping[str, float], network: HostsNetwork) -> dict[str, dict[str, float]]:
    """Return the constants of links inside hosts and between them, as `calibrated` takes them."""
    sizes = {"intra": network.chips_per_host, "nic": network.num_hosts}
    sharing = {"intra": 1, "nic": network.chips_per_host}  # all ranks of a host send over its NIC at once
    constants = {}
    for link, size in sizes.items():
        large, steps, users = LARGE_BYTES[link], size - 1, sharing[link]
        small_s, large_s, reduce_s, message_s = (
            medians[f"{kind} {link} {num_bytes}"]
            for kind, num_bytes in (
                ("all_gather", SMALL_BYTES),
                ("all_gather", large),
                ("all_reduce", SMALL_BYTES),
                ("permute", SMALL_BYTES),
            )
        )
        nominal = getattr(network, link).link_bytes_per_s
        grown_s = max(large_s - small_s, 1e-9)
        rate = min(users * steps * (large - SMALL_BYTES) / grown_s, nominal)
        part_s = users * SMALL_BYTES / rate
        constants[link] = {
            "bytes_per_s": rate,
            "step_s": max(small_s / steps - part_s, 0.0),
            "reduce_step_s": max(reduce_s / (2 * steps) - part_s / size, 0.0),
            "message_s": max(message_s - part_s, 0.0),
        }
    return {**constants, "chip": {"launch_s": medians["between products"]}}


def calibrated(cluster: Cluster, constants: Mapping[str, Mapping[str, float]]) -> Cluster:
    """Return a lab's cluster of hosts with measured links; rings go in one direction, as those of gloo do.

    Args:
        constants: for "intra" and "nic": bytes_per_s, step_s of a step of a ring, reduce_step_s of a step of an
            all-reduce, and message_s, the latency of a message. For "chip": launch_s, between two products.
    """
    network = cluster.network
    assert isinstance(network, HostsNetwork)

    def measured(axis: NetworkAxis, of: Mapping[str, float]) -> NetworkAxis:
        rate = of["bytes_per_s"]
        kinds = {"all_reduce": of["reduce_step_s"], "send_recv": of["message_s"]}
        return replace(
            axis,
            link_bytes_per_s=rate,
            link_latency_s=of["step_s"],
            num_directions=1,
            constants=tuple((kind, CommConstants(rate, seconds, 0.0)) for kind, seconds in kinds.items()),
        )

    links = {name: measured(getattr(network, name), constants[name]) for name in ("intra", "nic")}
    chip = replace(cluster.chip, launch_s=constants["chip"]["launch_s"])
    return replace(cluster, chip=chip, network=replace(network, **links))


# --- steps --------------------------------------------------------------------------------------------------


def measure_steps(context: RankContext, payload: Mapping[str, Any]) -> dict[str, Any]:
    """Calibrate the lab, unless it is, and run steps of every configuration: one that is checked, and timed ones.

    `payload`: lab, medians and constants (of an earlier calibration, or empty), model (fields of `Transformer`),
    batch, seq, cases (fields of `Parallelism`), repeat, deadline_s, until (the CLOCK_MONOTONIC after which no
    further case begins), and arrays: a file of weights ("before NAME"), of those expected after a step ("after
    NAME"), of `tokens` and of `targets`. Returns medians and constants, and as rows for each configuration the
    seconds of each step from the common start to the end of this rank, its share of the loss, the largest
    difference of a weight after one step, overruns [count, seconds], and late_s.
    """
    torch.set_num_threads(1)
    lab = load_lab(payload["lab"])
    assert lab.flops_per_s is not None
    arrays = np.load(payload["arrays"])
    before, after = (
        {name.removeprefix(word): arrays[name] for name in arrays.files if name.startswith(word)}
        for word in ("before ", "after ")
    )
    network = lab.cluster().network
    assert isinstance(network, HostsNetwork)
    medians, constants = payload["medians"], payload["constants"]
    if not constants:
        medians = measure_axes(context, lab, 2, payload["deadline_s"])
        constants = constants_of(medians, network)
    if context.rank == 0:
        print(f"calibrated: {constants}", file=sys.stderr, flush=True)
    cluster = calibrated(lab.cluster(), constants)
    problem = StepProblem(
        Transformer(**payload["model"]),
        cluster,
        payload["batch"],
        payload["seq"],
        "float32",
        overlap="layers",
    )
    world = TorchContext(liveness=context.liveness, deadline_s=payload["deadline_s"])
    out = []
    for number, fields in enumerate(payload["cases"]):
        goes_on = torch.tensor([int(time.monotonic() < payload["until"])])
        dist.broadcast(goes_on, 0)
        if not goes_on:
            break
        step = step_of(problem, parallelism_of(fields))
        began = time.monotonic()
        run = StepRun(
            step, before, optimizer=ADAM, functions=lambda block: FusedFunctions(block).table(),
            liveness=context.liveness, deadline_s=payload["deadline_s"],
        )  # fmt: skip
        gc.collect()
        bound_s = time.monotonic() - began
        row: dict[str, Any] = {"times": [], "late_s": 0.0, "overruns": [0, 0.0]}
        loss = run.run(arrays["tokens"], arrays["targets"])
        row |= {"loss": loss, "difference": run.worst_difference(after)}
        with without_garbage_collection(), paced(lab.flops_per_s, lab.call_flops_per_s) as pacer:
            for _ in range(payload["repeat"]):
                start_ns, late_ns = start_together(world)
                run.run(arrays["tokens"], arrays["targets"])
                row["times"].append(time.monotonic() - start_ns / 1e9)
                row["late_s"] = max(row["late_s"], late_ns / 1e9)
            report = pacer.report()
            row["overruns"] = [report.num_overruns, report.overrun_s]
        run.close()
        out.append(row)
        if context.rank == 0:
            times = ", ".join(f"{each:.3f}" for each in row["times"])
            done = f"{number + 1} of {len(payload['cases'])}"
            words = (
                f"bound in {bound_s:.1f} s, overruns {row['overruns']}, difference {row['difference']:.1e}"
            )
            print(f"{done}: {times} s, {words}", file=sys.stderr, flush=True)
    world.close()
    return {"medians": medians, "constants": constants, "rows": out}


def parallelism_of(fields: Mapping[str, Any]) -> Parallelism:
    """Return a configuration from its fields as JSON has them."""
    tensor = fields.get("tensor", 1)
    lists = {"tensor": tuple(tensor) if isinstance(tensor, list) else tensor}
    if "order" in fields:
        lists["order"] = tuple(fields["order"])
    return Parallelism(**{**fields, **lists})
