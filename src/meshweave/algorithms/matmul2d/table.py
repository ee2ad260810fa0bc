"""The table of 2D products, which the other families look up too."""

from meshweave.algorithms.entries import AlgorithmTable
from meshweave.algorithms.matmul2d.common.algorithm import Matmul2d

PRODUCTS_2D: AlgorithmTable[Matmul2d] = AlgorithmTable("2D product", "matmul2d:Matmul2d")
