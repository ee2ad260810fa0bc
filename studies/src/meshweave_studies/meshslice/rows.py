"""The published numbers of MeshSlice, computed here, row by row.

Nam, Gerogiannis, Torrellas: MeshSlice (ISCA '25, doi 10.1145/3695053.3731077).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import mean

from meshweave.algorithms.matmul2d import Matmul2dProblem
from meshweave.algorithms.matmul2d.common.passes import pass_problem
from meshweave.algorithms.table import PRODUCTS_2D
from meshweave.base.errors import UnsupportedError
from meshweave.ir.work import traffic
from meshweave.tune.unrolled import REFERENCE_ALGORITHM
from meshweave_studies.meshslice.agreement import (
    COMPARED,
    mesh_times,
    picks_best,
    product_errors,
    product_slice_times,
    slice_times,
    summary,
)
from meshweave_studies.meshslice.measured_mesh import MeasuredMesh
from meshweave_studies.meshslice.other_operations import end_to_end_gain, other_operations_percent
from meshweave_studies.meshslice.readings import PUBLIC, READINGS
from meshweave_studies.meshslice.study import FcBlock, MeshSliceStudy, distinct_products
from meshweave_studies.published import MODELS, PaperRows
from meshweave_studies.verdict import OurValue, percent_faster

PAPER = "meshslice"
KIBI = 1024
WANG, WANG_TUNED = "wang[S=meshslice]", "wang"
ORDER = (
    ("meshslice", WANG),
    (WANG, "collective"),
    *(("collective", name) for name in COMPARED if name not in ("meshslice", WANG, "collective")),
)
"""(faster, slower) at 256 chips, in words of section 5.1.1."""
FORWARD_DATAFLOWS = ("os", "ls", "os", "ls")


NEEDS_SIMULATION = OurValue(None, reason="compares estimates with simulation: run --by simulate")


def flops(study: MeshSliceStudy, model: str) -> float:
    """Return the FLOPs per chip and block of all products of the fully connected layers, in 1e13."""
    block = study.weak_scaling_block(model)
    return study.flops(block) / block.chips / 1e13


def peak_ms(study: MeshSliceStudy, model: str) -> float:
    """Return the milliseconds that the FLOPs of `flops` take at the chip's peak."""
    return flops(study, model) * 1e13 / study.pod.chip.peak(study.experiment.dtype) * 1e3


def dataflows(study: MeshSliceStudy, model: str) -> OurValue:
    """Return how many of the four layers have the paper's forward dataflow (section 3.2.1)."""
    problems = study.problems(study.weak_scaling_block(model), study.experiment.tall_mesh)
    forward = [problem.dataflow for problem in problems[::3]]
    num_same = sum(ours == theirs for ours, theirs in zip(forward, FORWARD_DATAFLOWS, strict=True))
    return OurValue(num_same, " ".join(forward))


def utilisation(study: MeshSliceStudy, model: str) -> OurValue:
    """Return the FLOP utilisation of MeshSlice in percent, with its mesh and slice counts (table 2)."""
    block = study.weak_scaling_block(model)
    chosen = study.chosen(block, REFERENCE_ALGORITHM)
    assert chosen is not None
    shape = "x".join(map(str, chosen.shape))
    counts = ", ".join(str(config.slice_count) for _, config in chosen.products)
    return OurValue(study.percent_of_peak(block, study.block_s(block)), f"{shape}, S = {counts}")


def over(rival: str) -> Callable[[MeshSliceStudy, str], float]:
    """Return a row function: by how many percent MeshSlice is faster than a rival (section 5.1.1)."""

    def gain(study: MeshSliceStudy, model: str) -> float:
        block = study.weak_scaling_block(model)
        return percent_faster(study.block_s(block, rival), study.block_s(block))

    return gain


def end_to_end(rival: str) -> Callable[[MeshSliceStudy, str], float]:
    """Return a row function: by how many percent MeshSlice is faster than a rival over all layers of a block."""
    return lambda study, model: end_to_end_gain(study, study.weak_scaling_block(model), rival)


def other_layers(study: MeshSliceStudy, model: str) -> float:
    """Return the percent of a block's time that is not spent in its fully connected layers."""
    return other_operations_percent(study, study.weak_scaling_block(model))


def unoptimised(study: MeshSliceStudy, model: str) -> float:
    """Return the FLOP utilisation in percent with all layers Y-stationary (table 2)."""
    block = study.weak_scaling_block(model, always="y")
    return study.percent_of_peak(block, study.block_s(block))


