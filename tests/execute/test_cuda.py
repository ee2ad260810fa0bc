"""Programs on CUDA tensors: streams and events, NCCL in one order. Several ranks share one device."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from backend_programs import PROGRAMS, inputs_for, ring  # noqa: E402
from backend_rank_functions import shards  # noqa: E402
from cuda_rank_functions import floating  # noqa: E402
from cuda_world import ENV, needs_cuda, places  # noqa: E402

from meshweave.algorithms.matmul2d import Matmul2dConfig, Matmul2dProblem  # noqa: E402
from meshweave.algorithms.table import PRODUCTS_2D  # noqa: E402
from meshweave.execute.numpy import run_numpy  # noqa: E402
from meshweave.execute.ranks.launch import launch  # noqa: E402
from meshweave.execute.torch.bind import bind  # noqa: E402
from meshweave.execute.torch.context import TorchContext  # noqa: E402
from meshweave.ir.analysis.dataflow import analyse  # noqa: E402
from meshweave.ir.program.parse import parse  # noqa: E402
from meshweave.trace import Trace, check_order, merge  # noqa: E402

LANES = """
program("lanes on streams")
q = mesh((1,), ("x",))
X = tensor((512, 512), "float32")
Y = tensor((512, 512), "float32")
Z = tensor((512, 512), "float32")
x = input(X, q[R])
y = output(Y, q[R])
z = output(Z, q[R])
box = scratch((512, 512), "float32", on=q, slots=2)
compute = lane()
dma = lane()
other = lane()
with q:
    zero(y, lane=compute)
    zero(z, lane=other)
    for i in range(8):
        copy(box(i % 2), x, lane=dma)
        matmul(y, box(i % 2), x, accumulate=1, lane=compute)
        add(z, box(i % 2), lane=other)
"""


@pytest.mark.gpu
def test_lanes_are_streams_and_edges_hold() -> None:
    needs_cuda()
    program, context = parse(LANES), TorchContext(device="cuda")
    for traced in (False, True):
        bound = bind(program, 0, {}, context=context, trace=traced)
        for seed in range(4):
            values = inputs_for(program, seed)
            trace = bound.run({name: x.cuda() for name, x in shards(program, values, 0).items()})
            expected = run_numpy(program, values)
            for name, tensor in bound.outputs.items():
                np.testing.assert_array_equal(tensor.cpu().numpy(), expected.memory[0, name, 0])
    assert trace is not None and check_order(trace, analyse(program)) > 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_products_of_one_rank_in_every_algorithm(dtype: str) -> None:
    needs_cuda()
    context = TorchContext(device="cuda")
    for name, entry in PRODUCTS_2D.items():
        problem = Matmul2dProblem(96, 64, 80, (1, 1), "os", dtype, (0,))
        if entry.refusal(problem) is not None:
            continue
        program = entry.program(problem, Matmul2dConfig((1, 1), 8))
        values = inputs_for(program)
        given = {key: x.cuda() for key, x in shards(program, values, 0).items()}
        bound = bind(program, 0, given, context=context)
        bound.run()
        expected = run_numpy(program, values).memory[0, "c", 0]
        np.testing.assert_array_equal(bound.outputs["c"].float().cpu().numpy(), expected, err_msg=name)


@pytest.mark.gpu
def test_a_ring_of_one_needs_no_process_group() -> None:
    needs_cuda()
    program = floating(ring(1))
    values = inputs_for(program)
    bound = bind(program, 0, {}, context=TorchContext(device="cuda"))
    bound.run({name: x.cuda() for name, x in shards(program, values, 0).items()})
    expected = run_numpy(program, values)
    for name, tensor in bound.outputs.items():
        np.testing.assert_array_equal(tensor.cpu().numpy(), expected.memory[0, name, 0])


@pytest.mark.gpu
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_program_over_nccl_on_one_device(num_ranks: int) -> None:
    needs_cuda()
    names = [name for name, make in PROGRAMS.items() if (len(make().ranks) == 2) == (num_ranks == 2)]
    names += ["ring 2"] if num_ranks == 4 else []
    options = {"timeout_s": 240.0, "env": ENV, "places": places(num_ranks)}
    found = launch("cuda_rank_functions:compare", num_ranks, {"programs": names, "stops": False}, **options)
    assert [rank["wrong"] for rank in found] == [[]] * num_ranks
    for name in names:
        program = floating(PROGRAMS[name]())
        trace = merge([Trace.from_json(found[rank]["traces"][name]) for rank in program.ranks])
        assert trace.source == "torch"
