"""Programs with remote views as they are written, over memory that ranks share: exact, atomic, never leaking."""

import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from memory_rank_functions import FUSED, IN_TILES, program_of  # noqa: E402

from meshweave.base.errors import BindError, RankLostError, UnsupportedError  # noqa: E402
from meshweave.execute.memory import open_memory  # noqa: E402
from meshweave.execute.memory.pool import ALIGN, Segment, take  # noqa: E402
from meshweave.execute.memory.shared import why_unavailable  # noqa: E402
from meshweave.execute.ranks.agreement import agree  # noqa: E402
from meshweave.execute.ranks.launch import launch  # noqa: E402
from meshweave.execute.torch.bind import bind  # noqa: E402
from meshweave.execute.torch.context import TorchContext  # noqa: E402
from meshweave.execute.torch.counters import completion_counters  # noqa: E402
from meshweave.execute.torch.groups import fence_groups, without_fences  # noqa: E402
from meshweave.ir.analysis.sums import update_order  # noqa: E402
from meshweave.ir.analysis.validate import validate  # noqa: E402
from meshweave.ir.program.ops import UPDATE, Fence  # noqa: E402
from meshweave.ir.program.parse import parse  # noqa: E402

HERE = Path(__file__).parent
ENV = {"PYTHONPATH": str(HERE)}
PROGRAMS = ["universal_b", "universal_c", "t3_ring", *FUSED, *IN_TILES, "views"]
needs_shared = pytest.mark.skipif(bool(why_unavailable()), reason=f"shared memory {why_unavailable()}")


def remote(target, payload, start=launch, **options):
    return start(f"memory_rank_functions:{target}", 4, payload, env=ENV, timeout_s=60.0, **options)


# --- shared memory, between processes --------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(launch_once):
    """One launch for all that ends well: starting processes is what takes time."""
    payload = {
        "compare": {"kind": "shared", "programs": [*PROGRAMS, "operands"]},
        "stress": {"kind": "shared", "threads": 4, "turns": 50},
        "repeats": {"kind": "shared", "turns": 8},
    }
    return remote("everything", payload, launch_once)


@pytest.mark.gloo
@needs_shared
def test_programs_with_remote_views_equal_their_numpy_runs(found):
    assert [rank["compare"]["wrong"] for rank in found] == [[]] * 4
    sizes = {size for rank in found for size in rank["compare"]["sizes"]}
    assert sizes == {1 << 16}, "the pool was not used again"


@pytest.mark.gloo
@needs_shared
def test_the_pool_is_used_again_and_grows(found):
    for rank, answer in enumerate(answers["pool"] for answers in found):
        (num_places, before), with_half, after = answer["found"]
        assert num_places <= 2 and before == 1
        assert (with_half, after) == ((2, 3) if rank < 2 else (1, 2))
        assert answer["closed"] == "the memory of program lost is closed"


@pytest.mark.gloo
@needs_shared
def test_updates_by_many_threads_of_many_ranks_lose_nothing(found):
    answers = [rank["stress"] for rank in found]
    assert [answer["errors"] for answer in answers] == [[]] * 4
    for rank, answer in enumerate(answers):
        expected = sum(np.array(other["added"][rank]) for other in answers)
        np.testing.assert_array_equal(np.array(answer["total"]), expected)
        assert np.abs(expected).sum() > 0


@pytest.mark.gloo
@needs_shared
def test_sums_have_the_same_bits_in_every_run_unless_in_order_of_arrival(found):
    sums = found[0]["repeats"]
    assert all(run == sums["fixed"][0] for run in sums["fixed"])
    assert any(run != sums["arrival"][0] for run in sums["arrival"]), "the numbers make no difference"


@pytest.mark.gloo
@needs_shared
@pytest.mark.parametrize("where", ["between ops", "in an update"])
def test_a_rank_that_is_killed_is_named_by_all_and_leaves_nothing(where):
    with pytest.raises(RankLostError, match=r"^rank 2 was killed by SIGKILL$") as caught:
        remote("dies", {"where": where}, stale_s=1.0)
    assert caught.value.missing == (2,)
    words = [caught.value.reports[rank] for rank in (0, 1, 3)]
    for said in words:
        assert said.startswith("rank 2 stopped answering while waiting for "), said
    assert any("in lane net" in said for said in words)
    if Path("/dev/shm").is_dir():
        assert not [path for path in Path("/dev/shm").iterdir() if "meshweave" in path.name]


