"""Write the pieces of a step's model for a pipeline rank: its layers of each kind, and both ends."""

from __future__ import annotations

from dataclasses import replace

from meshweave.algorithms.block import BlockProblem
from meshweave.algorithms.block.parts import BlockParts
from meshweave.algorithms.block.pieces import Piece
from meshweave.algorithms.block.roles import BATCH, RING
from meshweave.algorithms.step.layers import best_config, eager_logits_s, extra_s
from meshweave.algorithms.step.problem import Parallelism, StepProblem
from meshweave.algorithms.step.routing import expert_ranks, rank_loads
from meshweave.algorithms.step.stage_layers import order_of_kinds
from meshweave.algorithms.step.strategies import StrategyAround, strategy_of
from meshweave.algorithms.step.units import Unit
from meshweave.cost.calls import flops_per_s
from meshweave.describe.layout.mesh import Mesh
from meshweave.describe.model.workload import Workload
from meshweave.ir.program import Program
from meshweave.ir.program.ops import Call, Op
from meshweave.ir.program.statements import rewrite


def _kind_names(problem: StepProblem) -> list[str]:
    """Return the names of `layer_names`, each once, in the order of `problem.kinds`."""
    return sorted(set(layer_names(problem)), key=lambda name: int(name.removeprefix("layer") or 0))


def layer_names(problem: StepProblem) -> tuple[str, ...]:
    """Return the name of the unit of each layer of the model, in order: "layer", or "layer0", "layer1" by kind.

    Where a model's description has only the number of layers of each kind, not their order, kinds take turns as
    evenly as these numbers allow, the first kind first.
    """
    count, shares = problem.model.num_layers, [share for share, _ in problem.kinds]
    if len(shares) == 1:
        return ("layer",) * count
    if problem.model.layers:
        return tuple(f"layer{kind}" for kind in order_of_kinds(problem))
    names, placed = list[str](), [0] * len(shares)
    for number in range(1, count + 1):
        due = [share * number - before for share, before in zip(shares, placed, strict=True)]
        kind = max(range(len(due)), key=lambda each: round(due[each], 9))
        placed[kind] += 1
        names.append(f"layer{kind}")
    return tuple(names)


def block_of_piece(
    problem: StepProblem, parallelism: Parallelism, piece: Piece, data: int, experts: Mesh | None = None
) -> BlockProblem:
    """Return the block problem of one piece ("layers", "embedding" or "head") for `data` replicas together.

    Its mesh is (data, context, d1, d2) with the tensor mesh (d1, d2), its batch one micro-batch of each of these
    replicas. "layers" is one layer. Embedding and head have the model's vocabulary, padded to a multiple of the
    tensor-parallel ranks; layers have none.

    Args:
        experts: the positions of the block's ranks on the mesh over which experts are divided
            (`ProgramRanks.experts_of_block`); None without experts.
    """
    p = parallelism
    work = Workload(p.micro_batch * data, problem.sequence, problem.dtype)
    block = BlockProblem.of(problem.model, work, (data, p.context, *p.tensor_mesh))
    ranks = expert_ranks(problem, p)
    if ranks is not None and experts is not None:
        block = replace(block, experts=replace(ranks, loads=rank_loads(problem, p), mesh=experts))
    if piece == "layers":
        return block
    block = replace(block, experts=None)
    size = p.tensor_size
    return replace(block, vocabulary=-(-(problem.model.vocab_size or 0) // size) * size)


def write_units(
    problem: StepProblem,
    parallelism: Parallelism,
    data: int,
    shards: tuple[int, int],
    experts: Mesh | None = None,
) -> dict[str, Unit]:
    """Return the units of a step by name: the kinds of layers, and with a vocabulary "embedding" and "head".

    Args:
        data: how many replicas along the data axis the program has.
        shards: over how many ranks ZeRO shards (a bucket, a bucket of experts); 1 where it does not shard.
        experts: the positions of a block's ranks on a mesh for experts (`ProgramRanks.experts_of_block`), or
            None.

    Raises:
        UnsupportedError: a strategy has no forward and backward programs of this kind (`BlockAlgorithm.parts`).
    """
    rate = flops_per_s(problem.cluster.chip, "", problem.dtype)

    def unit(name: str, piece: Piece, of: StepProblem, seconds: tuple[float, float, float]) -> Unit:
        first, second, late = (round(each * rate) for each in seconds)
        parts = _parts(of, parallelism, piece, data, experts)
        return Unit(name, parts, (first, second, late), *shards)

    units = {}
    for name, (_, kind) in zip(_kind_names(problem), problem.kinds, strict=True):
        units[name] = unit(name, "layers", kind, extra_s(kind, parallelism))
    if not problem.model.vocab_size:
        return units
    forward_s, backward_s = (
        eager_logits_s(problem, parallelism, num_bytes) for num_bytes in problem.stack.logit_bytes
    )
    units["embedding"] = unit("embedding", "embedding", problem, (0.0, 0.0, 0.0))
    units["head"] = unit("head", "head", problem, (forward_s, backward_s, 0.0))
    return units


def _parts(
    problem: StepProblem, parallelism: Parallelism, piece: Piece, data: int, experts: Mesh | None
) -> BlockParts:
    p = parallelism
    inner = strategy_of(replace(p, context=1, zero_group=None, expert=1, expert_tensor=1))
    entry = StrategyAround(inner, (BATCH, RING))
    block = block_of_piece(problem, p, piece, data, experts)
    recompute = p.recompute if piece == "layers" else "none"
    config = best_config(problem, p)

    def written() -> BlockParts:
        parts = entry.parts(block, config, piece=piece, recompute=recompute)
        if p.context > 1 and piece == "layers":
            parts = replace(parts, forward=_striped(parts.forward), backward=_striped(parts.backward))
        return parts

    return problem.once("parts", (entry.name, p.strategy, block, config, piece, recompute), written)


def _striped(program: Program) -> Program:
    """Return a program whose rings attend to half of the keys in every turn, as the estimate has them."""

    def striped(op: Op) -> tuple[Op, ...]:
        if isinstance(op, Call) and op.work == "attention":
            op = replace(op, shape=(*op.shape[:3], op.shape[2] // 2 + 1, op.shape[4]))
        return (op,)

    return replace(program, body=rewrite(program.body, striped))
