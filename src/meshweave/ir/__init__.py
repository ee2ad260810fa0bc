"""What a program is written with: tensors, buffers, views, ops, statements and expressions, and its text.

`meshweave.Program` holds them, `meshweave.parse` reads its text, `meshweave.validate` proves it; `meshweave.lower`
has the passes that rewrite it into the ops of a transport.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshweave.base.lazy import lazy_names

_HOME = {
    "meshweave.ir.program": (
        "FULL Accumulate Add AllGather AllReduce AllToAll Blocked Broadcast Buffer Call Copy Counts Exchange Expr "
        "Fence Function Get Include Index Lane Matmul Meaning On Op Permute Product Put Range Recv Reduce "
        "ReduceScatter Release Repeat Same Send Statement Submesh Sum Tensor TensorPart Var View When Zero "
        "maximum minimum rewrite select to_text view"
    ),
}

if TYPE_CHECKING:
    from meshweave.ir.program import *  # noqa: F403

__all__ = lazy_names(__name__, _HOME, moved={"meshweave": "Program parse"})
