"""Every algorithm and PyTorch's DTensor on the same operands, on real sockets.

All rivals run interleaved in one set of processes, so that they meet the same machine. With paced products this
measures how well a schedule hides communication, not how fast this machine multiplies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from meshweave.algorithms.matmul2d import Matmul2dProblem
from meshweave.algorithms.matmul2d.common.passes import STATIONARY_OF, PassName, pass_problem
from meshweave.algorithms.matmul2d.common.problem import Dataflow
from meshweave.base.errors import LayoutError, UnsupportedError
from meshweave.describe.machine.cluster import Cluster
from meshweave_lab.bench.results import MeasuredRound, RivalTimes, Round
from meshweave_lab.bench.rivals import Rival, choose_rivals
from meshweave_lab.bench.yardsticks import (
    UNPACED_FLOPS_PER_S,
    balanced_flops_per_s,
    bound_s,
    ideal_cluster,
    matmul_machine,
    with_pace,
)
from meshweave_lab.lab import Lab, RunningLab


@dataclass(frozen=True)
class LayerCase:
    """A layer Y[m, n] = X[m, k] W[k, n] to be measured, whose forward uses `dataflow`.

    Attributes:
        sizes: m, n, k.
        ratios: compute time over the communication time of the slower axis, in each pass; 0 means unpaced.
        names, extra_slices: see `choose_rivals`.
    """

    sizes: tuple[int, int, int]
    mesh_shape: tuple[int, ...]
    dataflow: Dataflow
    passes: Sequence[PassName]
    ratios: Sequence[float]
    names: Sequence[str]
    extra_slices: Sequence[Sequence[int]] = ()


def layer_rounds(layer: LayerCase, lab: Cluster, tuned_on: Cluster) -> list[Round]:
    """Return a round per pass and ratio of a layer.

    Args:
        lab: the described lab, whose rates set the pace.
        tuned_on: the cluster by whose estimates configurations are chosen, its products at the pace.

    Raises:
        LayoutError: the sizes or the mesh do not fit, or a mesh of one rank communicates nothing.
    """
    m, n, k = layer.sizes
    rounds = []
    for pass_name in layer.passes:
        stationary = STATIONARY_OF[layer.dataflow]
        problem = pass_problem(stationary, pass_name, m, k, n, layer.mesh_shape, "float32")
        if not problem.traffic_bytes(0):
            raise LayoutError(f"a mesh of {problem.num_chips} rank communicates nothing; take a larger lab")
        for ratio in layer.ratios:
            pace = balanced_flops_per_s(problem, lab, ratio) if ratio else 0.0
            rivals = choose_rivals(problem, with_pace(tuned_on, pace), layer.names, layer.extra_slices)
            rounds.append(Round(problem, tuple(rivals), pace, ratio or None, pass_name))
    return rounds


def unpaced_rounds(rounds: Sequence[Round]) -> list[Round]:
    """Return for each product of `rounds` an unpaced round of all the rivals that it has in any of them."""
    rivals_of: dict[tuple[Matmul2dProblem, str], dict[Rival, None]] = {}
    for round_ in rounds:
        key = round_.problem, round_.pass_name
        rivals_of.setdefault(key, {}).update(dict.fromkeys(round_.rivals))
    return [Round(problem, tuple(rivals), pass_name=name) for (problem, name), rivals in rivals_of.items()]


def bench_layer(
    lab: Lab,
    layer: LayerCase,
    *,
    also_unpaced: bool = False,
    calibrated: Cluster | None = None,
    repeat: int = 5,
    timeout_s: float = 600.0,
) -> list[MeasuredRound]:
    """Build the lab, run the rounds of a layer (see `layer_rounds`), take the lab down.

    Args:
        also_unpaced: run all rivals without a pace too.
        calibrated: the cluster whose estimates choose configurations and stand beside the results; by default
            configurations are chosen on the described lab.

    Raises what `layer_rounds` and `run_rounds` raise, and UnsupportedError where there can be no lab.
    """
    cluster = lab.cluster()
    rounds = layer_rounds(layer, cluster, calibrated or cluster)
    if also_unpaced and 0 not in layer.ratios:
        rounds += unpaced_rounds(rounds)
    with lab.up() as running:
        return run_rounds(running, rounds, calibrated=calibrated, repeat=repeat, timeout_s=timeout_s)


def run_rounds(
    lab: RunningLab,
    rounds: Sequence[Round],
    *,
    calibrated: Cluster | None = None,
    repeat: int = 5,
    seed: int = 0,
    timeout_s: float = 600.0,
) -> list[MeasuredRound]:
    """Run all rounds on a lab that is up, in one set of processes; a rival is bound once for all its rounds.

    Every rival runs once to warm up and then `repeat` times, in turn and in changing order.

    Args:
        calibrated: the cluster for the estimates beside the results, its products at the pace.
        seed: seed of the operands.
        timeout_s: seconds after which everything is stopped.

    Raises:
        UnsupportedError: a problem has another number of ranks than the lab; else what `RunningLab.launch` raises.
    """
    for round_ in rounds:
        if round_.problem.num_chips != lab.num_ranks:
            raise UnsupportedError(f"a mesh of {round_.problem.num_chips} ranks on a lab of {lab.num_ranks}")
    rivals_of: dict[Matmul2dProblem, dict[Rival, int]] = {}
    rounds_of: dict[Matmul2dProblem, list[dict[str, Any]]] = {}
    for round_ in rounds:
        known = rivals_of.setdefault(round_.problem, {})
        indices = [known.setdefault(rival, len(known)) for rival in round_.rivals]
        rounds_of.setdefault(round_.problem, []).append(
            {"flops_per_s": round_.flops_per_s, "rivals": indices}
        )
    payload = {
        "products": [
            {
                "problem": [problem.m, problem.n, problem.k, list(problem.mesh_shape), problem.dataflow],
                "rivals": [rival.payload(problem) for rival in rivals],
                "rounds": rounds_of[problem],
            }
            for problem, rivals in rivals_of.items()
        ],
        "repeat": repeat,
        "seed": seed,
        "deadline_s": timeout_s,
    }
    # The benchmark sets its own pace; the lab's would hold where it sets none.
    no_pace = {"MESHWEAVE_PACE_FLOPS_PER_S": ""}
    ranks = lab.launch("meshweave_lab.bench.rank:bench_matmul", payload, timeout_s=timeout_s, env=no_pace)
    product_index = {problem: index for index, problem in enumerate(rivals_of)}
    next_round = {problem: iter(range(len(listed))) for problem, listed in rounds_of.items()}
    measured = []
    for round_ in rounds:
        product, number = product_index[round_.problem], next(next_round[round_.problem])
        reports = [rank[product][number] for rank in ranks]
        measured.append(_measured_round(round_, reports, lab.description.cluster(), calibrated))
    return measured


def _measured_round(
    round_: Round, ranks: Sequence[dict[str, Any]], lab: Cluster, calibrated: Cluster | None
) -> MeasuredRound:
    problem, pace = round_.problem, round_.flops_per_s
    at_link_rate = matmul_machine(ideal_cluster(lab, pace or UNPACED_FLOPS_PER_S), problem)
    measured = None if calibrated is None else matmul_machine(with_pace(calibrated, pace), problem)
    results = []
    for number, rival in enumerate(round_.rivals):
        runs = zip(*(rank["times"][number] for rank in ranks), strict=True)
        results.append(
            RivalTimes(
                rival.name,
                rival.family,
                tuple(max(run) for run in runs),
                bound_s(problem, at_link_rate),
                rival.estimate_s(problem, at_link_rate) if pace else None,
                rival.estimate_s(problem, measured)
                if measured is not None and rival.ring_directions
                else None,
                max(rank["errors"][number] for rank in ranks),
            )
        )
    pace_reports = tuple(rank["pace"] for rank in ranks)
    return MeasuredRound(round_, tuple(results), pace_reports, max(rank["late_s"] for rank in ranks))
