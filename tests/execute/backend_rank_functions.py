"""What the ranks of test_torch_backend.py run."""

import os
import signal
import threading
import time

import numpy as np
import torch
from backend_programs import CALLS, PROGRAMS, inputs_for

from meshweave.base.errors import UnsupportedError
from meshweave.execute.numpy import local_inputs, run_numpy
from meshweave.execute.torch.bind import bind
from meshweave.execute.torch.buffers import torch_dtype
from meshweave.execute.torch.context import TorchContext
from meshweave.ir.program.parse import parse

LANES_THAT_WAIT = """
program("lanes that wait")
q = mesh((2,), ("x",))
X = tensor((4, 4), "float32")
x = input(X, q[S(0)])
y = output(X, q[S(0)])
z = scratch((2, 4), "float32", on=q)
compute = lane()
net = lane()
third = lane()
with q:
    for i in range(STEPS):
        permute(y, x, over="q.x", lane=net, name="ring")
        call(fn="trouble", outs=(z,), ins=(x,), args=(q.x, i), lane=compute)
        copy(y, z, lane=third)
"""


def shards(program, values, rank):
    """The input buffers of a rank as tensors."""
    return {
        name: torch.from_numpy(np.ascontiguousarray(shard)).to(torch_dtype(program.buffer_of[name].dtype))
        for name, shard in local_inputs(program, values, rank).items()
    }


def differences(bound, result):
    """The output buffers that are not exactly what the numpy run says."""
    wrong = []
    for name, tensor in bound.outputs.items():
        value = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).cpu().numpy()
        if not np.array_equal(value, result.memory[bound.rank, name, 0]):
            wrong.append(name)
    return wrong


ROTATION = """
program("rotation")
q = mesh((3,), ("x",))
X = tensor((9,), "int64")
W = tensor((11,), "int64")
x = input(X, q[S(0)])
y = output(X, q[S(0)])
v = input(W, q[S(0)])
w = output(W, q[R])
z = scratch((1,), "int64", on=q)
net = lane()
with q:
    all_gather(w, v, over="q.x", dim=0, sizes=(4, 4, 3), lane=net)
    with ranks(1):
        call(fn="late", outs=(z,), ins=(), lane=net)
        recv(y, peer=0, lane=net)
        send(x, peer=2, lane=net)
    with ranks(0):
        send(x, peer=1, lane=net)
        recv(y, peer=2, lane=net)
    with ranks(2):
        send(x, peer=0, lane=net)
        recv(y, peer=1, lane=net)
"""


def rotated_in_place(context, rank):
    """Return y and w of ten runs where y lies where x does, and v at another place of w; nothing for rank 3.

    Rank 1 receives before it sends: its y is apart. Rank 0 waits for it, and may not yet receive where its x is.
    """
    if rank == 3:
        return []
    memory, whole = torch.full((3,), rank), torch.zeros(11, dtype=torch.int64)
    part = (whole[7:], whole[:4], whole[1:4])[rank]
    calls = {"late": lambda: (time.sleep(0.02), torch.zeros(1, dtype=torch.int64))[1]}
    given = {"x": memory, "y": torch.zeros_like(memory) if rank == 1 else memory, "v": part, "w": whole}
    bound = bind(parse(ROTATION), rank, given, context=context, calls=calls)
    results = []
    for _ in range(10):
        memory.fill_(rank)
        part.copy_(10 * rank + torch.arange(len(part)))
        bound.run()
        results.append([given["y"].tolist(), whole.tolist()])
    return results


