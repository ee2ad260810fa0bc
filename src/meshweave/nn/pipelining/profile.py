"""Profiles of stages: what a stage makes, computes and keeps of one micro-batch, from a run on the meta device.

The meta device has shapes and no values. The module is copied there without its memory, its parts run once
with the very functions that a pipeline runs, and FLOPs and saved bytes are counted on the way.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from meshweave.base.errors import LayoutError, MeshweaveError
from meshweave.nn.pipelining.gradients import num_local_elements
from meshweave.nn.pipelining.saved_memory import SavedMemory
from meshweave.nn.pipelining.stage_functions import (
    LossFunction,
    StageFunctions,
    StageShape,
    StageStep,
    TensorKind,
)


@dataclass(frozen=True)
class StageProfile:
    """What one stage computes, passes on and keeps, for one micro-batch of one rank.

    Attributes:
        outs: shape and dtype of each tensor that it passes on, one for each stage after it that reads something.
        flops: (of the forward, of the input gradient, of the weight gradient); of DTensors those of all ranks of
            their mesh together.
        bytes: of parameters, inputs and outputs together, which each of these three parts is taken to read and
            write; of a DTensor those of its largest shard.
        kept_bytes: (after the forward, after the input gradient): the bytes then kept for the parts that follow;
            of a DTensor this rank's part.
        recomputed_bytes: the bytes that the forward keeps if the stage recomputes: its inputs; 0 at the first
            stage.
        num_parameters: elements of the parameters that require gradients; of a DTensor those of its largest shard.
        dtype: of these parameters; "" if there are several, or none.
        missed_gradient: the name of a parameter whose gradient a backward in two parts misses; "" if there is
            none. torch looks for parameters where their graph meets that of inputs, so it misses those whose
            results depend on no input.
        unsplit: why a backward in two parts does not run; "" where it does. FLOPs of the backward are then halved.
    """

    outs: tuple[TensorKind, ...]
    flops: tuple[int, int, int]
    bytes: int
    kept_bytes: tuple[int, int]
    recomputed_bytes: int
    num_parameters: int
    dtype: str
    missed_gradient: str = ""
    unsplit: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the profile as JSON values, which `from_json` reads back."""
        outs = [[list(kind.shape), str(kind.dtype).removeprefix("torch.")] for kind in self.outs]
        return {**asdict(self), "outs": outs}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StageProfile:
        """Return the profile from the values that `to_json` returned."""
        outs = tuple(TensorKind(tuple(shape), getattr(torch, dtype)) for shape, dtype in data["outs"])
        lists = {name: tuple(data[name]) for name in ("flops", "kept_bytes")}
        return cls(**{**data, **lists, "outs": outs})


def profile_stage(
    module: nn.Module,
    number: int,
    inputs: Sequence[TensorKind],
    sources: Sequence[int],
    targets: Sequence[int],
    loss_fn: LossFunction | None = None,
    target: TensorKind | None = None,
    *,
    trains: bool = True,
) -> StageProfile:
    """Return the shapes, FLOPs and kept bytes of a stage for one micro-batch, from a run on the meta device.

    Args:
        module: the stage; a copy on the meta device is run, not this.
        number: of the stage, for errors.
        inputs: what it is called with on one rank: the tensors of the batch, or one for each of `sources`.
        sources: the stages whose results it reads, none for the first.
        targets: the stages that read its results, none for the last.
        loss_fn: of the last stage; None without a loss.
        target: what the loss compares the output with; None without a loss.
        trains: whether backwards are run, too; else the FLOPs are of the forward, and no bytes are kept.

    Raises:
        LayoutError: it does not run on such inputs, returns what is no tensor, does not return one tensor for
            each of `targets`, or passes on one that is not floating point.
    """
    clone = _on_meta(module)
    if isinstance(loss_fn, nn.Module) and [*loss_fn.parameters(), *loss_fn.buffers()]:
        loss_fn = _on_meta(loss_fn)
    batch = tuple(torch.empty(kind.shape, dtype=kind.dtype, device="meta") for kind in inputs)
    kinds = _run(clone, number, batch, sources)
    if targets and len(kinds) != len(targets):
        raise LayoutError(
            f"stage {number} returns {len(kinds)} tensors, and goes on to stages {', '.join(map(str, targets))}: "
            "it must return one for each, in this order"
        )
    for kind in kinds if targets else ():
        if not kind.dtype.is_floating_point:
            raise LayoutError(
                f"stage {number} passes on {kind}, which has no gradient: pass on floating point"
            )
    shape = StageShape(
        number, 1, tuple(inputs) if sources else (), kinds if targets else (), tuple(sources), tuple(targets)
    )
    has_loss = loss_fn is not None and target is not None and not targets
    targets_of = [torch.empty(target.shape, dtype=target.dtype, device="meta")] * 2 if target else []
    step = StageStep([batch, batch] if not sources else (), targets_of if has_loss else ())
    flops, kept, lost, unsplit = (0, 0, 0), (0, 0), "", ""
    if trains and (targets or has_loss):
        try:
            flops, kept, lost = _measured(clone, shape, loss_fn, step)
        except _NotSplitError as error:
            unsplit = str(error)
            flops, kept, lost = _measured(clone, shape, loss_fn, step, splits=False)
    elif not trains:
        flops = (_counted_flops(lambda: clone(*batch)), 0, 0)
    moved = [
        *clone.parameters(),
        *batch,
        *(torch.empty(k.shape, dtype=k.dtype, device="meta") for k in kinds),
    ]
    return StageProfile(
        kinds if targets else (),
        flops,
        sum(num_local_elements(tensor) * tensor.element_size() for tensor in moved),
        kept,
        sum(value.numel() * value.element_size() for value in batch) if sources else 0,
        *trained_elements(clone),
        lost,
        unsplit,
    )


