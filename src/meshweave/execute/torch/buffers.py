"""The memory of a rank's buffers: what the caller gives is checked and aliased, the rest is allocated."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from meshweave.base.errors import BindError, require_known
from meshweave.execute.torch.analysis import RankAnalysis
from meshweave.execute.torch.views import empty_in_order, overlaps_itself, share_memory
from meshweave.ir.program.ops import READ


def torch_dtype(dtype: str) -> torch.dtype:
    """Return the torch dtype for a program's name of it: "bfloat16" -> torch.bfloat16."""
    resolved = getattr(torch, dtype)
    assert isinstance(resolved, torch.dtype)
    return resolved


@dataclass(frozen=True)
class RankBuffers:
    """The memory of a rank's buffers.

    Attributes:
        slots: the local tensor of each (buffer name, slot).
        given: by buffer name, tensors of the caller that each run copies to or from their slot, because the slot
            is in remote memory.
        unset: names of input buffers that have no value yet.
    """

    slots: dict[tuple[str, int], Tensor]
    given: dict[str, Tensor]
    unset: set[str]


def check_tensors(
    analysis: RankAnalysis, tensors: Mapping[str, Tensor], device: torch.device
) -> frozenset[str]:
    """Return the outputs that lie in memory of other buffers, of `tensors` of this rank by buffer name.

    Raises BindError where the tensors do not fit the rank's input and output buffers. Compared are names, shapes,
    dtypes and the type of `device`, not its index. An output that is written must not share memory with itself or
    another output, and with an input only if all ops that use the input are done before any op that writes the
    output, or are that op.
    """
    program, rank = analysis.program, analysis.rank
    bindable = {name: b for name, b in analysis.buffers.items() if b.kind in ("input", "output")}
    for name, tensor in tensors.items():
        require_known(
            name, bindable, f"rank {rank} of program {program.name} has no input or output buffer", BindError
        )
        check_value(name, tensor, program.local_shape(name, rank), torch_dtype(bindable[name].dtype))
        if tensor.device.type != device.type:
            raise BindError(f"buffer {name} is on {tensor.device}, its context on {device}")
        if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__ or tensor.is_neg():
            kind = "a lazily negated tensor" if tensor.is_neg() else f"a {type(tensor).__name__}"
            raise BindError(
                f"buffer {name} is given {kind}, whose memory is not its value: give a plain tensor"
            )
        if bindable[name].kind == "output" and overlaps_itself(tensor):
            raise BindError(
                f"buffer {name} is given a tensor of strides {tensor.stride()}, whose elements share memory: "
                "an output needs its own for each"
            )
    shared = [
        (name, other)
        for name, other in itertools.permutations(tensors, 2)
        if bindable[name].kind == "output" and share_memory(tensors[name], tensors[other])
    ]
    for name, other in shared:
        _check_order(analysis, name, other)
    return frozenset(name for name, _ in shared)


def _check_order(analysis: RankAnalysis, output: str, other: str) -> None:
    """Raise BindError where an output is written before ops are done with another buffer in the same memory.

    An input may lie where the output does if each op that reads it ends before every op that writes the output,
    or is that op.
    """
    used: dict[str, list[tuple[int, bool]]] = {output: [], other: []}
    for index, bound in enumerate(analysis.ops):
        for mode, view in bound.op.accesses():
            if view.buffer in used and view.rank is None:
                used[view.buffer].append((index, mode != READ))
    ended: list[int] = []  # for each op the ops that have ended once it has, as bits
    last: dict[str, int] = {}  # of the lane so far
    for index, bound in enumerate(analysis.ops):
        done = 1 << index | last.get(bound.op.lane, 0)
        for earlier in analysis.edges[index]:
            done |= ended[earlier]
        ended.append(done)
        last[bound.op.lane] = done
    is_result = analysis.buffers[other].kind == "output" and any(writes for _, writes in used[other])
    for index, writes in used[output]:
        if writes and (is_result or any(not ended[index] >> use & 1 for use, _ in used[other])):
            raise BindError(
                f"buffers {output} and {other} of program {analysis.program.name} are given memory in common, and "
                f"{analysis.ops[index].label} writes {output} before {other} is done with: give each its own"
            )


def allocate(
    analysis: RankAnalysis,
    tensors: Mapping[str, Tensor],
    device: torch.device,
    exposed: Mapping[tuple[str, int], Tensor],
) -> RankBuffers:
    """Return the buffers of a rank; those without a tensor from the caller are allocated on `device`.

    A tensor from the caller becomes slot 0 of its buffer, or `given` where that slot is in `exposed` and is other
    memory.

    Args:
        tensors: the caller's tensors, by buffer name.
        exposed: slots that other ranks read or write, by (buffer name, slot), which are allocated already.
    """
    slots = dict(exposed)
    given: dict[str, Tensor] = {}
    for buffer in analysis.buffers.values():
        shape, dtype = analysis.program.local_shape(buffer.name, analysis.rank), torch_dtype(buffer.dtype)
        for slot in range(buffer.slots):
            if (buffer.name, slot) not in exposed:
                slots[buffer.name, slot] = empty_in_order(shape, dtype, buffer.order, device)
        if buffer.name in tensors:
            tensor = _ordinary(tensors[buffer.name].detach())
            if (buffer.name, 0) not in exposed:
                slots[buffer.name, 0] = tensor
            elif exposed[buffer.name, 0].data_ptr() != tensor.data_ptr():
                given[buffer.name] = tensor
    inputs = {name for name, buffer in analysis.buffers.items() if buffer.kind == "input"}
    return RankBuffers(slots, given, inputs - set(tensors))


def _ordinary(tensor: Tensor) -> Tensor:
    """Return the same memory as a tensor that may be written outside inference mode."""
    if not tensor.is_inference():
        return tensor
    alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


def check_value(name: str, value: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise BindError where `value`, given for buffer `name`, is no strided tensor with data, or not of this local
    `shape` and `dtype`.
    """
    if not isinstance(value, Tensor):
        raise BindError(f"buffer {name} is given a {type(value).__name__}: give a torch.Tensor")
    if value.layout != torch.strided or value.is_nested or value.is_meta:
        kind = "nested" if value.is_nested else "meta" if value.is_meta else value.layout
        raise BindError(f"buffer {name} is given a {kind} tensor: give a dense one (torch.strided) with data")
    if tuple(value.shape) != shape or value.dtype != dtype:
        raise BindError(
            f"buffer {name} is of shape {shape} and {dtype}, "
            f"what was given of {tuple(value.shape)} and {value.dtype}"
        )
