"""Fused products on the ranks of a ring: written out by tiles, bound once, run on local parts."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Literal

import torch

from meshweave.algorithms.fused import NoChoice, Tiles, ring_problems
from meshweave.algorithms.table import algorithm
from meshweave.algorithms.universal.problem import UniversalProblem
from meshweave.base.errors import UnsupportedError
from meshweave.execute.torch.bind import BoundProgram, bind
from meshweave.execute.torch.cache import CachedProgram, program_bytes
from meshweave.execute.torch.context import TorchContext
from meshweave.ir.analysis.edges import exposed_buffers
from meshweave.ir.program import Program
from meshweave.lower import lower_one_sided, write_out_tiles
from meshweave.nn.products import LocalProduct, copying
from meshweave.nn.transports import Transport, memory_of, resolve_transport

FusedKernels = Literal["auto", "library", "tracked"]
"""What computes the tiles of a fused product."""


@dataclass(frozen=True)
class FusedOptions:
    """How a fused product runs.

    Attributes:
        algorithm: its name in `ALGORITHMS`.
        tiles: sizes and order of tiles; unused by algorithms without tiles.
        transport: how ranks get the data of others; "auto" chooses.
        products: "tracked", one kernel that counts the tiles it has finished; "library", a call of torch for each
            tile; "auto", tracked on CUDA where kernels have the dtype and ranks share memory, else library.
    """

    algorithm: str
    tiles: Tiles
    transport: Transport
    products: FusedKernels = "auto"


def bound_product(
    problem: UniversalProblem, options: FusedOptions, context: TorchContext
) -> CachedProgram[BoundProgram]:
    """Return the bound program of a product on this rank's ring, from the cache of `context` if it has one.

    Otherwise all ranks of the ring bind it together.

    Raises:
        LayoutError: the algorithm does not take the layouts.
        BindError: ranks are about to run different products.
        UnsupportedError: the transport is not available here, or cannot run "tracked" products.
        RankLostError, DeadlineError: other ranks are missing or late.
    """
    key = "fused", problem, options
    cached = context.programs.get(problem.ranks, key)
    if cached is None:
        program = _program(problem, options)
        bound = _bind(program, problem.dtype, options, context)
        cached = context.programs.put(problem.ranks, key, bound, program_bytes(program))
    return cached


def prepare_fused(
    problem: UniversalProblem, options: FusedOptions, context: TorchContext
) -> CachedProgram[LocalProduct]:
    """Return a product C = A B, cached: its `value` is a function from this rank's shards of A and B to that of C.

    All ranks of the problem call `prepare_fused`, and later the function. The mesh is split into rings, each of
    which binds a program of its own unless `context` has it.

    Raises:
        LayoutError: the algorithm does not take the layouts.
        BindError: ranks are about to run different products.
        UnsupportedError: the transport is not available here, or cannot run "tracked" products.
        RankLostError, DeadlineError: other ranks are missing or late; the returned function raises them, too.
    """
    ring = next(ring for ring in ring_problems(problem) if context.rank in ring.ranks)
    key = "fused matmul", ring, options
    cached = context.programs.get(ring.ranks, key)
    if cached is None:
        program = _program(ring, options)
        run = copying(_bind(program, ring.dtype, options, context))
        cached = context.programs.put(ring.ranks, key, run, program_bytes(program))
    return cached


def _program(problem: UniversalProblem, options: FusedOptions) -> Program:
    entry = algorithm(options.algorithm)
    config = options.tiles if isinstance(next(entry.candidates(problem)), Tiles) else NoChoice()
    return entry.program(problem, config)


def _bind(program: Program, dtype: str, options: FusedOptions, context: TorchContext) -> BoundProgram:
    resolved, rank = resolve_transport(options.transport, program.ranks, context), context.rank
    assert rank is not None
    with torch.inference_mode(False):  # buffers outlive the call, and later ones may be ordinary
        if resolved == "messages" or not exposed_buffers(program):
            if options.products == "tracked":
                raise UnsupportedError(
                    f"tracked products by {options.algorithm} over {resolved}: their tiles go to memory that "
                    "ranks share; give transport 'symmetric' or 'shared', and an algorithm with tiles"
                )
            return bind(lower_one_sided(write_out_tiles(program)), rank, {}, context=context)
        memory = memory_of(resolved, program.ranks, context)
        if options.products == "tracked" or (options.products == "auto" and _is_tracked(dtype, context)):
            return bind(program, rank, {}, context=context, memory=memory, products="tracked")
        return bind(write_out_tiles(program), rank, {}, context=context, memory=memory)


def _is_tracked(dtype: str, context: TorchContext) -> bool:
    """Return whether kernels that count tiles take a dtype on the device, and add it to memory."""
    if context.device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    from meshweave.execute.cuda.kernels import lacks_atomic_add
    from meshweave.execute.cuda.tracked_product import DTYPES

    kind: torch.dtype = getattr(torch, dtype)
    return kind in DTYPES and not lacks_atomic_add(kind, context.device)