DIFFERENT = [
    ([1, 3], ("8, 4", "12, 4"), r"different programs: ranks 0 and 2 'lost' \(\w+\), ranks 1 and 3 'lost' "),
    ([3], ('"lost"', '"found"'), r"ranks 0, 1 and 2 'lost' \(\w+\), rank 3 'found' \(\w+\)$"),
    (
        [0],
        ("mesh((4,)", "mesh((3,)"),
        r"^rank \d waits with ranks \(0, 1, 2(, 3)?\) for all to agree on .*, rank \d with ranks \(0, 1, 2",
    ),
]


@pytest.mark.gloo
@needs_shared
def test_ranks_that_bind_different_programs_are_told():
    found = remote("agreed", {"cases": [(ranks, change) for ranks, change, _ in DIFFERENT]})
    for answer in found:
        assert answer["agreed"].startswith(
            "ranks are about to run different programs: ranks 0, 1 and 2 'lost' ("
        )
        assert len(answer["differ"]) == len(DIFFERENT)
        for said, (_, _, message) in zip(answer["differ"], DIFFERENT, strict=True):
            assert re.search(message, said), said


# --- in this process -------------------------------------------------------------------------------------


def test_what_the_tests_run_is_valid():
    for name in PROGRAMS:
        validate(program_of(name), labels=name != "views")  # these add up elements of all sorts


def test_fences_and_flags_are_the_same_list_everywhere():
    views = program_of("views")
    assert fence_groups(views) == [(0, 1, 2, 3), (0, 1), (2, 3)]
    assert not any(isinstance(op, Fence) for op in without_fences(views).ops())
    assert len(list(without_fences(views).ops())) == len(list(views.ops())) - 3
    assert completion_counters(program_of("universal_b"), in_arrival_order=True).totals == {}
    for in_arrival_order in (False, True):
        counters = completion_counters(program_of("t3_ring"), in_arrival_order=in_arrival_order)
        assert {(rank, 2) for rank in range(4)}.isdisjoint(counters.to_start)
        counted = [counter for to in counters.counts.values() for counter in to]
        assert {counter: counted.count(counter) for counter in counted} == counters.totals
        awaited = [
            (reader, count)
            for each in (counters.to_start, counters.to_update)
            for (reader, _), counts in each.items()
            for count in counts
        ]
        assert {(reader, count.counter) for reader, count in awaited} == counters.totals.keys()
        assert all(0 < count.needed <= counters.totals[reader, count.counter] for reader, count in awaited)
        assert counters.num_counters() > 1


def test_updates_of_the_same_elements_wait_for_each_other_in_one_order():
    program = program_of("universal_b")
    counters = completion_counters(program)
    before = update_order(program)
    assert counters.to_update.keys() == before.keys() and not counters.to_start
    ops = program.ops_by_rank
    updates = [
        ((rank, index), view)
        for rank in ops
        for index, bound in enumerate(ops[rank])
        for mode, view in bound.op.accesses()
        if mode == UPDATE
    ]

    def ordered(first, second):
        same_lane = first[0] == second[0] and first[1] < second[1]
        return same_lane or any(ordered(first, node) or node == first for node in before.get(second, ()))

    clashes = [
        (one, other)
        for (one, view), (other, other_view) in itertools.combinations(updates, 2)
        if one[0] != other[0] and view.rank == other_view.rank and view.overlaps(other_view)
    ]
    assert clashes and all(ordered(one, other) != ordered(other, one) for one, other in clashes)


def test_one_rank_needs_no_partner():
    text = """
program("alone")
q = mesh((1,), ("x",))
X = tensor((4, 6), "int64")
x = input(X, q[R])
y = output(X, q[R])
net = lane()
with q:
    zero(y, lane=net)
    fence(over="q", lane=net)
    put(at(rank, y[:, :2]), x[:, 1:3], lane=net)
    accumulate(at(0, y[:, 2:]), x[:, 2:], lane=net)
    fence(over="q", lane=net)
    accumulate(at(0, y[:1, :]), x[1:2, :], op="max", lane=net)
"""
    if why_unavailable():
        pytest.skip(f"shared memory {why_unavailable()}")
    context = TorchContext(deadline_s=1.0)
    x = torch.arange(24).reshape(4, 6)
    y = torch.zeros(4, 6, dtype=torch.int64)
    with open_memory("shared", context, pool_bytes=1 << 12) as memory:
        bound = bind(parse(text), 0, {"x": x, "y": y}, context=context, memory=memory)
        bound.run()
        expected = torch.cat([x[:, 1:3], x[:, 2:]], 1)
        expected[0] = torch.maximum(expected[0], x[1])
        assert torch.equal(y, expected) and bound.outputs["y"].data_ptr() == y.data_ptr()
        bound.run({"x": torch.ones(4, 6, dtype=torch.int64)})
        assert (y == 1).all() and (x == 1).all()
        with pytest.raises(BindError, match="cannot use this memory: it is that of rank 0"):
            bind(parse(text.replace("(1,)", "(2,)")), 1, {}, context=context, memory=memory)
    with pytest.raises(BindError, match="cannot use this memory: it is closed"):
        bind(parse(text), 0, {"x": x}, context=context, memory=memory)


