"""Calls are priced by kind, shape and dtype: counts, rates, and the same seconds in every reading."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from meshweave.base.errors import DescriptionError, UnsupportedError
from meshweave.calibrate.cluster_toml import to_toml
from meshweave.cost.calls import call_flops, engine_flops, with_counts
from meshweave.cost.compute import call_s
from meshweave.cost.machine import Machine, mesh_machine
from meshweave.cost.price import price
from meshweave.describe.machine.chip import WORK_KINDS, Chip
from meshweave.describe.machine.cluster import load_cluster
from meshweave.estimate import estimate
from meshweave.ir.program.call_dims import CALL_DIMS
from meshweave.ir.program.expressions import Var, evaluate
from meshweave.ir.program.parse import parse
from meshweave.ir.work import Compute, matmul_work, work_of
from meshweave.simulate import simulate
from plain_simulator.reference import simulate as simulate_reference

CHIP = Chip(
    "test",
    (("bfloat16", 1e12),),
    1e12,
    1 << 30,
    1e9,
    source="a test",
    dtype_flops_per_s=(("float32", 3e11),),
    call_flops_per_s=(("norm", 1e10),),
)
CLUSTER = replace(load_cluster("tpu-v4-pod:4"), chip=CHIP)

PROGRAM = """
program("calls")
tp = mesh((4,), ("x",))
x = scratch((8, 6), "bfloat16", on=tp)
y = scratch((8, 6), "float32", on=tp)
l = lane()
other = lane()
with tp:
    zero(x, lane=l)
    zero(y, lane=l)
    for i in range(3):
        call(fn="a", outs=(x,), ins=(x, y), work="attention", shape=(2, 4, 8 + i, 16, 32), lane=l)
        call(fn="n", outs=(y,), ins=(x,), work="norm", shape=(8 * (tp.x + 1), 6), lane=other)
        call(fn="e", outs=(y,), ins=(y,), work="elementwise", dtype="bfloat16", lane=l)
        call(fn="s", outs=(x,), ins=(x,), flops=1000000 + i, bytes=77, work="softmax", part="input_grad", lane=l)
        call(fn="o", outs=(x,), ins=(x,), flops=5000, bytes=0, lane=other)
