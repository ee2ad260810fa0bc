"""What a program is written with: tensors, buffers, views, ops, statements and expressions, and its text.

`meshweave.Program` holds them, `meshweave.parse` reads its text, `meshweave.validate` proves it; `meshweave.lower`
has the passes that rewrite it into the ops of a transport.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshweave.base.lazy import lazy_names

_HOME = {
    "ir.program": (
        "FULL Accumulate Add AllGather AllReduce AllToAll Blocked Broadcast Buffer Call Copy Counts Exchange Expr "
        "Fence Function Get Include Index Lane Matmul Meaning On Op Permute Product Put Range Recv Reduce "
        "ReduceScatter Release Repeat Same Send Statement Submesh Sum Tensor TensorPart Var View When Zero "
        "maximum minimum rewrite select to_text view"
    ),
}

if TYPE_CHECKING:
    from meshweave.ir.program import FULL as FULL
    from meshweave.ir.program import Accumulate as Accumulate
    from meshweave.ir.program import Add as Add
    from meshweave.ir.program import AllGather as AllGather
    from meshweave.ir.program import AllReduce as AllReduce
    from meshweave.ir.program import AllToAll as AllToAll
    from meshweave.ir.program import Blocked as Blocked
    from meshweave.ir.program import Broadcast as Broadcast
    from meshweave.ir.program import Buffer as Buffer
    from meshweave.ir.program import Call as Call
    from meshweave.ir.program import Copy as Copy
    from meshweave.ir.program import Counts as Counts
    from meshweave.ir.program import Exchange as Exchange
    from meshweave.ir.program import Expr as Expr
    from meshweave.ir.program import Fence as Fence
    from meshweave.ir.program import Function as Function
    from meshweave.ir.program import Get as Get
    from meshweave.ir.program import Include as Include
    from meshweave.ir.program import Index as Index
    from meshweave.ir.program import Lane as Lane
    from meshweave.ir.program import Matmul as Matmul
    from meshweave.ir.program import Meaning as Meaning
    from meshweave.ir.program import On as On
    from meshweave.ir.program import Op as Op
    from meshweave.ir.program import Permute as Permute
    from meshweave.ir.program import Product as Product
    from meshweave.ir.program import Put as Put
    from meshweave.ir.program import Range as Range
    from meshweave.ir.program import Recv as Recv
    from meshweave.ir.program import Reduce as Reduce
    from meshweave.ir.program import ReduceScatter as ReduceScatter
    from meshweave.ir.program import Release as Release
    from meshweave.ir.program import Repeat as Repeat
    from meshweave.ir.program import Same as Same
    from meshweave.ir.program import Send as Send
    from meshweave.ir.program import Statement as Statement
    from meshweave.ir.program import Submesh as Submesh
    from meshweave.ir.program import Sum as Sum
    from meshweave.ir.program import Tensor as Tensor
    from meshweave.ir.program import TensorPart as TensorPart
    from meshweave.ir.program import Var as Var
    from meshweave.ir.program import View as View
    from meshweave.ir.program import When as When
    from meshweave.ir.program import Zero as Zero
    from meshweave.ir.program import maximum as maximum
    from meshweave.ir.program import minimum as minimum
    from meshweave.ir.program import rewrite as rewrite
    from meshweave.ir.program import select as select
    from meshweave.ir.program import to_text as to_text
    from meshweave.ir.program import view as view

__all__ = lazy_names(__name__, [_HOME])
