"""What the ranks of test_fused_linear run."""

import itertools

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from meshweave.base.errors import MeshweaveError, UnsupportedError
from meshweave.execute.memory import open_memory
from meshweave.execute.torch.bind import bind
from meshweave.execute.torch.context import TorchContext
from meshweave.ir.program.parse import parse
from meshweave.lower import write_out_tiles
from meshweave.nn.fused import REDUCE_SCATTERS, all_gather_linear, linear_reduce_scatter
from meshweave.nn.products import DTYPES

LATE = """
program("late")
q = mesh((4,), ("x",))
X = tensor((16, 6), "float32")
W = tensor((6, 3), "float32")
x = input(X, q[S(0)])
w = input(W, q[R])
y = scratch((4, 3), "float32", on=q)
z = output(X, q[S(0)])
compute = lane()
other = lane()
with q:
    call(fn="hesitate", outs=(z,), ins=(x,), lane=compute)
    matmul(at((rank + 1) % 4, y), x, w, release=release(), lane=compute)
    copy(z[:, :3], y, lane=other)
"""


def cases(context, payload):
    """Every dtype, algorithm and transport against the dense product, all together or some: what differs."""
    ours, wrong = TorchContext(liveness=context.liveness, deadline_s=30.0), []
    combined = list(itertools.product(DTYPES, itertools.product(REDUCE_SCATTERS, ("messages", "shared"))))
    for number, (dtype, (algorithm, transport)) in enumerate(combined):
        of_dtype, pair = divmod(number, 2 * len(REDUCE_SCATTERS))
        if payload["all"] or (pair == of_dtype and of_dtype % 2 == 0):  # one pair of every second dtype
            given = {"algorithm": algorithm, "transport": transport, "context": ours}
            faults = _faults(dtype, ours.rank, ours.num_ranks, given)
            wrong += [(str(dtype), algorithm, transport, fault) for fault in faults]
    wrong += _dtensor_faults(ours)
    ours.close()
    return wrong


def tracked(context, payload):
    """Layers by kernels that count their tiles, in Triton's interpreter: what differs from dense ones."""
    import interpreted_triton  # noqa: F401

    ours = TorchContext(liveness=context.liveness, deadline_s=30.0)
    wrong = list(tracked_faults(ours, "shared", "cpu"))
    ours.close()
    return wrong


def tracked_faults(ours, transport, device):
    """Layers whose kernels count their tiles beside dense ones, and what is said where they cannot be had."""
    given = {"transport": transport, "products": "tracked", "context": ours}
    for dtype, algorithm in itertools.product((torch.float32, torch.float16), ("t3_ring", "t3_copied")):
        for fault in _faults(dtype, ours.rank, ours.num_ranks, given | {"algorithm": algorithm}, device):
            yield str(dtype), algorithm, fault
    given["transport"], said = "messages", ""
    try:
        linear_reduce_scatter(torch.ones(8, 8, device=device), torch.ones(8, 8, device=device), **given)
    except UnsupportedError as error:
        said = str(error)
    if "memory that ranks share" not in said:
        yield "messages", said


def _integers(shape, seed, dtype):
    """Small integers, whose products and sums every dtype of programs holds exactly."""
    return torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _faults(dtype, rank, ranks, given, device="cpu"):
    rows, n, k = 2 * ranks, 3 * ranks, 2 * ranks
    x, weight, grad = (
        _integers(shape, seed, dtype).to(device) for seed, shape in enumerate(((rows, k), (n, k), (rows, n)))
    )
    floating = dtype.is_floating_point
    dense = (x.double() @ weight.double().t()).to(dtype)
    grad_x, grad_w = (grad.double() @ weight.double()).to(dtype), (grad.double().t() @ x.double()).to(dtype)
    for dim, product in ((1, linear_reduce_scatter), (0, all_gather_linear)):
        local_x, local_w = (one.chunk(ranks, dim)[rank].clone() for one in (x, weight))
        if floating:
            local_x.requires_grad_(), local_w.requires_grad_()
        result = product(local_x, local_w, **given)
        if not torch.equal(result, dense.chunk(ranks, 1 - dim)[rank]):
            yield f"{product.__name__}"
        if floating:
            result.backward(grad.chunk(ranks, 1 - dim)[rank])
            if not torch.equal(local_x.grad, grad_x.chunk(ranks, dim)[rank]):
                yield f"{product.__name__}: gradient of x"
            if not torch.equal(local_w.grad, grad_w.chunk(ranks, dim)[rank]):
                yield f"{product.__name__}: gradient of weight"


def _dtensor_faults(ours):
    """Uneven rows, as DTensors: 10 over 4 ranks are 3, 3, 3 and 1. Equal calls give equal bits."""
    mesh = init_device_mesh("cpu", (ours.num_ranks,))
    whole = torch.randn(10, 8, generator=torch.Generator().manual_seed(1))
    weight = torch.randn(12, 8, generator=torch.Generator().manual_seed(2))

    def placed(tensor, dim):
        size = -(-tensor.shape[dim] // ours.num_ranks)
        local = tensor.split(size, dim)[ours.rank].clone()
        stride = (tensor.shape[1], 1)
        return DTensor.from_local(
            local, mesh, [Shard(dim)], run_check=False, shape=tensor.shape, stride=stride
        )

    for dim, product in ((1, linear_reduce_scatter), (0, all_gather_linear)):
        results = [product(placed(whole, dim), placed(weight, dim), context=ours) for _ in range(3)]
        if results[0].placements != (Shard(1 - dim),):
            yield "placements", str(results[0].placements)
        if not torch.allclose(results[0].full_tensor(), whole @ weight.t(), atol=1e-5):
            yield "uneven", product.__name__
        if not all(torch.equal(results[0].to_local(), one.to_local()) for one in results[1:]):
            yield "bits", product.__name__


def late(context, payload):
    """Rank 2 hesitates for longer than the deadline: what the others say."""
    ours = TorchContext(liveness=False, deadline_s=0.7)
    memory = open_memory("shared", ours, pool_bytes=1 << 16)
    program = write_out_tiles(parse(LATE), 2)

    def hesitate(x):
        if ours.rank == 2:
            import time

            time.sleep(2.0)
        return x

    given = {"x": torch.ones(4, 6), "w": torch.ones(6, 3)}
    bound = bind(program, ours.rank, given, context=ours, memory=memory, calls={"hesitate": hesitate})
    try:
        bound.run()
    except MeshweaveError as error:
        return str(error)
    return "completed"
