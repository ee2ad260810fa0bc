"""What a universal product sums before its local products, and which replicas of C it puts together after them."""

from __future__ import annotations

from meshweave.algorithms.universal.issue_order import rule_of
from meshweave.algorithms.universal.owners import BlockKey, owners
from meshweave.algorithms.universal.panels import OwnedBlock, Span
from meshweave.algorithms.universal.problem import Operand
from meshweave.algorithms.universal.slicing import Slicing
from meshweave.describe.layout import Layout, Partial


def partial_sums(
    slicing: Slicing, operand: Operand, rank: int
) -> list[tuple[tuple[int, int], tuple[OwnedBlock, ...]]]:
    """Return what a rank adds up, block by block, to reduce a partial operand before the products.

    Each entry is ((row, column), terms): the position of the block's first element in this rank's shard of the
    reduced operand, and the addends in the order of addition, each a block in the shard of the rank that holds it.
    If no other rank makes the same sum, the addends go from the nearest rank (this one) to the farthest. If other
    ranks do, all of them add in one order, which begins at a different term for each block to spread the reads.
    The list is empty for an operand that is not reduced first.

    Args:
        operand: "a" or "b".
        rank: a global rank.
    """
    layout = slicing.summed_layout(operand)
    if layout is None:
        return []
    problem, position = slicing.problem, slicing.position
    source = owners(problem.layout(operand), problem.shape(operand))
    target = slicing.matrices[operand]
    row, column, _ = target.block_of[rank]
    has_copies = len(target.holders[target.block_of[rank]]) > 1
    terms = _summed_terms(problem.layout(operand), layout, rank)
    sums = []
    for rows in source.rows.split(target.rows.classes[row]):
        for columns in source.columns.split(target.columns.classes[column]):
            row_span = rows.local_start, rows.local_start + rows.size
            column_span = columns.local_start, columns.local_start + columns.size
            start = rows.list_start, columns.list_start
            holders = [source.holders[rows.index_class, columns.index_class, term] for term in terms]
            nearest = [slicing.nearest_holder(ranks, rank) for ranks in holders]
            if has_copies:
                first = (rows.index_class + columns.index_class) % len(nearest)
                nearest = [*nearest[first:], *nearest[:first]]
            else:
                nearest.sort(key=lambda holder: (position[holder] - position[rank]) % len(position))
            blocks = tuple(OwnedBlock(holder, row_span, column_span, start) for holder in nearest)
            sums.append((start, blocks))
    return sums


def _summed_terms(source: Layout, target: Layout, rank: int) -> list[int]:
    """Return the terms of a partial matrix in `source` that make up what a rank holds of it in `target`."""
    placement_of = dict(zip(target.mesh.axes, target.placements, strict=True))
    terms = [0]
    for axis, placement, coordinate, count in zip(
        source.mesh.axes, source.placements, source.mesh.coords(rank), source.mesh.shape, strict=True
    ):
        if isinstance(placement, Partial):
            coordinates = [coordinate] if isinstance(placement_of[axis], Partial) else range(count)
            terms = [term * count + coordinate for term in terms for coordinate in coordinates]
    return terms


def replicas_have_same_bits(slicing: Slicing) -> bool:
    """Return whether all replicas of C, and of each term of a partial C, surely have the same bits.

    Within a group (`Slicing`) one rank computes an element, and the others copy it. Several groups get the same
    bits if each adds up the same products in the same order: products of equal panels, which also lie alike in
    memory (`Slicing.product_key`), each added by the same side, the owner or another rank. A schedule other than
    "direct" orders the products of a rank by what it has to fetch, so that with C stationary the ranks' costs
    must be equal, too; with A or B stationary the result is then False. `ir.analysis.replicas` decides the same
    for any program, and takes longer.
    """
    config = slicing.config
    if not slicing.is_recomputed:
        return True
    sums = _sums_of_products(slicing)
    if config.schedule != "direct":
        if config.stationary != "c" or config.rates is None:
            return False
        rule, rates = rule_of(config.schedule), config.rates
        sums = {rank: (sums[rank], rule.costs(slicing, rank, rates)) for rank in sums}
    sums_of_block: dict[BlockKey, object] = {}
    for rank in slicing.problem.ranks:
        of_rank = [sums[replica] for replica in replicas_of(slicing, rank)]
        if sums_of_block.setdefault(slicing.matrices["c"].block_of[rank], of_rank) != of_rank:
            return False
    return True


def _sums_of_products(slicing: Slicing) -> dict[int, object]:
    """Return for each rank what is added, in order, into what it owns of C within its group."""
    ranks = slicing.problem.ranks
    if slicing.config.stationary == "c":
        return {
            rank: [slicing.product_key(rank, part, run) for part, run in slicing.runs(rank)] for rank in ranks
        }
    terms: dict[int, list[tuple[int, int, object]]] = {rank: [] for rank in ranks}
    for rank in ranks:
        for number, ((part, run), step) in enumerate(
            zip(slicing.runs(rank), slicing.whole_steps[rank], strict=True)
        ):
            for block in step.panels["c"].blocks:
                product = slicing.product_key(rank, part, run), block.rows, block.columns, block.owner == rank
                terms[block.owner].append((number, rank, (number, product)))
    # Messages add in the order of steps, memory that ranks share in the order of ranks.
    return {
        owner: [[term for *_, term in sorted(listed, key=order)] for order in (_by_step, _by_rank)]
        for owner, listed in terms.items()
    }


def _by_step(term: tuple[int, int, object]) -> tuple[int, int]:
    return term[0], term[1]


def _by_rank(term: tuple[int, int, object]) -> tuple[int, int]:
    return term[1], term[0]


def merges_replicas(slicing: Slicing) -> bool:
    """Return whether some ranks of one group hold the same block of C, and so combine their results at the end."""
    return any(len(replicas_of(slicing, rank)) > 1 for rank in slicing.problem.ranks)


def replicas_of(slicing: Slicing, rank: int) -> tuple[int, ...]:
    """Return the global ranks, `rank` among them, of its group that hold the same term of the same block of C.

    They are in ascending order.
    """
    c, group_of = slicing.matrices["c"], slicing.group_of
    return tuple(holder for holder in c.holders[c.block_of[rank]] if group_of[holder] == group_of[rank])


def share_to_sum(slicing: Slicing, rank: int) -> tuple[Span, Span]:
    """Return the part of its shard of C that a rank sums over the replicas of its group; these then copy it.

    It is ((first row, stop), (first column, stop)) in the shard. The replicas divide the longer dim of C among
    them; the other dim is whole.
    """
    c = slicing.matrices["c"]
    rows, columns = c.shape(rank)
    spans = [(0, rows), (0, columns)]
    block = slicing.c_owners.block_of[rank]
    for dim in (0, 1):
        table = slicing.c_owners.dims[dim]
        if table is not c.dims[dim]:
            first = table.offsets[block[dim]]
            spans[dim] = (first, first + table.size(block[dim]))
    return spans[0], spans[1]
