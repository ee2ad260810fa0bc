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
    rows, hidden, out = problem.rows // count, problem.hidden, problem.out
    return f"""program("1F1B: two stages, {count} micro-batches")
{problem.declarations}h_out = scratch(({rows}, {hidden}), "float32", on=s0, slots=2)
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
