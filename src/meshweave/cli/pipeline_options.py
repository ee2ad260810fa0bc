"""The options of `meshweave pipeline`: their types, help texts, and what they stand for."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer

from meshweave.algorithms.pipeline.action_graph import TransferRuntime
from meshweave.algorithms.pipeline.action_times import ActionTimes
from meshweave.algorithms.pipeline.actions import Schedule
from meshweave.base.errors import LayoutError, UnsupportedError, printable, require_known
from meshweave.base.units import to_ps, work_ps
from meshweave.cli.option_fields import option
from meshweave.cli.options import JSON_HELP, output, read_bytes
from meshweave.cli.reshard_problem import fitting_cluster
from meshweave.cost.machine import Machine
from meshweave.describe.layout.mesh import Mesh
from meshweave.describe.machine.cluster import load_cluster
from meshweave.describe.machine.network import TorusNetwork

_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_MOST_S = 1e4
"""Seconds of one action: more is a slip of the keyboard, and sums of picoseconds stay exact."""

What = Annotated[
    str,
    typer.Argument(
        help="A CSV of actions in torch's format, '-' for stdin, or the name of a schedule, such as 1f1b or zbv; "
        "the error of an unknown name lists them all."
    ),
]


@dataclass(frozen=True)
class ScheduleTextOptions:
    """What a schedule given by name consists of, the times of a schedule's actions, and what is written."""

    stages: int = option(4, "Stages of the model, of a schedule given by name.")
    micro_batches: int = option(8, "Micro-batches of a step, of a schedule given by name.")
    per_rank: int = option(
        0, "Stages a rank. Default: as many as the schedule needs; interleaved-1f1b takes any."
    )
    delay: int = option(1, "eager-1f1b-delayed: micro-batches by which weight gradients are put off.")
    stash_rest: float = option(
        1.0,
        "zb-1p, zb-2p: share of a stash that stays until the weight gradient, once the input gradient "
        "has run; at most 1.",
    )
    forward: str = option("1ms", "Time of a stage's forward: 1.5ms, or one for each stage: 1ms,2ms.")
    input_grad: str = option("", "Time of an input gradient. Default: as the forward.")
    weight_grad: str = option("", "Time of a weight gradient. Default: as the forward.")
    transfer: str = option("0", "Time of a transfer between neighbouring stages; one, or one for each.")
    cluster: str | None = option(
        None,
        "Take the time of transfers from a catalog cluster, a TOML file or words, and --activation; ':N' "
        "sets the number of chips. Default of N: as many as the ranks have.",
    )
    activation: str = option("16MiB", "Bytes that a stage sends to the next for a micro-batch: 16MiB.")
    chips_per_rank: int = option(
        1, "Chips of a pipeline rank; each sends its share of the activation to one of the next."
    )
    runtime: str = option(
        "strict",
        "How transfers proceed: strict (one queue for each pair of ranks, as NCCL under torch), batched "
        "(neighbouring ones together), buffered (sends end by themselves, as in our Programs and gloo).",
    )
    beside: str | None = option(None, "A second schedule to time and draw: a name or a CSV file.")
    out: Path | None = output("Write the CSV of a named schedule here, not on stdout.", "--out", "-o")
    with_transfers: bool = option(
        False, "Write sends and receives too. torchtitan and torch's default take none."
    )
    svg: Path | None = output("Write the timeline as a picture.")
    report: Path | None = output("Write a page with table and timeline.")
    json: bool = option(False, JSON_HELP)


def read_runtime(text: str) -> TransferRuntime:
    """Return the rules for transfers that are called "strict", "batched" or "buffered".

    Raises UnsupportedError for another name.
    """
    names = [runtime.value for runtime in TransferRuntime]
    require_known(text, names, "there is no runtime", UnsupportedError, "there are")
    return TransferRuntime(text)


def read_durations(option: str, text: str, count: int) -> tuple[int, ...]:
    """Return `count` times in picoseconds, from one time for all of them or from `count` times.

    Args:
        option: the name of the option, for the error.
        text: times in s, ms, us or ns with commas between, such as "1.5ms" or "1ms,20us"; 0 needs no unit.

    Raises:
        LayoutError: one is no time or over 10000 s, or the number of times is neither 1 nor `count`.
    """
    values = [_read_duration(option, part) for part in text.split(",")]
    if len(values) == 1:
        return (values[0],) * count
    if len(values) != count:
        raise LayoutError(f"{option} '{printable(text)}' has {len(values)} times; give one, or {count}")
    return tuple(values)


