"""Products with batch dims on torch: equal to the numpy run in integers, whatever the layout in memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from meshweave.execute.numpy import run_numpy  # noqa: E402
from meshweave.execute.torch.bind import bind  # noqa: E402
from meshweave.execute.torch.context import TorchContext  # noqa: E402
from meshweave.ir.analysis.validate import validate  # noqa: E402
from meshweave.ir.program.parse import parse  # noqa: E402
from sampling import examples  # noqa: E402

WHO_HAS_THE_BATCH = ("both", "left", "right", "sum")


def program_text(draw, batch, m, n, k):
    """One product into part of a buffer, whose operands lie in any order of dims, in blocks or in boxes."""
    who, transpose_a, transpose_b = (
        draw(st.sampled_from(WHO_HAS_THE_BATCH)),
        *draw(st.tuples(*[st.booleans()] * 2)),
    )
    left, right = ((k, m) if transpose_a else (m, k)), ((n, k) if transpose_b else (k, n))
    shapes = {
        "A": left if who == "right" else (*batch, *left),
        "B": right if who == "left" else (*batch, *right),
        "C": (m, n) if who == "sum" else (*batch, m, n),
    }
    lines = ['program("batch")', 'tp = mesh((1,), ("x",))']
    lines += [f'{name} = tensor({shape}, "int64")' for name, shape in shapes.items()]
    flags = f"transpose_a={transpose_a}, transpose_b={transpose_b}"
    lines.append(f"computes(C, product(A, B, {flags}))")
    for name, kind in (("A", "input"), ("B", "input"), ("C", "output")):
        order = tuple(draw(st.permutations(range(len(shapes[name])))))
        lines.append(f"{name.lower()} = {kind}({name}, tp[R], order={order})")
    whole = ", ".join(f"1:{size + 1}" for size in shapes["C"])
    padded = tuple(size + 2 for size in shapes["C"])
    strided = f"{', '.join(':' for _ in shapes['C'][:-1])}, blocked(0, 1, 2)"
    lines.append(f'box = scratch({padded}, "int64", on=tp)')
    lines.append(f'blocks = scratch({(*shapes["C"][:-1], 2 * n)}, "int64", on=tp)')
    lines += ["l = lane()", "with tp:", "    zero(box, lane=l)", "    zero(blocks, lane=l)"]
    out = draw(st.sampled_from(["c", f"box[{whole}]", f"blocks[{strided}]"]))
    lines.append(f"    matmul({out}, a, b, {flags}, lane=l)")
    if draw(st.booleans()):
        lines.append(f"    zero({out}, lane=l)")
        lines.append(f"    matmul({out}, a, b, {flags}, accumulate=1, lane=l)")
    if out != "c":
        lines.append(f"    copy(c, {out}, lane=l)")
    return "\n".join(lines) + "\n"


@examples(60)
@given(st.data())
def test_batched_products_equal_the_numpy_run(data):
    sizes = st.integers(1, 4)
    batch = data.draw(st.lists(sizes, min_size=1, max_size=2).map(tuple))
    text = program_text(data.draw, batch, *(data.draw(sizes) for _ in range(3)))
    program = parse(text)
    assert validate(program).skipped == ()
    draw = np.random.default_rng(data.draw(st.integers(0, 99)))
    values = {name: draw.integers(-5, 6, program.tensor_of[name].shape) for name in "AB"}
    expected = run_numpy(program, values).outputs["C"]
    tensors = {}
    for name in "AB":
        order = program.buffer_of[name.lower()].order
        dense = torch.from_numpy(np.ascontiguousarray(values[name].transpose(order)))
        tensors[name.lower()] = dense.permute([order.index(dim) for dim in range(len(order))])
    bound = bind(program, 0, tensors, context=TorchContext())
    bound.run()
    np.testing.assert_array_equal(bound.outputs["c"].numpy(), expected)


@pytest.mark.parametrize("shape", [(64, 64), (2, 64, 64)])
def test_a_product_may_be_given_the_memory_of_its_operand(shape: tuple[int, ...]) -> None:
    program = parse(f"""
program("in place")
tp = mesh((1,), ("x",))
A = tensor({shape}, "float32")
B = tensor({shape}, "float32")
C = tensor({shape}, "float32")
a = input(A, tp[R])
b = input(B, tp[R])
c = output(C, tp[R])
compute = lane()
with tp:
    matmul(c, a, b, lane=compute)
""")
    a, b = (torch.randint(-3, 4, shape).float() for _ in "ab")
    wanted = a @ b
    bind(program, 0, {"a": a, "b": b, "c": a}, context=TorchContext()).run()
    assert torch.equal(a, wanted)


@pytest.mark.parametrize("shape", [(2, 2), (3, 2, 2)])
@pytest.mark.parametrize(
    ("operands", "result"),
    [("float32", "bfloat16"), ("float32", "int32"), ("bfloat16", "float32")],
)
def test_a_product_is_rounded_once_to_the_dtype_of_its_result(
    shape: tuple[int, ...], operands: str, result: str
) -> None:
    program = parse(f"""
program("rounded")
tp = mesh((1,), ("x",))
A = tensor({shape}, "{operands}")
B = tensor({shape}, "{operands}")
C = tensor({shape}, "{result}")
a = input(A, tp[R])
b = input(B, tp[R])
c = output(C, tp[R])
x = lane()
with tp:
    matmul(c, a, b, lane=x)
""")
    kind = getattr(torch, operands)
    a = torch.tensor([[1.00390625, -1], [300, 2]]).expand(shape).to(kind)  # the first lies between two halves
    b = torch.tensor([[256, 2], [256, 0]]).expand(shape).to(kind)
    bound = bind(program, 0, {"a": a, "b": b}, context=TorchContext())
    bound.run()
    assert torch.equal(bound.outputs["c"], (a.double() @ b.double()).to(getattr(torch, result)))
