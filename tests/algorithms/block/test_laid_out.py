"""How a layer lies on ranks is what the program of its strategy says: shards, and what is moved."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import prod

import pytest

import meshweave as mw
from meshweave.algorithms.block import ENTRIES, BlockAlgorithm, BlockConfig, BlockProblem
from meshweave.algorithms.block.laid_out import LaidLayer, laid_out
from meshweave.algorithms.block.problem import ExpertRanks
from meshweave.describe.layout import Layout
from meshweave.describe.model.experts import Router
from meshweave.ir.program import Program
from meshweave.ir.program.expand import expand
from meshweave.ir.program.ops import COMPUTE_KINDS

NAMES = [entry.name for entry in ENTRIES]


def laid(entry: BlockAlgorithm) -> tuple[LaidLayer, Program]:
    """Return a layer as a strategy lays it, and its program, for sizes that its mesh divides."""
    mesh = {2: (2, 1) if entry.is_one_dimensional else (2, 2), 3: (2, 2, 2)}[len(entry.roles)]
    problem = BlockProblem(4, 8, 32, 4, 4, 8, 64, mesh, dtype="bfloat16", training=False)
    config = next(iter(entry.candidates(problem)))
    return laid_out(problem, config, entry.roles_of(problem)), entry.program(problem, config)


def cut(layout: Layout, shape: tuple[int, ...]) -> list[int]:
    """Return into how many parts the ranks of a layout cut each dim of a tensor."""
    boxes = [layout.intervals(shape, rank) for rank in layout.mesh.ranks]
    return [len({box[dim] for box in boxes}) for dim in range(len(shape))]


@pytest.mark.parametrize("entry", ENTRIES, ids=NAMES)
def test_what_is_moved_is_what_the_program_moves(entry: BlockAlgorithm) -> None:
    layer, program = laid(entry)
    said: Counter[str] = Counter()
    for of_nodes in (layer.before, layer.within, layer.after):
        for moves in of_nodes.values():
            for each in moves:
                said[each.kind] += each.times
    whole = expand(program)
    ops = whole.unbound_ops_on_rank(whole.ranks[0])
    assert said == Counter(op.kind for op, _ in ops if op.kind not in COMPUTE_KINDS)


@pytest.mark.parametrize("entry", ENTRIES, ids=NAMES)
def test_shards_are_those_of_the_program(entry: BlockAlgorithm) -> None:
    layer, program = laid(entry)
    given = {b.tensor: b.layout for b in program.buffers if b.kind == "input"}
    for name, shards in layer.weights.items():
        tensor = next(t for t in given if t is not None and t.rstrip("0").rstrip("_") == name.rstrip("_"))
        layout = given[tensor]
        assert layout is not None
        assert shards.sides == tuple(cut(layout, program.tensor_of[tensor].shape)), name
    shape, layout = program.tensor_of["X"].shape, given["X"]
    assert layout is not None
    *tokens, features = cut(layout, shape)
    assert layer.edges["X"].sides == (prod(tokens), features)


def test_bytes_of_megatron() -> None:
    """Korthikanti et al. (MLSys '23), section 4.2.2: two gathers and two scatters of the residual forward."""
    entry = next(entry for entry in ENTRIES if entry.name == "megatron_sp")
    layer, _ = laid(entry)
    residual = 4 * 8 * 32 * 2
    before = [each for moves in layer.before.values() for each in moves]
    after = [each for moves in layer.after.values() for each in moves]
    assert [(each.kind, each.num_bytes) for each in before] == [("all_gather", residual)] * 2
    assert [(each.kind, each.num_bytes) for each in after] == [("reduce_scatter", residual)] * 2
    assert [edge for edge, moves in layer.before.items() if moves] == ["QKV", "Y"]


def test_experts_are_shared_and_tokens_exchanged() -> None:
    model = mw.load_model("mixtral-8x7b")
    block = BlockProblem.of(model, mw.Workload(1, 16), (2, 1))
    block = replace(block, experts=ExpertRanks(4, 2))
    entry = next(entry for entry in ENTRIES if entry.name == "megatron_sp")
    layer = laid_out(block, BlockConfig(), entry.roles_of(block))
    assert layer.weights["WE1"].count == layer.weights["WE2"].count == 8
    dispatch = next(each for each in layer.within["C"] if each.kind == "dispatch")
    chosen = next(node for node in model.layer.nodes if isinstance(node, Router)).chosen
    assert dispatch.num_bytes == 16 // 2 * chosen * model.hidden * 2
