"""Whatever the core is given ends soon and in bounded memory: in a result, a ValueError or a ProgramFault."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from core_fuzz import MAX_OPS, base
from random_programs import random_machine

from meshweave.base.errors import ProgramError
from meshweave.cost.machine import Machine
from meshweave.describe.machine.cluster import load_cluster
from meshweave.ir.program.parse import parse
from meshweave.simulate.columns import Columns
from meshweave.simulate.engine import Core, ProgramFault, _exchanges, _machine_columns, _routes, simulate

CASES = int(os.environ.get("MESHWEAVE_FUZZ_CASES", "1000"))

HEAD = """
program("absurd")
tp = mesh((4,), ("x",))
s = scratch((8, 8), "float32", on=tp, slots=2)
g = scratch((8, 32), "float32", on=tp)
l = lane()
k = lane(order="ready", width=3)
with tp:
"""


def campaign(first: int, count: int, folder: Path) -> None:
    at = folder / "seed"
    command = [sys.executable, *["-S"] * sys.flags.no_site, str(Path(__file__).with_name("core_fuzz.py"))]
    ran = subprocess.run([*command, str(first), str(count), str(at)], capture_output=True, text=True)
    seed = at.read_text() if at.exists() else "none"
    assert ran.returncode == 0, f"seed {seed}: {ran.returncode}\n{ran.stdout[-2000:]}\n{ran.stderr[-6000:]}"
    assert "runs" in ran.stdout and "refused" in ran.stdout and "cannot run" in ran.stdout


@pytest.mark.parametrize(
    "first", [0, 1_025_351, 1_207_997]
)  # a work of 0 FLOPs; a table's number that overflows
def test_damaged_columns_are_refused_or_run(first: int, tmp_path: Path) -> None:
    campaign(first, CASES, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_damaged_columns_are_refused_or_run(tmp_path: Path) -> None:
    campaign(10**6, 500_000, tmp_path)


def columns(body: str, max_ops: int | None = MAX_OPS, head: str = HEAD) -> Columns:
    made = Columns(parse(head + "".join(f"    {line}\n" for line in body.strip("\n").splitlines())))
    if max_ops is not None:
        made.data["max_ops"][0] = max_ops
    return made


ABSURD = {
    "a loop of many turns": "for i in range(1099511627776):\n    zero(s, lane=l)",
    "more ops than are allowed": "for i in range(1048576):\n    zero(s, lane=l)",
    "loops around nothing": "for i in range(1048576):\n"
    "    for j in range(1048576):\n        if i < 0:\n            zero(s, lane=l)",
    "packets": 'broadcast(s, s, over="tp.x", root=0, packets=1000000000000, lane=l)',
    "messages of many collectives": "for i in range(1000):\n"
    '    broadcast(s, s, over="tp.x", root=0, packets=65536, lane=l)',
    "a sum beyond 64 bits": "for i in range(2):\n    zero(s(i * 4611686018427387904 * 4), lane=l)",
    "no such slot": "for i in range(3):\n    zero(s(i - 1), lane=l)",
    "FLOPs beyond a run": 'call(fn="f", outs=(s,), ins=(), flops=4611686018427387904, '
    "bytes=4611686018427387904, lane=l)",
    "a negative cost": 'call(fn="f", outs=(s,), ins=(), flops=-1152921504606846976, lane=l)',
    "division by zero": "if 1 // tp.x:\n    zero(s, lane=l)",
    "a deadlock": "if tp.x == 0:\n    recv(s, peer=1, lane=l)\n    send(s(1), peer=1, lane=l)\n"
    "if tp.x == 1:\n    recv(s, peer=0, lane=l)\n    send(s(1), peer=0, lane=l)",
    "nobody to talk to": "if tp.x == 0:\n    send(s, peer=1, lane=l)",
    "an odd one out": 'if tp.x == 0:\n    fence(over="tp", lane=l)',
    "roots that differ": 'broadcast(s, s, over="tp.x", root=tp.x, lane=l)',
    "packets that differ": 'broadcast(s, s, over="tp.x", root=0, packets=1 + tp.x, lane=l)',
    "shifts that differ": 'permute(s, s(1), over="tp.x", shift=tp.x, lane=l)',
}


@pytest.mark.parametrize("name", sorted(ABSURD))
def test_what_cannot_run_is_said_soon(name: str) -> None:
    begun = time.monotonic()
    with pytest.raises(ProgramFault):
        made = columns(ABSURD[name])
        core = Core(made.data)
        on = machine_of(made, core)
        core.run(on)
    assert time.monotonic() - begun < 30


def machine_of(made: Columns, core: Any) -> dict[str, Any]:
    machine = next(
        one for seed in range(99) if (one := random_machine(Random(seed), made.program)) is not None
    )
    on = _machine_columns(machine, made.priced_axes, made.rated_work)
    on["work_flops"] = on["sized"] = np.array([], dtype=np.int64)
    on["exchange_ps"] = _exchanges(machine, made)
    _routes(machine).add(core.routes(on["num_directions"], on["rails"]), made, on)
    return on


def test_nothing_that_ends_is_called_a_deadlock_by_absurd_rates() -> None:
    """The slowest and the fastest machine that the core takes."""
    made = columns('all_reduce(s, s(1), over="tp.x", lane=l)\nmatmul(s, s(1), g[:, :8], lane=k)')
    core = Core(made.data)
    on = machine_of(made, core)
    for rate in (1, 2**60):
        fast = {name: values.copy() for name, values in on.items()}
        fast["chip"][:2] = fast["link_rates"][:] = rate
        fast["constants"][2::3] = rate
        assert (core.run(fast)["ended_ps"] > 0).all()


@pytest.mark.parametrize("flops", [0, -2, 2**62 + 1])
def test_a_work_of_no_flops_is_no_work(flops: int) -> None:
    made = columns("matmul(s, s(1), g[:, :8], lane=k)")
    core = Core(made.data)
    on = machine_of(made, core)
    on["work_flops"] = np.array([flops], dtype=np.int64)
    with pytest.raises(ValueError, match="FLOPs of a work"):
        core.run(on)


@pytest.mark.parametrize("latency_ps", [2**60 - 1, 2**60])
def test_times_beyond_a_run_are_a_fault_of_the_program(latency_ps: int) -> None:
    made = columns(
        'for i in range(9):\n    broadcast(s, s, over="tp.x", root=0, packets=9, lane=k)\n'
        '    fence(over="tp", lane=k)'
    )
    core = Core(made.data)
    on = machine_of(made, core)
    on["constants"][0::3] = on["constants"][1::3] = latency_ps
    with pytest.raises(ProgramFault, match=r"53 days|64 bits"):
        core.run(on)


@pytest.mark.slow
def test_the_largest_group_is_read_at_once_and_its_messages_are_counted() -> None:
    """A million ranks in one group: nothing may take time or memory that grows with their square."""
    data = {
        name: values.copy()
        for name, values in columns(
            'all_to_all(g, g, over="tp", split_dim=1, concat_dim=1, lane=l)'
        ).data.items()
    }
    count = 1 << 20
    data["ranks"] = np.arange(count)
    data["coords"] = np.zeros(count * int(data["num_coords"][0]), dtype=np.int64)
    data["axis_group"] = np.zeros(count * int(data["num_axes"][0]), dtype=np.int64)
    data["members"], data["groups"] = np.arange(count), np.array([0, count])
    data["max_ops"][0] = 2 * count
    core = Core(data)
    assert core.num_ops == count
    with pytest.raises(ProgramFault, match="routes"):
        core.routes(np.ones(1, dtype=np.int64), np.zeros(1, dtype=np.int64))


def test_tables_within_tables_are_bounded() -> None:
    """An expression that selects from one that selects ... would overflow the stack, or take 2**n steps."""
    data = {name: values.copy() for name, values in columns("zero(s, lane=l)").data.items()}
    number = len(data["exprs"]) - 1
    code, starts = data["code"].tolist(), data["exprs"].tolist()
    tables, entries = data["tables"].tolist(), data["entries"].tolist()
    for _ in range(100_000):
        entries.append(number - 1)
        tables.append(len(entries))
        code += [0, 0, 17, len(tables) - 2]
        starts.append(len(code) // 2)
        number += 1
    deep = {"code": code, "exprs": starts, "tables": tables, "entries": entries}
    with pytest.raises(ValueError, match="too deep"):
        Core(data | {name: np.array(values, dtype=np.int64) for name, values in deep.items()})


def test_what_is_no_dict_of_columns_is_refused() -> None:
    for given in (None, [], {1: 2}, {"ranks": "text"}):
        with pytest.raises((TypeError, ValueError)):
            Core(given)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        Core(base(0)[0]).routes(np.ones((2, 2)), np.ones(2, dtype=np.int64))
    with pytest.raises(ValueError):
        Core(base(0)[0]).run({})


def test_loops_that_do_nothing_are_an_error_in_seconds() -> None:
    """Explaining it by reading the program in Python would take hours."""
    program = parse("""
program("idle")
tp = mesh((2,), ("x",))
s = scratch((4,), "float32", on=tp)
lane0 = lane()
with tp:
    for a in range(1000000):
        for b in range(1000000):
            if a < 0:
                zero(s, lane=lane0)
""")
    with pytest.raises(ProgramError, match="lead to no op"):
        simulate(program, Machine.of(load_cluster("tpu-v4-pod:4"), program))
