"""The timeline of a skeleton: the same time as its estimate, whatever the skeleton."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from meshweave.algorithms.matmul2d import Matmul2dConfig, Matmul2dProblem
from meshweave.algorithms.table import PRODUCTS_2D
from meshweave.base.errors import UnsupportedError
from meshweave.base.units import to_s
from meshweave.cost.machine import Machine, mesh_machine
from meshweave.describe.machine.cluster import load_cluster
from meshweave.describe.machine.network import with_axes
from meshweave.estimate import estimate_skeleton
from meshweave.estimate.timeline import MAX_TASKS, timeline
from meshweave.ir.skeleton import Part, Phase, Skeleton, Task
from meshweave.ir.work import Compute, Transfer, Work, matmul_work, move_work
from sampling import examples

POD = load_cluster("tpu-v4-pod:16")
AXES = ("row", "col", "depth")
MESHES = {
    name: [shape for n in range(1, 17) for shape in entry.mesh_shapes(n)]
    for name, entry in PRODUCTS_2D.items()
}


def machine_of(shape: tuple[int, ...]) -> Machine:
    return mesh_machine(POD, shape, AXES[: len(shape)])


@pytest.mark.parametrize("name", sorted(PRODUCTS_2D))
@examples(40, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_it_takes_what_is_estimated(name: str, data: st.DataObject) -> None:
    """To the picosecond, in every algorithm, for products of uneven sizes too."""
    entry, size = PRODUCTS_2D[name], st.integers(1, 20_000)
    problem = Matmul2dProblem(
        *data.draw(st.tuples(size, size, size)),
        data.draw(st.sampled_from(MESHES[name])),
        data.draw(st.sampled_from(entry.dataflows)),
        data.draw(st.sampled_from(["bfloat16", "float32"])),
    )
    widths = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=min(40, problem.sliced_size)))
    config = Matmul2dConfig(tuple(widths), packets=data.draw(st.integers(1, 4)))
    skeleton, machine = entry.skeleton(problem, config), machine_of(problem.mesh_shape)
    drawn, estimated = timeline(skeleton, machine), estimate_skeleton(skeleton, machine)
    assert drawn.duration_s == estimated.total_s
    assert drawn.source == "estimate" and {span.rank for span in drawn.spans} <= {0}
    by_kind = {"compute": 0, "move": 0, "communicate": 0}
    ends: dict[str, int] = {}
    for span in drawn.spans:
        assert span.start_ps >= ends.get(span.lane, 0)  # a lane does one thing at a time
        ends[span.lane] = span.end_ps
        by_kind[span.activity] += span.end_ps - span.start_ps
    assert to_s(by_kind["compute"]) == estimated.compute_s and to_s(by_kind["move"]) == estimated.copy_s
    assert 0 <= drawn.overlap_s(0) <= estimated.compute_s


@st.composite
def chained(draw: st.DrawFn, depth: int = 1) -> Skeleton:
    """Chains, permutes, collectives and products, in phases of some turns; parts stand between tasks."""
    phases = []
    for _ in range(draw(st.integers(1, 3))):
        turns = draw(st.integers(1, 5))
        tasks: list[Task | Part] = []
        for number in range(draw(st.integers(1, 5))):
            names = [task.name for task in tasks]
            name = str(number)
            if depth and turns == 1 and draw(st.integers(0, 3)) == 0:
                after = tuple(
                    (lane, tuple(draw(st.lists(st.sampled_from(names), max_size=2)) if names else ()))
                    for lane in "xy"
                )
                tasks.append(Part(name, draw(chained(depth - 1)), after))
                continue
            after = draw(st.lists(st.tuples(st.sampled_from("01234"), st.integers(1, 3)), max_size=2))
            after += [(other, 0) for other in names if draw(st.booleans())]
            times, lane = draw(st.integers(1, 3)), draw(st.sampled_from("xyz"))
            axis, roots = draw(st.sampled_from(["row", "col"])), ()
            kind = draw(st.sampled_from(["broadcast", "reduce", "all_gather", "permute", "mesh", "product"]))
            if kind == "product":
                work: Work = Compute("matmul", flops=draw(st.integers(0, 10**9)))
            elif kind == "mesh":
                work = Transfer("all_gather", "tp", 12, draw(st.integers(0, 10**6)))
            else:
                size = SIZES[axis]
                work = Transfer(
                    kind, f"tp.{axis}", size, draw(st.integers(0, 10**6)), draw(st.integers(1, 4))
                )
                if kind in ("broadcast", "reduce"):
                    count = times * turns
                    roots = tuple(draw(st.lists(st.integers(0, size - 1), min_size=count, max_size=count)))
            tasks.append(Task(name, lane, work, tuple(after), times, roots))
        phases.append(Phase(turns, tuple(tasks)))
    return Skeleton(tuple(phases))


SIZES = {"row": 4, "col": 3}


@pytest.mark.parametrize(("send_buffer_bytes", "burst_bytes"), [(0, 0), (300_000, 0), (300_000, 200_000)])
@examples(100, suppress_health_check=[HealthCheck.too_slow])
@given(skeleton=chained())
def test_the_core_follows_chains_as_the_timeline_does(
    skeleton: Skeleton, send_buffer_bytes: int, burst_bytes: int
) -> None:
    network = with_axes(POD.network, lambda axis: replace(axis, burst_bytes=burst_bytes))
    cluster = replace(POD, network=network, send_buffer_bytes=send_buffer_bytes)
    machine = mesh_machine(cluster, (4, 3), AXES[:2])
    assert timeline(skeleton, machine).duration_s == estimate_skeleton(skeleton, machine).total_s


def test_tasks_wait_for_those_of_earlier_turns() -> None:
    """A double-buffered pipeline: the third copy waits for the first product."""
    copy = Task("copy", "row", move_work(1000, "int8"), (("matmul", 2),))
    product = Task("matmul", "compute", matmul_work(100, 100, 100, "float32"), (("copy", 0),))
    drawn = timeline(Skeleton((Phase(2, (copy, product)), Phase(2, (copy, product)))), machine_of((1, 1)))
    spans = {span.label: span for span in drawn.spans}
    assert list(spans) == [f"{name} {turn}" for turn in range(4) for name in ("copy", "matmul")]
    assert spans["copy 1"].start_ps == spans["copy 0"].end_ps
    assert spans["copy 2"].start_ps == max(spans["matmul 0"].end_ps, spans["copy 1"].end_ps)
    assert spans["copy 3"].start_ps == max(spans["matmul 1"].end_ps, spans["copy 2"].end_ps)


def test_too_long_a_skeleton_is_refused_at_once() -> None:
    task = Task("matmul", "compute", Compute("matmul", flops=1))
    with pytest.raises(UnsupportedError, match=f"^a timeline of {10**15} tasks .* {MAX_TASKS} at most$"):
        timeline(Skeleton((Phase(10**15, (task,)),)), machine_of((1, 1)))
    assert timeline(Skeleton(()), machine_of((1, 1))).duration_s == 0.0
