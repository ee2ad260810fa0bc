"""One GPU that stands for all, against the whole ring; equal runs; what memory does not bind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gpu_programs import LINK, fused, sequential, small_gpu
from meshweave.base.errors import UnsupportedError
from meshweave.cost.machine import Machine
from meshweave.describe.machine.cluster import load_cluster
from meshweave.describe.machine.gpu import load_gpu
from meshweave.ir.program.parse import parse
from meshweave.simulate import simulate
from meshweave_studies.gpu import Arbiter, GpuRun, lower, run, simulate_in_detail
from meshweave_studies.gpu.run import ProgramFault, columns_of, run_gpus

MAKERS = {"sequential": sequential, "fused": fused}
UNEVEN = parse((Path(__file__).parents[2] / "tests" / "golden" / "t3_ring.txt").read_text())
ALL_TO_ALL = parse("""
program("exchange")
tp = mesh((4,), ("x",))
s = scratch((8, 32), "float16", on=tp)
g = scratch((32, 8), "float16", on=tp)
l = lane()
with tp:
    all_to_all(g, s, over="tp.x", split_dim=1, concat_dim=0, lane=l)
""")
POLICIES = {"round-robin": Arbiter(), "communication-aware": Arbiter("communication-aware")}


def simulated(name: str, policy: str, num_ranks: int, num_gpus: int) -> GpuRun:
    gpu = small_gpu()
    kernels = lower(MAKERS[name](64 * num_ranks, 96, 64, num_ranks), gpu)
    return run(kernels, gpu, arbiter=POLICIES[policy], num_gpus=num_gpus, **LINK)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", MAKERS)
def test_one_gpu_stands_for_the_whole_ring(name: str, policy: str, num_ranks: int) -> None:
    one, ring = (simulated(name, policy, num_ranks, count) for count in (1, num_ranks))
    assert one.spans == ring.spans
    assert one.traffic_bytes == ring.traffic_bytes and one.counters == ring.counters
    np.testing.assert_array_equal(one.traffic_over_time, ring.traffic_over_time)


@pytest.mark.parametrize("name", MAKERS)
def test_equal_inputs_give_equal_runs(name: str) -> None:
    one, other = (simulated(name, "communication-aware", 4, 1) for _ in "ab")
    assert one.spans == other.spans and one.counters == other.counters
    np.testing.assert_array_equal(one.traffic_over_time, other.traffic_over_time)
    np.testing.assert_array_equal(one.queued, other.queued)


def test_a_run_ends_where_its_steps_end() -> None:
    gpu = small_gpu()
    columns = columns_of(lower(sequential(128, 64, 64, 2), gpu), gpu, 10**9, 500_000, Arbiter())
    with pytest.raises(ProgramFault, match="more steps"):
        run_gpus(columns, 1, 1000)


@pytest.mark.parametrize(("name", "m", "num_ranks"), [("sequential", 2048, 4), ("fused", 4096, 8)])
def test_both_levels_of_detail_agree_where_memory_does_not_bind(name: str, m: int, num_ranks: int) -> None:
    """With memory ten times as fast, and enough tiles for several rounds of all compute units."""
    program = MAKERS[name](m, 2560, 512, num_ranks)
    cluster = load_cluster(f"t3-8:{num_ranks}")
    quick = replace(cluster.chip, memory_bytes_per_s=10 * cluster.chip.memory_bytes_per_s)
    fast = simulate(program, Machine.of(replace(cluster, chip=quick), program))
    gpu = load_gpu(cluster.chip.gpu)
    memory = gpu.memory.model_copy(update={"clock_hz": 10 * gpu.memory.clock_hz})
    detailed = run(lower(program, gpu), gpu.model_copy(update={"memory": memory}), **LINK)
    assert detailed.duration_ps / 1e12 == pytest.approx(fast.duration_s, rel=0.03)


UNFIT = {
    "a torus": ("tpu-v4-pod:4", fused(64, 64, 64, 4), "stands in a ring or"),
    "half the ring": ("t3-8:8", fused(64, 64, 64, 4), "all 8 chips"),
    "uneven parts": ("t3-8:4", UNEVEN, "rank 1 has other ops or sizes"),
    "other ops": ("t3-8:4", ALL_TO_ALL, "this program has 'all_to_all'"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_what_is_not_run_in_detail_is_refused_with_what_to_do(name: str) -> None:
    cluster_name, program, reason = UNFIT[name]
    cluster = load_cluster(cluster_name)
    cluster = replace(cluster, chip=replace(cluster.chip, gpu="t3-80cu"))
    with pytest.raises(UnsupportedError, match=reason) as error:
        simulate_in_detail(program, Machine.of(cluster, program))
    assert "simulate --fast` runs it by the rates" in str(error.value) and "\n" not in str(error.value)
