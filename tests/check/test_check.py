"""`meshweave.check` from Python: programs against their declared meaning, plans at reduced size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshweave import check
from meshweave.algorithms.matmul2d import Matmul2dConfig, Matmul2dProblem
from meshweave.algorithms.matmul2d.common.problem import two_d_meshes
from meshweave.algorithms.table import PRODUCTS_2D
from meshweave.base.errors import LayoutError, UnsupportedError
from meshweave.check.reduced import reduce_layer
from meshweave.check.reference import expected_shard, random_inputs, random_tensor, reference
from meshweave.describe.machine.cluster import load_cluster
from meshweave.describe.model import load_model
from meshweave.describe.model.workload import Workload
from meshweave.execute.numpy import local_inputs
from meshweave.ir.program import Program
from meshweave.ir.program.parse import parse
from meshweave.ir.program.text import to_text
from meshweave.tune import plan_model
from meshweave.tune.plan import Plan

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture(scope="module")
def plan() -> Plan:
    workload = Workload(8, 2048)
    return plan_model(
        load_model("gpt3"), load_cluster("tpu-v4-pod:16"), workload, ("meshslice", "collective")
    )


@pytest.mark.parametrize("dataflow", ["os", "ls", "rs"])
def test_a_shard_of_the_reference_is_part_of_the_whole(dataflow: str) -> None:
    problem = Matmul2dProblem(24, 16, 32, (2, 2), dataflow)  # type: ignore[arg-type]
    program = PRODUCTS_2D["collective"].program(problem, Matmul2dConfig())
    inputs = random_inputs(program, 3)
    whole = reference(program, inputs)["C"]
    layout = program.buffer_of["c"].layout
    assert layout is not None
    for rank in program.ranks:
        shard = expected_shard(program, inputs, "c", rank)
        assert (shard == whole[np.ix_(*layout.indices(whole.shape, rank))]).all()
        assert set(local_inputs(program, inputs, rank)) == {"a", "b"}


@pytest.mark.parametrize("first", [0, 1])
def test_meanings_stand_in_any_order(first: int) -> None:
    meanings = ["computes(Z, same(Y))", "computes(Y, product(A, B))"]
    program = parse(f"""
program("chain")
tp = mesh((1,), ("x",))
A = tensor((2, 3), "int64")
B = tensor((3, 4), "int64")
Y = tensor((2, 4), "int64")
Z = tensor((8,), "int64")
{meanings[first]}
{meanings[1 - first]}
a = input(A, tp[R])
b = input(B, tp[R])
z = output(Z, tp[R])
""")
    inputs = random_inputs(program, 5)
    whole = (inputs["A"] @ inputs["B"]).reshape(-1)
    assert (reference(program, inputs)["Z"] == whole).all()


def test_programs_are_verified_by_what_they_declare() -> None:
    """A reshard computes `Same`; a product without its gathers cannot be proved."""
    reshard = parse((GOLDEN / "broadcast_reshard.txt").read_text())
    program = PRODUCTS_2D["collective"].program(Matmul2dProblem(16, 16, 16, (2, 2), "os"), Matmul2dConfig())
    lines = to_text(program).splitlines()
    broken = parse("\n".join(line for line in lines if "all_gather(" not in line) + "\n")
    seen = []
    report = check.verify(
        [reshard, program, broken],
        on_processes=False,
        progress=lambda done, total: seen.append((done, total)),
    )
    good, also_good, bad = report.verifications
    assert report.num_ranks == len(reshard.ranks)
    assert good.error_in_process == also_good.error_in_process == 0 and not good.is_wrong
    assert bad.failed.startswith("in process: ") and bad.is_wrong and report.num_wrong == 1
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_outputs_of_calls_cannot_be_checked() -> None:
    program = parse((GOLDEN / "one_f_one_b.txt").read_text())
    with pytest.raises(UnsupportedError, match="outputs of calls"):
        check.verify(program, on_processes=False)


def test_a_plan_is_verified_in_process(plan: Plan) -> None:
    report = check.verify(plan, layers=["ff1"], max_dim=64, on_processes=False)
    assert len(report.verifications) == 6 and report.num_wrong == 0
    assert {item.error_in_process for item in report.verifications} == {0.0}
    assert report.not_run == "left out"
    with pytest.raises(LayoutError, match="1 to 64"):
        check.verify(plan, num_ranks=65)


@pytest.mark.gloo
def test_programs_and_plans_run_on_processes(plan: Plan) -> None:
    pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")
    reshard = parse((GOLDEN / "broadcast_reshard.txt").read_text())
    (verification,) = check.verify(reshard).verifications
    assert verification.error_on_processes == 0 and not verification.is_wrong
    measured = check.run(plan, passes=["forward"], algorithms="all", num_ranks=2, max_dim=64, repeat=2)
    assert [product.error for product in measured.products] == [0.0, 0.0]
    assert all(len(product.runs_s) == 2 and product.num_orderings > 0 for product in measured.products)
    for product in measured.products:  # constants of these processes, measured beside the runs
        assert product.constants is not None and min(product.constants.to_json().values()) > 0
        assert product.predicted.duration_s > 0


def test_a_reduced_layer_keeps_the_proportions_of_its_shards() -> None:
    """GPT-3's ff1 on 32x8: shards of 8192 tokens by 1536 and 6144 features."""
    small = reduce_layer((262144, 12288, 49152), (32, 8), two_d_meshes(4), 2048)
    assert small.mesh_shape == (2, 2)
    assert (small.tokens, small.in_features, small.out_features) == (2048, 384, 1536)


