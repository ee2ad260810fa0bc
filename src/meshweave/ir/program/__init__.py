"""The Program: expressions, views, ops and statements, and its text form."""

from meshweave.ir.program.program import BoundOp, Buffer, Lane, Product, Program, Same, Tensor
from meshweave.ir.program.statements import On, Repeat, Statement, When

__all__ = [
    "BoundOp",
    "Buffer",
    "Lane",
    "On",
    "Product",
    "Program",
    "Repeat",
    "Same",
    "Statement",
    "Tensor",
    "When",
]
