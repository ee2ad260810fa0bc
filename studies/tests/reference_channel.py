"""A memory channel cycle by cycle, as `csrc/channel.hpp` says in words: the reference of the core's."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

READ, WRITE, UPDATE = 0, 1, 2
COMPUTE, COMMUNICATION = 0, 1
ROUND_ROBIN, COMPUTE_FIRST, COMMUNICATION_AWARE = 0, 1, 2


@dataclass(frozen=True)
class Timing:
    """Cycles, as a data sheet names them; `ccdwl` is `ccdl` after an update."""

    groups: int = 4
    banks: int = 16
    columns: int = 64
    ccd: int = 1
    ccdl: int = 2
    ccdwl: int = 4
    rcd: int = 12
    rp: int = 12
    ras: int = 28
    rc: int = 40
    rrd: int = 3
    cl: int = 12
    wl: int = 2
    wtr: int = 3
    wr: int = 10
    rtp: int = 3


@dataclass(frozen=True)
class Control:
    policy: int = ROUND_ROBIN
    queue: int = 64
    turn_limit: int = 32
    age_limit: int = 2000
    threshold: int = 64
    starvation: int = 1000


@dataclass(frozen=True)
class Wish:
    """A request: column commands in one row, and the cycle from which its stream may issue it."""

    stream: int
    arrival: int
    bank: int
    row: int
    commands: int
    access: int
    tag: int


@dataclass
class _Entry:
    wish: Wish
    entered: int
    left: int


def run(timing: Timing, control: Control, wishes: list[Wish]) -> list[tuple[int, bool, int]]:
    """Return (cycle, done or entered, tag) of all that happens, in the order of cycles."""
    streams = [deque(wish for wish in wishes if wish.stream == stream) for stream in (COMPUTE, COMMUNICATION)]
    queue: list[_Entry] = []
    rows: list[int | None] = [None] * timing.banks
    column_from, close_from, open_from = [0] * timing.banks, [0] * timing.banks, [0] * timing.banks
    group_from, any_from, direction_from, any_open_from = [0] * timing.groups, 0, [0, 0], 0
    writing, run_length, last_stream, last_communication = False, 0, COMMUNICATION, 0
    out: list[tuple[int, bool, int]] = []
    now = 0
    while queue or any(streams):

        def is_hit(entry: _Entry) -> bool:
            return rows[entry.wish.bank] == entry.wish.row

        # column
        hits = [entry for entry in queue if is_hit(entry)]
        same = [entry for entry in hits if (entry.wish.access != READ) == writing]
        other = [entry for entry in hits if (entry.wish.access != READ) != writing]
        chosen = other if not same or (run_length >= control.turn_limit and other) else same
        to_write = writing if chosen is same else not writing
        for entry in chosen if now >= max(any_from, direction_from[to_write]) else []:
            bank, group = entry.wish.bank, entry.wish.bank % timing.groups
            if now < max(column_from[bank], group_from[group]):
                continue
            run_length = run_length + 1 if to_write == writing else 1
            writing = to_write
            any_from = now + timing.ccd
            group_from[group] = now + (timing.ccdwl if entry.wish.access == UPDATE else timing.ccdl)
            if writing:
                direction_from[0] = now + timing.wl + timing.ccd + timing.wtr
                close_from[bank] = max(close_from[bank], now + timing.wl + timing.ccd + timing.wr)
            else:
                direction_from[1] = max(direction_from[1], now + timing.cl + timing.ccd + 1 - timing.wl)
                close_from[bank] = max(close_from[bank], now + timing.rtp)
            entry.left -= 1
            if not entry.left:
                latency = timing.wl if writing else timing.cl
                out.append((now + latency + timing.ccd, True, entry.wish.tag))
                queue.remove(entry)
            break
        # row
        looked_at = set()
        for entry in queue:
            bank = entry.wish.bank
            if is_hit(entry) or bank in looked_at:
                continue
            looked_at.add(bank)
            if rows[bank] is None:
                if now < max(open_from[bank], any_open_from):
                    continue
                rows[bank] = entry.wish.row
                column_from[bank], close_from[bank] = now + timing.rcd, now + timing.ras
                open_from[bank], any_open_from = now + timing.rc, now + timing.rrd
                break
            wanted = any(is_hit(one) for one in queue if one.wish.bank == bank)
            overdue = entry is queue[0] and now - entry.entered > control.age_limit
            if (wanted and not overdue) or now < close_from[bank]:
                continue
            rows[bank] = None
            open_from[bank] = max(open_from[bank], now + timing.rp)
            break
        # arbitration
        queued = sum(entry.left for entry in queue)
        if queued < control.queue:
            stream = _choose(control, streams, now, last_stream, last_communication, queued)
            if stream is not None and (not queued or queued + streams[stream][0].commands <= control.queue):
                wish = streams[stream].popleft()
                queue.append(_Entry(replace(wish), now, wish.commands))
                out.append((now, False, wish.tag))
                last_stream = stream
                if stream == COMMUNICATION:
                    last_communication = now
        now += 1
    return out


def _choose(
    control: Control, streams: list[deque[Wish]], now: int, last: int, last_communication: int, queued: int
) -> int | None:
    compute, communication = (bool(stream) and stream[0].arrival <= now for stream in streams)
    if control.policy == ROUND_ROBIN and compute and communication:
        return 1 - last
    if control.policy == COMMUNICATION_AWARE and communication:
        waited = now - max(last_communication, streams[COMMUNICATION][0].arrival)
        if waited > control.starvation:
            return COMMUNICATION
        if not compute and queued >= control.threshold:
            return None
    return COMPUTE if compute else COMMUNICATION if communication else None