def compare(context, payload):
    """Runs programs many times with changing input in either mode; reports whatever differs from numpy."""
    ours = TorchContext(liveness=context.liveness, deadline_s=30.0)
    wrong, traces = [], {}
    for name in payload["programs"]:
        program = PROGRAMS[name]()
        if context.rank not in program.ranks:
            ours.prepare(program)
            continue
        results = [run_numpy(program, inputs_for(program, seed), calls=CALLS) for seed in range(2)]
        given = [shards(program, inputs_for(program, seed), context.rank) for seed in range(2)]
        aliased = {key: value.clone() for key, value in given[0].items()}
        threads = bind(program, context.rank, aliased, context=ours, calls=CALLS, trace=True)
        num_groups = len(ours._groups)
        linear = bind(program, context.rank, {}, context=ours, calls=CALLS, mode="linear")
        assert len(ours._groups) == num_groups
        traces[name] = threads.run().to_json()
        wrong += [(name, "threads", 0, key) for key in differences(threads, results[0])]
        for repetition in range(1, 6):
            seed = repetition % 2
            for mode, bound in (("threads", threads), ("linear", linear)):
                bound.run(given[seed])
                wrong += [(name, mode, repetition, key) for key in differences(bound, results[seed])]
    in_place = rotated_in_place(ours, context.rank) if context.num_ranks == 4 else []
    ours.close()
    return {"wrong": wrong, "traces": traces, "in_place": in_place}


def trouble(context, payload):
    """One of two ranks fails in the lane `compute` while its other lanes wait for it and for the partner."""

    def fails(x, rank, step):
        if (rank, step) == (1, 3):
            if payload["how"] == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.3)  # until the others wait
            raise KeyError("boom")
        return x

    ours = TorchContext(liveness=context.liveness, deadline_s=1000.0)
    program = parse(LANES_THAT_WAIT.replace("STEPS", "6"))
    calls = {"trouble": fails}
    bound = bind(program, context.rank, {"x": torch.zeros(2, 4)}, context=ours, calls=calls)
    try:
        bound.run()  # where the other lanes were not stopped, the launch ends all of this long before the deadline
    except KeyError as error:
        assert error.__notes__ == ["in call 0.0.3.1 of lane compute"], error.__notes__
        try:
            bound.run()
        except UnsupportedError as refusal:
            assert "this context is broken: an earlier run in it failed" in str(refusal)
            raise error from None


GATHER = """
program("gather")
q = mesh((2,), ("x",))
X = tensor((2,), "int64")
x = input(X, q[S(0)])
y = output(X, q[R])
net = lane()
with q:
    all_gather(y, x, over="q.x", dim=0, lane=net)
"""


def begun_and_run(context, payload):
    """What a transfer that was begun gives, and then a run on other inputs that follows without its end."""
    one, taken = torch.tensor([context.rank + 1]), []
    ours = TorchContext(liveness=context.liveness, deadline_s=30.0)
    bound = bind(parse(GATHER), context.rank, {"x": one.clone()}, context=ours, meets=False)
    bound.begin(lambda: taken.append([*bound.outputs["y"].tolist(), *bound.inputs["x"].tolist()]))
    bound.run({"x": 3 * one})
    assert taken == [[1, 2, context.rank + 1]], taken
    return [taken[0][:2], bound.outputs["y"].tolist()]


ADD_UP = """
program("{}")
q = mesh((2,), ("x",))
X = tensor((1,), "int64")
x = input(X, q[P])
z = scratch((1,), "int64", on=q)
y = output(X, q[R])
net = lane()
with q:
    call(fn="wait", outs=(z,), ins=(x,), lane=net)
    all_reduce(y, z, over="q.x", lane=net)
"""


def refused_beside(context, payload):
    """What a second program says that rank 0 runs in another thread meanwhile; what the first and a third make."""
    ours, said = TorchContext(liveness=context.liveness, deadline_s=30.0), []

    def other():
        try:
            second.run()
        except UnsupportedError as error:
            said.append(str(error))

    def wait(x):
        if context.rank == 0:
            thread = threading.Thread(target=other)
            thread.start()
            thread.join(30)
        return x + 0

    def bound(name, function):
        one = torch.tensor([context.rank + 1])
        calls = {"wait": function}
        return bind(parse(ADD_UP.format(name)), context.rank, {"x": one}, context=ours, calls=calls)

    first, second = bound("first", wait), bound("second", lambda x: x + 0)
    first.run()
    third = bound("third", lambda x: x + 0)
    third.run()
    return [said, [each.outputs["y"].item() for each in (first, third)]]
