"""torch's CSV of actions: its own schedules come back as they were, and mistakes are named with row and column."""

from __future__ import annotations

import csv
import io
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipeline_schedules import KIND, named_schedules, sound_schedules
from schedule_reader import read_schedule

from meshweave.algorithms.pipeline import ENTRIES, PipelineProblem, pipeline_program
from meshweave.algorithms.pipeline.action_graph import TransferRuntime
from meshweave.algorithms.pipeline.actions import Action, Schedule
from meshweave.algorithms.pipeline.algorithm import PipelineConfig
from meshweave.algorithms.pipeline.dualpipe import dualpipe_v
from meshweave.algorithms.pipeline.examples import chain_of_ranks, small_stage
from meshweave.algorithms.pipeline.progress import prove_progress
from meshweave.algorithms.pipeline.torch_csv import schedule_from_csv, schedule_to_csv
from meshweave.algorithms.pipeline.transfer_order import list_transfers
from meshweave.algorithms.pipeline.zbv import zbv
from meshweave.base.errors import DescriptionError, LayoutError, UnsupportedError
from meshweave.describe.layout.mesh import Mesh
from meshweave.ir.program.text import to_text
from sampling import examples

pytest.importorskip("torch", reason="torch is not installed")
import torch_schedules

FEW = {
    "GPipe": [(1, 1, 1), (4, 1, 3)],
    "1F1B": [(3, 1, 4)],
    "LoopedBFS": [(2, 3, 3), (4, 2, 4)],
    "Interleaved1F1B": [(4, 2, 12), (2, 3, 4)],
    "InterleavedZeroBubble": [(4, 1, 12), (2, 2, 6)],
    "ZBVZeroBubble": [(4, 2, 3), (4, 2, 8)],
    "DualPipeV": [(1, 2, 2), (3, 2, 8)],
}


def without_idle_steps(text: str) -> str:
    """Return a CSV of torch without its empty cells, which is what `schedule_to_csv` writes."""
    rows = csv.reader(io.StringIO(text, newline=""))
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    return "".join(f"{','.join(row)}\r\n" for row in cells)


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp())
    yield path
    shutil.rmtree(path)


def check_torch_schedule(name: str, schedule: Any, folder: Path) -> None:
    text = torch_schedules.compute_only(schedule, folder)
    read = schedule_from_csv(text)
    assert schedule_to_csv(read) == without_idle_steps(text)
    # In torch 2.13 the last stage of this one counts its forwards from 1. torch draws the list and never runs it.
    sound = schedule_from_csv(shifted(text)) if name == "1F1B" else read
    if sound != read:
        with pytest.raises(LayoutError, match="has no forward"):
            prove_progress(read)
    listed = list_transfers(sound)
    for runtime in TransferRuntime:
        prove_progress(sound, runtime)
        prove_progress(listed, runtime)
    if name not in torch_schedules.SINGLE:
        text = torch_schedules.with_transfers(schedule, folder)
        read = schedule_from_csv(text)
        assert schedule_to_csv(read) == text
        for runtime in TransferRuntime:
            prove_progress(read, runtime)


def shifted(text: str) -> str:
    """Return the text with the forwards of its last row counted from 0."""
    *rows, last = text.splitlines()
    cells, forward = last.split(","), f"{len(rows)}F"
    counted = (f"{forward}{number}" for number in range(len(cells)))
    cells = [next(counted) if cell.startswith(forward) else cell for cell in cells]
    return "\r\n".join((*rows, ",".join(cells)))


@pytest.mark.parametrize("name", FEW)
def test_schedules_of_torch_come_back_and_are_proved(name: str, folder: Path) -> None:
    for sizes in FEW[name]:
        check_torch_schedule(name, torch_schedules.torch_schedule(name, *sizes), folder)


@pytest.mark.slow
def test_every_schedule_of_torch_comes_back_and_is_proved(folder: Path) -> None:
    seen = set()
    for name, schedule, _ in torch_schedules.cases():
        seen.add(name)
        check_torch_schedule(name, schedule, folder)
    assert seen == set(torch_schedules.ALL)


