"""Degrees of parallelism for a training, by hand or from a plan, and the mesh that they make."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh

import meshweave as mw

FOLDED = ("zbv", "dualpipev")
"""Schedules whose stages go down the pipeline ranks and back up: the first rank has the last stage."""
_NAMES = {
    "tp": "tensor",
    "pp": "pipeline",
    "dp": "data",
    "vp": "virtual_stages",
    "micro_batch": "micro_batch",
}


def parallelism_from(
    text: str, num_ranks: int, *, batch: int, strategy: str = "", schedule: str = ""
) -> mw.Parallelism:
    """Return the degrees of a text such as "tp=2,pp=2"; data parallelism takes the ranks that are left.

    Args:
        text: also `vp=2` (stages of a pipeline rank), `tp=2x2` (a mesh) and `micro_batch=4` (rows on a replica).
        batch: sequences of a step. Without `micro_batch` there are twice as many micro-batches as stages, if the
            batch has so many.
        strategy, schedule: where not those of `mw.Parallelism`.

    Raises:
        DescriptionError, LayoutError: it is not of this form, or the ranks are others.
    """
    fields: dict[str, object] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        numbers = value.split("x")
        if name not in _NAMES or not all(number.isdigit() for number in numbers) or len(numbers) > 2:
            raise mw.errors.DescriptionError(
                f"--parallel: '{part}'; give {', '.join(_NAMES)}, such as tp=2,pp=2,dp=2"
            )
        sizes = tuple(map(int, numbers))
        fields[_NAMES[name]] = sizes if len(sizes) > 1 else sizes[0]
    if "data" not in fields:
        rest = mw.Parallelism(**fields).num_ranks  # type: ignore[arg-type]
        fields["data"] = max(num_ranks // rest, 1)
    fields |= {"strategy": strategy} if strategy else {}
    fields |= {"schedule": schedule} if schedule else {}
    chosen = mw.Parallelism(**fields)  # type: ignore[arg-type]
    if "micro_batch" not in fields:
        rows = max(batch // chosen.data, 1)
        count = 2 * chosen.num_stages if chosen.num_stages > 1 else 1
        chosen = replace(chosen, micro_batch=max(rows // count, 1))
    return _checked(chosen, num_ranks)


def parallelism_of_plan(path: Path, num_ranks: int, *, accepts_sites: bool = False) -> mw.Parallelism:
    """Return the best configuration of a plan that `meshweave plan --out` wrote.

    Args:
        accepts_sites: whether to do without what the plan hides of a layer beyond what a product hides itself.

    Raises:
        PlanError: the plan counts on that, and it is not accepted.
        LayoutError, UnsupportedError: as `parallelism_from`.
    """
    steps = mw.tune.load_plan(path).step
    chosen = _checked(mw.Parallelism(**steps.best.degrees.model_dump()), num_ranks)
    if chosen.tensor_size > 1 and steps.overlap != "sites" and not accepts_sites:
        raise mw.errors.PlanError(
            f"{path} was planned with the overlap of whole layers, whose products run one by one here; plan "
            "without --overlap layers, or give --accept-sites"
        )
    return chosen


def _checked(chosen: mw.Parallelism, num_ranks: int) -> mw.Parallelism:
    if chosen.num_ranks != num_ranks:
        raise mw.errors.LayoutError(
            f"these degrees are for {chosen.num_ranks} ranks, and there are {num_ranks}"
        )
    refused = [
        what
        for what, is_wanted in (
            ("context parallelism", chosen.context > 1),
            ("ZeRO", chosen.zero > 0),
            ("recomputation of attention alone", chosen.recompute == "selective"),
        )
        if is_wanted
    ]
    if refused:
        raise mw.errors.UnsupportedError(f"this example trains without {' and '.join(refused)}")
    return chosen


def mesh_for(chosen: mw.Parallelism) -> DeviceMesh:
    """Return the mesh of all ranks: pipeline first, then data, then the one or two axes of a layer's ranks."""
    sizes = chosen.tensor if isinstance(chosen.tensor, tuple) else (chosen.tensor,)
    names = ("tp",) if len(sizes) == 1 else ("tp0", "tp1")
    outermost_first = chosen.order[::-1]
    ranks = torch.arange(chosen.num_ranks).view([chosen.size(degree) for degree in outermost_first])
    dims = [outermost_first.index(degree) for degree in ("pipeline", "data", "context", "tensor")]
    ranks = ranks.permute(dims).reshape(chosen.pipeline, chosen.data, *sizes)
    return DeviceMesh("cpu", ranks, mesh_dim_names=("pp", "dp", *names))


def stages_of(chosen: mw.Parallelism, pipeline_rank: int) -> list[int]:
    """Return the stages of a pipeline rank: dealt in turn, or down the ranks and back up."""
    if chosen.schedule in FOLDED:
        return [pipeline_rank, chosen.num_stages - 1 - pipeline_rank]
    return list(range(pipeline_rank, chosen.num_stages, chosen.pipeline))


def in_words(chosen: mw.Parallelism) -> str:
    """Return the degrees in words."""
    tensor = "x".join(map(str, chosen.tensor)) if isinstance(chosen.tensor, tuple) else str(chosen.tensor)
    words = f"dp {chosen.data}, pp {chosen.pipeline}, tp {tensor}"
    words += f" by {chosen.strategy}" if chosen.tensor_size > 1 else ""
    return words + (f", {schedule_name(chosen)}" if chosen.num_stages > 1 else "")


def schedule_name(chosen: mw.Parallelism) -> str:
    """Return the schedule as `mw.pipeline` calls it."""
    interleaved = chosen.virtual_stages > 1 and chosen.schedule == "1f1b"
    return "interleaved-1f1b" if interleaved else chosen.schedule
