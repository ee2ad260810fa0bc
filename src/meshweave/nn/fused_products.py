"""Fused products on the ranks of a ring: written out by tiles, bound once, run on local parts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from meshweave.algorithms.fused import NoChoice, Tiles, ring_problems
from meshweave.algorithms.table import algorithm
from meshweave.algorithms.universal.problem import UniversalProblem
from meshweave.execute.torch.bind import BoundProgram, bind
from meshweave.execute.torch.cache import CachedProgram, program_bytes
from meshweave.execute.torch.context import TorchContext
from meshweave.ir.analysis.edges import exposed_buffers
from meshweave.ir.program import Program
from meshweave.lower import lower_one_sided, write_out_tiles
from meshweave.nn.products import LocalProduct, copying
from meshweave.nn.transports import Transport, memory_of, resolve


@dataclass(frozen=True)
class FusedOptions:
    """How a fused product runs.

    Attributes:
        algorithm: its name in `ALGORITHMS`.
        tiles: for algorithms that have them.
    """

    algorithm: str
    tiles: Tiles
    transport: Transport


def bound_product(
    problem: UniversalProblem, options: FusedOptions, context: TorchContext
) -> CachedProgram[BoundProgram]:
    """Return a product on a ring, bound to memory of its own at the first of its kind by all ranks of the ring.

    Raises:
        LayoutError: the algorithm does not take the layouts.
        BindError: ranks are about to run different products.
        UnsupportedError: the transport is not available here.
        RankLostError, DeadlineError: other ranks are missing or late.
    """
    key = "fused", problem, options
    cached = context.programs.get(problem.ranks, key)
    if cached is None:
        program = _program(problem, options)
        bound = _bind(program, options.transport, context)
        cached = context.programs.put(problem.ranks, key, bound, program_bytes(program))
    return cached


def prepare_fused(
    problem: UniversalProblem, options: FusedOptions, context: TorchContext
) -> CachedProgram[LocalProduct]:
    """Return this rank's part of a product on a mesh of rings, as `products.prepare_cached` does; errors as there.

    All ranks of the problem call it. Each ring binds a program of its own.
    """
    ring = next(ring for ring in ring_problems(problem) if context.rank in ring.ranks)
    key = "fused matmul", ring, options
    cached = context.programs.get(ring.ranks, key)
    if cached is None:
        program = _program(ring, options)
        run = copying(_bind(program, options.transport, context))
        cached = context.programs.put(ring.ranks, key, run, program_bytes(program))
    return cached


def _program(problem: UniversalProblem, options: FusedOptions) -> Program:
    entry = algorithm(options.algorithm)
    config = options.tiles if isinstance(next(entry.candidates(problem)), Tiles) else NoChoice()
    return write_out_tiles(entry.program(problem, config))


def _bind(program: Program, transport: Transport, context: TorchContext) -> BoundProgram:
    resolved, rank = resolve(transport, program.ranks, context), context.rank
    assert rank is not None
    with torch.inference_mode(False):  # buffers outlive the call, and later ones may be ordinary
        if resolved == "messages" or not exposed_buffers(program):
            return bind(lower_one_sided(program), rank, {}, context=context)
        memory = memory_of(resolved, program.ranks, context)
        return bind(program, rank, {}, context=context, memory=memory)