@pytest.mark.parametrize("sizes", [(1, 2), (2, 4), (4, 8), (5, 17)], ids=str)
def test_folded_schedules_are_those_of_torch(sizes: tuple[int, int], folder: Path) -> None:
    ranks, count = sizes
    for name, ours in (("ZBVZeroBubble", zbv(*sizes)), ("DualPipeV", dualpipe_v(*sizes))):
        theirs = torch_schedules.torch_schedule(name, ranks, 2, count)
        assert schedule_from_csv(torch_schedules.compute_only(theirs, folder)) == ours


def test_torch_reads_what_is_written(folder: Path) -> None:
    """torch loads our CSV of either form into a runtime, and lists the actions that were written."""
    runtime = torch_schedules.torch_schedule("ZBVZeroBubble", 3, 2, 7)
    ours = zbv(3, 7)
    (folder / "compute.csv").write_text(schedule_to_csv(ours), newline="")
    (folder / "transfers.csv").write_text(schedule_to_csv(list_transfers(ours)), newline="")
    runtime._load_csv(str(folder / "compute.csv"), format="compute_only")
    assert listed(runtime.pipeline_order) == listed(ours)
    runtime._load_csv(str(folder / "transfers.csv"), format="compute_comms")
    assert listed(runtime.pipeline_order_with_comms) == listed(list_transfers(ours))
    assert len(runtime._simulate()) == 3, "torch's own dry run ends too"


def listed(order: Any) -> list[list[str]]:
    """Return the actions of each rank as text, of a schedule or of torch's dictionary."""
    rows = order.actions if isinstance(order, Schedule) else [order[rank] for rank in sorted(order)]
    return [list(map(str, row)) for row in rows]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_programs_come_back_through_csv(entry: Any) -> None:
    """Program to CSV to Program: the same text, byte by byte; with transfers too."""
    for ranks in ((0, 1, 2), (0, 1, 1, 0), (0, 1, 0, 1)):
        problem = chain_of_ranks(ranks, 4)
        if entry.refusal(problem) is not None:
            continue
        schedule = entry.schedule(problem, PipelineConfig(delay=1))
        program = pipeline_program(problem, schedule)
        for listed in (False, True):
            text = schedule_to_csv(read_schedule(program, communication=listed))
            again = pipeline_program(problem, schedule_from_csv(text))
            assert to_text(again) == to_text(program)
            assert schedule_to_csv(read_schedule(again, communication=listed)) == text


@pytest.mark.parametrize("name", ["Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"])
def test_every_kind_of_action_has_a_counterpart_in_a_program(name: str, folder: Path) -> None:
    """Transfers, overlaps, gathered parameters and reductions of torch, through a Program, byte by byte."""
    text = torch_schedules.with_transfers(torch_schedules.torch_schedule(name, 2, 2, 4), folder)
    schedule = schedule_from_csv(text)
    meshes = [Mesh.of(f"p{rank}", (2,), ("dp",), 2 * rank) for rank in range(2)]
    stages = [small_stage(meshes[r], 2, data_axes=("dp",), is_sharded=True) for r in schedule.stage_ranks]
    program = pipeline_program(PipelineProblem.chain(stages, 4, 2, (2,)), schedule)
    assert schedule_to_csv(read_schedule(program, communication=True)) == text


@st.composite
def any_schedules(draw: st.DrawFn) -> Schedule:
    """Actions of any kind in any order: nothing needs to end. Each rank works on its own stage."""
    ranks = draw(st.integers(1, 4))
    orders = []
    for rank in range(ranks):
        m = st.integers(0, 3)
        single = st.sampled_from([kind for kind in KIND if kind.per_micro_batch])
        whole = st.sampled_from([KIND.UNSHARD, KIND.RESHARD, KIND.REDUCE_GRAD])
        parts = st.lists(
            st.builds(
                Action, st.sampled_from([KIND.FORWARD, KIND.BACKWARD, KIND.INPUT_GRAD]), st.just(rank), m
            ),
            min_size=2,
            max_size=3,
        )
        action = st.one_of(
            st.builds(Action, single, st.just(rank), m),
            st.builds(Action, whole, st.just(rank)),
            parts.map(lambda some: Action(KIND.OVERLAP, -1, None, parts=tuple(some))),
        )
        order = draw(st.lists(action, max_size=8))
        orders.append((*order, Action(KIND.FORWARD, rank, 3)))
    return Schedule(tuple(range(ranks)), 4, tuple(orders))


