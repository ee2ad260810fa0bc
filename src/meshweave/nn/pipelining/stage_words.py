"""What ranks compare of their stages and of what they give a pipeline: texts for `nn.parallel.agreed`, targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshweave.base.errors import LayoutError
from meshweave.execute.ranks.blame import ranks_text
from meshweave.execute.torch.context import TorchContext
from meshweave.execute.torch.counted import gathered
from meshweave.nn.parallel.agreed import Words
from meshweave.nn.parallel.checksums import digest_of
from meshweave.nn.parallel.model_words import checksum_words, copy_words, setting_words, version_words
from meshweave.nn.pipelining.plan import PipelineOptions
from meshweave.nn.pipelining.stage_problem import StagePlaces


def stage_words(
    stages: Mapping[int, nn.Module],
    places: StagePlaces,
    *,
    batch: Sequence[Tensor],
    target: Tensor | None,
    options: PipelineOptions,
) -> Words:
    """Return {subject: {name: text}} to compare before a pipeline runs; equal subjects need equal texts.

    Subjects name the ranks: those along data axes share the weights of a stage, those along the other axes share
    tokens and targets, and all share options and versions. Ranks of a stage also compare which of its modules are
    in training and, where these draw random numbers for copies, the state of torch's generator.

    Args:
        stages: the modules of this rank, by number of the stage.
        places: which ranks have which stage.
        batch: what this rank gives the first stage; not read without it.
        target: what it gives the last stage; None, or not read without it.
        options: what `meshweave.pipeline` was called with.
    """
    given = {
        "scale_grads": str(options.scale_grads),
        "has_local_batch": str(options.has_local_batch),
        "micro_batches": str(options.micro_batches),
    }
    words: dict[str, Mapping[str, str]] = {
        "versions": version_words(), "arguments": given, "settings": setting_words()
    }  # fmt: skip
    for number, stage in stages.items():
        shared, own = _coordinates(places, number)
        named = list(stage.named_parameters())
        plain = [(name, each) for name, each in named if not isinstance(each, DTensor)]
        words[f"weights of parts {own} of stage {number}"] = checksum_words(plain)
        words |= copy_words(f"copies of stage {number}", named)
        words[f"modules in training of stage {number}"] = {
            f"{name}.training": str(child.training) for name, child in stage.named_modules()
        }
        if (table := getattr(stage, "tied", None)) is not None:
            words[f"weights of parts {own} of the table of embedding and head"] = checksum_words(
                [("", table)]
            )
        if getattr(stage, "draws", False):
            state = f"#{digest_of(torch.get_rng_state()):x}"
            words[f"generator of stage {number} of parts {shared}"] = {"state": state}
        rows = shared if options.has_local_batch else "all"
        if number == 0:
            words[f"tokens of parts {rows}"] = checksum_words(
                (f"batch {at}", x) for at, x in enumerate(batch)
            )
        if number == places.num_stages - 1 and target is not None:
            words[f"targets of parts {rows}"] = checksum_words([("target", target)])
    return words


def require_target_of_all(target: Tensor | None, ranks: tuple[int, ...], context: TorchContext) -> None:
    """Raise LayoutError where some of `ranks`, those of the last stage, have a target and others have None.

    Collective among them: the loss of those that have one would be a part of the whole. Raises BindError,
    RankLostError or DeadlineError where other ranks refuse, are missing or late.
    """
    own = torch.tensor([target is not None], dtype=torch.int64, device=context.device)
    told = gathered(own, context, ranks, "ranks of the last stage to say whether they have a target")
    lacking = [rank for rank, has_one in zip(ranks, told.flatten().tolist(), strict=True) if not has_one]
    if 0 < len(lacking) < len(ranks):
        raise LayoutError(
            f"{ranks_text(lacking)} of the last stage {'has' if len(lacking) == 1 else 'have'} no target, and "
            "others have one: give a target on all ranks of the last stage, or on none for outputs alone"
        )


def _coordinates(places: StagePlaces, stage: int) -> tuple[str, str]:
    """Return where this rank is along the data axes of a stage, and along the others."""
    mesh = places.meshes[stage]
    here = dict(zip(mesh.axes, mesh.coords(dist.get_rank() if dist.is_initialized() else 0), strict=True))
    shared = [f"{axis} {at}" for axis, at in here.items() if axis in places.data_axes]
    own = [f"{axis} {at}" for axis, at in here.items() if axis not in places.data_axes]
    return ", ".join(shared) or "all", ", ".join(own) or "all"