def test_a_small_layer_is_left_alone() -> None:
    small = reduce_layer((64, 32, 48), (2, 2), two_d_meshes(4), 2048)
    assert (small.tokens, small.in_features, small.out_features) == (64, 32, 48)


def test_inputs_are_the_same_on_every_rank_and_differ_from_each_other() -> None:
    assert (random_tensor("a", (8, 8), "float32", 1) == random_tensor("a", (8, 8), "float32", 1)).all()
    assert (random_tensor("a", (8, 8), "float32", 1) != random_tensor("b", (8, 8), "float32", 1)).any()


PRODUCT = """
program("product of {first}")
tp = mesh(({count},), ("x",), ranks={ranks})
A = tensor((8, {k}), "{dtype}")
B = tensor(({k}, 8), "{dtype}")
C = tensor((8, 8), "{out}")
computes(C, product(A, B))
a = input(A, tp[{left}])
b = input(B, tp[{right}])
c = output(C, tp[{result}])
compute = lane()
with tp:
    matmul(c, a, b, lane=compute)
"""
ROWS = {"left": "S(0)", "right": "R", "result": "S(0)"}
TERMS = {"left": "S(1)", "right": "S(0)", "result": "P"}


def product_of(
    count: int, *, first: int = 0, k: int = 16, dtype: str = "float32", out: str = "", layouts: Any = ROWS
) -> Program:
    ranks = tuple(range(first, first + count))
    text = PRODUCT.format(
        first=first, count=count, ranks=ranks, k=k, dtype=dtype, out=out or dtype, **layouts
    )
    return parse(text)


def test_each_rank_has_its_own_share_of_partial_sums() -> None:
    program = product_of(3, k=17, layouts=TERMS)
    inputs = random_inputs(program, 2)
    shares = [expected_shard(program, inputs, "c", rank) for rank in program.ranks]
    assert all(share.any() for share in shares) and (sum(shares) == reference(program, inputs)["C"]).all()


def test_the_reference_of_small_integers_does_not_overflow() -> None:
    """A product of int8 with int32 results is summed in these, whatever the operands hold."""
    program = product_of(1, k=4096, dtype="int8", out="int32")
    inputs = random_inputs(program, 0)
    whole = reference(program, inputs)["C"]
    assert whole.dtype == np.int32 and np.abs(whole).max() > 127
    assert (whole == inputs["A"].astype(np.int32) @ inputs["B"].astype(np.int32)).all()
    assert (expected_shard(program, inputs, "c", 0) == whole).all()
    assert not check.verify(program, on_processes=False).num_wrong


@pytest.mark.parametrize(("dtype", "exact"), [("bfloat16", 2**8), ("float16", 2**11)])
def test_halves_hold_the_sums_of_their_random_inputs(dtype: str, exact: int) -> None:
    program = product_of(1, k=1024, dtype=dtype)
    assert np.abs(reference(program, random_inputs(program, 0))["C"]).max() <= exact


@pytest.mark.gloo
def test_programs_on_some_of_the_processes_are_verified() -> None:
    pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")
    programs = [product_of(1), product_of(2, first=1), product_of(3, k=1024, dtype="bfloat16")]
    report = check.verify([*programs, product_of(2, first=1, k=17, layouts=TERMS)])
    assert [item.failed for item in report.verifications] == [""] * 4
    assert [item.error_on_processes for item in report.verifications] == [0.0] * 4