@examples(80)
@given(any_schedules())
def test_any_actions_come_back(schedule: Schedule) -> None:
    assert schedule_from_csv(schedule_to_csv(schedule)) == schedule


@examples(40)
@given(sound_schedules(), st.randoms(use_true_random=False))
def test_idle_steps_mean_nothing(schedule: Schedule, draw: Any) -> None:
    """Empty cells, spaces and other line ends leave the schedule as it was."""
    rows = []
    for order in schedule.actions:
        cells = [cell for action in order for cell in [""] * draw.randrange(3) + [f" {action} "]]
        rows.append(",".join([*cells, *[""] * draw.randrange(3)]))
    text = "\n".join(rows) + "\n\n"
    assert schedule_from_csv(text) == schedule
    assert without_idle_steps("\n".join(rows)) == schedule_to_csv(schedule)


def test_every_named_schedule_comes_back() -> None:
    for name, schedule in named_schedules((8,)):
        assert schedule_from_csv(schedule_to_csv(schedule)) == schedule, name


WRONG = {
    "": "plan.csv: no actions; a row is a rank, a cell an action such as 0F0",
    "0F0\n\n1F0": "plan.csv: row 2: rank 1 has no action; each row is a rank",
    "0F0,0X0": "plan.csv: row 1, column 2: '0X0' has no known kind: 'X'",
    "0F0,\n1F0,,1SEND_Q0": "row 2, column 3: '1SEND_Q0' has no known kind: 'SEND_Q' (did you mean 'SEND_",
    "0F": "row 1, column 1: '0F': F needs a micro-batch; right would be 0F0",
    "0UNSHARD3": "'0UNSHARD3': UNSHARD belongs to no micro-batch; right would be 0UNSHARD",
    "0F0x": "'0F0x' is no action; an action is STAGE KIND MICRO-BATCH such as 2F0",
    "F0": "'F0' is no action",
    "-1F0": "'-1F0' is no action",
    "0F0,(0F1;0B0)OVERLAP": "row 1, column 2: '(0F1;0B0)OVERLAP' is no overlap; right would be two actions",
    "(0F1)OVERLAP_F_B": "must have two compute actions or more",
    "(0F1;0SEND_F0)OVERLAP_F_B": "must have two compute actions or more",
    "0OVERLAP_F_B1": "'0OVERLAP_F_B1' has no known kind",
    "0F0,1F0\n0B0": "row 2, column 1: 0B0 works on stage 0, and row 1 does too (column 1); a stage belongs to one",
    "0F0\n2F0": "plan.csv: no action of stage 1, and there is stage 2; stages are numbered from 0 without gaps",
    "99999999999F0": "'99999999999F0' is no action",
}


@pytest.mark.parametrize(("text", "words"), WRONG.items(), ids=WRONG)
def test_mistakes_are_named_with_row_and_column(text: str, words: str) -> None:
    with pytest.raises(DescriptionError) as caught:
        schedule_from_csv(text, "plan.csv")
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_skip_connections_are_refused_with_the_reason() -> None:
    edges = ((0, 1), (1, 2), (0, 2))
    schedule = list_transfers(schedule_from_csv("0F0,0B0\n1F0,1B0\n2F0,2B0"), edges=edges)
    with pytest.raises(
        UnsupportedError, match="0SEND_F0 with stage 2, is a skip connection: torch's CSV names one"
    ):
        schedule_to_csv(schedule)
    named = replace(schedule, actions=((Action(KIND.SEND_FORWARD, 0, 0, 1),), *schedule.actions[1:]))
    assert schedule_to_csv(replace(named, actions=named.actions[:1])) == "0SEND_F0\r\n", (
        "a neighbour may be named"
    )