"""


def test_the_kinds_of_work_have_sizes_and_may_have_rates() -> None:
    assert set(CALL_DIMS) == set(WORK_KINDS)


@pytest.mark.parametrize(
    ("work", "part", "shape", "flops"),
    [
        ("attention", "", (2, 3, 5, 7, 11), 2 * 3 * 5 * 7 * 49),
        ("attention", "input_grad", (2, 3, 5, 7, 11), 2 * 3 * 5 * 7 * 120),
        ("matmul", "weight_grad", (3, 4, 5), 120),
        ("norm", "forward", (3, 4), 84),
        ("norm", "input_grad", (3, 4), 168),
        ("loss", "", (3, 4), 60),
        ("elementwise", "", (9,), 9),
        ("reduction", "", (), 0),
        ("", "", (), 0),
    ],
)
def test_counts(work: str, part: str, shape: tuple[int, ...], flops: int) -> None:
    assert call_flops(work, part, shape) == flops
    symbols = [Var(f"s{i}") for i in range(len(shape))]
    env = {f"s{i}": size for i, size in enumerate(shape)}
    assert evaluate(call_flops(work, part, symbols), env) == flops
    assert with_counts(Compute("call", call=work, part=part, shape=shape)).flops == flops
    assert with_counts(Compute("call", 7, call=work, part=part, shape=shape)).flops == 7


def test_work_without_a_price() -> None:
    with pytest.raises(UnsupportedError, match="work 'dance' of 1 sizes has no price; known are attention"):
        call_flops("dance", "", (1,))
    with pytest.raises(UnsupportedError, match="work 'norm' of 1 sizes"):
        call_flops("norm", "", (1,))


def test_a_rate_per_dtype_and_per_kind() -> None:
    assert [CHIP.flops_per_s(dtype) for dtype in ("bfloat16", "float32", "int8", "")] == [
        1e12,
        3e11,
        1e12,
        1e12,
    ]
    assert CHIP.flops_per_s("bfloat16", "norm") == CHIP.flops_per_s("float32", "norm") == 1e10
    assert CHIP.flops_per_s("float32", "attention") == 3e11
    assert engine_flops(3, CHIP, "", "bfloat16") == 3 and engine_flops(3, CHIP, "norm", "") == 300
    assert engine_flops(1, CHIP, "", "float32") == 4  # rounded up
    assert CHIP.with_flops_per_s(5.0).flops_per_s("float32", "norm") == 5.0
    machine = mesh_machine(CLUSTER, (2, 2), ("row", "col"))
    times = {d: price(matmul_work(100, 100, 100, d), machine).total_ps for d in ("bfloat16", "float32")}
    assert times["bfloat16"] == 2 * 10**6 and 0 <= times["float32"] - times["bfloat16"] * 10 / 3 < 2


def test_a_call_is_a_roofline_of_its_kind() -> None:
    machine = mesh_machine(CLUSTER, (2, 2), ("row", "col"))
    norm = Compute("call", bytes=1000, call="norm", shape=(100, 10), dtype="float32")
    assert (
        call_s(norm, CHIP) == 1e-6 and price(norm, machine).total_ps == 10**6
    )  # 7000 FLOPs in 0.7 us, 1 us of bytes
    assert price(replace(norm, shape=(200, 10)), machine).total_ps == 1_400_000
    assert call_s(Compute("call"), CHIP) == 0


def test_a_call_reads_and_writes_its_views() -> None:
    program = parse(PROGRAM)
    works = [work_of(program, bound.op) for bound in program.ops_by_rank[1][2:7]]
    assert [work.bytes for work in works] == [8 * 6 * 8, 8 * 6 * 6, 8 * 6 * 8, 77, 0]  # type: ignore[union-attr]
    assert [work.dtype for work in works] == ["bfloat16", "float32", "bfloat16", "bfloat16", "bfloat16"]  # type: ignore[union-attr]
    assert works[1].shape == (16, 6)  # type: ignore[union-attr]


def test_all_readings_price_a_call_alike() -> None:
    program = parse(PROGRAM)
    machine = Machine(CLUSTER, program.meshes)
    spans = simulate_reference(program, machine).spans
    assert set(simulate(program, machine).trace().spans) == set(spans)
    serial = parse(PROGRAM.replace("lane=other", "lane=l").replace("tp.x + 1", "2"))
    total = sum(price(work_of(serial, bound.op), machine).total_ps for bound in serial.ops_by_rank[0])
    assert round(estimate(serial, machine).total_s * 1e12) == total


def test_cluster_files_with_and_without_rates_per_dtype(tmp_path: Path) -> None:
    text = to_toml(replace(CLUSTER, chip=replace(CHIP, dtype_flops_per_s=(), call_flops_per_s=())))
    assert "dtype_flops_per_s" not in text
    path = tmp_path / "old.toml"
    path.write_text(text)
    assert load_cluster(path).chip.flops_per_s("float32") == 1e12
    path.write_text(to_toml(CLUSTER))
    assert load_cluster(path).chip == CHIP
    without = re.sub(r"(?m)^effective_flops_per_s.*\n", "", text)
    path.write_text(re.sub(r"\{ bfloat16 = \S+ \}", "{ bfloat16 = 1e12, float32 = 2e11 }", without))
    peaks = load_cluster(path).chip
    assert peaks.flops_per_s("float32") == 2e11 and peaks.flops_per_s("float64") == 1e12
    for line, message in [
        ("dtype_flops_per_s = { float23 = 1 }", r"unknown dtype \(did you mean 'float32'\?\)"),
        ("call_flops_per_s = { nrom = 1 }", r"unknown work \(did you mean 'norm'\?\)"),
        ("call_flops_per_s = { norm = 0 }", "chip.call_flops_per_s.norm"),
    ]:
        path.write_text(text.replace("[chip]", f"[chip]\n{line}"))
        with pytest.raises(DescriptionError, match=message):
            load_cluster(path)
