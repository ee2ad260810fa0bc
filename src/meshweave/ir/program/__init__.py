"""The Program: expressions, views, ops and statements, and its text form."""

from meshweave.ir.program.program import (
    BoundOp,
    Buffer,
    Lane,
    On,
    Product,
    Program,
    Repeat,
    Same,
    Statement,
    Tensor,
    When,
)

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
