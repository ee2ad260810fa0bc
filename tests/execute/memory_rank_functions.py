"""What the ranks of test_remote_memory.py run."""

import gc
import itertools
import os
import signal
import threading
import time

import numpy as np
import torch
from backend_programs import FUSED, IN_TILES, fused_product, golden, in_tiles, inputs_for
from backend_rank_functions import differences, shards

from meshweave.base.errors import BindError
from meshweave.execute.memory import open_memory
from meshweave.execute.memory.base import Exposure, Slot
from meshweave.execute.numpy import run_numpy
from meshweave.execute.ranks.agreement import agree
from meshweave.execute.torch.bind import bind
from meshweave.execute.torch.context import TorchContext
from meshweave.ir.program.parse import parse
from meshweave.ir.program.text import to_text

# Every way to reach another rank: strided and blocked views, column-major slots, a rank's own memory, a row that
# fences alone, released products and copies.
VIEWS = """
program("views")
q = mesh((2, 2), ("row", "col"))
X = tensor((12, 20), "int64")
Y = tensor((12, 20), "int64")
Z = tensor((12, 20), "int64")
W = tensor((12, 20), "int64")
x = input(X, q[S(0), S(1)], slots=2)
y = output(Y, q[S(0), S(1)])
z = output(Z, q[S(0), S(1)], order=(1, 0))
w = output(W, q[S(0), S(1)])
box = scratch((6, 10), "int64", on=q, slots=2, order=(1, 0))
sums = scratch((6, 6), "int64", on=q)
compute = lane()
net = lane()
dma = lane()
with q:
    zero(y, lane=compute)
    zero(w, lane=compute)
    zero(sums, lane=compute)
    copy(z, x, lane=compute)
    zero(box, lane=compute)
    zero(box(1), lane=compute)
    fence(over="q", lane=net)
    get(box[:, blocked(1, 2, 5)], at((rank + 1) % 4, x(1)[:, blocked(0, 2, 5)]), lane=net)
    get(box[:3, blocked(0, 1, 5)], at(rank, x[3:, 4:6]), lane=dma)
    put(at((rank + 3) % 4, box(1)[2:6, 1:4]), x[:4, 3:6], lane=dma)
    put(at(rank, box(1)[:1, :]), x[5:, :], lane=net)
    for i in range(3):
        accumulate(at(i, y[:, blocked(-1, 3, 4)]), x[:, 1:9], lane=net)
        accumulate(at(i, y[1:5, :]), x[:4, :], lane=dma)
        accumulate(at(i + 1, z), x, lane=net)
        matmul(at(i, sums), x, x(1), transpose_b=True, release=release(update=True), lane=compute)
        copy(sums[2:, :], x[:4, :6], release=release(update=True), lane=dma)
    fence(over="q.col", lane=net)
    fence(over="q", lane=dma)
    copy(at((rank + 1) % 4, w[:, :4]), x[:, 6:], release=release(), lane=dma)
    copy(w[:, blocked(4, 1, 2, 4, 10)], box(1)[:, blocked(1, 1, 3)], lane=compute)
    add(z, box, lane=net)
"""

# What `ir.validate` does not let a program say, and memory that is aliased can do as it stands.
OPERANDS = """
    add(w[:, 4:], at((rank + 1) % 4, y[:, 4:]), lane=compute)
    add(w[:, 4:10], at((rank + 2) % 4, sums), lane=compute)
    matmul(w[:, 4:10], at((rank + 1) % 4, sums), at((rank + 2) % 4, sums), accumulate=1, lane=compute)
"""

LOST = """
program("lost")
q = mesh((4,), ("x",))
X = tensor((8, 4), "int64")
x = input(X, q[S(0)])
y = output(X, q[S(0)])
compute = lane()
net = lane()
with q:
    zero(y, lane=compute)
    fence(over="q", lane=net)
    for i in range(4):
        call(fn="trouble", outs=(y,), ins=(x,), args=(rank, i), lane=compute)
        fence(over="q", lane=net)
        accumulate(at((rank + 1) % 4, y), x, lane=net)
        fence(over="q", lane=net)
"""


# Every rank adds a number to the same element of rank 0, after a pause of its own.
SUMS = """
program("sums")
q = mesh((4,), ("x",))
X = tensor((4, 3), "float32")
Y = tensor((4, 3), "float32")
x = input(X, q[S(0)])
y = output(Y, q[S(0)])
late = scratch((1, 3), "float32", on=q)
compute = lane()
net = lane()
with q:
    zero(y, lane=compute)
    fence(over="q", lane=net)
    call(fn="pause", outs=(late,), ins=(x,), lane=compute)
    accumulate(at(0, y), late, lane=net)
"""


def program_of(name):
    if name in ("views", "operands"):
        return parse(VIEWS + OPERANDS.removeprefix("\n") * (name == "operands"))
    if name in IN_TILES:
        return in_tiles(name.removesuffix(" in tiles"))
    return fused_product(name) if name in FUSED else golden(name)


