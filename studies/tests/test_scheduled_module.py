"""The reader of scheduled modules, on texts that XLA's compiler for TPUs wrote, less what the reader ignores."""

from __future__ import annotations

from pathlib import Path

import pytest

import meshweave as mw
from meshweave.base.errors import UnsupportedError
from meshweave.cost.machine import Machine
from meshweave.ir.analysis.validate import validate
from meshweave_studies.tpu.compiled import EMISSIONS, emission_named, schedule_time, target_cluster
from meshweave_studies.tpu.scheduled_module import ModuleCollective, ScheduledModule
from meshweave_studies.tpu.targets import TPU_TARGETS

MODULES = Path(__file__).parent / "modules"
AXES = (("row", 4), ("col", 4))


def module(name: str) -> ScheduledModule:
    return ScheduledModule((MODULES / f"{name}.txt").read_text())


def test_fused_gathers_have_the_product_that_carries_them() -> None:
    """Four slices: five of eight gathers run alone, three inside one product each."""
    read = module("fused_gathers_v5e")
    assert [one.mode for one in read.collectives] == ["synchronous"] * 5 + ["fused"] * 3
    assert [one.axis(AXES) for one in read.collectives] == ["col", "row"] * 2 + ["col", "row", "col", "row"]
    assert {(one.kind, one.part_bytes, one.sent_bytes) for one in read.collectives} == {
        ("all_gather", 1024 * 256 * 2, 3 * 1024 * 256 * 2)
    }
    assert [product.cycles for product in read.products] == [16640, 16640, 16640, 24051]
    assert [one.products for one in read.collectives[5:]] == [(read.products[at],) for at in range(3)]
    assert read.num_exposed_within == 0


def test_permutes_run_beside_products() -> None:
    """Wang as the compiler left it: all permutes before the first product, and a gather that runs alone."""
    read = module("wang_v4")
    assert [(one.kind, one.mode) for one in read.collectives] == [
        *[("permute", "asynchronous")] * 3,
        ("all_gather", "synchronous"),
    ]
    assert all(not one.products for one in read.collectives)


def test_rings_of_meshslice_run_beside_products() -> None:
    """The emission `rings` on v4: after the prologue every permute has a product between start and done.

    The prologue is the ring of the first slice along both axes, and the first step of the second slice.
    """
    read = module("rings_v4")
    beside = [len(one.products) for one in read.collectives]
    assert len(beside) == 24 and beside[:8] == [0] * 8 and all(beside[8:])
    assert read.num_exposed_within == 0 and len(read.products) == 8


@pytest.mark.parametrize("name", ["fused_v4", "fused_v5e"])
def test_all_gathers_but_the_first_of_each_axis_run_in_products(name: str) -> None:
    """The emission `fused`: six of eight gathers have a product each; two come before the first product."""
    read = module(name)
    assert [one.mode for one in read.collectives] == ["synchronous"] * 2 + ["fused"] * 6
    assert {one.axis(AXES) for one in read.collectives[:2]} == {"row", "col"}
    hosts = [one.products for one in read.collectives[2:]]
    assert hosts == [(product,) for product in read.products[:6]] and len(read.products) == 8
    assert read.num_exposed_within == 0


def test_all_permutes_but_the_first_ring_of_each_axis_run_beside_products() -> None:
    """The emission `ordered-rings` on v4: 18 of 24 permutes; the others are the rings of the first slice."""
    read = module("ordered_rings_v4")
    beside = [len(one.products) for one in read.collectives]
    assert len(beside) == 24 and beside[:6] == [0] * 6 and all(beside[6:])
    assert [one.axis(AXES) for one in read.collectives[:6]].count("row") == 3
    assert read.num_exposed_within == 0 and len(read.products) == 12


def test_the_time_follows_cycles_and_links() -> None:
    """A schedule takes at least its fusions; what is exposed are transfers, of all collectives at most."""
    target = TPU_TARGETS["tpu-v5e"]
    problem = mw.algorithms.Matmul2dProblem(4096, 4096, 4096, (4, 4), dtype="bfloat16")
    program = mw.algorithm("meshslice").program(problem, mw.algorithms.Matmul2dConfig((1,) * 4))
    machine = Machine.of(target_cluster(target, 16), program)
    read = module("fused_gathers_v5e")
    time = schedule_time(read, machine, target.cycles_per_s)
    cycles = sum(product.cycles for product in read.products)
    assert time.product_s == pytest.approx(cycles / 1.5e9)
    each = 3 * 1024 * 256 * 2 / 100e9  # both directions of the ring
    # Three col and two row gathers run alone, one after the other; the fused ones are hidden in part.
    hidden = [max(each - 16640 / 1.5e9, 0) for _ in range(3)]
    assert time.exposed_s == pytest.approx(5 * each + sum(hidden), rel=0.01)
    assert time.total_s == pytest.approx(time.product_s + time.other_s + time.exposed_s)


def test_groups_lie_along_axes() -> None:
    def axis(*group: int) -> str:
        return ModuleCollective("x", "all_gather", "synchronous", 8, group).axis(AXES)

    assert axis(0, 1, 2, 3) == "col" and axis(0, 4, 8, 12) == "row" and axis(0, 5) == ""


LOOP = """HloModule loop, is_scheduled=true
%body (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %ag = f32[32]{0} all-gather(%p), replica_groups=[4,4]<=[4,4]T(1,0), dimensions={0}
  ROOT %f = f32[8]{0} fusion(%ag), kind=kLoop, calls=%inner, backend_config={"estimated_cycles":"7"}
}
%inner (q: f32[32]) -> f32[8] {
  ROOT %c = f32[8]{0} convolution(%q, %q)
}
%cond (p: f32[8]) -> pred[] {
  ROOT %t = pred[] constant(true)
}
ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  ROOT %w = f32[8]{0} while(%a), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"3"}}
}
"""


def test_loops_are_written_out() -> None:
    read = ScheduledModule(LOOP)
    assert [product.cycles for product in read.products] == [7, 7, 7]
    assert [one.group for one in read.collectives] == [(0, 4, 8, 12)] * 3
    assert [one.part_bytes for one in read.collectives] == [32] * 3
    with pytest.raises(UnsupportedError, match="no known number of turns"):
        ScheduledModule(LOOP.replace("known_trip_count", "other")).events  # noqa: B018
    with pytest.raises(UnsupportedError, match="is_scheduled"):
        ScheduledModule("HloModule x\n")


@pytest.mark.parametrize("name", EMISSIONS)
@pytest.mark.parametrize("dataflow", ["os", "ls", "rs"])
def test_emissions_keep_the_meaning(name: str, dataflow: mw.Dataflow) -> None:
    """Rings, parts and order change no result: each program is proved again."""
    problem = mw.algorithms.Matmul2dProblem(22, 13, 18, (2, 3), dataflow)
    validate(
        emission_named(name).program(
            mw.algorithm("meshslice").program(problem, mw.algorithms.Matmul2dConfig((1,) * 3, 2))
        )
    )


def test_unknown_emissions_are_named() -> None:
    with pytest.raises(UnsupportedError, match="did you mean 'rings'"):
        emission_named("ring")
