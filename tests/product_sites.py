"""The products of a layer as sites, which the library writes one by one where a model needs them."""

from __future__ import annotations

from meshweave.algorithms.block import BlockProblem
from meshweave.algorithms.block.sites import ProductSite


def product_sites(problem: BlockProblem) -> list[ProductSite]:
    """Return the products of a layer."""
    sites = []
    for node in problem.layer.linears:
        inner = node.result if node.reads_residual else node.operand
        is_attention = node.group == "attention"
        sites.append(ProductSite(node.reads_residual, is_attention, problem.hidden, inner.count, inner.unit))
    return sites
