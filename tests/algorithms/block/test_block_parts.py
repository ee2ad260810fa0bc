"""Pieces of a model as a forward and a backward program: each is proved, and together they are the whole."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshweave.algorithms.block import ENTRIES, BlockAlgorithm, BlockConfig, BlockProblem
from meshweave.algorithms.block.roles import RING
from meshweave.algorithms.step.strategies import StrategyAround
from meshweave.base.errors import LayoutError, UnsupportedError
from meshweave.describe.model.dense import DenseForm, dense_layer
from meshweave.describe.model.layer import LayerGraph
from meshweave.describe.model.nodes import LayerNode
from meshweave.ir.analysis.validate import validate
from meshweave.ir.program import Program
from sampling import examples

BY_NAME = {entry.name: entry for entry in ENTRIES}
STRATEGIES = ("megatron", "megatron_sp", "atp", "meshslice_block", "summa_block")


@st.composite
def blocks(draw: st.DrawFn) -> tuple[BlockAlgorithm, BlockProblem]:
    """Draw a strategy and a layer whose sizes its mesh divides, or with rings around it."""
    name = draw(st.sampled_from(STRATEGIES))
    shape = (draw(st.sampled_from([1, 2, 4])), 1) if "megatron" in name else (2, 2)
    family = draw(st.sampled_from(["gpt", "llama"]))
    problem = BlockProblem(
        4, 4, 8, 4, 4, 2, 16, shape, family=family, exact=True, biases=draw(st.booleans()) and family == "gpt"
    )
    if name == "megatron_sp" and draw(st.booleans()):
        return StrategyAround(BY_NAME[name], (RING,)), replace(problem, mesh_shape=(2, 2, 1))
    return BY_NAME[name], problem


def op_kinds(program: Program) -> Counter[str]:
    """Count the ops of a program by what they do."""
    return Counter(f"{op.kind} {getattr(op, 'fn', '')}" for op in program.expanded.ops())


@examples(4)
@given(blocks(), st.sampled_from(["none", "selective", "full"]))
def test_both_parts_are_proved(block: tuple[BlockAlgorithm, BlockProblem], recompute: str) -> None:
    entry, problem = block
    config = next(entry.candidates(problem))
    parts = entry.parts(problem, config, recompute=recompute)
    assert not validate(parts.forward).skipped
    assert not validate(parts.backward).skipped
    if recompute == "full":
        assert not parts.kept
    weights = {buffer.name for buffer in parts.backward.buffers if buffer.kind == "output"} - {"dx"}
    assert parts.sums.keys() == weights


@examples(3)
@given(blocks())
def test_both_parts_have_the_ops_of_the_whole(block: tuple[BlockAlgorithm, BlockProblem]) -> None:
    """But for sums of gradients, and for what a ring needs again of the forward part."""
    entry, problem = block
    config = next(entry.candidates(problem))
    parts, whole = entry.parts(problem, config), op_kinds(entry.program(problem, config))
    both = op_kinds(parts.forward) + op_kinds(parts.backward)
    if len(problem.mesh_shape) == 3:
        both["call split_heads"] -= 1
    assert both - whole == Counter()
    assert (whole - both).keys() <= {"all_reduce "}


@pytest.mark.parametrize("name", ["megatron_sp", "atp", "meshslice_block"])
@pytest.mark.parametrize("piece", ["embedding", "head"])
def test_ends_are_proved(name: str, piece: str) -> None:
    shape = (4, 1) if "megatron" in name else (2, 2)
    problem = BlockProblem(4, 4, 8, 4, 4, 2, 16, shape, exact=True, vocabulary=12)
    parts = BY_NAME[name].parts(problem, BlockConfig(), piece=piece)
    assert not validate(parts.forward).skipped
    assert not validate(parts.backward).skipped


def test_attention_alone_is_computed_again() -> None:
    problem = BlockProblem(4, 4, 8, 4, 4, 2, 16, (2, 1))
    entry = BY_NAME["megatron_sp"]
    parts = entry.parts(problem, BlockConfig(), recompute="selective")
    assert "a0" not in parts.kept
    assert op_kinds(parts.backward)["call attention"] == 1
    rings = StrategyAround(entry, (RING,))
    parts = rings.parts(replace(problem, mesh_shape=(2, 2, 1)), BlockConfig(), recompute="selective")
    assert "a0" not in parts.kept
    assert not validate(parts.backward).skipped
    with pytest.raises(UnsupportedError, match="recompute='full'"):
        entry.parts(problem, BlockConfig(chunks=2), recompute="selective")


def twice(layer: LayerGraph, other: LayerGraph) -> LayerGraph:
    """Return two dense layers as one graph: names of the second end in B, and it reads what the first makes."""

    def renamed(node: LayerNode) -> LayerNode:
        own = {each.name for each in fields(node)} & {"weight", "gain", "statistics", "sums", "name"}
        words = {name: f"{getattr(node, name)}B" for name in own}
        ins = tuple(layer.output if edge == other.input else f"{edge}B" for edge in node.ins)
        return replace(node, out=f"{node.out}B", ins=ins, **words)

    return LayerGraph((*layer.nodes, *map(renamed, other.nodes)))


TWO_ATTENTIONS = twice(
    *(dense_layer(8, 4, 2, 2, 8, DenseForm(False, "layer", window=each)) for each in (None, 2))
)


def test_keys_of_two_attentions_in_a_layer_do_not_go_round_one_ring() -> None:
    problem = BlockProblem(2, 4, 8, 4, 2, 2, 8, (2, 1), exact=True, graph=TWO_ATTENTIONS)
    for write in (BY_NAME["ring_attention"].program, BY_NAME["ring_attention"].skeleton):
        with pytest.raises(LayoutError, match="several attentions has no ring yet; give context=1"):
            write(problem, BlockConfig())


def test_attention_alone_is_not_computed_again_where_there_are_two() -> None:
    """They are told apart by numbers in the names of their calls; one alone would be computed again."""
    problem = BlockProblem(2, 4, 8, 4, 2, 2, 8, (2, 1), exact=True, graph=TWO_ATTENTIONS)
    with pytest.raises(UnsupportedError, match="give recompute='full'"):
        BY_NAME["megatron"].parts(problem, BlockConfig(), recompute="selective")
    again = op_kinds(BY_NAME["megatron"].parts(problem, BlockConfig(), recompute="full").backward)
    assert again["call attention"] == again["call attention_1"] == 1