def test_a_reduction_that_does_not_exist_is_refused_at_bind():
    text = """
program("alone")
q = mesh((1,), ("x",))
X = tensor((4,), "int64")
y = output(X, q[R])
net = lane()
with q:
    accumulate(at(0, y), y, op="mum", lane=net)
"""
    if why_unavailable():
        pytest.skip(f"shared memory {why_unavailable()}")
    context = TorchContext(deadline_s=1.0)
    with (
        open_memory("shared", context) as memory,
        pytest.raises(UnsupportedError, match=r"there is no reduction 'mum' \(did you mean 'sum'\?\)"),
    ):
        bind(parse(text), 0, {}, context=context, memory=memory)


def test_what_is_not_available_says_so_in_one_line(monkeypatch):
    context = TorchContext()
    with pytest.raises(BindError, match=r"there is no memory 'shard' \(did you mean 'shared'\?\)"):
        open_memory("shard", context)
    with pytest.raises(
        UnsupportedError, match=r"^symmetric memory needs CUDA, this context's tensors are on cpu$"
    ):
        open_memory("symmetric", context)
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(UnsupportedError, match=r"^MPI memory needs mpi4py: pip install 'meshweave\[mpi\]'$"):
        open_memory("mpi", context)
    monkeypatch.setattr(sys, "platform", "plan9")
    with pytest.raises(UnsupportedError, match=r"^shared memory needs Linux \(memfd\), this is plan9$"):
        open_memory("shared", context)


def test_agreement_without_a_process_group_is_refused():
    with pytest.raises(BindError, match=r"no way to talk \(all to agree on program .*\): initialise"):
        agree(TorchContext(), program_of("universal_b"))


def test_blocks_of_a_pool():
    segment = Segment(0, 8 * ALIGN, frozenset({0, 1}))
    starts = [segment.take(2 * ALIGN) for _ in range(4)]
    assert starts == [0, 2 * ALIGN, 4 * ALIGN, 6 * ALIGN] and segment.take(ALIGN) is None
    for start in (4 * ALIGN, 0, 2 * ALIGN):
        segment.give_back(start, 2 * ALIGN)
    assert take([segment], 6 * ALIGN, (0, 2)) is None
    assert take([segment], 6 * ALIGN, (0, 1)) == (segment, 0)
    assert segment.take(1) is None


# --- MPI -------------------------------------------------------------------------------------------------


def mpiexec():
    """The launcher that belongs to the mpi4py of this interpreter."""
    beside = Path(sys.executable).with_name("mpiexec")
    return str(beside) if beside.exists() else shutil.which("mpiexec")


def needs_mpi():
    pytest.importorskip("mpi4py", reason="needs mpi4py: pip install 'meshweave[mpi]'")
    if mpiexec() is None:
        pytest.skip("needs mpiexec")


@pytest.mark.mpi
def test_over_mpi():
    needs_mpi()
    # Ranks of MPI wait by asking again and again: they leave the cores to who has work.
    command = ["nice", "-n", "5", mpiexec(), "-n", "4", sys.executable, str(HERE / "mpi_ranks.py")]
    environment = {**os.environ, "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1", "UCX_LOG_LEVEL": "error"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == ["right"], done.stdout + done.stderr


# --- symmetric memory --------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_over_symmetric_memory():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    env = {**ENV, "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
    payload = {"kind": "symmetric", "programs": PROGRAMS}
    found = launch("memory_rank_functions:compare_on_gpu", 4, payload, env=env, timeout_s=200.0)
    assert [rank["wrong"] for rank in found] == [[]] * 4
