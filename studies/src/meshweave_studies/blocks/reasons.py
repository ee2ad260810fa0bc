"""Why one strategy for a block is faster than another, in numbers and in words.

The difference of two estimates is a sum of differences: of products and copies, of latency, of transfers, and of
the communication that runs beside products. The reason is the largest of these in favour of the faster one. A
difference of transfers is traced to a link: the one over which both together spend most time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from meshweave.base.units import format_bytes, format_s
from meshweave.cost.machine import Machine
from meshweave.tune.ranked import RankedConfig
from meshweave_studies.blocks.ranking import BlockRanking, mesh_of

_SHARES = {
    Fraction(1, 2): "half",
    Fraction(1, 3): "a third of",
    Fraction(2, 3): "two thirds of",
    Fraction(1, 4): "a quarter of",
    Fraction(3, 4): "three quarters of",
    Fraction(1, 5): "a fifth of",
    Fraction(1, 6): "a sixth of",
    Fraction(1, 7): "a seventh of",
    Fraction(1, 8): "an eighth of",
    Fraction(1, 1): "about",
}
_NEAR = 0.06
SAME = 1e-6
"""Times that differ by a smaller share count as the same."""


@dataclass(frozen=True)
class AxisUse:
    """What a rank moves along one mesh axis: its bytes, and what a ring has of the slowest links there."""

    link: str
    num_bytes: int
    bytes_per_s: float

    @property
    def seconds(self) -> float:
        """Return the seconds of the bytes alone."""
        return self.num_bytes / self.bytes_per_s


def axis_uses(ranked: RankedConfig, machine: Machine) -> Iterator[AxisUse]:
    """Yield what a rank moves along each mesh axis, that which takes longest first."""
    uses = []
    for axis, num_bytes in ranked.traffic_bytes.items():
        if num_bytes:
            rate = machine.rate(axis, "all_reduce", shared=True)
            uses.append(AxisUse(machine.axis(axis, shared=True).name, num_bytes, rate))
    yield from sorted(uses, key=lambda use: -use.seconds)


def name_of(ranked: RankedConfig) -> str:
    """Return the name of a ranked config as tables have it: `atp 2x4`."""
    return f"{ranked.algorithm.name} {'x'.join(map(str, mesh_of(ranked)))}"


def gains_s(faster: RankedConfig, slower: RankedConfig) -> dict[str, float]:
    """Return by how many seconds each part of the slower one's estimate is larger; they add up to the difference.

    The parts are "products" (with copies), "latency", "transfers", and "overlap": the time that the faster one
    hides beyond that of the slower.
    """
    a, b = faster.estimate, slower.estimate
    gains = {
        "products": b.compute_s + b.copy_s - a.compute_s - a.copy_s,
        "latency": b.launch_s + b.sync_s - a.launch_s - a.sync_s,
        "transfers": b.transfer_s - a.transfer_s,
    }
    gains["overlap"] = b.total_s - a.total_s - sum(gains.values())
    return gains


def block_reason(ranking: BlockRanking, position: int = 0, other: int | None = None) -> str:
    """Return in one sentence why a config is ahead of another one, by default the next; "" where there is none."""
    other = position + 1 if other is None else other
    if not position < other < len(ranking.ranked):
        return ""
    faster, slower = ranking.ranked[position], ranking.ranked[other]
    gains = gains_s(faster, slower)
    part = max(gains, key=lambda name: gains[name])
    is_less = faster.estimate.total_s < slower.estimate.total_s
    if (faster.simulated is None) != (slower.simulated is None) and not is_less:
        return (
            f"{name_of(faster)} was simulated, {name_of(slower)} only estimated; their times do not compare"
        )
    if abs(slower.seconds / faster.seconds - 1) < SAME:
        return f"{name_of(faster)} and {name_of(slower)} take the same time"
    if not is_less or gains[part] <= 0:
        return (
            f"{name_of(faster)} loses less to shared links: by estimate, without contention, {name_of(slower)} "
            f"takes {format_s(slower.estimate.total_s)} and it {format_s(faster.estimate.total_s)}"
        )
    if part == "products":
        a, b = (x.estimate.compute_s + x.estimate.copy_s for x in (faster, slower))
        return f"{name_of(faster)} computes and copies for {format_s(a)}, {name_of(slower)} for {format_s(b)}"
    if part == "latency":
        a, b = (x.estimate.launch_s + x.estimate.sync_s for x in (faster, slower))
        waits = f"waits {format_s(a)} for launches and steps of rings"
        return f"{name_of(faster)} {waits}, {name_of(slower)} {format_s(b)}"
    if part == "overlap":
        return f"{name_of(faster)} {_hidden(faster)}, {name_of(slower)} {_hidden(slower)}"
    return _transfer_reason(ranking, faster, slower)


def next_strategy(ranking: BlockRanking) -> int | None:
    """Return the position of the first config of another strategy and time than the first one; None for none."""
    first = ranking.ranked[0]
    for position, ranked in enumerate(ranking.ranked):
        if ranked.algorithm.name != first.algorithm.name and abs(ranked.seconds / first.seconds - 1) >= SAME:
            return position
    return None


def _hidden(ranked: RankedConfig) -> str:
    times = ranked.estimate
    beside = times.copy_s + times.communication_s
    hidden = max(times.compute_s + beside - times.total_s, 0.0)
    return f"hides {format_s(hidden)} of {format_s(beside)} of communication and copies"


def _transfer_reason(ranking: BlockRanking, faster: RankedConfig, slower: RankedConfig) -> str:
    uses = [list(axis_uses(ranked, ranking.machine(ranked))) for ranked in (faster, slower)]
    spent: dict[str, float] = {}
    for use in (*uses[0], *uses[1]):
        spent[use.link] = spent.get(use.link, 0.0) + use.seconds
    link = max(spent, key=lambda name: spent[name])
    a, b = (_on(link, some) for some in uses)
    if b is None:
        others = ", ".join(f"{format_bytes(use.num_bytes)} over {use.link}" for use in uses[1]) or "nothing"
        ours = f"{format_bytes(a.num_bytes)} over {link}" if a is not None else "nothing there"
        return (
            f"{name_of(slower)} takes longer for its transfers: it moves {others}, {name_of(faster)} {ours}"
        )
    if a is None:
        return (
            f"{name_of(faster)} keeps off {link}, over which {name_of(slower)} moves "
            f"{format_bytes(b.num_bytes)} at {format_bytes(b.bytes_per_s)}/s"
        )
    return (
        f"{name_of(faster)} moves {_share(a.num_bytes, b.num_bytes)} the bytes of {name_of(slower)} over {link} "
        f"({format_bytes(a.num_bytes)} at {format_bytes(a.bytes_per_s)}/s a ring, not "
        f"{format_bytes(b.num_bytes)} at {format_bytes(b.bytes_per_s)}/s)"
    )


def _on(link: str, uses: list[AxisUse]) -> AxisUse | None:
    """Return all that is moved over a link as one, at the rate at which it is moved on the whole."""
    on_link = [use for use in uses if use.link == link]
    if not on_link:
        return None
    num_bytes = sum(use.num_bytes for use in on_link)
    return AxisUse(link, num_bytes, num_bytes / sum(use.seconds for use in on_link))


def _share(a: int, b: int) -> str:
    ratio = a / b
    near = min(_SHARES, key=lambda share: abs(ratio / float(share) - 1))
    if abs(ratio / float(near) - 1) <= _NEAR:
        return _SHARES[near]
    return f"{ratio:.2f} times"