def dataflow_gain(study: MeshSliceStudy, model: str) -> float:
    """Return by how many percent chosen dataflows are faster than Y-stationary ones (table 2)."""
    return percent_faster(
        study.block_s(study.weak_scaling_block(model, always="y")),
        study.block_s(study.weak_scaling_block(model)),
    )


def scaling_loss(study: MeshSliceStudy, model: str) -> float:
    """Return the percent of FLOP utilisation that is lost from the smallest to the largest pod (section 5.1.1)."""
    blocks = [study.weak_scaling_block(model, study.experiment.sizes[end]) for end in (0, -1)]
    small, large = (study.percent_of_peak(block, study.block_s(block)) for block in blocks)
    return 100 * (1 - large / small)


def order(study: MeshSliceStudy, model: str) -> OurValue:
    """Return how many pairs of algorithms rank the other way round than in the paper (section 5.1.1, figure 9)."""
    block = study.weak_scaling_block(model)
    times = {name: timing.total_s for name in COMPARED if (timing := study.timing(block, name)) is not None}
    wrong = sum(a in times and b in times and times[a] > times[b] for a, b in ORDER)
    ranked = sorted(times, key=lambda name: times[name])
    return OurValue(
        wrong, ", ".join(f"{name} {study.percent_of_peak(block, times[name]):.1f} %" for name in ranked)
    )


def fastest(study: MeshSliceStudy, model: str) -> OurValue:
    """Return how often another algorithm is faster than MeshSlice under weak scaling (figure 9)."""
    return _slower_than(
        study, [study.weak_scaling_block(model, chips) for chips in study.experiment.sizes], COMPARED[1:]
    )


def strong_order(study: MeshSliceStudy, model: str) -> OurValue:
    """Return how many of 1D TP and SUMMA are faster than MeshSlice under strong scaling (figure 12)."""
    return _slower_than(
        study, [study.strong_scaling_block(model, study.experiment.chips)], ("tp1d", "summa[S=meshslice]")
    )


def never_slower(study: MeshSliceStudy, model: str) -> OurValue:
    """Return how often Collective is faster than MeshSlice (sections 5.1.1 and 5.1.4).

    The cases are all cluster sizes under weak and strong scaling, and the 16 products on their own.
    """
    sizes = study.experiment.sizes
    blocks = [study.weak_scaling_block(m, chips) for m in MODELS for chips in sizes]
    blocks += [study.strong_scaling_block(m, chips) for m in MODELS for chips in sizes]
    losses = _slower_than(study, blocks, ("collective",))
    alone = [
        study.block_s(block, "collective", index) < study.block_s(block, REFERENCE_ALGORITHM, index)
        for block, index in products(study)
    ]
    assert losses.value is not None
    return OurValue(losses.value + sum(alone), f"of {len(blocks) + len(alone)} cases")


def _slower_than(study: MeshSliceStudy, blocks: Sequence[FcBlock], rivals: Sequence[str]) -> OurValue:
    cases, lost = 0, []
    for block in blocks:
        mine = study.block_s(block)
        for rival in rivals:
            timing = study.timing(block, rival)
            if timing is not None:
                cases += 1
                if timing.total_s < mine:
                    lost.append(f"{rival} at {block.chips} chips")
    return OurValue(len(lost), "; ".join((f"of {cases} cases", *lost)))


def least_communication(study: MeshSliceStudy, model: str) -> OurValue:
    """Return how many algorithms communicate for less time in all than Collective (figure 10)."""
    block = study.weak_scaling_block(model)
    timings = {name: timing for name in COMPARED if (timing := study.timing(block, name)) is not None}
    least = timings["collective"].communication_s
    less = [name for name, timing in timings.items() if timing.communication_s < least]
    return OurValue(len(less), ", ".join(less))


def more_communication(name: str) -> Callable[[MeshSliceStudy, str], OurValue]:
    """Return a row function: by how many percent an algorithm communicates longer than Collective (figure 10)."""

    def longer(study: MeshSliceStudy, model: str) -> OurValue:
        block = study.weak_scaling_block(model)
        own, least = study.timing(block, name), study.timing(block, "collective")
        assert own is not None and least is not None
        shares = ", ".join(
            f"{part} {getattr(own, f'{part}_s') / own.compute_s:.2f} against "
            f"{getattr(least, f'{part}_s') / least.compute_s:.2f}"
            for part in ("launch", "sync", "transfer")
        )
        longer = percent_faster(own.communication_s, least.communication_s)
        return OurValue(longer, f"of the time of products: {shares}")

    return longer


