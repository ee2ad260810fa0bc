"""Following a skeleton: jumps change nothing, and lower bounds are lower bounds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from meshweave.estimate import TimedSkeleton, skeleton_ps
from meshweave.estimate.timeline import task_spans
from meshweave.ir.skeleton import Phase, Skeleton, Task
from meshweave.ir.work import Compute, Work
from sampling import examples

NAMES = "abcde"


def amount(work: Work) -> int:
    assert isinstance(work, Compute)
    return work.flops


@st.composite
def skeletons(draw: st.DrawFn) -> Skeleton:
    """Phases of different tasks, which wait for tasks of this and of up to four turns back."""
    phases = []
    for _ in range(draw(st.integers(1, 4))):
        names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True))
        tasks = []
        for i, name in enumerate(names):
            back = st.tuples(st.sampled_from(NAMES), st.integers(1, 4))
            here = st.tuples(st.sampled_from(names[:i]), st.just(0)) if i else back
            after = tuple(draw(st.lists(back | here, max_size=2)))
            work = Compute("matmul", flops=draw(st.integers(0, 6)))
            tasks.append(Task(name, draw(st.sampled_from("xyz")), work, after, draw(st.integers(1, 3))))
        phases.append(Phase(draw(st.sampled_from([1, 2, 3, 5, 9, 40, 70])), tuple(tasks)))
    return Skeleton(tuple(phases))


def followed(skeleton: Skeleton) -> int:
    """Turn by turn, by the definition of a skeleton."""
    past: list[dict[str, int]] = []
    lanes: dict[str, int] = {}
    for phase in skeleton.phases:
        for _ in range(phase.turns):
            finish: dict[str, int] = {}
            for task in phase.tasks:
                waits = [lanes.get(task.lane, 0)]
                for name, distance in task.after:
                    if distance == 0:
                        waits.append(finish[name])
                    elif distance <= len(past):
                        waits.append(past[-distance].get(name, 0))
                finish[task.name] = lanes[task.lane] = max(waits) + task.times * amount(task.work)
            past.append(finish)
    return max(lanes.values())


@examples(500)
@given(skeletons())
def test_jumping_over_steady_turns_changes_nothing(skeleton: Skeleton) -> None:
    assert skeleton_ps(skeleton, amount) == followed(skeleton)


@examples(100)
@given(skeletons())
def test_the_longest_lane_is_a_lower_bound(skeleton: Skeleton) -> None:
    timed = TimedSkeleton(skeleton, amount)
    assert timed.lower_bound_ps() <= timed.total_ps()


@examples(100)
@given(skeletons())
def test_spans_of_tasks_end_when_the_skeleton_does(skeleton: Skeleton) -> None:
    spans = task_spans(skeleton, amount)
    assert spans is not None
    assert max(span.end_ps for span in spans) == skeleton_ps(skeleton, amount)
    assert len(spans) == sum(phase.turns * len(phase.tasks) for phase in skeleton.phases)
    free: dict[str, int] = {}
    for span in spans:
        assert span.end_ps - span.begin_ps == span.task.times * amount(span.task.work)
        assert span.begin_ps >= free.get(span.task.lane, 0)
        free[span.task.lane] = span.end_ps


def test_a_phase_is_not_steady_because_of_the_phase_before_it() -> None:
    """The first turn after a phase that had more to do in a lane shifts by more than the turns to come."""
    x, y = (Task(name, "lane", Compute("matmul", flops=flops)) for name, flops in (("x", 1), ("y", 10)))
    assert skeleton_ps(Skeleton((Phase(1, (x, y)), Phase(5, (x,)))), amount) == 16


def test_lanes_that_drift_apart_are_jumped_over() -> None:
    """As a ring that is faster than the products: a million turns, and no one amount by which they shift."""
    ring = Task("steps", "row", Compute("matmul", flops=2))
    product = Task("matmul", "compute", Compute("matmul", flops=3), (("steps", 0),))
    assert skeleton_ps(Skeleton((Phase(10**15, (ring, product)),)), amount) == 2 + 3 * 10**15