def context_of(context, deadline_s=30.0):
    return TorchContext(liveness=context.liveness, deadline_s=deadline_s)


def compare(context, payload):
    """Programs one after another in one pool, many times with changing input in either mode."""
    ours, wrong = context_of(context), []
    memory = open_memory(payload["kind"], ours, pool_bytes=1 << 16)
    sizes = []
    for name in payload["programs"]:
        program = program_of(name)
        results = [run_numpy(program, inputs_for(program, seed)) for seed in range(2)]
        given = [shards(program, inputs_for(program, seed), context.rank) for seed in range(2)]
        mine = {key: value.clone() for key, value in given[0].items()}
        threads = bind(program, context.rank, mine, context=ours, memory=memory, trace=True)
        linear = bind(program, context.rank, {}, context=ours, memory=memory, mode="linear")
        assert threads.inputs[next(iter(mine))].data_ptr() == next(iter(mine.values())).data_ptr()
        assert len(threads.run().spans) == len(program.ops_on_rank(context.rank))
        wrong += [(name, "threads", 0, key) for key in differences(threads, results[0])]
        for repetition in range(1, 6):
            seed = repetition % 2
            for mode, bound in (("threads", threads), ("linear", linear)):
                bound.run(given[seed])
                wrong += [(name, mode, repetition, key) for key in differences(bound, results[seed])]
        del threads, linear, bound
        gc.collect()
        sizes.append(sum(segment.size for segment in memory.segments.values()))
    memory.close()
    ours.close()
    return {"wrong": wrong, "sizes": sizes}


def compare_on_gpu(context, payload):
    """As `compare`, in single precision (exact for such inputs) with all ranks on one device."""
    ours, wrong = TorchContext(liveness=context.liveness, deadline_s=60.0, device="cuda:0"), []
    memory = open_memory(payload["kind"], ours)
    for name in payload["programs"]:
        program = parse(to_text(program_of(name)).replace("int64", "float32"))
        result = run_numpy(program, inputs_for(program))
        given = {
            key: value.cuda() for key, value in shards(program, inputs_for(program), context.rank).items()
        }
        bound = bind(program, context.rank, {}, context=ours, memory=memory)
        for repetition in range(5):
            bound.run(given)
            torch.cuda.synchronize()
            for key, tensor in bound.outputs.items():
                if not np.array_equal(tensor.cpu().numpy(), result.memory[context.rank, key, 0]):
                    wrong.append((name, repetition, key))
    memory.close()
    return {"wrong": wrong}


def pool(context, payload):
    """Blocks come back when their tensors are gone, the pool grows, results stay where the next program reads."""
    ours = context_of(context)
    memory = open_memory("shared", ours, pool_bytes=1 << 16)
    text = LOST.replace("8, 4", "SIZE").replace("accumulate(at", "put(at")
    calls = {"trouble": lambda x, rank, step: x + step}

    def bound(size, tensors=None, name="x"):
        program = parse(text.replace("SIZE", f"{4 * size}, 4"))
        return bind(program, context.rank, tensors or {}, context=ours, memory=memory, calls=calls)

    found, starts = [], set()
    for _ in range(5):
        one = bound(16, {"x": torch.full((16, 4), context.rank)})
        one.run()
        starts.add(one.outputs["y"].data_ptr())
        kept = one.outputs["y"]
        del one
        gc.collect()
        left = kept.clone()
        two = bound(16)
        assert two.outputs["y"].data_ptr() != kept.data_ptr()
        two.run({"x": torch.full((16, 4), 7)})
        assert torch.equal(kept, left) and (kept == (context.rank - 1) % 4).all()
        # What lies in the pool is taken as it is, and read there by the others.
        three = bound(16, {"x": kept})
        assert three.inputs["x"].data_ptr() == kept.data_ptr()
        three.run()
        assert (three.outputs["y"] == (context.rank - 2) % 4).all()
        del two, three, kept
        gc.collect()
    found.append((len(starts), len(memory.segments)))
    # Some of the ranks make the pool grow by a segment that the others never map, so these cannot use it later.
    half = parse(text.replace("SIZE", f"{1 << 14}, 4").replace("(4,)", "(2,)").replace("% 4", "% 2"))
    if context.rank < 2:
        small = bind(half, context.rank, {}, context=ours, memory=memory, calls=calls)
        small.run({"x": torch.full((1 << 13, 4), context.rank)})
        assert (small.outputs["y"] == 1 - context.rank).all()
        del small
        gc.collect()
    found.append(len(memory.segments))
    again = bound(1 << 13)
    again.run({"x": torch.full((1 << 13, 4), 3)})
    assert (again.outputs["y"] == 3).all()
    found.append(len(memory.segments))
    memory.close()
    try:
        again.run()
    except Exception as error:
        return {"found": found, "closed": str(error)}