def _read_duration(option: str, text: str) -> int:
    match = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,12})?) ?(s|ms|us|ns)", text.strip())
    if match is None and re.fullmatch(r"0(\.0*)?", text.strip()):
        return 0
    if match is None or float(match[1]) * _UNITS[match[2]] > _MOST_S:
        raise LayoutError(
            f"{option} '{printable(text)}' is no time of at most {_MOST_S:g} s, such as 1.5ms or 20us"
        )
    return to_ps(float(match[1]) * _UNITS[match[2]])


def read_compute_times(num_stages: int, texts: Sequence[str]) -> ActionTimes:
    """Return the times of the compute actions of each stage in picoseconds; transfers between stages have 0.

    Args:
        texts: three texts as for `read_durations`: the times of forwards, of input gradients and of weight
            gradients. One of the last two that is "" is the same as that of forwards.

    Raises LayoutError where a text has no times, or neither one time nor one for each stage.
    """
    forward, input_grad, weight_grad = texts
    return ActionTimes(
        read_durations("--forward", forward, num_stages),
        read_durations("--input-grad", input_grad or forward, num_stages),
        read_durations("--weight-grad", weight_grad or forward, num_stages),
        (0,) * (num_stages - 1),
    )


def transfer_times(
    stage_ranks: Sequence[int], transfer: str, cluster: str | None, activation: str, chips_per_rank: int
) -> tuple[int, ...]:
    """Return the picoseconds of a transfer of one micro-batch from each stage but the last to the next one.

    Without a cluster they are those of `transfer`. On a cluster, pipeline rank r has the chips from
    r * chips_per_rank on, and each chip sends its equal share of an activation to the chip of the same position
    in the next stage's rank. All send at once, over links that they may share, and the slowest counts. Ranks lie
    on a torus row by row.

    Args:
        stage_ranks: the pipeline rank of each stage.
        transfer: times as for `read_durations`, of one micro-batch in one direction; "0" with a cluster.
        cluster: a catalog name, a file or words, as for `load_cluster`; None for the times of `transfer`.
        activation: the bytes that a stage sends for a micro-batch, such as "16MiB"; without a cluster ignored.
        chips_per_rank: the chips of a pipeline rank; without a cluster ignored.

    Raises:
        LayoutError: a time or size is wrong, `transfer` and `cluster` are both given, or the ranks do not fit
            the cluster.
        DescriptionError: there is no such cluster.
    """
    num_edges = len(stage_ranks) - 1
    if cluster is None:
        return read_durations("--transfer", transfer, num_edges) if num_edges else ()
    if transfer != "0":
        raise LayoutError("give --transfer or --cluster: both say how long a transfer takes")
    if not 1 <= chips_per_rank <= 1 << 16:
        raise LayoutError(f"--chips-per-rank is {chips_per_rank}; give 1 or more")
    num_chips = (max(stage_ranks) + 1) * chips_per_rank
    described = fitting_cluster(load_cluster(cluster), cluster, num_chips)
    network = described.network
    shape = network.cube if isinstance(network, TorusNetwork) else (described.num_chips,)
    machine = Machine(described, (Mesh.of("chips", shape, tuple(f"x{n}" for n in range(len(shape)))),))
    share = -(-read_bytes("--activation", activation) // chips_per_rank)
    times = []
    for source, target in pairwise(stage_ranks):
        first, second = source * chips_per_rank, target * chips_per_rank
        pairs = [(first + n, second + n) for n in range(chips_per_rank)]
        times.append(0 if source == target else _slowest_ps(machine, pairs, share))
    return tuple(times)


def _slowest_ps(machine: Machine, pairs: Sequence[tuple[int, int]], num_bytes: int) -> int:
    """Return the picoseconds of the slowest of messages of `num_bytes` between pairs of chips, all at once."""
    paths = {pair: machine.path(*pair) for pair in pairs}
    loads = Counter(link for path in paths.values() for link in path)
    times = []
    for pair, path in paths.items():
        constants = machine.one_sided_constants(*pair, adds=False)
        rates = (machine.weighted_link_rate(x) // (loads[x] * machine.link_weight(x)) for x in path)
        times.append(constants.fixed_ps + work_ps(num_bytes, max(min(constants.rate, *rates), 1)))
    return max(times)


def placement_of(schedule: Schedule) -> str:
    """Return the numbers of stages and ranks in words: `8 stages on 4 ranks`, or `4 ranks of one stage`."""
    per_rank = schedule.num_stages / schedule.num_ranks
    ranks = f"{schedule.num_ranks} rank{'s' if schedule.num_ranks > 1 else ''}"
    return f"{schedule.num_stages} stages on {ranks}" if per_rank != 1 else f"{ranks} of one stage"
