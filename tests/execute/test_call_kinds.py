"""Arguments of another kind than a call takes are one line that names them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import pytest

import meshweave as mw
from meshweave.base.errors import MeshweaveError
from meshweave.execute.torch.world import join_ranks

PROBLEM = mw.algorithms.Matmul2dProblem(8, 8, 8, (2, 2))
NO_SECONDS: list[Any] = [
    0,
    -1.0,
    float("nan"),
    float("inf"),
    2**70,
    True,
    "3",
    None,
    timedelta(seconds=3),
    [1],
]
TIMES = ("timeout_s", "deadline_s", "grace_s", "interval_s", "stale_s")


@pytest.mark.parametrize("value", NO_SECONDS, ids=lambda value: type(value).__name__)
def test_a_time_is_seconds_above_0(value: Any) -> None:
    calls = [lambda: mw.TorchContext(liveness=False, deadline_s=value), lambda: join_ranks(deadline_s=value)]
    for name in TIMES:
        if (name, value) not in (("deadline_s", None), ("grace_s", 0)):
            calls.append(lambda name=name: mw.launch("json:dumps", 1, {}, **{"timeout_s": 9.0, name: value}))
    for call in calls:
        with pytest.raises(MeshweaveError, match="give seconds"):
            call()


def test_heartbeats_are_more_frequent_than_they_get_stale() -> None:
    with pytest.raises(MeshweaveError, match="longer stale_s"):
        mw.launch("json:dumps", 1, {}, timeout_s=9.0, interval_s=3.0)


@pytest.mark.parametrize(
    "value", [None, 3, 1.5, "text", (), object, np.float32(1)], ids=lambda value: type(value).__name__
)
def test_a_program_is_a_program(value: Any) -> None:
    cluster = mw.load_cluster("tpu-v4-pod:4")
    calls = (
        lambda: mw.simulate(value, cluster),
        lambda: mw.estimate(value, cluster),
        lambda: mw.Machine.of(cluster, value),
        lambda: mw.run_numpy(value, {}),
    )
    for call in calls:
        with pytest.raises(MeshweaveError, match="give a Program"):
            call()
    if not isinstance(value, str):
        with pytest.raises(MeshweaveError, match="give a str"):
            mw.parse(value)


def test_clusters_are_taken_by_name_wherever_they_are() -> None:
    by_name = mw.rank(PROBLEM, "tpu-v4-pod:4", algorithms=["collective"])
    assert by_name == mw.rank(PROBLEM, mw.load_cluster("tpu-v4-pod:4"), algorithms=["collective"])
    program = by_name[0].algorithm.program(PROBLEM, by_name[0].config)
    assert mw.Machine.of("tpu-v4-pod:4", program) == mw.Machine.of(mw.load_cluster("tpu-v4-pod:4"), program)
    for value in (None, 3, [1], {}):
        with pytest.raises(MeshweaveError, match="no cluster"):
            mw.rank(PROBLEM, value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "value", [1.5, "8", None, True, float("nan")], ids=lambda value: type(value).__name__
)
def test_numbers_of_a_config_are_whole(value: Any) -> None:
    for given in ({"block": value}, {"packets": value}, {"slices": value}, {"slices": (1, value)}):
        with pytest.raises(MeshweaveError):
            mw.algorithms.Matmul2dConfig(**given)
    for name in ("max_configs", "num_exact"):
        with pytest.raises(MeshweaveError, match=name):
            mw.rank(PROBLEM, "tpu-v4-pod:4", **{name: value})