def strong_over(rival: str) -> Callable[[MeshSliceStudy, str], float]:
    """Return a row function: MeshSlice's lead in percent at 256 chips with the fixed batch (section 5.1.3)."""

    def gain(study: MeshSliceStudy, model: str) -> float:
        block = study.strong_scaling_block(model, study.experiment.chips)
        return percent_faster(study.block_s(block, rival), study.block_s(block))

    return gain


def strong_small(study: MeshSliceStudy, model: str) -> OurValue:
    """Return the utilisation of the slowest algorithm in percent of the fastest, on the fewest chips with the
    fixed batch (section 5.1.3).
    """
    block = study.strong_scaling_block(model, study.experiment.sizes[0])
    names = [name for name in COMPARED if name != "fsdp"]
    shares = {name: share for name in names if (share := study.utilisation(block, name)) is not None}
    shown = ", ".join(f"{name} {share:.1f} %" for name, share in shares.items())
    return OurValue(100 * min(shares.values()) / max(shares.values()), shown)


def products(study: MeshSliceStudy) -> Iterator[tuple[FcBlock, int]]:
    """Yield the 16 distinct products of both models: (block, position in it)."""
    for model in MODELS:
        block = study.weak_scaling_block(model)
        shape = study.shapes(block, REFERENCE_ALGORITHM)[0]
        for index in distinct_products(study.problems(block, shape)):
            yield block, index


def products_over(rival: str) -> Callable[[MeshSliceStudy, str], float]:
    """Return a row function: the mean gain over the 16 products in percent, each at its own best mesh (figure
    11).
    """

    def gain(study: MeshSliceStudy, model: str) -> float:
        return mean(
            percent_faster(study.block_s(block, rival, i), study.block_s(block, REFERENCE_ALGORITHM, i))
            for block, i in products(study)
        )

    return gain


def mesh_effect(study: MeshSliceStudy, model: str) -> OurValue:
    """Return the time on the worst mesh shape with sides of at least 4 over that on the best shape (figure 13)."""
    block = study.weak_scaling_block(model)
    times = {shape: seconds for shape, (_, seconds) in mesh_times(study, block).items()}
    seen = [seconds for shape, seconds in times.items() if min(shape) >= 4] or list(times.values())
    shown = ", ".join(f"{r}x{c} {study.percent_of_peak(block, t):.1f} %" for (r, c), t in times.items())
    return OurValue(max(seen) / min(seen), shown)


def picks_mesh(study: MeshSliceStudy, model: str) -> OurValue:
    """Return at how many cluster sizes the estimate picks another mesh than simulation does (figure 13)."""
    if study.timer.by != "simulate":
        return NEEDS_SIMULATION
    misses = []
    for chips in study.experiment.sizes:
        is_best, loss = picks_best(mesh_times(study, study.weak_scaling_block(model, chips)))
        if not is_best:
            misses.append(f"{chips} chips: {loss}")
    return OurValue(len(misses), "; ".join(misses) or f"all {len(study.experiment.sizes)} sizes agree")


def picks_slices(study: MeshSliceStudy, model: str) -> OurValue:
    """Return 1 if the estimate picks another slice count than simulation on the tall mesh, else 0 (figure 14)."""
    if study.timer.by != "simulate":
        return NEEDS_SIMULATION
    times = slice_times(study, model)
    is_best, loss = picks_best(times)
    return OurValue(
        int(not is_best), loss or f"S = {min(times, key=lambda s: times[s])} of {len(times)} counts"
    )


def picks_slices_each(study: MeshSliceStudy, model: str) -> OurValue:
    """Return for how many products the estimate picks another slice count than simulation, at all sizes."""
    if study.timer.by != "simulate":
        return NEEDS_SIMULATION
    picks = [
        (name, *picks_best(times))
        for chips in study.experiment.sizes
        for name, times in product_slice_times(study, study.weak_scaling_block(model, chips))
    ]
    misses = [f"{name}: {loss}" for name, is_best, loss in picks if not is_best]
    return OurValue(len(misses), "; ".join([f"of {len(picks)} products", *misses]))


def estimate_error(study: MeshSliceStudy, model: str) -> OurValue:
    """Return the mean error in percent of estimates against simulation, over all products that are computed."""
    if study.timer.by != "simulate":
        return NEEDS_SIMULATION
    return OurValue(*summary(product_errors(study, MODELS, study.timer)))