def stress(context, payload):
    """All ranks, several threads each, add to overlapping views of one buffer of each rank."""
    ours = context_of(context)
    memory = open_memory(payload["kind"], ours)
    key, shape, ranks = ("sums", 0), (12, 10), range(context.num_ranks)
    slot = Slot(shape, (10, 1), torch.int64)
    window = memory.expose(Exposure(ranks, [tuple(ranks)], "stress", {key: slot}))
    window.own[key].zero_()
    fence = window.fence(0, "the stress test")
    fence()
    errors = []

    def work(seed):
        try:
            chooser = np.random.default_rng(seed)
            actions = []
            for _ in range(20):
                slot = window.remote[int(chooser.integers(len(ranks))), key]
                rows, columns = sorted(chooser.integers(0, 13, 2)), sorted(chooser.integers(0, 11, 2))
                piece = slot.tensor[rows[0] : rows[1], columns[0] : columns[1]]
                if piece.numel():
                    value = torch.from_numpy(chooser.integers(-9, 10, tuple(piece.shape)))
                    actions.append((slot.rank, rows, columns, value))
                    actions[-1] += (window.accumulate(slot, piece, value, "sum"),)
            for _ in range(payload["turns"]):
                for *_, action in actions:
                    action()
            for rank, rows, columns, value, _ in actions:
                expected[seed][rank, rows[0] : rows[1], columns[0] : columns[1]] += value
        except BaseException as error:
            errors.append(repr(error))

    seeds = [100 * context.rank + number for number in range(payload["threads"])]
    expected = {seed: torch.zeros((len(ranks), *shape), dtype=torch.int64) for seed in seeds}
    threads = [threading.Thread(target=work, args=(seed,)) for seed in seeds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    fence()
    total = window.own[key].tolist()
    fence()
    window = fence = None
    gc.collect()
    memory.close()
    return {
        "errors": errors,
        "total": total,
        "added": [(payload["turns"] * sum(expected.values())[rank]).tolist() for rank in ranks],
    }


def repeats(context, payload):
    """The sums of rank 0 in runs in which the numbers arrive in other orders, for which rounding differs."""
    ours = context_of(context)
    results = {}
    with open_memory(payload["kind"], ours) as memory:
        for update_order in ("fixed", "arrival"):
            turns = itertools.count()

            def pause(x, turns=turns):
                time.sleep(0.01 * ((context.rank + next(turns)) % 4))
                return x

            bound = bind(
                parse(SUMS),
                context.rank,
                {},
                context=ours,
                memory=memory,
                calls={"pause": pause},
                update_order=update_order,
            )
            x = torch.tensor([[1e8, 1.0, -1e8, 3.0][context.rank]]).repeat(1, 3)
            sums = []
            for _ in range(payload["turns"]):
                bound.run({"x": x})
                sums.append(bound.outputs["y"].tolist())
            results[update_order] = sums
            bound = None
            gc.collect()
    return results


def dies(context, payload):
    """A rank is killed in the middle, be it while it holds a lock; the others say who."""
    ours = context_of(context, 1000.0)  # where nobody noticed, the launch would end all of this long before
    memory = open_memory("shared", ours)

    def trouble(x, rank, step):
        if (rank, step) == (2, 2):
            if payload["where"] == "in an update":
                window = [
                    slot for (owner, key), slot in held.remote.items() if owner == 1 and key == ("y", 0)
                ]
                with memory.locked(1, window[0].number, 0, 1 << 20):
                    time.sleep(0.2)
                    os.kill(os.getpid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        return x + 0

    expose, held = memory.expose, None

    def keep(*arguments):
        nonlocal held
        held = expose(*arguments)
        return held

    memory.expose = keep
    bound = bind(parse(LOST), context.rank, {}, context=ours, memory=memory, calls={"trouble": trouble})
    bound.run({"x": torch.ones(2, 4, dtype=torch.int64)})


def differ(context, payload):
    """Ranks that bind different programs; what each of them is told."""
    ours = context_of(context)
    memory, said = open_memory("shared", ours), []
    for ranks, change in payload["cases"]:
        text = LOST.replace(*change) if context.rank in ranks else LOST
        calls = {"trouble": lambda x, rank, step: x}
        try:
            bind(parse(text), context.rank, {}, context=ours, memory=memory, calls=calls)
        except BindError as error:
            said.append(str(error))
    return said


def agreed(context, payload):
    """Agreement alone, over and over, among all and among some."""
    ours, said = context_of(context), None
    for _ in range(20):
        agree(ours, parse(LOST))
        if context.rank < 2:
            agree(ours, parse(LOST.replace("(4,)", "(2,)")))
    try:
        agree(ours, parse(LOST.replace("8, 4", f"{8 + 4 * (context.rank == 3)}, 4")))
    except BindError as error:
        said = str(error)
    return {"agreed": said, "differ": differ(context, payload)}


def everything(context, payload):
    return {
        "compare": compare(context, payload["compare"]),
        "stress": stress(context, payload["stress"]),
        "repeats": repeats(context, payload["repeats"]),
        "pool": pool(context, {}),
    }
