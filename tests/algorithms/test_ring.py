"""Rings beside products: the steps of one turn are one operation."""

from __future__ import annotations

from itertools import groupby

import pytest

from meshweave.algorithms.matmul import ALGORITHMS, Config, MatmulProblem
from meshweave.cost.machine import Machine
from meshweave.cost.price import price
from meshweave.describe.cluster import load_cluster
from meshweave.ir.ops import Permute, Step
from meshweave.ir.work import work_of


@pytest.mark.parametrize("turns", [2, 3, 4, 8])
@pytest.mark.parametrize("dataflow", ["os", "ls", "rs"])
def test_as_many_launches_as_turns_that_move_something(dataflow: str, turns: int) -> None:
    """MeshSlice, section 4.2: turn 0 moves nothing, and each further one pays for a launch once."""
    problem = MatmulProblem(64, 64, 64, (1, 8), dataflow)  # type: ignore[arg-type]
    program = ALGORITHMS["wang"].program(problem, Config((1,) * turns))
    machine = Machine.of(load_cluster("tpu-v4-pod:8"), program)
    moves = [bound.op for bound in program.on_rank(0) if isinstance(bound.op, Permute)]
    launches = [price(work_of(program, op), machine).launch_ps for op in moves]
    assert len(moves) == 7
    assert len([launch for launch in launches if launch]) == turns - 1


def test_a_turn_of_one_step_is_a_plain_permute() -> None:
    program = ALGORITHMS["wang"].program(MatmulProblem(64, 64, 64, (1, 8)), Config((1,) * 5))
    steps = [bound.op.step for bound in program.on_rank(0) if isinstance(bound.op, Permute)]
    groups = [list(group) for _, group in groupby(steps, key=lambda step: step is None)]
    pair = [Step("send_recv", 0, 2), Step("send_recv", 1, 2)]
    assert groups == [3 * pair, [None]]