def trained_elements(module: nn.Module) -> tuple[int, str]:
    """Return (`StageProfile.num_parameters`, its dtype) of a module."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    dtypes = {str(parameter.dtype).removeprefix("torch.") for parameter in trained}
    return sum(map(num_local_elements, trained)), dtypes.pop() if len(dtypes) == 1 else ""


def _on_meta(module: nn.Module) -> nn.Module:
    """Return a copy of a module whose parameters and buffers are on the meta device."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        meta = torch.empty_like(parameter, device="meta", requires_grad=False)
        memo[id(parameter)] = nn.Parameter(meta, parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    for child in module.modules():  # such as a normed weight, or an auxiliary loss of an earlier call
        computed = [
            own for own in vars(child).values() if isinstance(own, Tensor) and own.grad_fn is not None
        ]
        memo |= {id(own): torch.empty_like(own, device="meta", requires_grad=False) for own in computed}
    return copy.deepcopy(module, memo)


def _run(
    module: nn.Module, number: int, batch: Sequence[Tensor], sources: Sequence[int]
) -> tuple[TensorKind, ...]:
    """Return the kinds of what a stage returns. Raises LayoutError in one line where it fails."""
    try:
        with torch.no_grad():
            made = module(*batch)
    except MeshweaveError:
        raise
    except Exception as error:
        given = ", ".join(str(TensorKind.of(value)) for value in batch)
        makers = f"what stage {' and '.join(map(str, sources))} makes" if sources else "the batch"
        raise LayoutError(
            f"stage {number} does not run on {makers}, {given}, on the meta device: {_first_line(error)}; "
            + _REMEDY.format(number)
        ) from error
    outs = made if isinstance(made, (tuple, list)) else [made]
    for out in outs:
        if not isinstance(out, Tensor):
            raise LayoutError(f"stage {number} returns a {type(out).__name__}; it must return tensors")
    return tuple(TensorKind.of(out) for out in outs)


_REMEDY = (
    "where it or the loss reads values, give outputs={{{}: [what it passes on for a micro-batch, if any]}}"
)


class _NotSplitError(Exception):
    """A backward in two parts fails, and may run whole."""


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _measured(
    module: nn.Module,
    shape: StageShape,
    loss_fn: LossFunction | None,
    step: StageStep,
    splits: bool = True,
) -> tuple[tuple[int, int, int], tuple[int, int], str]:
    """Return the FLOPs of the three parts, the bytes kept after the first and second, and a lost parameter.

    Without `splits` the backward runs whole. Raises _NotSplitError where it fails in two parts, LayoutError where
    it fails whole, or the forward does.
    """
    memory = SavedMemory()
    functions = StageFunctions(module, shape, loss_fn, {1}, memory=memory)
    functions.step, functions.refuses_missed = step, False  # the profile names it
    memory.exclude_batch([value for micro_batch in step.batch for value in micro_batch] + list(step.targets))
    ins, grads = (
        [torch.empty(kind.shape, dtype=kind.dtype, device="meta") for kind in kinds]
        or [torch.empty(0, device="meta")]
        for kinds in (shape.ins, shape.outs)
    )
    token = torch.empty(1, device="meta")
    stash: dict[str, Any] = {}
    micro_batch = 0 if splits else 1
    try:
        forward = _counted_flops(lambda: functions.forward(stash, *ins, token, micro_batch))
        after_forward = memory.bytes
        try:
            input_grad = _counted_flops(lambda: functions.input_grad(stash, *grads, token, micro_batch))
            after_input_grad = memory.bytes
            weight_grad = _counted_flops(lambda: functions.weight_grad(stash, token, micro_batch))
        except Exception as error:
            if not splits or isinstance(error, MeshweaveError):
                raise
            raise _NotSplitError(_first_line(error)) from error
        if not splits:
            half = input_grad // 2
            return (forward, half, input_grad - half), (after_forward, after_forward), ""
        split = _with_gradients(module)
        module.zero_grad(set_to_none=True)
        functions.forward(stash, *ins, token, 1)
        functions.input_grad(stash, *grads, token, 1)
    except (MeshweaveError, _NotSplitError):
        raise
    except Exception as error:
        reason = _first_line(error)
        remedy = _REMEDY.format(shape.number)
        if "leaf Variable that requires grad" in reason:
            remedy = "it changes in place what arrives: let its first operation make a new tensor"
        raise LayoutError(
            f"stage {shape.number} does not run on the meta device: {reason.rstrip('.')}; {remedy}"
        ) from error
    lost = sorted(_with_gradients(module) - split)
    return (forward, input_grad, weight_grad), (after_forward, after_input_grad), lost[0] if lost else ""


def _with_gradients(module: nn.Module) -> set[str]:
    return {name for name, parameter in module.named_parameters() if parameter.grad is not None}


def _counted_flops(run: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops())
