"""The core's memory channel against its reference, event by event, and against closed forms."""

from __future__ import annotations

from dataclasses import astuple, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshweave_studies.gpu.run import run_channel
from reference_channel import (
    COMMUNICATION,
    COMMUNICATION_AWARE,
    COMPUTE,
    COMPUTE_FIRST,
    READ,
    ROUND_ROBIN,
    UPDATE,
    WRITE,
    Control,
    Timing,
    Wish,
    run,
)
from sampling import examples

HBM = Timing()
ATOMS = 4
"""Column commands of a line."""


def core(timing: Timing, control: Control, wishes: list[Wish]) -> list[tuple[int, bool, int]]:
    """Return what the core says happens, in its own order."""
    columns = {
        "timing": np.array(astuple(timing), dtype=np.int64),
        "controller": np.array(astuple(control), dtype=np.int64),
        "requests": np.array([astuple(wish) for wish in wishes], dtype=np.int64).reshape(-1),
    }
    rows = run_channel(columns).reshape(-1, 3).tolist()
    return [(cycle, bool(done), tag) for cycle, done, tag in rows]


def end(timing: Timing, control: Control, wishes: list[Wish]) -> int:
    return max(cycle for cycle, _, _ in core(timing, control, wishes))


@st.composite
def traffic(draw: st.DrawFn) -> list[Wish]:
    banks, rows = draw(st.sampled_from([1, 4, 16])), draw(st.sampled_from([1, 2, 8]))
    gaps = draw(st.sampled_from([0, 3, 60]))
    out: list[Wish] = []
    for stream in (COMPUTE, COMMUNICATION):
        arrival = draw(st.integers(0, 40))
        accesses = draw(st.sampled_from([(READ,), (READ, WRITE), (WRITE, UPDATE), (READ, WRITE, UPDATE)]))
        for _ in range(draw(st.integers(0, 40))):
            arrival += draw(st.integers(0, gaps))
            bank, row = draw(st.integers(0, banks - 1)), draw(st.integers(0, rows - 1))
            access = draw(st.sampled_from(accesses))
            out.append(Wish(stream, arrival, bank, row, draw(st.sampled_from([1, ATOMS])), access, len(out)))
    return out


@st.composite
def controls(draw: st.DrawFn) -> Control:
    queue = draw(st.sampled_from([1, 4, 64]))
    return Control(
        draw(st.sampled_from([ROUND_ROBIN, COMPUTE_FIRST, COMMUNICATION_AWARE])),
        queue,
        draw(st.sampled_from([1, 8, 32])),
        draw(st.sampled_from([10, 200, 2000])),
        draw(st.sampled_from([0, 1, 5, queue + 1])),
        draw(st.sampled_from([5, 100, 1000])),
    )


@examples(300)
@given(controls(), traffic(), st.booleans())
def test_equals_its_reference_event_by_event(control: Control, wishes: list[Wish], slow: bool) -> None:
    timing = replace(HBM, ccd=2, ccdl=5, ccdwl=9, rrd=6, wtr=8) if slow else HBM
    assert core(timing, control, wishes) == run(timing, control, wishes)


def stream(count: int, access: int, banks: int = 16, rows: bool = False) -> list[Wish]:
    """Return lines one after the other in memory: round all groups, or each in another row of one bank."""
    if rows:
        return [Wish(COMPUTE, 0, 0, number, ATOMS, access, number) for number in range(count)]
    return [
        Wish(COMPUTE, 0, number % 4 + 4 * (number // 64 % (banks // 4)), number // 256, ATOMS, access, number)
        for number in range(count)
    ]


def test_lines_in_turn_reach_the_rate_of_the_bus() -> None:
    lines = 4096
    assert end(HBM, Control(), stream(lines, READ)) == pytest.approx(lines * ATOMS * HBM.ccd, rel=0.02)
    assert end(HBM, Control(), stream(lines, WRITE)) == pytest.approx(lines * ATOMS * HBM.ccd, rel=0.02)


@pytest.mark.parametrize(("access", "gap"), [(READ, "ccdl"), (WRITE, "ccdl"), (UPDATE, "ccdwl")])
def test_one_bank_group_goes_at_its_own_column_delay(access: int, gap: str) -> None:
    lines = 256
    wishes = [Wish(COMPUTE, 0, 0, 0, ATOMS, access, number) for number in range(lines)]
    assert end(HBM, Control(), wishes) == pytest.approx(lines * ATOMS * getattr(HBM, gap), rel=0.02)


def test_rows_of_one_bank_take_a_row_cycle_each() -> None:
    lines = 128
    one = max(HBM.rc, HBM.rcd + (ATOMS - 1) * HBM.ccdl + HBM.rtp + HBM.rp)
    assert end(HBM, Control(), stream(lines, READ, rows=True)) == pytest.approx(lines * one, rel=0.02)
    recovery = HBM.rcd + (ATOMS - 1) * HBM.ccdl + HBM.wl + HBM.ccd + HBM.wr + HBM.rp
    assert end(HBM, Control(), stream(lines, WRITE, rows=True)) == pytest.approx(lines * recovery, rel=0.02)


def test_turns_of_the_bus_cost_what_their_delays_say() -> None:
    """One read and one write in turn, each a command: read to write, then write to read."""
    control = Control(turn_limit=1)
    pairs = 200
    wishes = [
        Wish(COMPUTE, 0, number % 2, 0, 1, WRITE if number % 2 else READ, number)
        for number in range(2 * pairs)
    ]
    turn = HBM.cl + HBM.ccd + 1 - HBM.wl + HBM.wl + HBM.ccd + HBM.wtr
    assert end(HBM, control, wishes) == pytest.approx(pairs * turn, rel=0.02)
    assert end(HBM, Control(), wishes) < pairs * turn / 3


def test_compute_is_served_first_and_communication_is_not_starved() -> None:
    lines = 2048
    compute = stream(lines, READ)
    communication = [
        Wish(COMMUNICATION, 0, 3, 40 + number, ATOMS, READ, lines + number) for number in range(8)
    ]
    starving = Control(COMMUNICATION_AWARE, threshold=5, starvation=500)
    entered = [
        cycle
        for cycle, done, tag in core(HBM, starving, compute + communication)
        if not done and tag >= lines
    ]
    assert np.diff(entered).max() <= 501 + 64 and entered[-1] <= 8 * (501 + 64)
    last = [
        cycle
        for cycle, done, tag in core(HBM, Control(COMPUTE_FIRST), compute + communication)
        if not done and tag >= lines
    ]
    assert last[0] > lines * ATOMS * 0.9
