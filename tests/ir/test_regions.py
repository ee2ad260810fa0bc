"""A product whose regions go to different memories: the ops that it stands for, its errors, one launch."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from meshweave.base.errors import ProgramError
from meshweave.cost.machine import Machine
from meshweave.describe.machine.cluster import load_cluster
from meshweave.estimate.uncontended import estimate
from meshweave.ir.program import Program
from meshweave.ir.program.parse import parse
from meshweave.ir.program.regions import EachRegion, LocalMap, product_statements
from meshweave.ir.program.release import Release
from meshweave.ir.program.text import to_text
from meshweave.ir.program.views import FULL, View
from meshweave.simulate import simulate
from plain_simulator import reference

HEAD = """program("regions")
tp = mesh((4,), ("x",))
a = scratch((8, 6), "float32", on=tp)
b = scratch((6, 4), "float32", on=tp)
x = scratch((8, 4), "float32", on=tp)
compute = lane()
dma = lane()
with tp:
"""
SHORT = """    product(a, b, (
        remote_map(at((tp.x + 1) % 4, x[0:2, :]), a=a[0:2, :]),
        *(dma_map(at((tp.x + 1) % 4, x[2 + 2 * s:4 + 2 * s, :]), x[2 + 2 * s:4 + 2 * s, :],
                  a=a[2 + 2 * s:4 + 2 * s, :], lane=dma) for s in range(2)),
        local(x[6:8, :], a=a[6:8, :])), release=release(tile=(2, 2), update=True), lane=compute)
"""
LONG = """    matmul(at((tp.x + 1) % 4, x[0:2, :]), a[0:2, :], b, release=release(tile=(2, 2), update=True),
           lane=compute, name="remote_map")
    for s in range(2):
        matmul(x[2 + 2 * s:4 + 2 * s, :], a[2 + 2 * s:4 + 2 * s, :], b,
               release=release(tile=(2, 2), update=True, joins=True), lane=compute)
        put(at((tp.x + 1) % 4, x[2 + 2 * s:4 + 2 * s, :]), x[2 + 2 * s:4 + 2 * s, :],
            release=release(update=True), lane=dma, name="dma_map")
    matmul(x[6:8, :], a[6:8, :], b, release=release(tile=(2, 2), update=True, joins=True), lane=compute)
"""
FAULTS = {
    "stands alone, outside of a loop": "product(a, b, (*(local(x[s:s + 1, :]) for s in range(8)),), lane=compute)",
    "has regions": "product(a, b, (), lane=compute)",
    "a region is no 'dma_mop' (did you mean 'dma_map'?)": "product(a, b, (dma_mop(x),), lane=compute)",
    "a region is remote_map, dma_map, local": "product(a, b, (x,), lane=compute)",
    "expected (target, via, lane, a, b)": "product(a, b, (dma_map(at(1, x), lane=dma),), lane=compute)",
    "'gone' is no lane": "product(a, b, (local(x),), lane=gone)",
}


def test_it_is_read_as_the_ops_that_it_stands_for() -> None:
    program = parse(HEAD + SHORT)
    assert program == parse(HEAD + LONG)
    assert parse(to_text(program)) == program


@pytest.mark.parametrize("message", FAULTS)
def test_errors_say_where_and_what(message: str) -> None:
    with pytest.raises(ProgramError, match=re.escape(message)) as error:
        parse(f"{HEAD}    {FAULTS[message]}\n")
    assert str(error.value).startswith("line 9, column ") and "\n" not in str(error.value)


def test_operands_of_a_region_are_those_of_the_product_unless_named() -> None:
    a, b, x = (View(name, (FULL, FULL)) for name in "abx")
    first, loop = product_statements(
        a, b, [LocalMap(target=x), EachRegion(LocalMap(target=x, b=x), "s", 3)], "l"
    )
    assert (first.a, first.b, first.release) == (a, b, Release())
    assert (loop.var, loop.count) == ("s", 3)
    (joined,) = loop.body
    assert (joined.a, joined.b, joined.release) == (a, x, Release(joins=True))


def of_regions(joins: bool) -> Program:
    text = HEAD + "".join(
        f"    matmul(x[{2 * row}:{2 * row + 2}, :], a[{2 * row}:{2 * row + 2}, :], b, "
        f"release=release(joins={joins and row > 0}), lane=compute)\n"
        for row in range(4)
    )
    return parse(text.replace("(4,)", "(1,)").replace("float32", "bfloat16"))


@pytest.mark.parametrize("cluster", ["t3-8:4", "dgx-h100"])
def test_a_product_is_launched_once_whatever_its_regions(cluster: str) -> None:
    """By the estimate and by both simulators, for rates and for prices by shape."""
    joined, apart = of_regions(True), of_regions(False)
    known = load_cluster(cluster)
    machine = Machine.of(replace(known, chip=replace(known.chip, launch_s=5e-6)), joined)
    times = [
        (reference.simulate(program, machine).duration_s, simulate(program, machine).duration_s)
        for program in (joined, apart)
    ]
    assert all(one == other for one, other in times)
    products = known.chip.kernels.product("bfloat16") if known.chip.kernels is not None else None
    launch_s = 5e-6 + (products.launch_s if products is not None else 0.0)
    assert times[1][0] - times[0][0] == pytest.approx(3 * launch_s, rel=1e-3)
    saved = estimate(apart, machine).total_s - estimate(joined, machine).total_s
    assert saved == pytest.approx(3 * launch_s, rel=1e-3)
