"""The Program: expressions, views, ops and statements, and its text form.

What a reader or writer of programs needs is exported here; `ir.program.statements` has the recursion over
statements, `ir.program.views` and `ir.program.expressions` the arithmetic of selectors and expressions.
"""

from meshweave.ir.program.expressions import Expr as Expr
from meshweave.ir.program.expressions import Index as Index
from meshweave.ir.program.expressions import Var as Var
from meshweave.ir.program.expressions import maximum as maximum
from meshweave.ir.program.expressions import minimum as minimum
from meshweave.ir.program.expressions import select as select
from meshweave.ir.program.include import Include as Include
from meshweave.ir.program.include import Submesh as Submesh
from meshweave.ir.program.meanings import Function as Function
from meshweave.ir.program.meanings import Meaning as Meaning
from meshweave.ir.program.meanings import Product as Product
from meshweave.ir.program.meanings import Same as Same
from meshweave.ir.program.meanings import Sum as Sum
from meshweave.ir.program.meanings import TensorPart as TensorPart
from meshweave.ir.program.ops import Accumulate as Accumulate
from meshweave.ir.program.ops import Add as Add
from meshweave.ir.program.ops import AllGather as AllGather
from meshweave.ir.program.ops import AllReduce as AllReduce
from meshweave.ir.program.ops import AllToAll as AllToAll
from meshweave.ir.program.ops import Broadcast as Broadcast
from meshweave.ir.program.ops import Call as Call
from meshweave.ir.program.ops import Copy as Copy
from meshweave.ir.program.ops import Exchange as Exchange
from meshweave.ir.program.ops import Fence as Fence
from meshweave.ir.program.ops import Get as Get
from meshweave.ir.program.ops import Matmul as Matmul
from meshweave.ir.program.ops import Op as Op
from meshweave.ir.program.ops import Permute as Permute
from meshweave.ir.program.ops import Put as Put
from meshweave.ir.program.ops import Recv as Recv
from meshweave.ir.program.ops import Reduce as Reduce
from meshweave.ir.program.ops import ReduceScatter as ReduceScatter
from meshweave.ir.program.ops import Send as Send
from meshweave.ir.program.ops import Zero as Zero
from meshweave.ir.program.parse import parse as parse
from meshweave.ir.program.program import BoundOp as BoundOp
from meshweave.ir.program.program import Program as Program
from meshweave.ir.program.release import Release as Release
from meshweave.ir.program.statements import On as On
from meshweave.ir.program.statements import Repeat as Repeat
from meshweave.ir.program.statements import Statement as Statement
from meshweave.ir.program.statements import When as When
from meshweave.ir.program.statements import rewrite as rewrite
from meshweave.ir.program.text import to_text as to_text
from meshweave.ir.program.views import FULL as FULL
from meshweave.ir.program.views import Blocked as Blocked
from meshweave.ir.program.views import Range as Range
from meshweave.ir.program.views import View as View
from meshweave.ir.program.views import view as view
from meshweave.ir.program.written import Buffer as Buffer
from meshweave.ir.program.written import Counts as Counts
from meshweave.ir.program.written import Lane as Lane
from meshweave.ir.program.written import Tensor as Tensor
