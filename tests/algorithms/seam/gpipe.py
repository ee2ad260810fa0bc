"""GPipe on two stages (Huang et al., NeurIPS '19): all forwards, then all backwards. A trial of the contract."""

from __future__ import annotations

from meshweave.algorithms.pipeline import MicroBatches, PipelineAlgorithm, PipelineProblem
from meshweave.ir.program import Program
from meshweave.ir.program.parse import parse


class GPipe(PipelineAlgorithm):
    """Every stage keeps the stashes of all micro-batches."""

    name = "gpipe"
    title = "GPipe"
    source = "Huang et al., NeurIPS '19"

    def program(self, problem: PipelineProblem, config: MicroBatches) -> Program:
        count, (f, h, o) = config.count, (problem.features, problem.hidden, problem.out)
        r = problem.rows // count
        now = f"{r} * m:{r} * m + {r}"
        first = (
            f'flops={2 * r * f * h}, bytes={4 * (r * f + f * h + r * h)}, stash="mb", args=(m,), lane=compute'
        )
        last = (
            f'flops={2 * r * h * o}, bytes={4 * (r * h + h * o + r * o)}, stash="mb", args=(m,), lane=compute'
        )
        return parse(f"""program("GPipe: two stages, {count} micro-batches")
{problem.declarations}h0 = scratch(({r}, {h}), "float32", on=s0, slots=2)
h1 = scratch(({r}, {h}), "float32", on=s1, slots=2)
loss = scratch(({r}, {o}), "float32", on=s1, slots=2)
g1 = scratch(({r}, {h}), "float32", on=s1, slots=2)
g0 = scratch(({r}, {h}), "float32", on=s0, slots=2)
compute = lane()
net = lane()
back = lane()
with s0:
    zero(dw0, lane=compute)
    for m in range({count}):
        call(fn="stage", outs=(h0(m % 2),), ins=(x[{now}, :], w0), part="forward",
             stash_bytes={4 * r * (f + h)}, {first})
        send(h0(m % 2), peer=1, tag=m, lane=net)
    for m in range({count}):
        recv(g0(m % 2), peer=1, tag=m, lane=back)
        call(fn="stage_input_grad", outs=(dx[{now}, :],), ins=(g0(m % 2), w0), part="input_grad", {first})
        call(fn="stage_weight_grad", outs=(dw0,), ins=(g0(m % 2), dw0), part="weight_grad", {first})
with s1:
    zero(dw1, lane=compute)
    for m in range({count}):
        recv(h1(m % 2), peer=0, tag=m, lane=net)
        call(fn="stage", outs=(y[{now}, :],), ins=(h1(m % 2), w1), part="forward",
             stash_bytes={4 * r * (h + o)}, {last})
    for m in range({count}):
        call(fn="loss_grad", outs=(loss(m % 2),), ins=(y[{now}, :], t[{now}, :]),
             flops={r * o}, bytes={12 * r * o}, lane=compute)
        call(fn="stage_input_grad", outs=(g1(m % 2),), ins=(loss(m % 2), w1), part="input_grad", {last})
        send(g1(m % 2), peer=0, tag=m, lane=back)
        call(fn="stage_weight_grad", outs=(dw1,), ins=(loss(m % 2), dw1), part="weight_grad", {last})
""")
