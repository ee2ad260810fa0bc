"""What the ranks of test_tracked_product.py run, in Triton's interpreter or on a GPU."""

from dataclasses import replace

import interpreted_triton  # noqa: F401
from backend_programs import inputs_for
from backend_rank_functions import differences, shards
from cuda_world import nccl_context
from thread_queue import QueuedMemory

from meshweave.algorithms.fused import ENTRIES, RingReduceScatter, Tiles
from meshweave.base.errors import MeshweaveError
from meshweave.execute.cuda import tracked_product
from meshweave.execute.memory import open_memory
from meshweave.execute.numpy import run_numpy
from meshweave.execute.torch.bind import bind
from meshweave.execute.torch.context import TorchContext
from meshweave.ir.program.text import to_text


def opened(kind, ours):
    """Memory of a kind; "queued" is that of a window whose waits are queued, by the calling thread."""
    return (
        QueuedMemory.open(ours, 1 << 16) if kind == "queued" else open_memory(kind, ours, pool_bytes=1 << 16)
    )


def programs(num_ranks, dtype, every=1):
    """Each entry, problem and config that stands for so many ranks, or every so many of them."""
    listed = [
        (f"{entry.name} {config}", entry.program(replace(problem, dtype=dtype), config))
        for entry in ENTRIES
        for problem in entry.examples()
        if len(problem.ranks) == num_ranks
        for config in entry.candidates(problem)
    ]
    return listed[::every]


def cases(context, payload):
    """Programs in memory of several kinds: what differs from numpy."""
    ours = TorchContext(liveness=context.liveness, deadline_s=30.0)
    wrong = [
        fault
        for kind, dtype in payload["memories"]
        for fault in faults(ours, opened(kind, ours), dtype, payload)
    ]
    ours.close()
    return wrong


def cases_on_gpu(context, payload):
    """As `cases`, over symmetric memory, all ranks on one device."""
    with nccl_context(context) as ours:
        return [
            fault
            for dtype in payload["dtypes"]
            for fault in faults(ours, open_memory("symmetric", ours), dtype, payload)
        ]


def faults(ours, memory, dtype, payload):
    """Yield what differs in programs in one memory; on a CPU, bfloat16 where nothing is added atomically."""
    listed = programs(ours.num_ranks, dtype, payload.get("every", 1))
    if dtype == "bfloat16" and ours.device.type == "cpu":
        listed = [(name, program) for name, program in listed if "update=True" not in to_text(program)]
    for name, program in listed:
        bound = bind(program, ours.rank, {}, context=ours, memory=memory, products="tracked")
        for turn in (0, 1):
            values = inputs_for(program, turn)
            given = {key: value.to(ours.device) for key, value in shards(program, values, ours.rank).items()}
            bound.run(given)
            for key in differences(bound, run_numpy(program, values)):
                yield name, dtype, turn, key
    memory.close()


def late(context, payload):
    """The product of rank 2 does not count its tiles in the second run: what the ranks say."""
    is_on_gpu = payload["memory"] == "symmetric"
    device = "cuda:0" if is_on_gpu else "cpu"
    ours = TorchContext(liveness=context.liveness, deadline_s=60.0, device=device)
    memory = opened(payload["memory"], ours)
    problem = next(iter(RingReduceScatter().examples()))
    program = RingReduceScatter().program(replace(problem, dtype="float32"), Tiles())
    bound = bind(program, ours.rank, {}, context=ours, memory=memory, products="tracked")
    given = {key: value.to(device) for key, value in shards(program, inputs_for(program), ours.rank).items()}
    bound.run(given)
    ours.deadline_s = 3.0
    if payload["memory"] == "queued":
        memory.words.patience_s = 0.5
    if ours.rank == 2:
        launch = tracked_product.launch_product

        def uncounted(*arguments, **constants):
            launch(*arguments, **{**constants, "COUNTS": False})

        tracked_product.launch_product = uncounted
    try:
        bound.run(given)
    except MeshweaveError as error:
        return str(error)
    return ""
