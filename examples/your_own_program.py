"""A program written by hand: what it means, whether it is sound, how long it takes, what it computes.

    python examples/your_own_program.py

Two ranks each hold half of A's columns and half of B's rows. The product of the halves is a partial sum, which
an all-reduce finishes; cut into two parts, the all-reduce of the first overlaps with the product of the second.
"""

from __future__ import annotations

import numpy as np

import meshweave as mw

TEXT = """
program("overlapped all-reduce")
tp = mesh((2,), ("x",))
A = tensor((512, 512), "float32")
B = tensor((512, 256), "float32")
C = tensor((512, 256), "float32")
computes(C, product(A, B))
a = input(A, tp[S(1)])
b = input(B, tp[S(0)])
c = output(C, tp[R])
part = scratch((256, 256), "float32", on=tp, slots=2)
compute = lane()
net = lane()
with tp:
    for i in range(2):
        matmul(part(i), a[256 * i:256 * i + 256, :], b, lane=compute)
        all_reduce(c[256 * i:256 * i + 256, :], part(i), over="tp.x", lane=net)
"""


def main() -> None:
    program = mw.parse(TEXT)
    mw.validate(program)
    print("valid: no deadlock, no race, and C is A B, each k once")

    rng = np.random.default_rng(0)
    inputs = {name: rng.integers(-3, 4, program.tensor_of[name].shape).astype("float32") for name in "AB"}
    result = mw.run_numpy(program, inputs)
    print("equal to numpy's product:", bool((result.outputs["C"] == inputs["A"] @ inputs["B"]).all()))

    trace = mw.simulate(program, mw.Machine.of(mw.load_cluster("local-cpu"), program)).trace()
    print(mw.simulation.timeline_text(trace, rank=0, width=60))

    try:
        mw.validate(mw.parse(TEXT.replace("a[256 * i:256 * i + 256, :]", "a[0:256, :]")))
    except mw.errors.ProgramError as error:
        print("a mistake is found before anything runs:", error)


if __name__ == "__main__":
    main()
