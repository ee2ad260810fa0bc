"""The Program: expressions, views, ops and statements, and its text form.

What a reader or writer of programs needs is exported here; `ir.program.statements` has the recursion over
statements, `ir.program.views` and `ir.program.expressions` the arithmetic of selectors and expressions.
"""

from meshweave.ir.program.expressions import Expr, Index, Var, equal, evaluate, maximum, minimum, select
from meshweave.ir.program.include import Include, Submesh
from meshweave.ir.program.meanings import Function, Meaning, Product, Same, Sum, TensorPart
from meshweave.ir.program.ops import (
    OP_TYPES,
    Accumulate,
    Add,
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Call,
    Collective,
    Copy,
    Fence,
    Get,
    Matmul,
    Op,
    Permute,
    Put,
    Recv,
    Reduce,
    ReduceScatter,
    Send,
    Zero,
)
from meshweave.ir.program.parse import parse
from meshweave.ir.program.program import BoundOp, Program
from meshweave.ir.program.release import CollectiveStep, Release
from meshweave.ir.program.statements import On, Repeat, Statement, When, rewrite, statements_of
from meshweave.ir.program.text import op_to_text, to_text
from meshweave.ir.program.views import FULL, Blocked, Range, View, view
from meshweave.ir.program.written import Buffer, Lane, Tensor

__all__ = [
    "FULL",
    "OP_TYPES",
    "Accumulate",
    "Add",
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Blocked",
    "BoundOp",
    "Broadcast",
    "Buffer",
    "Call",
    "Collective",
    "CollectiveStep",
    "Copy",
    "Expr",
    "Fence",
    "Function",
    "Get",
    "Include",
    "Index",
    "Lane",
    "Matmul",
    "Meaning",
    "On",
    "Op",
    "Permute",
    "Product",
    "Program",
    "Put",
    "Range",
    "Recv",
    "Reduce",
    "ReduceScatter",
    "Release",
    "Repeat",
    "Same",
    "Send",
    "Statement",
    "Submesh",
    "Sum",
    "Tensor",
    "TensorPart",
    "Var",
    "View",
    "When",
    "Zero",
    "equal",
    "evaluate",
    "maximum",
    "minimum",
    "op_to_text",
    "parse",
    "rewrite",
    "select",
    "statements_of",
    "to_text",
    "view",
]