def communication_error(study: MeshSliceStudy, model: str) -> OurValue:
    """Return the mean error in percent of estimated communication times of the 8 layers on 4x4 (figure 15)."""
    if study.timer.by != "simulate":
        return NEEDS_SIMULATION
    errors = MeasuredMesh(study).communication_errors(study.timer)
    return OurValue(mean(errors), f"of {len(errors)} layers, worst {max(errors):.1f} %")


def overlap_gain(study: MeshSliceStudy, model: str) -> float:
    """Return by how many percent MeshSlice with overlap is faster than Collective without, on 4x4 (section
    5.3.1).
    """
    real = MeasuredMesh(study)
    return percent_faster(real.overlapped(model, REFERENCE_ALGORITHM), real.serial(model, "collective"))


def moved_bytes(algorithm: str, mesh_shape: tuple[int, ...]) -> float:
    """Return the bytes that a chip moves for (M, N, K) = (1024K, 12K, 48K), read off the program (section 7).

    For "25d" bytes along "tp.depth" are left out. For others they are those of the forward product, and those of
    the gradient of the weights along "tp.depth".
    """
    if algorithm not in PRODUCTS_2D:
        raise UnsupportedError(f"{algorithm} is not in the table")
    entry = PRODUCTS_2D[algorithm]
    sizes = (1024 * KIBI, 12 * KIBI, 48 * KIBI)
    if algorithm == "25d":
        problem = Matmul2dProblem(*sizes, mesh_shape, "os", "bfloat16")
        moved = traffic(entry.program(problem, next(entry.candidates(problem))), 0)
        return sum(amount for axis, amount in moved.items() if axis != "tp.depth")
    forward = pass_problem("x", "forward", sizes[0], sizes[2], sizes[1], mesh_shape, "bfloat16")
    weight = pass_problem("x", "backward_weight", sizes[0], sizes[2], sizes[1], mesh_shape, "bfloat16")
    total = sum(traffic(entry.program(forward, next(entry.candidates(forward))), 0).values())
    return total + traffic(entry.program(weight, next(entry.candidates(weight))), 0).get("tp.depth", 0)


OURS: dict[str, Callable[[MeshSliceStudy, str], float | OurValue]] = {
    "flops": flops,
    "peak_time": peak_ms,
    "dataflows": dataflows,
    "utilisation": utilisation,
    "over_wang": over(WANG),
    "over_wang_at_its_best": over(WANG_TUNED),
    "end_to_end": end_to_end(WANG),
    "end_to_end_at_its_best": end_to_end(WANG_TUNED),
    "other_layers": other_layers,
    "unoptimised": unoptimised,
    "dataflow_gain": dataflow_gain,
    "scaling_loss": scaling_loss,
    "order": order,
    "fastest": fastest,
    "strong_order": strong_order,
    "never_slower": never_slower,
    "least_communication": least_communication,
    "meshslice_communication": more_communication(REFERENCE_ALGORITHM),
    "wang_communication": more_communication(WANG),
    "strong_over_collective": strong_over("collective"),
    "strong_over_wang": strong_over(WANG),
    "strong_small": strong_small,
    "products_over_collective": products_over("collective"),
    "products_over_wang": products_over(WANG),
    "products_over_wang_at_its_best": products_over(WANG_TUNED),
    "mesh_effect": mesh_effect,
    "picks_mesh": picks_mesh,
    "picks_slices": picks_slices,
    "picks_slices_each": picks_slices_each,
    "estimate_error": estimate_error,
    "real_collective": lambda study, model: MeasuredMesh(study).serial(model, "collective"),
    "real_wang": lambda study, model: MeasuredMesh(study).serial(model, "wang"),
    "real_meshslice": lambda study, model: MeasuredMesh(study).serial(model, REFERENCE_ALGORITHM),
    "real_overlap": lambda study, model: MeasuredMesh(study).overlapped(model, REFERENCE_ALGORITHM),
    "real_overlap_gain": overlap_gain,
    "real_overhead": lambda study, model: MeasuredMesh(study).overhead(),
    "real_slicing": lambda study, model: MeasuredMesh(study).slicing(),
    "communication_error": communication_error,
    "bytes_25d": lambda study, model: moved_bytes("25d", (16, 16, 4)) / 1e9,
    "bytes_meshslice_dp": lambda study, model: moved_bytes("meshslice_dp", (32, 8, 4)) / 1e6,
}

rows = PaperRows(PAPER, OURS, reading=READINGS[PUBLIC], fits=False)
