"""1F1B on two stages (Narayanan et al., SOSP '19): after a warm-up, a stage alternates forwards and backwards.

The first stage runs one forward ahead, so it holds two stashes however many micro-batches there are; the last
holds one. The input gradient is sent before the weight gradient is computed, which then hides the transfer.
"""

from __future__ import annotations

from meshweave.algorithms.pipeline.problem import MicroBatches, PipelineAlgorithm, PipelineProblem
from meshweave.base.errors import LayoutError
from meshweave.ir.program import Program
from meshweave.ir.program.parse import parse


class OneForwardOneBackward(PipelineAlgorithm):
    """Two stages, each on one rank. A config is the number of micro-batches."""

    name = "1f1b"
    title = "1F1B"
    source = "Narayanan et al., PipeDream, SOSP '19"

    def program(self, problem: PipelineProblem, config: MicroBatches) -> Program:
        if config.count < 1 or problem.rows % config.count:
            raise LayoutError(f"{config.count} micro-batches do not divide a batch of {problem.rows} rows")
        return parse(_text(problem, config.count))


def _text(problem: PipelineProblem, count: int) -> str:
    """Return the text of the program for `count` micro-batches of equal size."""
    return _declarations(problem, count) + _first_stage(problem, count) + _last_stage(problem, count)


def _declarations(problem: PipelineProblem, count: int) -> str:
    rows, features, hidden, out = problem.rows // count, problem.features, problem.hidden, problem.out
    return f"""program("1F1B: two stages, {count} micro-batches")
s0 = mesh((1,), ("x",))
s1 = mesh((1,), ("x",), first=1)
X = tensor(({problem.rows}, {features}), "float32")
W0 = tensor(({features}, {hidden}), "float32")
W1 = tensor(({hidden}, {out}), "float32")
Y = tensor(({problem.rows}, {out}), "float32")
T = tensor(({problem.rows}, {out}), "float32")
DX = tensor(({problem.rows}, {features}), "float32")
DW0 = tensor(({features}, {hidden}), "float32")
DW1 = tensor(({hidden}, {out}), "float32")
H = tensor(({problem.rows}, {hidden}), "float32")
GY = tensor(({problem.rows}, {out}), "float32")
GH = tensor(({problem.rows}, {hidden}), "float32")
computes(H[r, :], call("stage", X[r, :], W0))
computes(Y[r, :], call("stage", H[r, :], W1))
computes(GY[r, :], call("loss_grad", Y[r, :], T[r, :]))
computes(GH[r, :], call("stage_input_grad", GY[r, :], W1, stash=(H[r, :], W1)))
computes(DX[r, :], call("stage_input_grad", GH[r, :], W0, stash=(X[r, :], W0)))
computes(DW1, call("stage_weight_grad", GY[r, :], DW1, stash=(H[r, :], W1), reduce="sum"))
computes(DW0, call("stage_weight_grad", GH[r, :], DW0, stash=(X[r, :], W0), reduce="sum"))
x = input(X, s0[R])
w0 = input(W0, s0[R])
w1 = input(W1, s1[R])
t = input(T, s1[R])
y = output(Y, s1[R])
dx = output(DX, s0[R])
dw0 = output(DW0, s0[R])
dw1 = output(DW1, s1[R])
h_out = scratch(({rows}, {hidden}), "float32", on=s0, slots=2)
h_in = scratch(({rows}, {hidden}), "float32", on=s1, slots=2)
g_loss = scratch(({rows}, {out}), "float32", on=s1, slots=2)
g_out = scratch(({rows}, {hidden}), "float32", on=s1, slots=2)
g_in = scratch(({rows}, {hidden}), "float32", on=s0, slots=2)
compute = lane()
activations = lane()
gradients = lane()
"""


def _first_stage(problem: PipelineProblem, count: int) -> str:
    rows, features, hidden = problem.rows // count, problem.features, problem.hidden
    x, w0, h, flops = rows * features, features * hidden, rows * hidden, 2 * rows * features * hidden
    now, before = f"{rows} * m:{rows} * m + {rows}", f"{rows} * m - {rows}:{rows} * m"
    return f"""with s0:
    zero(dw0, lane=compute)
    for m in range({count + 1}):
        if m < {count}:
            call(fn="stage", outs=(h_out(m % 2),), ins=(x[{now}, :], w0),
                flops={flops}, bytes={4 * (x + w0 + h)},
                stash_bytes={4 * (x + h)}, stash="mb", part="forward", args=(m,), lane=compute, name="forward")
            send(h_out(m % 2), peer=1, tag=m, lane=activations)
        if m > 0:
            recv(g_in((m - 1) % 2), peer=1, tag=m - 1, lane=gradients)
            call(fn="stage_input_grad", outs=(dx[{before}, :],), ins=(g_in((m - 1) % 2), w0), flops={flops},
                bytes={4 * (x + w0 + h)}, stash="mb", part="input_grad",
                args=(m - 1,), lane=compute, name="input_grad")
            call(fn="stage_weight_grad", outs=(dw0,), ins=(g_in((m - 1) % 2), dw0), flops={flops},
                bytes={4 * (h + 2 * w0 + x)}, stash="mb", part="weight_grad",
                args=(m - 1,), lane=compute, name="weight_grad")
"""


def _last_stage(problem: PipelineProblem, count: int) -> str:
    rows, hidden, out = problem.rows // count, problem.hidden, problem.out
    h, w1, y, flops = rows * hidden, hidden * out, rows * out, 2 * rows * hidden * out
    now = f"{rows} * m:{rows} * m + {rows}"
    return f"""with s1:
    zero(dw1, lane=compute)
    for m in range({count}):
        recv(h_in(m % 2), peer=0, tag=m, lane=activations)
        call(fn="stage", outs=(y[{now}, :],), ins=(h_in(m % 2), w1), flops={flops}, bytes={4 * (h + w1 + y)},
                stash_bytes={4 * (h + y)}, stash="mb", part="forward", args=(m,), lane=compute, name="forward")
        call(fn="loss_grad", outs=(g_loss(m % 2),), ins=(y[{now}, :], t[{now}, :]),
                flops={y}, bytes={12 * y}, lane=compute)
        call(fn="stage_input_grad", outs=(g_out(m % 2),), ins=(g_loss(m % 2), w1),
                flops={flops}, bytes={4 * (h + w1 + y)},
                stash="mb", part="input_grad", args=(m,), lane=compute, name="input_grad")
        send(g_out(m % 2), peer=0, tag=m, lane=gradients)
        call(fn="stage_weight_grad", outs=(dw1,), ins=(g_loss(m % 2), dw1), flops={flops},
                bytes={4 * (y + 2 * w1 + h)}, stash="mb", part="weight_grad",
                args=(m,), lane=compute, name="weight_grad")
"""
