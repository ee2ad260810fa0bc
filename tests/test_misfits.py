"""What does not fit is refused where it is given, by the error that is documented and in its own words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import meshweave as mw
from meshweave.algorithms.block import BlockConfig, BlockProblem
from meshweave.algorithms.experts.routing import Routing
from meshweave.algorithms.pipeline.action_times import ActionTimes, time_schedule
from meshweave.algorithms.pipeline.by_name import ScheduleRequest, schedule_by_name
from meshweave.algorithms.reshard.plan import plan_reshard
from meshweave.algorithms.settings import problem_from_settings
from meshweave.algorithms.table import STRATEGIES
from meshweave.base.errors import (
    DescriptionError,
    LayoutError,
    MeshweaveError,
    ProgramError,
    UnsupportedError,
)
from meshweave.calibrate.device import calibrate_device
from meshweave.describe.machine.cluster import cluster_from
from meshweave.describe.machine.cluster_table import cluster_table
from meshweave.execute.cuda.tiling import block_of
from meshweave.execute.jax.devices import DeviceMesh
from meshweave.ir.program.release import Release

BLOCK = BlockProblem(4, 4, 8, 4, 4, 2, 8, (2, 1))
PRODUCT = mw.algorithm("collective").program(
    mw.algorithms.Matmul2dProblem(4, 4, 4, (2, 2)), mw.algorithms.Matmul2dConfig()
)


def _parts(name: str, problem: BlockProblem, **settings: str) -> object:
    return STRATEGIES[name].parts(problem, BlockConfig(), **settings)


def _with_kernels(name: str) -> object:
    table = cluster_table(mw.load_cluster("dgx-h100:8"), whole=False)
    return cluster_from(table | {"chip": table["chip"] | {"kernels": name}}, "my.toml")


@pytest.mark.parametrize(
    ("call", "error", "told"),
    [
        (lambda: _parts("zero1", BLOCK), UnsupportedError, "reduced after all backward parts"),
        (lambda: _parts("megatron", replace(BLOCK, training=False)), LayoutError, "without training"),
        (
            lambda: _parts("meshslice_block", replace(BLOCK, layers=2), recompute="selective"),
            UnsupportedError,
            "not computed again alone",
        ),
        (lambda: Routing("table", table=(0.0, 0.0)), LayoutError, "none below 0 and one above it"),
        (lambda: ActionTimes((1, 1), (1, 1), (1, 1), (0,), (1,)), LayoutError, "saved has 1 times"),
        (lambda: ActionTimes((1,), (1,), (1,), (), (3,)), LayoutError, "must not be negative"),
        (
            lambda: schedule_by_name("1f1b", ScheduleRequest(4, 4), ActionTimes.uniform(3)),
            LayoutError,
            "times are of 3 stages, and 4 are asked for",
        ),
        (
            lambda: problem_from_settings(STRATEGIES["megatron"], ["training=2"]),
            LayoutError,
            "give a value such as training=1",
        ),
        (lambda: plan_reshard(*_reshard(), message_bytes=0), LayoutError, "messages have 0 bytes"),
        (lambda: PRODUCT.local_shapes("zz"), ProgramError, "there is no buffer 'zz'"),
        (lambda: block_of([(8, 8, Release())], 8, 8), UnsupportedError, "not 8"),
        (lambda: DeviceMesh(PRODUCT, ("u",)), LayoutError, "has 2 axes, and 1 are named"),
        (lambda: calibrate_device("cpu", "float32", 3, 1, 0), DescriptionError, "give at least 20"),
        (lambda: _with_kernels("nonesuch"), DescriptionError, "my.toml: chip: 'nonesuch' is neither"),
    ],
)
def test_it_is_refused(call: Callable[[], object], error: type[MeshweaveError], told: str) -> None:
    with pytest.raises(error, match=told):
        call()


def _reshard() -> tuple[mw.algorithms.ReshardProblem, object]:
    problem = next(mw.algorithm("reshard_broadcast").examples())
    return problem, mw.load_cluster("dgx-h100:64")


def test_a_table_of_equal_weights_is_one() -> None:
    assert Routing("table", table=(1.0, 1.0)).draw(8, 1, 2).shape == (8, 1)


def test_a_whole_backward_takes_less_than_both_gradients() -> None:
    times = ActionTimes((1, 1), (2, 2), (2, 2), (0,), (1, 1))
    schedule = schedule_by_name("gpipe", ScheduleRequest(2, 1), times)
    timed = time_schedule(schedule, times)
    assert max(max(ends) for ends in timed.ends) == 2 * (1 + 2 + 2 - 1)


@pytest.mark.parametrize("key", ["step_s", "tokens_per_s_per_chip"])
def test_a_plan_file_without_time_is_refused(key: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    mw.plan("llama-2-7b", "dgx-h100:8", batch=8, sequence=2048, tp=8, micro_batch=1).save(path)
    text = path.read_text()
    begin = text.index(f'"{key}": ') + len(key) + 4
    path.write_text(text[:begin] + "0" + text[text.index(",", begin) :])
    with pytest.raises(DescriptionError, match="a finite number above 0"):
        mw.tune.load_plan(path)
